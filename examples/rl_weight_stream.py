"""Reinforcement learning that sends FP8 weights to an inference engine after each update.

torchrun --standalone --nproc-per-node 2 examples/rl_weight_stream.py, on GPUs or on CPUs with gloo.

The policy learns to generate even tokens. All ranks train it under FSDP2. The engine on rank 0 gets
the weights by name, as codes and scales, and samples from them.

No inference server runs here. The engine is written in plain torch from the formulas of
FP8_DYNAMIC, the scheme of vLLM and compressed-tensors. The policy trains with the same codes. What
is left between both is the order in which GEMMs sum, so the divergence is small but not zero.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import fp8rs
from fp8rs import convert_to_float8_training
from fp8rs.demo.model import Llama, LlamaConfig
from fp8rs.export import compare_layers, serving_config, tensors
from fp8rs.monitoring import mismatch

CONFIG = LlamaConfig(vocabulary=32, dim=64, layers=2, heads=4, kv_heads=2, hidden=128)
#: Sequences that the engine samples for an update, and their tokens.
SAMPLES = 64
LENGTH = 16

RECIPE = fp8rs.Float8RowwiseScaling.for_serving()


def quantize_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations as FP8_DYNAMIC does: one scale per token, which divides."""
    x = x.float()
    amax = x.abs().amax(-1, keepdim=True)
    # A tensor, because torch would multiply by the reciprocal of a number on GPUs.
    largest = torch.full_like(amax, 448)
    scale = (amax / largest).clamp(min=1 / (448 * 512))
    codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scale


class Fp8DynamicLinear(nn.Module):
    """A linear layer with FP8 codes and one scale per output channel."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        codes = torch.zeros(out_features, in_features, dtype=torch.float8_e4m3fn)
        self.register_buffer("weight", codes)
        self.register_buffer("weight_scale", torch.ones(out_features, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply codes, and scale the sums."""
        codes, scale = quantize_per_token(x)
        sums = codes.float() @ self.weight.float().T
        return (sums * scale * self.weight_scale.T).to(x.dtype)


class Engine:
    """Stands for an inference engine, such as vLLM. It has the names of the unconverted model."""

    def __init__(self, config: dict[str, Any], device: str) -> None:
        self.model = Llama(CONFIG).to(torch.bfloat16)
        for name, module in list(self.model.named_modules()):
            if isinstance(module, nn.Linear) and name not in config["ignore"]:
                layer = Fp8DynamicLinear(module.in_features, module.out_features)
                self.model.set_submodule(name, layer)
        self.model.to(device)
        self.weights = self.model.state_dict()  # the same memory

    def receive(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor of the stream: codes, scales, or a tensor in high precision."""
        self.weights[name].copy_(tensor)

    @torch.no_grad()
    def sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Generate int64 (SAMPLES, LENGTH + 1) and the log-probabilities (SAMPLES, LENGTH).

        The first token is 1.
        """
        # All forwards have the same shape. Later tokens do not affect earlier ones.
        device = self.model.norm.weight.device
        tokens = torch.ones(SAMPLES, LENGTH + 1, dtype=torch.int64, device=device)
        logprobs = torch.empty(SAMPLES, LENGTH, device=device)
        for i in range(LENGTH):
            log_probabilities = self.model(tokens[:, :-1])[:, i].float().log_softmax(-1)
            new = torch.multinomial(log_probabilities.exp(), 1)
            tokens[:, i + 1 : i + 2] = new
            logprobs[:, i : i + 1] = log_probabilities.gather(1, new)
        return tokens, logprobs


def shard(policy: Llama, device: str, ranks: int) -> None:
    """Shard each block, then the rest."""
    mesh = init_device_mesh(device, (ranks,))
    # FSDP2 would cast the rotary angles, which blocks get as inputs, to bf16. The engine does not.
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in policy.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)


class CodeCounter:
    """Compares the codes of the policy's inputs with those that the engine would compute."""

    def __init__(self, policy: nn.Module) -> None:
        self.different = 0
        self.total = 0
        self.quantizer = fp8rs.Quantizer(RECIPE, role="input", columnwise=False)
        for module in policy.modules():
            if isinstance(module, fp8rs.nn.Linear):
                module.register_forward_pre_hook(self.compare)

    @torch.no_grad()
    def compare(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        """Count the codes of one input of a layer."""
        codes, scale = quantize_per_token(args[0].flatten(0, -2))
        plane = self.quantizer(args[0]).rowwise
        differs = plane.matrix.view(torch.uint8) != codes.view(torch.uint8)
        self.different += int((differs | (plane.scale != scale)).sum())
        self.total += codes.numel()


def token_logprobs(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token after the first: (sequences, tokens - 1)."""
    logits = model(tokens[:, :-1]).float()
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return -loss.view(len(tokens), -1)


def main(argv=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--json", metavar="FILE", help="rewards and divergences of all updates")
    args = parser.parse_args(argv)

    rank = int(os.environ["LOCAL_RANK"])
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    device = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)

    policy = Llama(CONFIG)
    policy.init_weights(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for weight in policy.blocks.parameters():
            if weight.dim() == 2:
                weight.mul_(4)  # as large as weights that were trained before
    policy.to(device)
    # The policy's forward quantizes as the engine does, whatever is faster.
    convert_to_float8_training(policy, recipe=RECIPE, filter_fqns=["head"], gemms="fp8")
    config = serving_config(policy, "fp8-row")
    differences = compare_layers(policy, config)
    assert not differences, str(differences)
    shard(policy, device, ranks)
    code_counter = CodeCounter(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    engine = Engine(config, device) if rank == 0 else None
    # The same weights without FP8, as training in bf16 would have them in its forward.
    bf16_policy = Llama(CONFIG).to(device, torch.bfloat16)
    bf16_weights = bf16_policy.state_dict()

    rewards = []
    divergences = []
    bf16_divergences = []
    for update in range(args.updates):
        # Every rank iterates and gets every tensor. "rowwise" trains with these codes.
        for name, tensor in tensors(policy, format="fp8-row"):
            if engine is not None:
                engine.receive(name, tensor)
        for name, tensor in tensors(policy, format="bf16"):
            bf16_weights[name].copy_(tensor)
        tokens = torch.empty(SAMPLES, LENGTH + 1, dtype=torch.int64, device=device)
        engine_logprobs = torch.empty(SAMPLES, LENGTH, device=device)
        if engine is not None:
            tokens, engine_logprobs = engine.sample()
        dist.broadcast(tokens, 0)
        dist.broadcast(engine_logprobs, 0)

        even = (tokens[:, 1:] % 2 == 0).float()
        rewards.append(even.mean().item())
        rank_tokens = tokens.chunk(ranks)[rank]
        rank_engine_logprobs = engine_logprobs.chunk(ranks)[rank]
        advantage = (even - even.mean()).chunk(ranks)[rank]
        logprobs = token_logprobs(policy, rank_tokens)

        with torch.no_grad():
            bf16_logprobs = token_logprobs(bf16_policy, rank_tokens)
        kl = mismatch(logprobs.detach(), rank_engine_logprobs).kl
        bf16_kl = mismatch(bf16_logprobs, rank_engine_logprobs).kl
        kl_sums = torch.stack((kl, bf16_kl))
        dist.all_reduce(kl_sums)
        divergences.append(kl_sums[0].item() / ranks)
        bf16_divergences.append(kl_sums[1].item() / ranks)
        if rank == 0 and (update % 5 == 0 or update == args.updates - 1):
            print(
                f"update {update}: reward {rewards[-1]:.3f}, KL of the engine from training in "
                f"FP8 {divergences[-1]:.1e}, in bf16 {bf16_divergences[-1]:.1e}",
                flush=True,
            )

        (-advantage * logprobs).mean().backward()  # REINFORCE
        optimizer.step()
        optimizer.zero_grad()

    if rank == 0:
        mean = sum(divergences) / len(divergences)
        bf16_mean = sum(bf16_divergences) / len(bf16_divergences)
        print(
            f"Mean KL {mean:.1e} with FP8 training, {bf16_mean:.1e} with bf16 training. "
            f"{code_counter.different} of {code_counter.total} activation codes differ."
        )
    if rank == 0 and args.json:
        report = {
            "torch": torch.__version__,
            "device": device,
            "ranks": ranks,
            "rewards": rewards,
            "fp8": divergences,
            "bf16": bf16_divergences,
        }
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    time.sleep(0.1)  # gloo may abort the exit otherwise, see docs/troubleshooting.md
    dist.destroy_process_group()
    return {
        "rewards": rewards,
        "divergences": divergences,
        "bf16_divergences": bf16_divergences,
        "different_codes": code_counter.different,
        "policy": policy,
        "engine": engine,
    }


if __name__ == "__main__":
    main()
