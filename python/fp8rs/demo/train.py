"""Trains the demo's model on one rank, in high precision or in FP8.

The two runs differ in one call, `fp8rs.convert_to_float8_training`: seeds, batches, optimizer and
FSDP2 settings are the same. With FP8 weights the optimizer is
`fp8rs.optim.AdamW`, of the same arithmetic.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8rs.quantize.recipes import Recipe, RecipeName

from .data import VOCABULARY, Corpus, load_corpus
from .memory import Meter
from .model import Llama, LlamaConfig, parameter_count
from .traffic import converted_share, counted

#: The output head stays in high precision, as is usual in FP8 training.
HIGH_PRECISION = ("head",)


@dataclass(frozen=True)
class Settings:
    """What is trained, and how long. ``rows`` is the global batch."""

    model: LlamaConfig
    device: str
    steps: int
    rows: int
    length: int
    learning_rate: float
    evaluations: int = 12
    held_out_batches: int = 4
    seed: int = 0

    @staticmethod
    def choose(device: str, ranks: int, steps: int | None = None) -> Settings:
        """Two to three minutes on two CPU cores; a larger model where there is a GPU."""
        if device == "cuda":
            model = LlamaConfig(VOCABULARY, 512, 8, 8, 4, 1408)
            settings = Settings(model, device, 600, 64, 256, 1e-3)
        else:
            model = LlamaConfig(VOCABULARY, 192, 4, 6, 2, 512)
            settings = Settings(model, device, 200, 16, 128, 2e-3)
        # Each rank takes as many rows: the mean over ranks is then the mean over the batch.
        rows = -(-settings.rows // ranks) * ranks
        return replace(settings, rows=rows, steps=settings.steps if steps is None else steps)


#: Dtypes of the moments, by the names that options have.
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Weights:
    """How the converted weights are kept, and what their optimizer does.

    Attributes:
        kind: "master", in fp32 and quantized for each forward; or "fp8", FP8 weights. All that
            follows is for the second.
        masters: the optimizer keeps fp32 masters.
        state_dtype: of its moments, a key of `STATE_DTYPES`.
        stochastic_rounding: how it rounds codes; None is its default, stochastically without
            masters.
    """

    kind: str = "master"
    masters: bool = True
    state_dtype: str = "fp32"
    stochastic_rounding: bool | None = None

    @property
    def fp8(self) -> bool:
        """Whether they are FP8 weights."""
        return self.kind == "fp8"


#: fp32 masters that are quantized for each forward.
MASTER = Weights()


@dataclass
class Result:
    """What one rank's training run found.

    ``weight_bytes`` is the converted weights' part of ``allgather_bytes``; ``at_rest`` as in
    `memory.AtRest`.
    """

    params: int
    held_out: list[tuple[int, float]] = field(default_factory=list)
    allgather_bytes: int = 0
    weight_bytes: int = 0
    peak_memory: int = 0
    at_rest: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


Progress = Callable[[dict[str, Any]], None]


def build_model(settings: Settings) -> Llama:
    """The untrained model with fp32 weights, the same on every rank."""
    model = Llama(settings.model)
    # A CPU generator: CPU and GPU runs start from the same weights.
    model.init_weights(torch.Generator().manual_seed(settings.seed))
    return model.to(settings.device)


def convert(model: nn.Module, recipe: Recipe | RecipeName, weights: Weights = MASTER) -> nn.Module:
    """Converts the model's linear layers for FP8 training with a recipe or that of a short name."""
    from fp8rs import convert_to_float8_training

    return convert_to_float8_training(
        model,
        recipe=recipe,
        filter_fqns=HIGH_PRECISION,
        fp8_weights=weights.fp8,
        # What masters begin with.
        preserve_high_precision_init_val=weights.fp8 and weights.masters,
    )


def make_optimizer(
    model: nn.Module, settings: Settings, weights: Weights = MASTER
) -> torch.optim.Optimizer:
    """AdamW; the learning rate follows `learning_rate`."""
    options: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": (0.9, 0.95),
        "weight_decay": 0.1,
    }
    if not weights.fp8:
        return torch.optim.AdamW(model.parameters(), **options)
    return fp8_adamw(model, weights, **options)


def fp8_adamw(model: nn.Module, weights: Weights, **options: Any) -> torch.optim.Optimizer:
    """`fp8rs.optim.AdamW` as ``weights`` say; ``options`` are those of any AdamW."""
    from fp8rs.optim import AdamW

    return AdamW(
        model.parameters(),
        state_dtype=STATE_DTYPES[weights.state_dtype],
        master_weights=weights.masters,
        stochastic_rounding=weights.stochastic_rounding,
        **options,
    )


def learning_rate(settings: Settings, step: int) -> float:
    """Warm-up over a tenth of the steps, then a cosine down to a tenth of the peak."""
    warm_up = max(1, settings.steps // 10)
    if step < warm_up:
        return settings.learning_rate * (step + 1) / warm_up
    done = (step - warm_up) / max(1, settings.steps - warm_up)
    return settings.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


def train_step(
    model: Llama, optimizer: torch.optim.Optimizer, settings: Settings, step: int, rows: Any
) -> None:
    """One forward, backward, clip and update on the given rows."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(settings, step)
    model.loss(rows).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def train_under_fsdp(
    settings: Settings, recipe: RecipeName | None, report: Progress, weights: Weights = MASTER
) -> Result:
    """Trains on this rank of the default process group.

    Args:
        settings: the same on all ranks.
        recipe: a recipe's short name, or None for the high-precision reference.
        report: called with a progress event after each evaluation and now and then between: the
            step, the last held-out loss, and the step that this was measured at.
        weights: how the converted weights are kept.
    """
    ranks = dist.get_world_size()
    corpus = load_corpus()
    meter = Meter()
    model = build_model(settings)
    result = Result(parameter_count(model))
    converted = linear_weights(model)
    if recipe is not None:
        convert(model, recipe, weights)
    shard(model, settings.device, ranks)
    optimizer = make_optimizer(model, settings, weights)
    marks = _evaluation_steps(settings)
    start = time.perf_counter()
    for step in range(settings.steps + 1):
        if step in marks:
            loss = _held_out_loss(model, corpus, settings, ranks)
            result.held_out.append((step, loss))
        if step in marks or step % max(1, settings.steps // 100) == 0:
            measured, loss = result.held_out[-1]
            report({"step": step, "loss": loss, "measured": measured})
        if step == settings.steps:
            break
        batch = _local(corpus.batch(settings.seed, step, settings.rows, settings.length), settings)
        last = step == settings.steps - 1
        with counted(model, ranks) if last else nullcontext() as traffic:
            train_step(model, optimizer, settings, step, batch)
        if traffic is not None:
            result.allgather_bytes = traffic.total
            result.weight_bytes = (
                traffic.handed_over
                if recipe is not None
                else converted_share(traffic, model, converted, ranks, itemsize=2)
            )
    result.seconds = time.perf_counter() - start
    result.peak_memory = peak_memory(settings.device)
    del batch
    model.reshard()  # type: ignore[operator]
    result.at_rest = asdict(meter.at_rest(model, optimizer, converted))
    return result


def train_alone(settings: Settings, corpus: Corpus) -> Llama:
    """Trains the high-precision model in this process, without FSDP2 and in fp32."""
    model = build_model(settings)
    optimizer = make_optimizer(model, settings)
    for step in range(settings.steps):
        batch = corpus.batch(settings.seed, step, settings.rows, settings.length)
        train_step(model, optimizer, settings, step, batch.to(settings.device))
    return model


def peak_memory(device: str) -> int:
    """Most bytes held so far: of the GPU's allocator, or of this process on CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def linear_weights(model: nn.Module) -> set[str]:
    """Names of the weights that `convert` converts."""
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in HIGH_PRECISION
    }


def shard(model: Llama, device: str, ranks: int, reduce_dtype: torch.dtype = torch.float32) -> None:
    """Shards each block, then the rest: bf16 compute, gradients reduced in fp32 or as told."""
    mesh = init_device_mesh(device, (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _evaluation_steps(settings: Settings) -> set[int]:
    count = min(settings.evaluations, settings.steps)
    return {round(settings.steps * i / count) for i in range(count + 1)}


def _local(batch: torch.Tensor, settings: Settings) -> torch.Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()].to(settings.device)


@torch.no_grad()
def _held_out_loss(model: Llama, corpus: Corpus, settings: Settings, ranks: int) -> float:
    total = torch.zeros((), device=settings.device)
    for index in range(settings.held_out_batches):
        batch = corpus.held_out_batch(index, settings.rows, settings.length)
        total += model.loss(_local(batch, settings))
    dist.all_reduce(total)
    # The root stays gathered after a forward without a backward: the next step would find it so.
    model.reshard()  # type: ignore[operator]
    return total.item() / (ranks * settings.held_out_batches)
