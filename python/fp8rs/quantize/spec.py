"""One description of how a tensor is quantized, and the function that does it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8rs.tensor.formats import BlockFormat
from fp8rs.tensor.planes import Plane

_amax = torch.ops.fp8rs.amax.default
_quantize = torch.ops.fp8rs.quantize.default
_quantize_blocks = torch.ops.fp8rs.quantize_blocks.default
_quantize_current = torch.ops.fp8rs.quantize_current.default
_quantize_delayed = torch.ops.fp8rs._quantize_delayed.default
_scale_from_amax = torch.ops.fp8rs.scale_from_amax.default

Planes = tuple[Plane | None, Plane | None]


@dataclass(frozen=True)
class QuantSpec:
    """How a tensor becomes planes.

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

    def scale_from_amax(self, amax: Tensor) -> Tensor:
        """fp32 scales for amaxes of any shape."""
        scale: Tensor = _scale_from_amax(
            amax, self.fp8_dtype, self.power_2_scale, self.amax_epsilon, self.margin
        )
        return scale


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
) -> Planes:
    """The planes of ``x`` (fp32, bf16 or fp16; any strides), None for one not asked for.

    Args:
        spec: how.
        rowwise, columnwise: which planes.
        scale: one fp32 scale that is known already, for one scale a tensor.
        amax: with ``scale``: a slot that is raised to the finite amax of ``x`` (delayed scaling).
        fold: fp32 factors of the columns of ``x``, multiplied into the rowwise plane alone; for
            blocks of a whole row.
        after: a tensor that a compiler must have before this is computed.
    """
    format = spec.format
    if not format.per_tensor:
        if format.microscaled:
            row, row_scale, col, col_scale = _quantize_blocks(
                x,
                spec.fp8_dtype,
                format.block,
                format.scale_dtype,
                rowwise,
                columnwise,
                rounding=spec.scale_rounding,
                fold=fold,
                after=after,
            )
        else:
            row, row_scale, col, col_scale = _quantize_blocks(
                x,
                spec.fp8_dtype,
                format.block,
                format.scale_dtype,
                rowwise,
                columnwise,
                power_2_scale=spec.power_2_scale,
                amax_epsilon=spec.amax_epsilon,
                fold=fold,
                after=after,
            )
        return (
            Plane(row, row_scale, format) if rowwise else None,
            Plane(col, col_scale, format) if columnwise else None,
        )
    if scale is not None and amax is not None:
        row, col, scale = _quantize_delayed(x, scale, amax, spec.fp8_dtype, rowwise, columnwise)
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


def reduce_amax(amax: Tensor, group: str) -> Tensor:
    """The maximum of fp32 ``amax`` over the ranks of the group of that name.

    The bits are reduced as int32: amaxes are not negative, so that the order is the same, and NaN
    and Inf reach every rank. Functional, so that it can be traced.
    """
    collectives = torch.ops._c10d_functional
    reduced = collectives.all_reduce(amax.view(torch.int32), "max", group)
    bits: Tensor = collectives.wait_tensor(reduced)
    return bits.view(torch.float32)
