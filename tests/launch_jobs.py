"""Short functions that tests of benches/launch.py run.

Each rank imports this module, which therefore imports no more than the launcher does.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def add(arguments: dict[str, Any], report: Any) -> dict[str, Any]:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    report({"step": 1})
    report({"step": 2})
    return {"rank": dist.get_rank(), "total": total.item(), "given": arguments["given"]}


def fail_on_one(arguments: dict[str, Any], report: Any) -> None:
    if dist.get_rank() == 0:
        raise ValueError("the planned failure")
    dist.barrier()


def die_on_one(arguments: dict[str, Any], report: Any) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang(arguments: dict[str, Any], report: Any) -> None:
    Path(arguments["folder"], str(os.getpid())).touch()
    dist.barrier()
    report({"hanging": True})
    time.sleep(300)
