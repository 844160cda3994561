"""Notices: what a user sees of decisions that the library makes for a model."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import torch.distributed as dist

_log = logging.getLogger("fp8rs")


def notice(summary: str, details: Sequence[str] = ()) -> None:
    """Log a decision at level INFO.

    If the program has not configured logging, rank 0 prints the summary to stderr, so that the
    decision is visible by default. A level above INFO on the logger silences it.

    Args:
        summary: one line.
        details: further lines, for programs that have configured logging.
    """
    if _log.hasHandlers():
        _log.info("%s", "\n".join([summary, *details]))
    elif _log.level <= logging.INFO and _rank() == 0:
        print(f"fp8rs: {summary}", file=sys.stderr)


def _rank() -> int:
    """Return this process's rank, even before the default process group exists."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))
