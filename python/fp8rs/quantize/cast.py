"""Quantize high-precision values into planes.

Quantizers, writes to quantized tensors, all-gathers and linear layers call these functions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8rs import ops  # noqa: F401  (registers torch.ops.fp8rs)
from fp8rs._torch import group_named
from fp8rs.quantize.planes import Plane, Planes, as_bytes
from fp8rs.quantize.spec import QuantSpec

_amax = torch.ops.fp8rs.amax.default
_block_amax = torch.ops.fp8rs.block_amax.default
_quantize = torch.ops.fp8rs.quantize.default
_quantize_blocks = torch.ops.fp8rs.quantize_blocks.default
_quantize_current = torch.ops.fp8rs.quantize_current.default
_quantize_delayed = torch.ops.fp8rs.quantize_delayed.default
_quantize_delayed_silently = torch.ops.fp8rs._quantize_delayed.default


def quantize_planes(
    spec: QuantSpec,
    x: Tensor,
    rowwise: bool,
    columnwise: bool,
    *,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    column_scale: Tensor | None = None,
    after: Tensor | None = None,
    declare_mutation: bool = False,
    block_offset: int = 0,
    block_amaxes: dict[str, Tensor] | None = None,
) -> Planes:
    """Quantize ``x`` (fp32, bf16 or fp16; any strides). Planes that are not requested are None.

    For one scale per tensor, the scale is computed from ``x`` (current scaling) unless ``scale`` is
    given. With an ``amax`` too, ``scale`` is a delayed scale.

    Args:
        spec: how ``x`` is quantized.
        x: the values. Gradients do not reach it.
        rowwise: whether to make the rowwise plane.
        columnwise: whether to make the columnwise plane.
        scale: the fp32 scale if it is known already, for one scale per tensor: one element, or
            (E,) for a batch.
        amax: with ``scale``: fp32 of that shape, raised to the finite amax of ``x``. If ``x`` has
            NaN or Inf, the amax stays and the scale is NaN.
        column_scale: fp32 factors of the columns of ``x``, multiplied into the rowwise plane only.
            It requires blocks of a whole row.
        after: a tensor that compiled code computes before this. It has no effect with current or
            delayed scaling.
        declare_mutation: declare the write to ``amax`` to autograd and compilers.
        block_offset: number of rows by which the first blocks begin before ``x``.
        block_amaxes: fp32 amaxes of whole blocks, if ``x`` has only a part of a block: "amax" (rows
            of blocks, columns of blocks), and "amax_columnwise" for the columnwise plane.

    Raises:
        TypeError, ValueError: an operator rejects an argument. Nothing was written.
    """
    format = spec.format
    if not format.per_tensor:
        # Omit defaults, because each keyword takes half a microsecond.
        options = spec.block_options
        if column_scale is not None or after is not None:
            options = {**options, "column_scale": column_scale, "after": after}
        rowwise_offset = columnwise_offset = (0, 0)
        if block_amaxes is not None:
            options = {**options, **block_amaxes}
        if block_offset:
            options = {**options, "row_offset": block_offset}
            # The remainder is 0 for blocks of one row (1) or of all rows (-1).
            rowwise_offset = block_offset % format.block[0], 0
            columnwise_offset = 0, block_offset % format.block[1]
        row, row_scale, col, col_scale = _quantize_blocks(
            x, spec.fp8_dtype, format.block, format.scale_dtype, rowwise, columnwise, **options
        )
        return (
            Plane(row, row_scale, format, rowwise_offset) if rowwise else None,
            Plane(col, col_scale, format, columnwise_offset) if columnwise else None,
        )

    if column_scale is not None:
        raise ValueError("column_scale is given; it must be None with one scale per tensor")
    dtype = spec.fp8_dtype
    batched = spec.batched
    if scale is None and spec.group is not None:
        scale = spec.scale_from_amax(reduce_amax(_amax(x, batched), spec.group))
    if scale is None:
        row, col, scale = _quantize_current(
            x, dtype, rowwise, columnwise, spec.power_2_scale, spec.amax_epsilon, batched
        )
    elif amax is None:
        row, col = _quantize(x, scale, dtype, rowwise, columnwise, after, batched)
    else:
        quantize: Any = _quantize_delayed if declare_mutation else _quantize_delayed_silently
        row, col, scale = quantize(x, scale, amax, dtype, rowwise, columnwise, batched)
    assert scale is not None
    return (
        Plane(row, scale, format) if rowwise else None,
        Plane(col, scale, format) if columnwise else None,
    )


def requantize_plane(
    spec: QuantSpec,
    plane: Plane,
    values: Tensor,
    changed: Tensor,
    delayed_amax: Tensor | None = None,
) -> Plane:
    """Quantize ``values`` into a new plane, close to the bytes of ``plane``.

    A block in which no element changed keeps its codes and its scale. In the other blocks, the
    elements that did not change keep their value, as far as `QuantSpec.keep_scale` allows it.

    Args:
        spec: quantization of the plane's format.
        plane: the plane before the write.
        values: the values after the write, in the shape of ``plane.matrix``.
        changed: bool of the same shape, whether the write changes an element.
        delayed_amax: with delayed scaling, the amax to raise. A non-finite amax does not change it.
    """
    format = plane.format
    batched = plane.batched
    block_row_offset, block_col_offset = plane.block_offset

    def maxima(x: Tensor) -> Tensor:
        """Return the maximum of each block."""
        if format.per_tensor:
            maximum: Tensor = _amax(x, batched)
        elif block_col_offset:
            # The operator supports an offset of rows only, so reduce the transposed matrix.
            maximum = _block_amax(x.mT, format.block[::-1], block_col_offset, batched).mT
        else:
            maximum = _block_amax(x, format.block, block_row_offset, batched)
        return maximum

    def expand(blocks: Tensor) -> Tensor:
        """Return the value of each element's block."""
        return Plane(plane.data, blocks, format, plane.block_offset).expand_scale()

    amax = maxima(values)
    block_changed = maxima(changed.to(torch.bfloat16))
    if format.per_tensor and spec.group is not None:
        # The ranks of the group share the scale, so one rank's change is a change for all.
        amax, block_changed = reduce_amax(torch.stack([amax, block_changed]), spec.group).unbind()
    if delayed_amax is not None:
        raised = delayed_amax.maximum(amax)
        delayed_amax.copy_(torch.where(amax.isfinite(), raised, delayed_amax))

    scale = spec.keep_scale(plane.scale.to(torch.float32).view(amax.shape), amax)
    # Devices that flush subnormals would compute the inverse of the least E8M0 scale as infinite.
    inverse = (1.0 / scale).clamp(max=2.0**127)
    scaled = values.to(torch.float32) * expand(inverse)
    codes = _quantize(scaled, scale.new_ones(()), spec.fp8_dtype)[0]
    return Plane(
        _select(expand(block_changed) != 0, codes, plane.matrix),
        _select(block_changed != 0, scale.to(format.scale_dtype), plane.scale),
        format,
        plane.block_offset,
    )


def _select(condition: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """``torch.where`` for codes and scales, bit for bit."""
    return torch.where(condition, as_bytes(new), as_bytes(old)).view(old.dtype)


def reduce_amax(amax: Tensor, group: str, *, in_place: bool = False) -> Tensor:
    """Return the maximum of ``amax`` over the ranks of a group.

    The bits are reduced as int32. Amaxes are not negative, so integers have the same order, and NaN
    and Inf reach every rank. A float MAX drops NaN on some ranks.

    Args:
        amax: fp32 of any shape, contiguous.
        group: the name of a process group.
        in_place: write to ``amax``, on the current stream. Compilers cannot trace this.
    """
    bits = amax.view(torch.int32)
    if in_place:
        dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group_named(group))
    else:
        collectives = torch.ops._c10d_functional
        bits = collectives.wait_tensor(collectives.all_reduce(bits, "max", group))
    return bits.view(torch.float32)
