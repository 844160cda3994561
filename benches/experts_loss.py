"""Train small mixtures of experts on real text, in bf16 and in FP8, and compare losses and gathers.

    python benches/experts_loss.py [--models mixtral,qwen3_moe] [--recipes current,mxfp8] [--json F]

The models are transformers', with two layers, and are sharded by FSDP2. The text is the demo's. All
trainings of a model have equal initial weights and batches. The loss is the mean over held-out
text. Its difference from bf16 must be below 1%, and gathers of expert weights must take 0.50 to
0.52 of bf16's bytes. Exits with 1 otherwise. A second training in bf16 begins with weights that
differ by 0.1%, and shows how much results depend on such a difference.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import fp8rs
from fp8rs.demo.data import Corpus, load_corpus

#: Tokens of a sequence.
LENGTH = 64
#: Sequences of a batch.
ROWS = 16
LEARNING_RATE = 1e-3
#: The bf16 training that begins with other weights.
PERTURBED = "bf16, perturbed"
#: Batches of held-out text.
HELD_OUT = 8
SIZES = {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
#: The prefix of transformers' classes, and options of the experts.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "intermediate_size": 256}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 16, "moe_intermediate_size": 96, "head_dim": 32}),
}


@dataclass(frozen=True)
class Result:
    """The result of one training.

    Attributes:
        model: a key of `KINDS`.
        recipe: a recipe, or "bf16".
        experts: the argument of the conversion.
        loss: the held-out loss after the training.
        expert_bytes: bytes of an all-gather of all weights of experts on one rank, with scales.
        gathered: bytes of all all-gathers of the training on one rank.
        seconds: the duration of the training.
    """

    model: str
    recipe: str
    experts: str
    loss: float
    expert_bytes: int
    gathered: int
    seconds: float


class Gathers(TorchDispatchMode):
    """Counts the bytes of all-gathers, and records the size of each."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "allgather" in func._schema.name:
            self.sizes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def build(kind: str) -> Any:
    """Return a model of transformers with seeded values."""
    import transformers

    class_prefix, expert_options = KINDS[kind]
    config_class = getattr(transformers, f"{class_prefix}Config")
    model_class = getattr(transformers, f"{class_prefix}ForCausalLM")
    config = config_class(**SIZES, **expert_options, num_key_value_heads=2, num_experts_per_tok=2)
    torch.manual_seed(0)
    return model_class(config)


def train(kind: str, recipe: str, experts: str, corpus: Corpus, steps: int) -> Result:
    """Train one model on all ranks."""
    model = build(kind)
    start = time.monotonic()
    is_fp8 = not recipe.startswith("bf16")
    if recipe == PERTURBED:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 1e-3 * torch.randn_like(parameter))
    if is_fp8:
        fp8rs.convert_to_float8_training(
            model, recipe=recipe, gemms="fp8", experts=experts, filter_fqns=["lm_head"]
        )

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        # Experts are gathered alone, so that their bytes can be counted.
        fully_shard(layer.mlp.experts, mp_policy=policy)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    rank = dist.get_rank()
    ranks = dist.get_world_size()

    with Gathers() as expert_gathers:
        for layer in model.model.layers:
            if is_fp8:
                fp8rs.precompute_float8_dynamic_scale_for_fsdp(model)
            layer.mlp.experts.unshard()
            layer.mlp.experts.reshard()

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    with Gathers() as training_gathers:
        for step in range(steps):
            rows = corpus.batch(0, step, ROWS, LENGTH).chunk(ranks)[rank]
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps)
            model(input_ids=rows, labels=rows).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    seconds = time.monotonic() - start

    model.eval()
    loss_sum = torch.zeros(())
    with torch.no_grad():
        for index in range(HELD_OUT):
            rows = corpus.held_out_batch(index, ROWS, LENGTH).chunk(ranks)[rank]
            loss_sum += model(input_ids=rows, labels=rows).loss.float()
    dist.all_reduce(loss_sum)
    return Result(
        model=kind,
        recipe=recipe,
        experts=experts,
        loss=loss_sum.item() / HELD_OUT / ranks,
        expert_bytes=sum(expert_gathers.sizes),
        gathered=sum(training_gathers.sizes),
        seconds=seconds,
    )


def learning_rate(step: int, steps: int) -> float:
    """Return the learning rate: a linear warm-up, then a cosine to 0."""
    warm_up = steps // 10
    if step < warm_up:
        return LEARNING_RATE * (step + 1) / warm_up
    progress = (step - warm_up) / (steps - warm_up)
    return LEARNING_RATE * (1 + math.cos(math.pi * progress)) / 2


def run_rank(rank: int, ranks: int, store: str, options: argparse.Namespace) -> None:
    """Train all models on one rank, and print the results on the first one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    corpus = load_corpus()

    results: list[Result] = []
    for kind in options.models:
        runs = [("bf16", "off"), (PERTURBED, "off")]
        for recipe in options.recipes:
            blockwise = recipe in ("block", "mxfp8")
            runs.append((recipe, "gather" if blockwise else "fp8"))
        for recipe, experts in runs:
            result = train(kind, recipe, experts, corpus, options.steps)
            results.append(result)
            if rank == 0:
                print(row(result, reference(results, kind)), flush=True)
    if rank == 0 and options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2))

    failed = []
    for result in results:
        bf16 = reference(results, result.model)
        if result.recipe != PERTURBED and not passes(result, bf16):
            failed.append(f"{result.model} {result.recipe}")
    dist.destroy_process_group()
    if failed and rank == 0:
        sys.exit(f"beyond the limits: {', '.join(failed)}")


def reference(results: list[Result], model: str) -> Result:
    """Return the bf16 training of a model."""
    return next(result for result in results if result.model == model and result.recipe == "bf16")


def passes(result: Result, bf16: Result) -> bool:
    """Return whether the loss and the bytes of gathers are within the limits."""
    is_bf16 = result.recipe.startswith("bf16")
    bytes_ratio = result.expert_bytes / bf16.expert_bytes
    loss_difference = abs(result.loss / bf16.loss - 1)
    return (is_bf16 or 0.5 <= bytes_ratio <= 0.52) and loss_difference < 0.01


def row(result: Result, bf16: Result) -> str:
    """Return a row of the table."""
    return (
        f"| {result.model} | {result.recipe} | {result.experts} | {result.loss:.4f} "
        f"| {100 * (result.loss / bf16.loss - 1):+.2f}% "
        f"| {result.expert_bytes / bf16.expert_bytes:.4f} "
        f"| {result.gathered / bf16.gathered:.3f} | {result.seconds:.0f} |"
    )


def main() -> None:
    """Start the ranks."""

    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=names, default=list(KINDS))
    recipes = ["current", "delayed", "rowwise", "block", "mxfp8"]
    parser.add_argument("--recipes", type=names, default=recipes)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    print("| model | recipe | experts | held-out loss | to bf16 | experts' bytes | all bytes | s |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (options.ranks, f"{folder}/store", options), options.ranks)


if __name__ == "__main__":
    main()
