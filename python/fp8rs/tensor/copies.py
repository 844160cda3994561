"""Codes and scales of one quantized tensor taken over by another, as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8rs._torch import note_write
from fp8rs.tensor.planes import Plane
from fp8rs.tensor.region import Region
from fp8rs.tensor.spec import Planes
from fp8rs.tensor.windows import Rectangle, Span
from fp8rs.tensor.wrapper import StoreTensor
from fp8rs.tensor.writes import is_box


def take(dst: StoreTensor, src: StoreTensor, non_blocking: bool = False) -> bool:
    """Take over the codes and scales of ``src`` (same shape) as they are.

    Returns:
        False, with nothing written, where that does not make ``dst`` equal to ``src``: formats or
        element types differ, ``src`` lacks a plane that cannot be made from its other one, ``dst``
        shares its scales with other elements, or blocks begin elsewhere in the two.
    """
    store = dst._store
    if store is src._store and dst._window == src._window:
        return True  # torch loads state dicts that were filled in place
    own, given = store.any_plane, src._store.any_plane
    if given.format is not own.format or given.data.dtype != own.data.dtype:
        return False
    observer = store.active_observer
    if dst.loads_pieces:
        loaded = load_piece(dst, src)
        if loaded and observer is not None:
            observer.observe_write(dst, None, exact=False)
        return loaded
    # FSDP2 fills an allocated shard by one copy, but makes none into an empty shard.
    if store.first_copy is not None and (observer is None or dst.numel()):
        return store.first_copy(dst.region, src.region)
    if store.lead != src._store.lead:
        return False
    planes = planes_for(dst.region, src.region)
    made = None if planes is None else completed(planes[0], store.has)
    if planes is None or made is None:
        return False
    store.put(made, planes[1], non_blocking)
    if observer is not None:
        observer.observe_write(dst, None, exact=False)
    return True


def planes_for(dst: Region, src: Region) -> tuple[Planes, Rectangle | None] | None:
    """Return the planes that make ``dst`` equal to ``src``, and their rows and columns in ``dst``.

    None if there are none.
    """
    if dst.is_whole and src.is_whole and dst.store.matrix == src.store.matrix:
        same_scales = dst.store.batched == src.store.batched
        return ((src.store.rowwise, src.store.columnwise), None) if same_scales else None
    if dst.store.batched and src.store.batched and src.planes == (None, None):
        box = src.rectangle  # a flat view of whole matrices
        if box is None or src.store.matrix[1:] != dst.store.matrix[1:]:
            return None
        src = Region(src.store.over(*src.store.part(box)), None, src.shape)
    if dst.store.format.per_tensor and not dst.store.batched:
        return (arranged(dst, src), None), None
    if dst.window is None:
        return src.planes, None
    rectangle = dst.rectangle
    if rectangle is None or dst.window.numel == 0 or not is_box(dst.hull, rectangle):
        return None
    row, col = src.planes
    return ((col, row) if rectangle.transposed else (row, col)), dst.hull


def completed(planes: Planes, wanted: tuple[bool, bool]) -> Planes | None:
    """Planes with those that are wanted and can be made of the others; None if one cannot be."""
    row, col = planes
    plane = row if row is not None else col
    if plane is None:
        return None
    wants_row, wants_col = wanted
    lacks_row, lacks_col = wants_row and row is None, wants_col and col is None
    if (lacks_row or lacks_col) and not plane.format.square:
        return None
    if lacks_row:
        row = plane.transposed("rowwise", "copy_")
    if lacks_col:
        col = plane.transposed("columnwise", "copy_")
    return row, col


def arranged(dst: Region, src: Region) -> Plane | None:
    """The rowwise plane of all of a store, of which ``dst`` has the codes of ``src``.

    For one scale a tensor; None where ``dst`` has not all elements of the store.
    """
    (row, col), matrix = src.planes, dst.store.matrix
    if row is None:
        if col is None:
            return None
        row = src.made("rowwise", "copy_")
    codes, window = row.data.view(torch.uint8), dst.window
    if window is None:
        codes = codes.reshape(matrix)
    elif window.numel != matrix[0] * matrix[1] or not window.dense:
        return None
    else:
        given, codes = codes, torch.empty(matrix, dtype=torch.uint8, device=row.data.device)
        window.of(codes).copy_(given)
    return Plane(codes.view(row.data.dtype), row.scale, row.format)


def load_piece(dst: StoreTensor, src: StoreTensor) -> bool:
    """Load a piece of a shard: replace codes and scales of ``dst`` by the ones of ``src``.

    Other elements of the blocks keep their codes, not their values: other pieces will replace
    them. Keeping their values could change the scale, and so the codes of ``src``.

    Returns:
        False, with nothing written, if ``src`` lacks a plane that cannot be made from the other.

    Raises:
        ValueError: the blocks of ``src`` begin elsewhere.
    """
    store, of = dst._store, src._store
    to, given = dst.region.box, src.region.box
    planes = completed((of.rowwise, of.columnwise), store.has)
    if planes is None or to is None or given is None:
        return False
    copies: list[tuple[Tensor, Tensor]] = []
    for own, plane, turned in zip(
        (store.rowwise, store.columnwise), planes, (False, True), strict=True
    ):
        if own is not None:
            assert plane is not None
            if turned:
                to, given = ((*box[:-2], *box[:-3:-1]) for box in (to, given))
            copies += _pairs(own, to, plane, given)
    for target, values in copies:
        target.copy_(values)
    for own in (store.rowwise, store.columnwise):
        if own is not None:
            note_write(own.data)
    return True


def _pairs(own: Plane, to: Any, plane: Plane, given: Any) -> list[tuple[Tensor, Tensor]]:
    """Return codes and scales of two boxes (`Region.box`) of planes, each to copy into."""
    codes = own.matrix[slices(to)], plane.matrix[slices(given)]
    batch, from_batch = slices(to[:-2]), slices(given[:-2])
    if own.format.per_tensor:
        return [codes, (own.scale[batch], plane.scale[from_batch])]
    at: list[tuple[slice, slice]] = []
    for span, source, block, lead, source_lead in zip(
        to[-2:], given[-2:], own.format.block, own.lead, plane.lead, strict=True
    ):
        if block > 0 and (span.start + lead - source.start - source_lead) % block:
            raise ValueError(
                f"cannot load FP8 codes of format {own.format.name!r} into this layout: they were "
                "saved in blocks that begin at other rows or columns. Save and load with "
                "fp8rs.checkpoint.Model(model) in place of the model's state dict"
            )
        at.append((_blocks(span, block, lead), _blocks(source, block, source_lead)))
    blocks, from_blocks = zip(*at, strict=True)
    return [codes, (own.scale[batch + blocks], plane.scale[from_batch + from_blocks])]


def slices(box: Sequence[Span]) -> tuple[slice, ...]:
    """Return the index of a box."""
    return tuple(span.slice for span in box)


def _blocks(span: Span, block: int, lead: int) -> slice:
    """Return the blocks that rows or columns lie in; ``block`` is negative if it is all of them."""
    if block < 0:
        return slice(None)
    start = span.start + lead
    return slice(start // block, -(-(start + span.length) // block))
