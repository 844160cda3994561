"""Train the model of the demo on one rank, in high precision or in FP8.

Both trainings have the same seeds, batches and FSDP2 settings. The FP8 training adds a call of
`fp8rs.convert_to_float8_training`. With FP8 weights, its optimizer is `fp8rs.optim.AdamW`.

Both trainings gather unconverted parameters and compute in one dtype. It is bf16, or fp32 on a CPU
whose bf16 GEMMs are slower than its fp32 GEMMs (`faster_dtype`).
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
from fp8rs.quantize.recipes import Recipe, RecipeName
from fp8rs.tensor.quantized import QuantizedTensor

from .data import VOCABULARY, Corpus, load_corpus
from .launch import Report
from .model import Llama, LlamaConfig, parameter_count

#: Layers that stay in high precision. The output head usually does in FP8 training.
HIGH_PRECISION = ("head",)

#: Dtypes of the reference, by the names that the demo prints.
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Settings:
    """Settings of a training.

    ``rows`` is the global batch size, and ``dtype`` a key of `DTYPES`.
    """

    model: LlamaConfig
    device: str
    steps: int
    rows: int
    length: int
    learning_rate: float
    evaluations: int = 12
    held_out_batches: int = 4
    seed: int = 0
    dtype: str = "bf16"

    @staticmethod
    def choose(device: str, ranks: int, steps: int | None = None, dtype: str = "bf16") -> Settings:
        """Return settings for a run of minutes on two CPU cores, or for a larger one on GPUs."""
        if device == "cuda":
            model = LlamaConfig(VOCABULARY, 512, 8, 8, 4, 1408)
            settings = Settings(model, device, 600, 64, 256, 1e-3)
        else:
            model = LlamaConfig(VOCABULARY, 192, 4, 6, 2, 512)
            settings = Settings(model, device, 200, 16, 128, 2e-3)
            if dtype == "fp32":
                # CPUs without fast bf16 GEMMs are often slow in fp32 too.
                settings = replace(settings, dtype=dtype, steps=40, evaluations=6)

        if steps is not None:
            settings = replace(settings, steps=steps)

        # With equal rows on all ranks, the mean over ranks is the mean over the batch.
        rows_per_rank = math.ceil(settings.rows / ranks)
        return replace(settings, rows=rows_per_rank * ranks)


def faster_dtype() -> str:
    """Return "bf16" or "fp32", whichever this CPU multiplies faster.

    A CPU without AMX or AVX-512 runs torch's bf16 GEMMs 10 to 20 times slower than fp32 GEMMs.
    """
    # The shape of the demo's largest GEMM on each of two ranks.
    tokens, inputs, outputs = 1024, 512, 192
    seconds = {}
    for name, dtype in DTYPES.items():
        x = torch.ones(tokens, inputs, dtype=dtype)
        weight = torch.ones(outputs, inputs, dtype=dtype)
        durations = []
        # Other processes can delay a GEMM, so compare the shortest of several.
        for _ in range(5):
            start = time.perf_counter()
            nn.functional.linear(x, weight)
            durations.append(time.perf_counter() - start)
        seconds[name] = min(durations)
    return min(seconds, key=seconds.__getitem__)


@dataclass
class Result:
    """Measurements of one rank.

    Attributes:
        params: number of parameters of the model.
        held_out: steps and the held-out losses before them.
        allgather_bytes: bytes of the all-gathers of the last step.
        peak_memory: see `peak_memory`.
        at_rest: see `bytes_at_rest`.
        seconds: time of the training.
    """

    params: int
    held_out: list[tuple[int, float]] = field(default_factory=list)
    allgather_bytes: int = 0
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
    names = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in HIGH_PRECISION:
            names.add(f"{name}.weight")
    return names


def shard(
    model: Llama,
    device: str,
    ranks: int,
    reduce_dtype: torch.dtype = torch.float32,
    param_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Shard each block, then the rest. Unconverted parameters are gathered in ``param_dtype``."""
    mesh = init_device_mesh(device, (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
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
        recipe: short name of a recipe, or None for the reference in high precision.
        fp8_adamw: options of `fp8rs.optim.AdamW`, which trains FP8 weights. With None, torch's
            AdamW trains master weights.
        report: called with the number of a step, which counts from 1, and its training loss.
    """
    ranks = dist.get_world_size()
    corpus = load_corpus()
    model = build_model(settings)
    weight_names = converted_weights(model)
    result = Result(parameter_count(model))

    if recipe is not None:
        fp8_weights = fp8_adamw is not None
        # Masters start with the values before quantization.
        keep_init_values = fp8_adamw is not None and fp8_adamw.get("master_weights", True)
        convert(
            model,
            recipe,
            fp8_weights=fp8_weights,
            preserve_high_precision_init_val=keep_init_values,
        )
    shard(model, settings.device, ranks, param_dtype=DTYPES[settings.dtype])
    optimizer = make_optimizer(model, settings, fp8_adamw)

    evaluations = min(settings.evaluations, settings.steps)
    evaluated_steps = [round(settings.steps * i / evaluations) for i in range(evaluations + 1)]
    report_interval = max(1, settings.steps // 100)
    all_gathers = _AllGatherBytes()

    start = time.perf_counter()
    result.held_out.append((0, held_out_loss(model, corpus, settings, ranks)))
    for step in range(1, settings.steps + 1):
        rows = corpus.batch(settings.seed, step - 1, settings.rows, settings.length)
        is_last = step == settings.steps
        with all_gathers if is_last else nullcontext():
            loss = train_step(model, optimizer, settings, step - 1, _local(rows, settings))

        if is_last or step % report_interval == 0:
            dist.all_reduce(loss)
            report({"step": step, "loss": loss.item() / ranks})
        if step in evaluated_steps:
            result.held_out.append((step, held_out_loss(model, corpus, settings, ranks)))

    result.seconds = time.perf_counter() - start
    result.allgather_bytes = all_gathers.nbytes
    result.peak_memory = peak_memory(settings.device)
    model.reshard()  # type: ignore[operator]
    result.at_rest = bytes_at_rest(model, optimizer, weight_names)
    return result


def peak_memory(device: str) -> int:
    """Return the peak memory: of the GPU's allocator, or of this process on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def bytes_at_rest(
    model: nn.Module, optimizer: torch.optim.Optimizer, weight_names: set[str]
) -> dict[str, float]:
    """Return the bytes a parameter that this rank stores of some weights.

    "weights" is the local tensors, "optimizer" their optimizer states.
    """
    numel = 0
    weight_bytes = 0
    optimizer_bytes = 0
    for name, parameter in model.named_parameters():
        if name not in weight_names:
            continue
        numel += own_part(parameter).numel()
        weight_bytes += _local_bytes(parameter)
        for state in optimizer.state.get(parameter, {}).values():
            if torch.is_tensor(state):
                optimizer_bytes += _local_bytes(state)
    return {"weights": weight_bytes / numel, "optimizer": optimizer_bytes / numel}


def _local_bytes(tensor: torch.Tensor) -> int:
    local = own_part(tensor)
    if isinstance(local, QuantizedTensor):
        return sum(plane.data.nbytes + plane.scale.nbytes for plane in local.planes if plane)
    return int(local.nbytes)


class _AllGatherBytes(TorchDispatchMode):
    """Counts the bytes of the outputs of all-gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and "gather" in func._schema.name:
            # The gathered tensor is the largest one. Some operators return it, others write it.
            tensors = [t for t in tree_leaves((args, out)) if isinstance(t, torch.Tensor)]
            self.nbytes += max(tensor.nbytes for tensor in tensors)
        return out


def _local(batch: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Return the rows of this rank."""
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
