"""One rank of a launched run: ``python -m fp8rs.demo.worker`` with a job on standard input.

Standard input stays open while the launcher lives. When it closes, this process ends, so that no
rank outlives a launcher that was killed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

#: A rank that waits this long for another has lost it.
_COLLECTIVE_TIMEOUT = timedelta(minutes=5)


def main() -> NoReturn:
    """Runs this rank's job; what it returns goes to ``result-RANK.json`` in the run's folder.

    The process ends without the interpreter's finalization. Once a rank's result is on disk and its
    groups are gone there is nothing left to save, and threads of torch's that still want the GIL
    while the interpreter goes away abort the process ("terminate called without an active
    exception"), which would make a finished run a failed one.
    """
    job = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    rank, folder = int(os.environ["RANK"]), Path(job["folder"])
    try:
        _join(job["device"], rank)
        module, _, name = job["target"].partition(":")
        result = getattr(importlib.import_module(module), name)(job["arguments"], _reporter(rank))
        _write(folder / f"result-{rank}.json", result)
        dist.destroy_process_group()
    except BaseException:
        error = {"time": time.time(), "traceback": traceback.format_exc()}
        _write(folder / f"error-{rank}.json", error)
        # The groups stay: the other ranks may never answer the communicator's shutdown.
        _end(1)
    _end(0)


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _join(device: str, rank: int) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=_COLLECTIVE_TIMEOUT,
        device_id=torch.device("cuda", rank) if device == "cuda" else None,
    )


def _reporter(rank: int) -> Any:
    def report(event: dict[str, Any]) -> None:
        if rank == 0:
            descriptor = int(os.environ["FP8RS_EVENTS"])
            os.write(descriptor, json.dumps(event).encode() + b"\n")

    return report


def _write(path: Path, value: Any) -> None:
    # Renamed into place, so that the launcher never reads half a file.
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value))
    partial.rename(path)


def _end_with_launcher() -> None:
    while os.read(0, 4096):
        pass
    os._exit(3)


if __name__ == "__main__":
    main()
