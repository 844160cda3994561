"""The result of `fp8rs.report`, and its table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf
from typing import Any

import torch

from fp8rs.convert.expert_selection import IF_CALLED
from fp8rs.convert.memory import Memory
from fp8rs.convert.select import counted, listed
from fp8rs.convert.speed import LinearSpeed
from fp8rs.gemm.estimates import CHOICE
from fp8rs.quantize.recipes import Recipe, describe

NOT_COUNTED = (
    "activations, tensors saved for the backward, the transposed plane of the weight in use, "
    "buffers, the all-reduce of amaxes, the CUDA context, NCCL, unused memory of the allocator"
)


@dataclass(frozen=True)
class Left:
    """Parameters that stay in high precision for one reason.

    Attributes:
        reason: the reason.
        names: names of layers, or of parameters outside linear layers.
        parameters: their number of elements.
    """

    reason: str
    names: tuple[str, ...]
    parameters: int


@dataclass(frozen=True)
class Report:
    """The layers, communication volume and memory of a model. ``str()`` returns a table.

    Sizes are bytes of one rank. Communication is per step, which is one forward and one backward.

    Attributes:
        recipe: the recipe.
        world_size: number of shards, without replicas.
        param_dtype, reduce_dtype: the arguments of `fp8rs.report`.
        optimizer: the argument, or the default.
        summary: the numbers of converted layers and weights of experts.
        converted: names of the converted modules.
        converted_parameters: number of elements of their weights.
        parameters: number of elements of all parameters.
        experts: the argument, or the mode in which the model was converted.
        speed: the estimated speed of the linear layers.
        gemms: by name of a weight of experts, its GEMMs on Hopper by rows per expert: "FP8", "FP8,
            high-precision wgrad" or "high precision".
        gemm_reasons: by name of a weight of experts, why all its GEMMs run in high precision, or
            that they run as named if the module's forward calls torch's grouped GEMMs. Other
            weights have FP8 GEMMs, or the number of rows decides.
        left: parameters that stay in high precision, by reason.
        units: names of the modules that ``fully_shard`` is called on. The root is "".
        gathered, gathered_high_precision: bytes of the outputs of a step's all-gathers, padding
            included, with and without FP8.
        scattered: bytes of the inputs of a step's reduce-scatters.
        memory, memory_high_precision: memory with and without FP8.
    """

    recipe: Recipe
    world_size: int
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    optimizer: str | float
    experts: str
    summary: str
    converted: tuple[str, ...]
    converted_parameters: int
    parameters: int
    speed: LinearSpeed
    gemms: dict[str, dict[int, str]]
    gemm_reasons: dict[str, str]
    left: tuple[Left, ...]
    units: tuple[str, ...]
    gathered: int
    gathered_high_precision: int
    scattered: int
    memory: Memory
    memory_high_precision: Memory

    def __str__(self) -> str:
        parameters = [(f"converted: {self.summary}", self.converted_parameters, "")]
        for unconverted in self.left:
            names = listed(unconverted.names)
            parameters.append((unconverted.reason, unconverted.parameters, names))
        width = max(40, *(len(label) for label, _, _ in parameters))
        mode = f"experts={self.experts!r}; " if self.gemms or self.experts != "auto" else ""
        lines = [
            f"recipe {describe(self.recipe)}; {counted(self.world_size, 'rank')}; "
            f"{counted(len(self.units), 'FSDP2 unit')}; {mode}"
            f"gradients are reduced in {_dtype(self.reduce_dtype)}",
            "",
            f"{'parameters':<{width + 2}}{'elements':>18}{'share':>8}",
        ]
        for label, elements, names in parameters:
            share = elements / max(self.parameters, 1)
            lines.append(f"  {label:<{width}}{elements:>18,}{share:>8.1%}  {names}".rstrip())

        lines += _linear_layers(self.speed)
        lines += _gemms(self)

        plain = self.memory_high_precision
        fp8 = self.memory
        sizes = [
            ("all-gathers of a step", self.gathered_high_precision, self.gathered),
            ("reduce-scatters of a step", self.scattered, self.scattered),
            ("memory", plain.total, fp8.total),
            ("  sharded parameters", plain.parameters, fp8.parameters),
            ("  gradients", plain.gradients, fp8.gradients),
            (f"  optimizer states ({self.optimizer})", plain.optimizer, fp8.optimizer),
            ("  gathered: root and two largest units", plain.gathered, fp8.gathered),
            ("  gradients in reduction", plain.reduced, fp8.reduced),
        ]
        width = max(40, *(len(label) for label, _, _ in sizes))
        dtype = _dtype(self.param_dtype)
        lines += ["", f"{'bytes per rank':<{width + 2}}{dtype:>14}{'FP8':>14}{'ratio':>8}"]
        for label, plain_bytes, fp8_bytes in sizes:
            ratio = f"{fp8_bytes / plain_bytes:>8.3f}" if plain_bytes else ""
            lines.append(f"  {label:<{width}}{_size(plain_bytes):>14}{_size(fp8_bytes):>14}{ratio}")
        return "\n".join([*lines, f"Not counted: {NOT_COUNTED}."])

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON. A dtype is its name, and the recipe is its repr."""
        fields = asdict(self)
        fields["recipe"] = repr(self.recipe)
        for name in ("param_dtype", "reduce_dtype"):
            fields[name] = None if fields[name] is None else _dtype(fields[name])
        return fields


def _linear_layers(speed: LinearSpeed) -> list[str]:
    """Return the lines about the speed of linear layers."""
    if speed.layers == 0:
        return []
    if speed.min_tokens == inf:
        where = "FP8 is slower than bf16 with any number of tokens"
    else:
        where = f"FP8 is faster than bf16 from {speed.min_tokens:,} tokens per GPU on"
    lines = ["", "linear layers, estimated for Hopper", f"  {where}"]
    if speed.factor is None:
        return lines

    choice = "FP8" if speed.run_in_fp8 else "high precision (gemms='auto')"
    lines.append(
        f"  with {speed.tokens:,} tokens they run in {choice}. FP8 is {speed.factor:.2f} times as "
        "fast as bf16:"
    )
    names_by_factor: dict[str, list[str]] = {}
    for name, factor in speed.factors.items():
        names_by_factor.setdefault(f"{factor:.2f}", []).append(name)
    for factor_text, names in sorted(names_by_factor.items(), reverse=True):
        lines.append(f"  {factor_text}  {counted(len(names), 'layer')}, such as {names[0]}")
    return lines


def _gemms(report: Report) -> list[str]:
    """Return the table of grouped GEMMs, with a line for each choice and reason."""
    if not report.gemms:
        return []
    row_counts = "".join(f"{count:<27,}" for count in next(iter(report.gemms.values())))
    lines = ["", "grouped GEMMs on Hopper, by rows per expert", f"  {row_counts}".rstrip()]

    names_by_row: dict[tuple[str, str], list[str]] = {}
    for name, gemms in report.gemms.items():
        cells = "".join(f"{text:<27}" for text in gemms.values())
        reason = report.gemm_reasons.get(name)
        suffix = f": {reason}" if reason else ""
        names_by_row.setdefault((cells, suffix), []).append(name)
    for (cells, suffix), names in names_by_row.items():
        lines.append(f"  {cells}{listed(names)}{suffix}")

    if report.experts == "auto":
        reasons = [report.gemm_reasons.get(name, IF_CALLED) for name in report.gemms]
        if IF_CALLED in reasons:
            lines.append(CHOICE)
    return lines


def _dtype(dtype: torch.dtype | None) -> str:
    return "stored dtype" if dtype is None else str(dtype).removeprefix("torch.")


def _size(size: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:,.3f} {name}"
    return f"{size} B"
