"""Train the model of the demo on one rank, in bf16 or in FP8.

Both trainings have the same seeds, batches and FSDP2 settings. The FP8 training adds a call of
`fp8rs.convert_to_float8_training`. With FP8 weights, its optimizer is `fp8rs.optim.AdamW`.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8rs._torch import own_part
from fp8rs.nn.linear import Float8Linear
from fp8rs.quantize.recipes import Recipe, RecipeName
from fp8rs.tensor.quantized import QuantizedTensor

from .data import VOCABULARY, Corpus, load_corpus
from .launch import Report
from .model import Llama, LlamaConfig, parameter_count

#: Layers that stay in high precision. The output head usually does in FP8 training.
HIGH_PRECISION = ("head",)


@dataclass(frozen=True)
class Settings:
    """Settings of a training. ``rows`` is the global batch size."""

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
        """Return settings for a run of minutes on two CPU cores, or for a larger one on GPUs."""
        if device == "cuda":
            model = LlamaConfig(VOCABULARY, 512, 8, 8, 4, 1408)
            settings = Settings(model, device, 600, 64, 256, 1e-3)
        else:
            model = LlamaConfig(VOCABULARY, 192, 4, 6, 2, 512)
            settings = Settings(model, device, 200, 16, 128, 2e-3)
        # With equal rows on all ranks, the mean over ranks is the mean over the batch.
        rows = -(-settings.rows // ranks) * ranks
        return replace(settings, rows=rows, steps=settings.steps if steps is None else steps)


@dataclass
class Result:
    """Measurements of one rank.

    Attributes:
        params: number of parameters of the model.
        held_out: steps and the held-out losses before them.
        allgather_bytes: bytes of the all-gathers of the last step.
        weight_bytes: bytes of the converted weights among them.
        peak_memory: see `peak_memory`.
        at_rest: see `bytes_at_rest`.
        seconds: time of the training.
    """

    params: int
    held_out: list[tuple[int, float]] = field(default_factory=list)
    allgather_bytes: int = 0
    weight_bytes: int = 0
    peak_memory: int = 0
    at_rest: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def build_model(settings: Settings) -> Llama:
    """Return the untrained model with fp32 weights, the same on every rank."""
    model = Llama(settings.model)
    # With a CPU generator, CPU and GPU trainings start from the same weights.
    model.init_weights(torch.Generator().manual_seed(settings.seed))
    return model.to(settings.device)


def convert(model: nn.Module, recipe: Recipe | RecipeName, **options: Any) -> nn.Module:
    """Convert the linear layers of the model, except the output head."""
    from fp8rs import convert_to_float8_training

    return convert_to_float8_training(model, recipe=recipe, filter_fqns=HIGH_PRECISION, **options)


def converted_weights(model: nn.Module) -> set[str]:
    """Return the names of the weights that `convert` converts."""
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in HIGH_PRECISION
    }


def shard(model: Llama, device: str, ranks: int, reduce_dtype: torch.dtype = torch.float32) -> None:
    """Shard each block, then the rest. Parameters are gathered in bf16."""
    mesh = init_device_mesh(device, (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def make_optimizer(
    model: nn.Module, settings: Settings, fp8_adamw: dict[str, Any] | None = None
) -> torch.optim.Optimizer:
    """Return AdamW. `train_step` sets its learning rate.

    Args:
        model: the model.
        settings: the settings.
        fp8_adamw: options of `fp8rs.optim.AdamW`. None returns `torch.optim.AdamW`.
    """
    from fp8rs.optim import AdamW

    options: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": (0.9, 0.95),
        "weight_decay": 0.1,
    }
    if fp8_adamw is None:
        fused = settings.device == "cuda"
        return torch.optim.AdamW(model.parameters(), fused=fused, **options)
    return AdamW(model.parameters(), **options, **fp8_adamw)


def learning_rate(settings: Settings, step: int) -> float:
    """Return the learning rate: a warm-up, then a cosine down to a tenth of the peak."""
    warm_up = max(1, settings.steps // 10)
    if step < warm_up:
        return settings.learning_rate * (step + 1) / warm_up
    done = (step - warm_up) / max(1, settings.steps - warm_up)
    return settings.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


def train_step(
    model: Llama, optimizer: torch.optim.Optimizer, settings: Settings, step: int, rows: Any
) -> torch.Tensor:
    """Run a forward, a backward, gradient clipping and an update. Return the loss of this rank."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(settings, step)
    loss = model.loss(rows)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def train_under_fsdp(
    settings: Settings,
    recipe: RecipeName | None,
    fp8_adamw: dict[str, Any] | None,
    report: Report,
) -> Result:
    """Train on this rank of the default process group.

    Args:
        settings: the same on all ranks.
        recipe: short name of a recipe, or None for the reference in bf16.
        fp8_adamw: options of `fp8rs.optim.AdamW`, which trains FP8 weights. With None, torch's
            AdamW trains master weights.
        report: called with the step, the last held-out loss, and the step of that loss.
    """
    ranks = dist.get_world_size()
    corpus, model = load_corpus(), build_model(settings)
    result = Result(parameter_count(model))
    names = converted_weights(model)
    if recipe is not None:
        fp8 = fp8_adamw is not None
        masters = fp8_adamw is not None and fp8_adamw.get("master_weights", True)
        # Masters start with the values before quantization.
        convert(model, recipe, fp8_weights=fp8, preserve_high_precision_init_val=masters)
    shard(model, settings.device, ranks)
    optimizer = make_optimizer(model, settings, fp8_adamw)
    count = min(settings.evaluations, settings.steps)
    evaluations = {round(settings.steps * i / count) for i in range(count + 1)}
    start = time.perf_counter()
    for step in range(settings.steps + 1):
        if step in evaluations:
            loss = held_out_loss(model, corpus, settings, ranks)
            result.held_out.append((step, loss))
        if step in evaluations or step % max(1, settings.steps // 100) == 0:
            measured, loss = result.held_out[-1]
            report({"step": step, "loss": loss, "measured": measured})
        if step == settings.steps:
            break
        batch = _local(corpus.batch(settings.seed, step, settings.rows, settings.length), settings)
        last = step == settings.steps - 1
        with _AllGatherBytes() if last else nullcontext() as counter:
            train_step(model, optimizer, settings, step, batch)
        if counter is not None:
            result.allgather_bytes = counter.nbytes
    result.seconds = time.perf_counter() - start
    result.peak_memory = peak_memory(settings.device)
    model.reshard()  # type: ignore[operator]
    result.weight_bytes = _weight_bytes(model, names, ranks)
    result.at_rest = bytes_at_rest(model, optimizer, names)
    return result


def peak_memory(device: str) -> int:
    """Return the peak memory: of the GPU's allocator, or of this process on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def bytes_at_rest(
    model: nn.Module, optimizer: torch.optim.Optimizer, names: set[str]
) -> dict[str, float]:
    """Return the bytes a parameter that this rank stores of the weights ``names``.

    "weights" is the local tensors, "optimizer" their optimizer states.
    """
    named = {p for name, p in model.named_parameters() if name in names}
    elements = sum(own_part(p).numel() for p in named)
    states = [value for p in named for value in optimizer.state.get(p, {}).values()]
    return {
        "weights": sum(map(_nbytes, named)) / elements,
        "optimizer": sum(_nbytes(value) for value in states if torch.is_tensor(value)) / elements,
    }


def _nbytes(tensor: torch.Tensor) -> int:
    local = own_part(tensor)
    if isinstance(local, QuantizedTensor):
        return sum(plane.data.nbytes + plane.scale.nbytes for plane in local.planes if plane)
    return int(local.nbytes)


def _weight_bytes(model: nn.Module, names: set[str], ranks: int) -> int:
    """Return the bytes that a training step gathers of the weights ``names``."""
    from fp8rs.convert.sizes import groups_of, layouts_of

    if ranks == 1:
        return 0
    layers = [module for module in model.modules() if isinstance(module, Float8Linear)]
    layouts = layouts_of(layers[0].recipe, ((m, "weight") for m in layers)) if layers else {}
    groups = groups_of(model, layouts, world_size=ranks, param_dtype=torch.bfloat16)
    named = {id(p) for name, p in model.named_parameters() if name in names}
    return sum(
        group.gathers * p.gathered_bytes
        for group in groups
        for p in group.parameters
        if id(p.parameter) in named
    )


class _AllGatherBytes(TorchDispatchMode):
    """Counts the bytes of the outputs of all-gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and "gather" in func._schema.name:
            tensors = (t for t in tree_leaves((args, out)) if isinstance(t, torch.Tensor))
            self.nbytes += max(t.nbytes for t in tensors)
        return out


def _local(batch: torch.Tensor, settings: Settings) -> torch.Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()].to(settings.device)


@torch.no_grad()
def held_out_loss(model: Llama, corpus: Corpus, settings: Settings, ranks: int) -> float:
    """Return the mean loss of held-out batches. All ranks call it."""
    total = torch.zeros((), device=settings.device)
    for index in range(settings.held_out_batches):
        batch = corpus.held_out_batch(index, settings.rows, settings.length)
        total += model.loss(_local(batch, settings))
    dist.all_reduce(total)
    # Without a backward, the root stays unsharded, and the next step would not gather it.
    model.reshard()  # type: ignore[operator]
    return total.item() / (ranks * settings.held_out_batches)
