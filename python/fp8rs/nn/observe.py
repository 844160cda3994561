"""The operator that adds up what quantization did to an operand: `fp8rs.monitor`'s statistics.

It runs where a layer computes, in eager code and in graphs, on the codes that the GEMM is about to
multiply. What it adds up stays on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp8rs.ops.define import in_python
from fp8rs.tensor import formats
from fp8rs.tensor.formats import FP8_BOUND, FP8_MAX
from fp8rs.tensor.planes import Plane
from fp8rs.tensor.quantized import QuantizedTensor
from fp8rs.tensor.spec import Planes
from fp8rs.tensor.windows import Span

from .spec import GRAD, WEIGHT

#: What is kept of an operand, fp64: first what is summed over micro-batches and ranks. (Of what
#: comes quantized, elements and the sums after it are not counted: nobody has the values.)
SEEN, ELEMENTS, SIGNAL, NOISE, SATURATED, UNDERFLOWN = range(6)
SUMMED = 6
#: Then that of which the maximum is taken. The smallest scale is kept with its sign changed.
AMAX, SCALE, MINUS_SMALLEST_SCALE, HISTORY = range(SUMMED, 10)
#: An even number, so that each layer's begin at a multiple of 16 bytes: compilers copy what does
#: not, and would lose what is written to it.
KEPT = 10

#: Elements that are looked at together: eight fp32 copies of all of a large operand would take
#: gigabytes.
CHUNK = 1 << 23


class Watch(NamedTuple):
    """Where a layer's statistics are added up. Compilers know it by its fields.

    Attributes:
        slots: (operands, `KEPT`), fp64.
        shard: this rank's part of a weight that FSDP2 gathers in FP8, in high precision; None where
            nobody has it so.
        row, col: where that begins in what was gathered.
    """

    slots: Tensor
    shard: Tensor | None = None
    row: int = 0
    col: int = 0

    def seen(self, role: int, x: Tensor, plane: Plane, column_scale: Tensor | None = None) -> Plane:
        """Add up what an operand's plane lost; gives the plane, for the GEMM to wait for it.

        Args:
            role: the operand.
            x: what was quantized, or what came so.
            plane: a plane of it.
            column_scale: see `_observe`.
        """
        values, row, col = None if isinstance(x, QuantizedTensor) else x, 0, 0
        if role == WEIGHT and values is None and self.shard is not None:
            values, row, col = self.shard.to(plane.data.device), self.row, self.col
        block = list(plane.format.block)
        scale = observe(
            values, plane.data, plane.scale, block, row, col, column_scale, self.slots, role
        )
        return Plane(plane.data, scale, plane.format)

    def gradient(
        self, dy: Tensor, row: Plane | None, col: Plane | None, column_scale: Tensor | None
    ) -> Planes:
        """`seen` of the output's gradient, in the plane that has it as it is if there is one."""
        if row is not None and (column_scale is None or col is None):
            return self.seen(GRAD, dy, row, column_scale), col
        if col is not None:
            plain = not isinstance(dy, QuantizedTensor)
            return row, self.seen(GRAD, dy.reshape(-1, dy.shape[-1]).t() if plain else dy, col)
        return row, col


def clear_(slots: Tensor) -> None:
    """Have nothing been seen."""
    slots.zero_()
    slots[..., MINUS_SMALLEST_SCALE] = -torch.inf


def _add(
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
    per_tensor = tuple(block) == formats.TENSOR.block
    format = formats.TENSOR if per_tensor else formats.format_of(tuple(block), scale.dtype)
    plane = Plane(codes, scale, format)
    seen = codes if values is None else values
    if seen.numel():
        rows, cols = seen.reshape(-1, seen.shape[-1]).shape
        kept = slots.data[role]  # whose version nobody has saved
        kept[SEEN] += 1
        if values is not None:
            values = values.reshape(rows, cols)
            kept[ELEMENTS] += rows * cols
        for span in _chunks(rows, cols):
            part = _part(plane, Span(row + span.start, span.length), Span(col, cols))
            x = None if values is None else values[span.slice].to(torch.float32)
            _add_part(kept, x if x is None or column_scale is None else x * column_scale, part)
    return scale.clone()


@in_python(_add)
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
    """Add what ``codes`` lost of ``values`` to ``slots[role]``; gives a copy of ``scale``.

    As in ``_note_amax`` the write is not declared, and what is returned keeps the call in a graph.

    Args:
        values: fp32, bf16 or fp16; its 2-D view is a part of that of the codes. None: nobody has
            them, and amax and scales alone are known.
        codes: of a whole plane.
        scale: of that plane.
        block: of that plane's format.
        row, col: where the part begins.
        column_scale: factors of the values' columns, multiplied into the values before the cast.
        slots: (operands, `KEPT`), fp64.
        role: the operand.
    """
    return torch.empty_like(scale)


observe = torch.ops.fp8rs._observe.default


def _add_part(kept: Tensor, x: Tensor | None, part: Plane) -> None:
    codes, scale = part.data.to(torch.float32), part.spread()
    decoded = codes * scale
    size = (decoded if x is None else x).abs()
    amax = size.amax()
    if part.format.per_tensor:
        largest = smallest = part.scale.view(())
    else:
        used = codes != 0  # the scale of a block of zeros says nothing
        largest = torch.where(used, scale, 0.0).amax()
        smallest = torch.where(used, scale, torch.inf).amin()
    found = torch.stack([amax, largest, -smallest]).double()
    torch.maximum(kept[AMAX:HISTORY], found, out=kept[AMAX:HISTORY])
    if x is None:
        return
    # Squares of gradients may be too small for fp32; those of their shares of the largest are not.
    unit = torch.where(amax > 0, amax, 1.0)
    sums = torch.stack([(v / unit).square().sum() for v in (x, x - decoded)])
    kept[SIGNAL : NOISE + 1] += sums.double() * unit.double().square()
    dtype = part.data.dtype
    saturated = (codes.abs() == FP8_MAX[dtype]) & (size > scale * FP8_BOUND[dtype])
    underflown = (codes == 0) & (size > 0)
    kept[SATURATED : UNDERFLOWN + 1] += torch.stack([saturated.sum(), underflown.sum()])


def _chunks(rows: int, cols: int) -> Iterator[Span]:
    """The rows, in parts of at most `CHUNK` elements."""
    height = max(1, CHUNK // cols)
    for start in range(0, rows, height):
        yield Span(start, min(height, rows - start))


def _part(plane: Plane, rows: Span, cols: Span) -> Plane:
    """The plane of some rows and columns, which may begin within a block."""
    codes, scale = plane.matrix[rows.slice, cols.slice], plane.scale
    if plane.format.per_tensor:
        return Plane(codes, scale, plane.format)
    lead = [0, 0]
    for dim, (span, block) in enumerate(zip((rows, cols), plane.format.block, strict=True)):
        if block > 0:
            first = span.start // block
            scale = scale.narrow(dim, first, -(-span.stop // block) - first)
            lead[dim] = span.start % block
    return Plane(codes, scale, plane.format, (lead[0], lead[1]))
