"""How a tensor is quantized: one frozen description, and the function that does it.

Quantizers, quantized tensors (for what is written into them) and linear layers share both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from fp8rs import ops  # noqa: F401  (registers torch.ops.fp8rs)
from fp8rs.tensor.formats import BlockFormat
from fp8rs.tensor.planes import Plane

_amax = torch.ops.fp8rs.amax.default
_quantize = torch.ops.fp8rs.quantize.default
_quantize_blocks = torch.ops.fp8rs.quantize_blocks.default
_quantize_current = torch.ops.fp8rs.quantize_current.default
_quantize_delayed = torch.ops.fp8rs.quantize_delayed.default
_quantize_delayed_silently = torch.ops.fp8rs._quantize_delayed.default
_scale_from_amax = torch.ops.fp8rs.scale_from_amax.default

Planes = tuple[Plane | None, Plane | None]


@dataclass(frozen=True)
class QuantSpec:
    """How a tensor becomes planes. Plain values, equal and hashed by value.

    Args:
        format: block shape and scale dtype.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        power_2_scale: round fp32 scales up to powers of two.
        amax_epsilon: lower bound of the amaxes that fp32 scales come from.
        scale_rounding: "ceil" or "floor", for E8M0 scales.
        margin: of delayed scaling: scales are multiplied by 2**margin.
        group: the name of a process group over which a tensor's amax is reduced, or None.
    """

    format: BlockFormat
    fp8_dtype: torch.dtype
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    scale_rounding: str = "ceil"
    margin: int = 0
    group: str | None = None

    @cached_property
    def block_options(self) -> dict[str, Any]:
        """The options of the operator for blocks that are not its defaults."""
        if self.format.microscaled:
            return {} if self.scale_rounding == "ceil" else {"rounding": self.scale_rounding}
        options = {"power_2_scale": self.power_2_scale, "amax_epsilon": self.amax_epsilon}
        return {name: value for name, value in options.items() if value}

    def scale_from_amax(self, amax: Tensor) -> Tensor:
        """fp32 scales for amaxes (fp32) of any shape."""
        scale: Tensor = _scale_from_amax(
            amax, self.fp8_dtype, self.power_2_scale, self.amax_epsilon, self.margin
        )
        return scale

    def without_group(self) -> QuantSpec:
        """The same for another process, where the group's name may mean another group."""
        return self if self.group is None else replace(self, group=None)


@lru_cache(maxsize=64)
def default_spec(format: BlockFormat, fp8_dtype: torch.dtype) -> QuantSpec:
    """Scales from the data at hand, with no options."""
    return QuantSpec(format, fp8_dtype)


def quantize_planes(
    spec: QuantSpec,
    x: Tensor,
    rowwise: bool,
    columnwise: bool,
    *,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    fold: Tensor | None = None,
    after: Tensor | None = None,
    declared: bool = False,
    lead: int = 0,
) -> Planes:
    """The planes of ``x`` (fp32, bf16 or fp16; any strides), None for one not asked for.

    With one scale a tensor, the scale is that of ``x`` (current scaling), or ``scale`` as it is
    known, or with an ``amax`` too that of delayed scaling.

    Args:
        spec: how.
        x: what; no gradient reaches it.
        rowwise, columnwise: which planes.
        scale: one fp32 scale that is known already, for one scale a tensor.
        amax: with ``scale``: fp32 of one element, raised to the finite amax of ``x``. A tensor
            with NaN or Inf leaves it and gets the scale NaN.
        fold: fp32 factors of the columns of ``x``, multiplied into the rowwise plane alone; for
            blocks of a whole row.
        after: a tensor that a compiler must have before this is computed; not for current scaling.
        declared: tell autograd and compilers of the write to ``amax``.
        lead: rows that the first blocks have in front of ``x``.

    Raises:
        TypeError, ValueError: the operators' own, before anything is written.
    """
    format = spec.format
    if not format.per_tensor:
        # What is not the default: each keyword takes half a microsecond.
        options = spec.block_options
        if fold is not None or after is not None:
            options = {**options, "fold": fold, "after": after}
        down = along = (0, 0)
        if lead:
            options = {**options, "row_offset": lead}
            down, along = plane_leads(format, lead)
        row, row_scale, col, col_scale = _quantize_blocks(
            x, spec.fp8_dtype, format.block, format.scale_dtype, rowwise, columnwise, **options
        )
        return (
            Plane(row, row_scale, format, down) if rowwise else None,
            Plane(col, col_scale, format, along) if columnwise else None,
        )
    if fold is not None:
        raise ValueError("fold is for blocks of a whole row, not for one scale a tensor")
    if scale is not None and amax is not None:
        quantize: Any = _quantize_delayed if declared else _quantize_delayed_silently
        row, col, scale = quantize(x, scale, amax, spec.fp8_dtype, rowwise, columnwise)
    else:
        if scale is None and spec.group is not None:
            scale = spec.scale_from_amax(reduce_amax(_amax(x), spec.group))
        if scale is not None:
            row, col = _quantize(x, scale, spec.fp8_dtype, rowwise, columnwise, after)
        else:
            row, col, scale = _quantize_current(
                x, spec.fp8_dtype, rowwise, columnwise, spec.power_2_scale, spec.amax_epsilon
            )
    assert scale is not None
    return (
        Plane(row, scale, format) if rowwise else None,
        Plane(col, scale, format) if columnwise else None,
    )


def plane_leads(format: BlockFormat, lead: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """What the two planes of a matrix have in front of it, whose blocks begin ``lead`` rows above.

    Whole rows and single ones are never begun within.
    """
    down, along = format.block
    return (lead % down if down > 1 else 0, 0), (0, lead % along if along > 1 else 0)


def reduce_amax(amax: Tensor, group: str) -> Tensor:
    """The maximum of fp32 ``amax`` over the ranks of the group of that name.

    The bits are reduced as int32: amaxes are not negative, so that the order is the same, and NaN
    and Inf reach every rank (a float MAX drops NaN on some of them). Functional, so that it can be
    traced.
    """
    collectives = torch.ops._c10d_functional
    reduced = collectives.all_reduce(amax.view(torch.int32), "max", group)
    bits: Tensor = collectives.wait_tensor(reduced)
    return bits.view(torch.float32)
