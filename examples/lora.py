"""Train LoRA adapters on a frozen base with FP8 weights, and save the adapters alone.

The example first trains the base on a text. The adapters then learn the text in upper case.

torchrun --standalone --nproc-per-node 2 examples/lora.py, on GPUs or on CPUs with gloo.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from fp8rs import convert_to_float8_training
from fp8rs.demo.data import load_corpus
from fp8rs.demo.model import Llama, LlamaConfig
from fp8rs.demo.train import shard


class LoRA(nn.Module):
    """Adds a product of two small matrices to a frozen linear layer."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        device = base.weight.device
        self.down = nn.Linear(base.in_features, rank, bias=False, device=device)
        self.up = nn.Linear(rank, base.out_features, bias=False, device=device)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def train_base(model, batches):
    """Train all weights. All ranks compute the mean gradient, so their weights stay equal."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for tokens in batches:
        loss = model.loss(tokens)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()


def upper_case(tokens):
    """Replace the bytes of lower-case letters."""
    is_lower = (tokens >= ord("a")) & (tokens <= ord("z"))
    return torch.where(is_lower, tokens - 32, tokens)


def main(argv=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--base-steps", type=int, default=100, help="steps of the base")
    parser.add_argument("--rank", type=int, default=8, help="columns of an adapter")
    parser.add_argument("--save", help="a file for the adapters")
    args = parser.parse_args(argv)

    rank = int(os.environ["LOCAL_RANK"])
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    device = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")

    corpus = load_corpus()

    def batches(seed, steps):
        for step in range(steps):
            tokens = corpus.batch(seed, step, rows=8 * ranks, length=64)
            yield tokens.chunk(ranks)[rank].to(device)

    # A model of your own would load its weights instead.
    model = Llama(LlamaConfig(256, dim=128, layers=2, heads=4, kv_heads=2, hidden=256))
    model.init_weights(torch.Generator().manual_seed(0))
    model.to(device)
    train_base(model, batches(seed=0, steps=args.base_steps))

    # Convert first: adapters that are added later stay in high precision.
    convert_to_float8_training(model, recipe="current", filter_fqns=["head"], fp8_weights=True)
    model.requires_grad_(False)
    torch.manual_seed(0)
    for block in model.blocks:
        for parent in (block.attention, block.feed_forward):
            for name, layer in list(parent.named_children()):
                setattr(parent, name, LoRA(layer, args.rank))
    shard(model)  # calls fully_shard
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)

    losses = []
    for step, tokens in enumerate(batches(seed=1, steps=args.steps)):
        loss = model.loss(upper_case(tokens))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean_loss = loss.detach() / ranks
        dist.all_reduce(mean_loss)
        losses.append(mean_loss.item())
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)

    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=options)  # on every rank; rank 0 gets the tensors
    if rank == 0 and args.save:
        torch.save(state, args.save)
    time.sleep(0.1)  # gloo may abort the exit otherwise, see docs/troubleshooting.md
    dist.destroy_process_group()
    return {"losses": losses, "saved": list(state), "model": model}


if __name__ == "__main__":
    main()
