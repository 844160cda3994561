"""The operator behind `fp8rs.monitor`: it accumulates statistics of quantized operands.

Layers call it in eager code and in graphs, on the codes that the GEMM multiplies. The statistics
stay on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8rs.model.linear_spec import GRAD, WEIGHT
from fp8rs.ops.define import python_op
from fp8rs.quantize import formats
from fp8rs.quantize.formats import FP8_BOUND, FP8_MAX
from fp8rs.quantize.planes import Plane, Planes
from fp8rs.tensor.quantized import QuantizedTensor

#: The statistics of an operand, in fp64. These are summed over micro-batches and ranks. For an
#: operand that comes quantized only `SEEN` is counted, because its values are not known.
SEEN, ELEMENTS, SIGNAL, NOISE, SATURATED, UNDERFLOWN = range(6)
SUMMED = 6
#: These are reduced by a maximum. The smallest scale is stored negated.
AMAX, SCALE, MINUS_SMALLEST_SCALE, HISTORY = range(SUMMED, 10)
#: An even number, so that the slots of each layer are aligned to 16 bytes. Compilers copy unaligned
#: inputs, and would lose what is written to them.
STATISTICS = 10

#: Elements that are processed together. The computation makes eight fp32 copies, which would take
#: gigabytes for a large operand.
CHUNK = 1 << 23


class OperandStats(NamedTuple):
    """Accumulates the statistics of a layer's operands.

    Attributes:
        slots: (operands, `STATISTICS`), fp64.
        shard: this rank's high-precision shard of a weight that FSDP2 gathers in FP8, or None.
        row: the first row of the shard in the gathered weight.
        col: the first column of the shard in the gathered weight.
    """

    slots: Tensor
    shard: Tensor | None = None
    row: int = 0
    col: int = 0

    def add(self, role: int, x: Tensor, plane: Plane, column_scale: Tensor | None = None) -> Plane:
        """Add the quantization error of an operand.

        Args:
            role: the operand.
            x: the operand before it was quantized, or a QuantizedTensor.
            plane: one of its planes.
            column_scale: see `_observe`.

        Returns:
            The plane, which now depends on the operator. A graph therefore keeps the call.
        """
        values = None if isinstance(x, QuantizedTensor) else x
        row = col = 0
        if role == WEIGHT and values is None and self.shard is not None:
            values = self.shard.to(plane.data.device)
            row = self.row
            col = self.col
        block = list(plane.format.block)
        scale = observe(
            values, plane.data, plane.scale, block, row, col, column_scale, self.slots, role
        )
        return Plane(plane.data, scale, plane.format)

    def add_gradient(
        self, dy: Tensor, row: Plane | None, col: Plane | None, column_scale: Tensor | None
    ) -> Planes:
        """Add the output's gradient, from a plane that was not scaled by column if there is one.

        Args:
            dy: (..., out_features).
            row: the rowwise plane, or None.
            col: the columnwise plane, or None.
            column_scale: factors by which the rowwise plane was multiplied, or None.
        """
        if row is not None and (column_scale is None or col is None):
            return self.add(GRAD, dy, row, column_scale), col
        if col is not None:
            if not isinstance(dy, QuantizedTensor):
                dy = dy.reshape(-1, dy.shape[-1]).t()
            return row, self.add(GRAD, dy, col)
        return row, col


def clear_(slots: Tensor) -> None:
    """Reset the statistics."""
    slots.zero_()
    slots[..., MINUS_SMALLEST_SCALE] = -torch.inf


def _add(*args: Any) -> Any:
    """Run `_observe`, which describes the arguments."""
    values, codes, scale, block, row, col, column_scale, slots, role = args
    is_per_tensor = tuple(block) == formats.TENSOR.block
    format = formats.TENSOR if is_per_tensor else formats.format_of(tuple(block), scale.dtype)
    plane = Plane(codes.view(-1, codes.shape[-1]), scale, format)
    operand = codes if values is None else values
    if not operand.numel():
        return scale.clone()

    rows, cols = operand.reshape(-1, operand.shape[-1]).shape
    stats = slots.data[role]  # no graph saved the version of .data
    stats[SEEN] += 1
    if values is not None:
        values = values.reshape(rows, cols)
        stats[ELEMENTS] += rows * cols
    for span in _chunks(rows, cols):
        part = plane.part((slice(row + span.start, row + span.stop), slice(col, col + cols)))
        x = None
        if values is not None:
            x = values[span].to(torch.float32)
            if column_scale is not None:
                x = x * column_scale
        _add_part(stats, x, part)
    return scale.clone()


@python_op(_add)
def _observe(
    values: Tensor | None,
    codes: Tensor,
    scale: Tensor,
    block: Sequence[int],
    row: int,
    col: int,
    column_scale: Tensor | None,
    slots: Tensor,
    role: int,
) -> Tensor:
    """Add the quantization error of ``values`` to ``slots[role]``.

    The write is not declared to torch, as in ``_note_amax``. A graph keeps the call because the
    GEMM uses its result.

    Args:
        values: (rows, cols) after flattening, a part of the codes, fp32, bf16 or fp16. With None
            only amax and scales are added.
        codes: the codes of a whole plane.
        scale: the scales of that plane.
        block: the block of that plane's format.
        row: the first row of ``values`` in the codes.
        col: the first column of ``values`` in the codes.
        column_scale: (1, cols) factors that multiplied ``values`` before the cast, or None.
        slots: (operands, `STATISTICS`), fp64.
        role: the operand.

    Returns:
        A copy of ``scale``.
    """
    return torch.empty_like(scale)


observe = torch.ops.fp8rs._observe.default


def add_batch(stats: Tensor, values: Tensor | None, plane: Plane) -> None:
    r"""Add the quantization error of a batched weight (E, \*, K), or of a shard of it.

    Args:
        stats: (`STATISTICS`,), fp64, to which it is added.
        values: the values that were quantized, in the shape of the codes. With None, only amax and
            scales are added.
        plane: the codes and scales.
    """
    plane = Plane(plane.matrix, plane.scale, plane.format, plane.block_offset)
    experts, rows, cols = plane.data.shape
    if not experts * rows * cols:
        return
    stats[SEEN] += 1
    if values is not None:
        stats[ELEMENTS] += values.numel()
        values = values.view(experts, rows, cols)

    experts_per_chunk = max(1, CHUNK // (rows * cols))
    for first in range(0, experts, experts_per_chunk):
        batch = slice(first, min(first + experts_per_chunk, experts))
        for span in _chunks(rows, cols):
            x = None if values is None else values[batch, span].float()
            _add_part(stats, x, plane.part((batch, span, slice(0, cols))))


def _add_part(stats: Tensor, x: Tensor | None, plane: Plane) -> None:
    """Add the statistics of a part of an operand.

    Args:
        stats: (`STATISTICS`,), fp64, to which they are added.
        x: the values before quantization, fp32, or None.
        plane: the codes and scales of the part.
    """
    codes = plane.data.to(torch.float32)
    scale = plane.expand_scale()
    decoded = codes * scale
    magnitudes = (decoded if x is None else x).abs()
    amax = magnitudes.amax()

    if plane.format.per_tensor and not plane.batched:
        largest_scale = smallest_scale = plane.scale.view(())
    else:
        is_used = codes != 0  # the scale of an all-zero block is arbitrary
        largest_scale = torch.where(is_used, scale, 0.0).amax()
        smallest_scale = torch.where(is_used, scale, torch.inf).amin()
    maxima = torch.stack([amax, largest_scale, -smallest_scale]).double()
    torch.maximum(stats[AMAX:HISTORY], maxima, out=stats[AMAX:HISTORY])
    if x is None:
        return

    # Divide by the amax first, because squares of small gradients underflow in fp32.
    unit = torch.where(amax > 0, amax, 1.0)
    signal = (x / unit).square().sum()
    noise = ((x - decoded) / unit).square().sum()
    stats[SIGNAL : NOISE + 1] += torch.stack([signal, noise]).double() * unit.double().square()

    dtype = plane.data.dtype
    saturated = (codes.abs() == FP8_MAX[dtype]) & (magnitudes > scale * FP8_BOUND[dtype])
    underflown = (codes == 0) & (magnitudes > 0)
    stats[SATURATED : UNDERFLOWN + 1] += torch.stack([saturated.sum(), underflown.sum()])


def _chunks(rows: int, cols: int) -> Iterator[slice]:
    """Yield ranges of rows of at most `CHUNK` elements."""
    height = max(1, CHUNK // max(cols, 1))
    for start in range(0, rows, height):
        yield slice(start, min(start + height, rows))
