"""Temporary folders that all ranks of a case share."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import torch.distributed as dist

_created: list[str] = []


def shared_folder(rig: Any) -> str:
    """Return a new folder, the same on all ranks. The pool removes it after the case."""
    folder = [tempfile.mkdtemp(prefix="fp8rs-ranks-") if rig.rank == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    if rig.rank == 0:
        _created.append(folder[0])
    return folder[0]


def remove_folders() -> None:
    """Remove the folders that this rank has created."""
    while _created:
        shutil.rmtree(_created.pop(), ignore_errors=True)
