"""Codes and scales of one quantized tensor taken over by another, as they are."""

from __future__ import annotations

import torch

from fp8rs.tensor.planes import Plane
from fp8rs.tensor.region import Region
from fp8rs.tensor.spec import Planes
from fp8rs.tensor.windows import Rectangle
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
    own, given = store.any_plane, src._store.any_plane
    if given.format is not own.format or given.data.dtype != own.data.dtype:
        return False
    owner = store.told
    # FSDP2 copies nothing into an empty shard: there it is the owner who hears of copies.
    if store.first_copy is not None and (owner is None or dst.numel()):
        return store.first_copy(dst.region, src.region)
    if owner is not None and owner.take(dst, src):
        return True
    if store.lead != src._store.lead:
        return False
    planes = planes_for(dst.region, src.region)
    made = None if planes is None else completed(planes[0], store.has)
    if planes is None or made is None:
        return False
    store.put(made, planes[1], non_blocking)
    if owner is not None:
        owner.wrote(dst)
    return True


def planes_for(dst: Region, src: Region) -> tuple[Planes, Rectangle | None] | None:
    """The planes that make ``dst`` equal to ``src``, and the rows and columns that they are of."""
    if dst.is_whole and src.is_whole and dst.store.matrix == src.store.matrix:
        return (src.store.rowwise, src.store.columnwise), None
    if dst.store.format.per_tensor:
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
