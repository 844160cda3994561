"""Rows of blocks of one height in a matrix that is cut into shards of ``padded`` rows."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=1024)
def touched(rows: int, padded: int, ranks: int, height: int) -> int:
    """The most rows of blocks that any shard touches."""
    most = 0
    for start in range(0, min(rows, ranks * padded), max(padded, 1)):
        end = min(start + padded, rows)
        most = max(most, -(-end // height) - start // height)
    return most


@lru_cache(maxsize=1024)
def cut_rows(rows: int, padded: int, ranks: int, height: int) -> tuple[int, ...]:
    """Those rows of blocks that lie in more than one shard."""
    cuts = (k * padded for k in range(1, ranks))
    return tuple(sorted({cut // height for cut in cuts if cut < rows and cut % height}))


@lru_cache(maxsize=1024)
def scale_order(rows: int, padded: int, ranks: int, height: int) -> tuple[int, ...] | None:
    """Where each row of blocks is among those gathered: in the first shard that touches it.

    None where they are in order already: that is cheaper to pass on than to see, at each gather.
    """
    each = touched(rows, padded, ranks, height)
    order = []
    for block in range(-(-rows // height)):
        shard = block * height // padded
        order.append(shard * each + block - shard * padded // height)
    return None if order == list(range(len(order))) else tuple(order)
