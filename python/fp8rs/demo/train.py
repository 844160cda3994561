"""Train the model on one rank, in high precision or in FP8.

Both trainings have the same initial weights, batches and FSDP2 settings. The FP8 training adds a
call of `fp8rs.convert_to_float8_training`.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8rs
from fp8rs.quantize.recipes import RecipeName

from .data import VOCABULARY, Corpus, load_corpus
from .model import Llama, LlamaConfig

#: Layers that stay in high precision. The output head usually does in FP8 training.
HIGH_PRECISION = ("head",)

#: Dtypes of the reference, by the names that the demo prints.
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

#: Evaluations on held-out text, without the one before the first step.
EVALUATIONS = 10
HELD_OUT_BATCHES = 4


@dataclass(frozen=True)
class Settings:
    """Settings of a training.

    ``rows`` is the global batch size. What is not in FP8 is gathered and computed in ``dtype``, a
    key of `DTYPES`.
    """

    model: LlamaConfig
    device: str
    steps: int
    rows: int
    length: int
    learning_rate: float
    dtype: str = "bf16"
    seed: int = 0

    @staticmethod
    def choose(device: str, ranks: int, steps: int | None = None) -> Settings:
        """Return settings for two minutes on two CPU cores, or for a larger training on GPUs."""
        if device == "cuda":
            model = LlamaConfig(VOCABULARY, dim=512, layers=8, heads=8, kv_heads=4, hidden=1408)
            settings = Settings(model, device, 600, rows=64, length=256, learning_rate=1e-3)
        else:
            model = LlamaConfig(VOCABULARY, dim=192, layers=4, heads=6, kv_heads=2, hidden=512)
            settings = Settings(model, device, 200, rows=16, length=128, learning_rate=2e-3)

        # With equal rows on all ranks, the mean over ranks is the mean over the batch.
        rows_per_rank = math.ceil(settings.rows / ranks)
        return replace(settings, rows=rows_per_rank * ranks, steps=steps or settings.steps)


@dataclass(frozen=True)
class Result:
    """The result of a training.

    Attributes:
        held_out: steps, and the held-out losses after them.
        gathered_bytes: bytes of the all-gathers of a step on one rank.
        seconds: duration of the training.
    """

    held_out: list[tuple[int, float]]
    gathered_bytes: int
    seconds: float


def build_model(settings: Settings) -> Llama:
    """Return the untrained model with fp32 weights, the same on every rank."""
    model = Llama(settings.model)
    # With a CPU generator, CPU and GPU trainings start from the same weights.
    model.init_weights(torch.Generator().manual_seed(settings.seed))
    return model.to(settings.device)


def shard(
    model: Llama,
    mesh: DeviceMesh | None = None,
    param_dtype: torch.dtype = torch.bfloat16,
    reduce_dtype: torch.dtype = torch.float32,
) -> None:
    """Shard each block, then the rest. Unconverted parameters are gathered in ``param_dtype``.

    Without a mesh, parameters are sharded over all ranks.
    """
    if mesh is None:
        # FSDP2's default mesh would be on GPUs if there are any, even for a model on the CPU.
        device = next(model.parameters()).device
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Return AdamW. `train_step` sets its learning rate."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=settings.device == "cuda",
    )


def learning_rate(settings: Settings, step: int) -> float:
    """Return the learning rate: a warm-up, then a cosine down to a tenth of the peak."""
    warm_up = max(1, settings.steps // 10)
    if step < warm_up:
        return settings.learning_rate * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, settings.steps - warm_up)
    return settings.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def train_step(
    model: Llama,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    step: int,
    tokens: torch.Tensor,
) -> torch.Tensor:
    """Run a forward, a backward, gradient clipping and an update. Return the loss of this rank."""
    rate = learning_rate(settings, step)
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    loss = model.loss(tokens)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@torch.no_grad()
def held_out_loss(
    model: Llama, corpus: Corpus, settings: Settings, batches: int = HELD_OUT_BATCHES
) -> float:
    """Return the mean loss of held-out batches. All ranks call it."""
    total = torch.zeros((), device=settings.device)
    for index in range(batches):
        batch = corpus.held_out_batch(index, settings.rows, settings.length)
        total += model.loss(_rows_of_rank(batch, settings))
    # Without a backward, the root stays unsharded, and the next step would not gather it.
    model.reshard()  # type: ignore[operator]
    return _mean_over_ranks(total / batches)


def train(settings: Settings, recipe: RecipeName | None) -> Result:
    """Train on this rank of the default process group. Rank 0 prints the progress.

    Args:
        settings: the same on all ranks.
        recipe: short name of a recipe, or None for the reference in high precision.
    """
    corpus = load_corpus()
    model, optimizer = prepare(settings, recipe)

    # The report of an unconverted model has the bytes with and without FP8.
    sizes = fp8rs.report(model, param_dtype=DTYPES[settings.dtype])
    gathered_bytes = sizes.gathered if recipe else sizes.gathered_high_precision

    title = recipe or settings.dtype
    held_out = [(0, held_out_loss(model, corpus, settings))]
    if dist.get_rank() == 0:
        print(f"{title:>9}: before training    held-out loss {held_out[0][1]:.3f}", flush=True)

    interval = math.ceil(settings.steps / EVALUATIONS)
    start = time.perf_counter()
    for step in range(1, settings.steps + 1):
        batch = corpus.batch(settings.seed, step - 1, settings.rows, settings.length)
        tokens = _rows_of_rank(batch, settings)
        loss = train_step(model, optimizer, settings, step - 1, tokens)

        if step % interval == 0 or step == settings.steps:
            training_loss = _mean_over_ranks(loss)
            held_out.append((step, held_out_loss(model, corpus, settings)))
            if dist.get_rank() == 0:
                print(
                    f"{title:>9}: step {step:>4}/{settings.steps}  "
                    f"training loss {training_loss:.3f}  held-out loss {held_out[-1][1]:.3f}  "
                    f"{time.perf_counter() - start:5.1f} s",
                    flush=True,
                )
    return Result(held_out, gathered_bytes, time.perf_counter() - start)


def steps_in(seconds: float, settings: Settings, recipe: RecipeName) -> int:
    """Return how many steps of both trainings take about ``seconds``, at most ``settings.steps``.

    All ranks call it and return the same number. Steps in FP8 are measured, because a CPU is slower
    in FP8 than in the dtype of the reference.
    """
    model, optimizer = prepare(settings, recipe)
    batch = load_corpus().batch(settings.seed, 0, settings.rows, settings.length)
    tokens = _rows_of_rank(batch, settings)
    durations = []
    for step in range(5):
        start = time.perf_counter()
        train_step(model, optimizer, settings, step, tokens)
        durations.append(time.perf_counter() - start)

    # The first step is longer, because it allocates memory.
    step_seconds = _mean_over_ranks(torch.tensor(statistics.median(durations)))
    steps = int(seconds / (2 * step_seconds))
    evenly_evaluated_steps = steps // EVALUATIONS * EVALUATIONS
    return max(EVALUATIONS, min(evenly_evaluated_steps, settings.steps))


def prepare(settings: Settings, recipe: RecipeName | None) -> tuple[Llama, torch.optim.Optimizer]:
    """Return the model, converted and sharded, and its optimizer."""
    model = build_model(settings)
    if recipe is not None:
        # The model is too small for FP8 to be faster. The demo shows its losses.
        fp8rs.convert_to_float8_training(
            model, recipe=recipe, filter_fqns=HIGH_PRECISION, gemms="fp8"
        )
    shard(model, param_dtype=DTYPES[settings.dtype])
    return model, make_optimizer(model, settings)


def _rows_of_rank(batch: torch.Tensor, settings: Settings) -> torch.Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()].to(settings.device)


def _mean_over_ranks(loss: torch.Tensor) -> float:
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()
