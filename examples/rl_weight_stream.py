"""Reinforcement learning that sends FP8 weights to an inference engine after each update.

torchrun --standalone --nproc-per-node 2 examples/rl_weight_stream.py, on GPUs or on CPUs with gloo.

The policy learns to generate even tokens. All ranks train it under FSDP2. The engine on rank 0 gets
the weights by name, as codes and scales, and samples from them.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F

from fp8rs import convert_to_float8_training
from fp8rs.demo.model import Llama, LlamaConfig
from fp8rs.demo.train import shard
from fp8rs.export import tensors

CONFIG = LlamaConfig(vocabulary=32, dim=64, layers=2, heads=4, kv_heads=2, hidden=128)
SAMPLES, LENGTH = 64, 16


class Engine:
    """Stands for an inference engine, such as vLLM. It has the names of the unconverted model."""

    def __init__(self, device: str) -> None:
        self.model = Llama(CONFIG).to(device)
        self.weights = self.model.state_dict()  # the same memory

    def receive(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor of the stream. The scales of a layer follow its codes."""
        if tensor.dtype == torch.float8_e4m3fn:
            self.codes = tensor.float()
        elif name.endswith(".weight_scale"):  # (out_features, 1)
            self.weights[name.removesuffix("_scale")].copy_(self.codes * tensor)
        else:
            self.weights[name].copy_(tensor)

    @torch.no_grad()
    def sample(self) -> torch.Tensor:
        """Generate int64 (SAMPLES, LENGTH + 1). The first token is 1."""
        tokens = torch.ones(SAMPLES, 1, dtype=torch.int64, device=self.model.head.weight.device)
        for _ in range(LENGTH):
            probabilities = self.model(tokens)[:, -1].softmax(-1)
            tokens = torch.cat((tokens, torch.multinomial(probabilities, 1)), dim=1)
        return tokens


def main(argv=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=20)
    args = parser.parse_args(argv)
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)

    policy = Llama(CONFIG)
    policy.init_weights(torch.Generator().manual_seed(0))
    policy.to(device)
    # The policy's forward quantizes as the engine does, whatever is faster.
    convert_to_float8_training(policy, recipe="rowwise", filter_fqns=["head"], gemms="fp8")
    shard(policy, device, ranks)  # calls fully_shard
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    engine = Engine(device) if rank == 0 else None

    rewards = []
    for update in range(args.updates):
        # Every rank iterates and gets every tensor. "rowwise" trains with these codes.
        for name, tensor in tensors(policy, format="fp8-row"):
            if engine is not None:
                engine.receive(name, tensor)
        tokens = torch.empty(SAMPLES, LENGTH + 1, dtype=torch.int64, device=device)
        if engine is not None:
            tokens = engine.sample()
        dist.broadcast(tokens, 0)

        even = (tokens[:, 1:] % 2 == 0).float()
        rewards.append(even.mean().item())
        if rank == 0 and (update % 5 == 0 or update == args.updates - 1):
            print(f"update {update}: reward {rewards[-1]:.3f}", flush=True)
        own, advantage = tokens.chunk(ranks)[rank], (even - even.mean()).chunk(ranks)[rank]
        logits = policy(own[:, :-1]).float()
        surprise = F.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten(), reduction="none")
        (advantage.flatten() * surprise).mean().backward()  # REINFORCE
        optimizer.step()
        optimizer.zero_grad()

    time.sleep(0.1)  # gloo may abort the exit otherwise, see docs/troubleshooting.md
    dist.destroy_process_group()
    return {"rewards": rewards, "policy": policy, "engine": engine}


if __name__ == "__main__":
    main()
