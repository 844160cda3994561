"""A replacement of symmetric memory on the CPU."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from internals import own_store


class SharedFiles:
    """Replaces `fp8rs.comm.symmetric.PeerMemory`. Its parts are files that all ranks map.

    The barrier uses the store of the process group, with one counter for each channel. It times
    out as the barrier of torch does.
    """

    allocated = 0

    def __init__(self, group: Any, device: Any, nbytes: int, timeout: Any) -> None:
        names = [tempfile.mkdtemp(prefix="fp8rs-shared-") if group.rank() == 0 else None]
        first = dist.get_process_group_ranks(group)[0]
        dist.broadcast_object_list(names, src=first, group=group)
        self._folder = Path(str(names[0]))
        mine = self._part(group.rank(), nbytes)
        mine.fill_(0xAA)
        dist.barrier(group)
        self.parts = [
            mine if rank == group.rank() else self._part(rank, nbytes)
            for rank in range(group.size())
        ]
        dist.barrier(group)
        self._store = own_store()
        self._store.set_timeout(timeout)
        self._ranks, self._rank = group.size(), group.rank()
        self._passed: Counter[int] = Counter()
        type(self).allocated += 1

    def _part(self, rank: int, nbytes: int) -> torch.Tensor:
        path = str(self._folder / str(rank))
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)

    def barrier(self, channel: int) -> None:
        """Wait for all ranks on this channel."""
        number = self._passed[channel]
        self._passed[channel] += 1
        key = f"{self._folder} {channel} {number}"
        self._store.set(f"{key} {self._rank}", "")
        try:
            self._store.wait([f"{key} {rank}" for rank in range(self._ranks)])
        except dist.DistStoreError as error:
            raise TimeoutError(
                f"barrier: rank {self._rank} timed out on channel {channel}"
            ) from error
