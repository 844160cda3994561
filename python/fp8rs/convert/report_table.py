"""What a report on a model has, and its table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from fp8rs.convert.link import Gather
from fp8rs.fsdp.chosen_links import Link, rows
from fp8rs.fsdp.memory import Memory
from fp8rs.quantize.recipes import Recipe, describe

NOT_COUNTED = (
    "activations and what layers save for the backward, the transposed plane of the weight at "
    "hand, buffers, the all-reduce of largest values, the CUDA context, NCCL, what the allocator "
    "holds beside"
)


@dataclass(frozen=True)
class Left:
    """Parameters that stay in high precision.

    Attributes:
        reason: why.
        names: of the layers, or of the parameters where they are in no linear layer.
        parameters: how many elements they have.
    """

    reason: str
    names: tuple[str, ...]
    parameters: int


@dataclass(frozen=True)
class Report:
    """What converting a model would come to. ``str()`` of it is a table.

    Bytes are of one rank and, where they go over the wire, of one step: a forward and a backward.

    Attributes:
        recipe: the recipe.
        world_size: ranks that shard the model. Replicas gather nothing.
        param_dtype, reduce_dtype: as given.
        optimizer: as given, or which one it is by default.
        converted: names of the layers that are converted, or would be.
        converted_parameters: elements of their weights.
        parameters: elements of all parameters.
        left: what stays in high precision, by reason.
        units: names of the modules that are gathered at once; "" is the root.
        gathered, gathered_high_precision: bytes that a rank holds after each all-gather of a step,
            padding included, summed: with FP8, and without.
        scattered: bytes that a rank hands to the reduce-scatters of a step.
        memory, memory_high_precision: what the rank needs: with FP8, and without.
        gather: when the FP8 gather shortens a step; None without a link's and a GPU's figures.
        links: what ``set_links`` chose, by unit, and why nothing better; empty before it is called.
    """

    recipe: Recipe
    world_size: int
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    optimizer: str | float
    converted: tuple[str, ...]
    converted_parameters: int
    parameters: int
    left: tuple[Left, ...]
    units: tuple[str, ...]
    gathered: int
    gathered_high_precision: int
    scattered: int
    memory: Memory
    memory_high_precision: Memory
    gather: Gather | None
    links: tuple[Link, ...] = ()

    def __str__(self) -> str:
        return _text(self)

    def as_dict(self) -> dict[str, Any]:
        """The fields, of what JSON has: dtypes by their names, the recipe as its repr."""
        fields = asdict(self)
        fields["recipe"] = repr(self.recipe)
        for name in ("param_dtype", "reduce_dtype"):
            fields[name] = None if fields[name] is None else _dtype(fields[name])
        return fields


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _text(r: Report) -> str:
    high = _dtype(r.param_dtype)
    converted = f"converted: {_count(len(r.converted), 'layer')}"
    parameters = [(converted, r.converted_parameters, "")]
    parameters += [(left.reason, left.parameters, _names(left.names)) for left in r.left]
    width = max(40, *(len(row[0]) for row in parameters))
    lines = [
        f"recipe {describe(r.recipe)}; {_count(r.world_size, 'rank')}; "
        f"{_count(len(r.units), 'unit')} of FSDP2; reduced in {_dtype(r.reduce_dtype)}",
        "",
        f"{'parameters':<{width + 2}}{'elements':>18}{'share':>8}",
    ]
    for what, elements, names in parameters:
        share = elements / max(r.parameters, 1)
        lines.append(f"  {what:<{width}}{elements:>18,}{share:>8.1%}  {names}".rstrip())
    plain, fp8 = r.memory_high_precision, r.memory
    sizes = [
        ("a step all-gathers", r.gathered_high_precision, r.gathered),
        ("a step reduce-scatters", r.scattered, r.scattered),
        ("memory", plain.total, fp8.total),
        ("  shards of parameters", plain.parameters, fp8.parameters),
        ("  their FP8 codes", plain.codes, fp8.codes),
        ("  gradients", plain.gradients, fp8.gradients),
        (f"  optimizer states ({r.optimizer})", plain.optimizer, fp8.optimizer),
        ("  gathered: root and two largest units", plain.gathered, fp8.gathered),
        ("  gradients that are being reduced", plain.reduced, fp8.reduced),
    ]
    if r.links:
        sizes.append(("  symmetric memory", plain.symmetric, fp8.symmetric))
    width = max(40, *(len(row[0]) for row in sizes))
    lines += ["", f"{'bytes of a rank':<{width + 2}}{high:>14}{'FP8':>14}{'ratio':>8}"]
    for what, before, after in sizes:
        ratio = f"{after / before:>8.3f}" if before else ""
        lines.append(f"  {what:<{width}}{_size(before):>14}{_size(after):>14}{ratio}")
    lines.append(f"Not counted: {NOT_COUNTED}.")
    if r.links:
        lines += ["", "links", *(f"  {row}" for row in rows(r.links))]
    if r.gather is not None:
        g = r.gather
        lines += [
            "",
            f"The link is hidden from {g.hidden_high_precision:,} tokens a rank and step on in "
            f"{high}, from {g.hidden_fp8:,} with the FP8 gather.",
        ]
        if g.seconds_high_precision is not None and g.seconds_fp8 is not None:
            gain = g.seconds_high_precision / g.seconds_fp8
            lines.append(
                f"A step takes at least {g.seconds_high_precision:.3g} s in {high}, "
                f"{g.seconds_fp8:.3g} s with the FP8 gather: {gain:.2f} times as fast."
            )
    return "\n".join(lines)


def _dtype(dtype: torch.dtype | None) -> str:
    return "stored dtype" if dtype is None else str(dtype).removeprefix("torch.")


def _size(size: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:,.3f} {name}"
    return f"{size} B"


def _names(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
