"""The operator behind `fp8rs.monitor`: it accumulates statistics of quantized operands.

Layers call it in eager code and in graphs, on the codes that the GEMM multiplies. The statistics
stay on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8rs.model.spec import GRAD, WEIGHT
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
KEPT = 10

#: Elements that are processed together. The computation makes eight fp32 copies, which would take
#: gigabytes for a large operand.
CHUNK = 1 << 23


class OperandStats(NamedTuple):
    """Accumulates the statistics of a layer's operands.

    Attributes:
        slots: (operands, `KEPT`), fp64.
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
        values, row, col = None if isinstance(x, QuantizedTensor) else x, 0, 0
        if role == WEIGHT and values is None and self.shard is not None:
            values, row, col = self.shard.to(plane.data.device), self.row, self.col
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
            plain = not isinstance(dy, QuantizedTensor)
            return row, self.add(GRAD, dy.reshape(-1, dy.shape[-1]).t() if plain else dy, col)
        return row, col


def clear_(slots: Tensor) -> None:
    """Reset the statistics."""
    slots.zero_()
    slots[..., MINUS_SMALLEST_SCALE] = -torch.inf


def _add(*args: Any) -> Any:
    """Run `_observe`, which describes the arguments."""
    values, codes, scale, block, row, col, column_scale, slots, role = args
    per_tensor = tuple(block) == formats.TENSOR.block
    format = formats.TENSOR if per_tensor else formats.format_of(tuple(block), scale.dtype)
    seen = codes if values is None else values
    if seen.numel():
        plane = Plane(codes.view(-1, codes.shape[-1]), scale, format)
        rows, cols = seen.reshape(-1, seen.shape[-1]).shape
        kept = slots.data[role]  # no graph saved the version of .data
        kept[SEEN] += 1
        if values is not None:
            values = values.reshape(rows, cols)
            kept[ELEMENTS] += rows * cols
        for span in _chunks(rows, cols):
            part = plane.part((slice(row + span.start, row + span.stop), slice(col, col + cols)))
            x = None if values is None else values[span].to(torch.float32)
            _add_part(kept, x if x is None or column_scale is None else x * column_scale, part)
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
        slots: (operands, `KEPT`), fp64.
        role: the operand.

    Returns:
        A copy of ``scale``.
    """
    return torch.empty_like(scale)


observe = torch.ops.fp8rs._observe.default


def add_batch(kept: Tensor, values: Tensor | None, plane: Plane) -> None:
    r"""Add the quantization error of a batched weight (E, \*, K), or of a shard of it.

    Args:
        kept: (`KEPT`,), fp64, to which it is added.
        values: the values that were quantized, in the shape of the codes. With None, only amax and
            scales are added.
        plane: the codes and scales.
    """
    plane = Plane(plane.matrix, plane.scale, plane.format, plane.block_offset)
    experts, rows, cols = plane.data.shape
    if not experts * rows * cols:
        return
    kept[SEEN] += 1
    if values is not None:
        kept[ELEMENTS] += values.numel()
        values = values.view(experts, rows, cols)
    together = max(1, CHUNK // (rows * cols))
    for first in range(0, experts, together):
        batch = slice(first, min(first + together, experts))
        for span in _chunks(rows, cols):
            part = plane.part((batch, span, slice(0, cols)))
            _add_part(kept, None if values is None else values[batch, span].float(), part)


def _add_part(kept: Tensor, x: Tensor | None, part: Plane) -> None:
    codes, scale = part.data.to(torch.float32), part.expand_scale()
    decoded = codes * scale
    size = (decoded if x is None else x).abs()
    amax = size.amax()
    if part.format.per_tensor and not part.batched:
        largest = smallest = part.scale.view(())
    else:
        used = codes != 0  # the scale of an all-zero block is arbitrary
        largest = torch.where(used, scale, 0.0).amax()
        smallest = torch.where(used, scale, torch.inf).amin()
    found = torch.stack([amax, largest, -smallest]).double()
    torch.maximum(kept[AMAX:HISTORY], found, out=kept[AMAX:HISTORY])
    if x is None:
        return
    # Divide by the amax first, because squares of small gradients underflow in fp32.
    unit = torch.where(amax > 0, amax, 1.0)
    sums = torch.stack([(v / unit).square().sum() for v in (x, x - decoded)])
    kept[SIGNAL : NOISE + 1] += sums.double() * unit.double().square()
    dtype = part.data.dtype
    saturated = (codes.abs() == FP8_MAX[dtype]) & (size > scale * FP8_BOUND[dtype])
    underflown = (codes == 0) & (size > 0)
    kept[SATURATED : UNDERFLOWN + 1] += torch.stack([saturated.sum(), underflown.sum()])


def _chunks(rows: int, cols: int) -> Iterator[slice]:
    """Yield ranges of rows of at most `CHUNK` elements."""
    height = max(1, CHUNK // max(cols, 1))
    for start in range(0, rows, height):
        yield slice(start, min(start + height, rows))
