"""Writes of values to a store.

A block has one scale, and a write may cover a part of a block. The other elements of the block then
keep their values: the scale stays, or changes by a power of two.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fp8rs.tensor.planes import Plane
from fp8rs.tensor.spec import Planes, QuantSpec, quantize_planes, requantize_plane
from fp8rs.tensor.store import Delayed, Store


def write(
    store: Store,
    offset: int,
    values: Tensor,
    spec: QuantSpec,
    delayed: Delayed | None,
    keep: bool = False,
) -> bool:
    """Quantize values into consecutive elements of a store.

    Args:
        store: the planes to write. For a batch, the elements are whole matrices.
        offset: the first element to write.
        values: float32, bfloat16 or float16, on the device of the planes.
        spec: how to quantize, in the format of the planes.
        delayed: for delayed scaling, the scale to read and the amax to raise.
        keep: elements that do not change keep their codes, and blocks without a changed element
            their scales. Otherwise this holds only where the values are a part of their blocks.

    Returns:
        Whether anything was written.

    Raises:
        RuntimeError: the storage was freed by a reshard.
    """
    store.any_plane.check_live("this quantized tensor")
    if store.batched and not spec.batched:
        spec = replace(spec, batched=True)
    count, (height, size) = values.numel(), store.extent
    rows = store.rows_around(offset, offset + count)
    first, end = rows.start * size, rows.stop * size
    whole = count == end - first
    # The ranks of a group quantize together, also a rank that writes nothing.
    if not count and spec.group is None and (keep or height * size):
        return False
    shape = rows.stop - rows.start, *store.matrix[1:]
    if keep or not whole:
        old = store.read(rows, values.dtype)
        if not whole:
            flat, begin = old.view(-1), offset - first
            values = torch.cat([flat[:begin], values.reshape(-1), flat[begin + count :]])
        planes = _requantized(store, rows, old, values.reshape(shape), spec, delayed)
    else:
        scale, amax = (None, None) if delayed is None else delayed
        planes = quantize_planes(
            spec,
            values.reshape(shape),
            *store.has,
            scale=scale,
            amax=amax,
            declared=True,
            lead=0 if rows.start else store.lead,
        )
    store.put(store.rows(rows), planes)
    return True


def _requantized(
    store: Store,
    rows: slice,
    old: Tensor,
    new: Tensor,
    spec: QuantSpec,
    delayed: Delayed | None,
) -> Planes:
    """Return the planes of some rows after a write. Blocks that do not change keep their bytes."""
    # NaN in the place of NaN is not a change, and neither is a zero of the other sign.
    changed = (new != old) & ~(new.isnan() & old.isnan())
    noted = None if delayed is None else delayed[1]

    def requantized(plane: Plane, new: Tensor, changed: Tensor) -> Plane:
        own = plane.dequantize(torch.float32).view(new.shape)
        # `old` comes from one plane. Where only the other one has NaN, the value replaces it as
        # soon as something in its block changes.
        values = torch.where(changed | own.isnan(), new.to(torch.float32), own)
        return requantize_plane(spec, plane, values, changed, noted)

    row, col = store.rows(rows)
    if row is not None:
        row = requantized(row, new, changed)
    if col is not None:
        if row is not None and row.format.square:
            col = row.transposed("columnwise", "a write")
        else:
            col = requantized(col, new.mT, changed.mT)
    return row, col
