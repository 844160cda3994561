"""Starts a job's ranks as processes on this machine, watches them, and leaves none behind."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 3.0


class RankFailed(RuntimeError):
    """A rank ended with an error; the message holds its traceback or the end of its output."""

    def __init__(self, rank: int, detail: str) -> None:
        super().__init__(f"rank {rank} failed:\n{detail.rstrip()}")
        self.rank = rank


@dataclass(frozen=True)
class Job:
    """What every rank runs: ``target`` ("module:function") called with (arguments, report).

    ``report(event)`` on rank 0 reaches the launcher's ``on_event``. The function's return value,
    as JSON, is that rank's result.
    """

    target: str
    arguments: dict[str, Any]
    device: str


def launch(
    job: Job,
    ranks: int,
    on_event: Callable[[dict[str, Any]], None],
    limit_seconds: float = float("inf"),
) -> list[Any]:
    """Runs a job on ``ranks`` processes and returns their results in rank order.

    Raises:
        RankFailed: a rank failed; the others have been ended.
        TimeoutError: the limit passed; all ranks have been ended.
    """
    deadline = time.monotonic() + limit_seconds
    with (
        tempfile.TemporaryDirectory(prefix="fp8rs-") as folder,
        _event_pipe() as (reader, writer),
        _ranks_started(job, ranks, Path(folder), writer) as processes,
    ):
        pending = b""
        while True:
            running = [p for p in processes if p.poll() is None]
            pending = _pass_events(reader, pending, on_event)
            failed = any(p.returncode not in (None, 0) for p in processes)
            if failed:
                raise _failure(processes, Path(folder))
            if not running:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done after {limit_seconds:.0f} s")
        return [json.loads(Path(folder, f"result-{r}.json").read_text()) for r in range(ranks)]


def threads_per_rank(ranks: int) -> int:
    """This process's cores shared out to the ranks, at least one each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // ranks)


@contextmanager
def _event_pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


@contextmanager
def _ranks_started(
    job: Job, ranks: int, folder: Path, events: int
) -> Iterator[list[subprocess.Popen[bytes]]]:
    # The launcher holds the store, on a port that the system picks: no race for a free one.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    order = json.dumps(
        {
            "target": job.target,
            "arguments": job.arguments,
            "device": job.device,
            "folder": str(folder),
        }
    )
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            with (folder / f"output-{rank}").open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "fp8rs.demo.worker"],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=_environment(rank, ranks, store.port, events),
                    pass_fds=[events],
                    # Ctrl-C is the launcher's to handle; it ends the ranks.
                    start_new_session=True,
                )
            processes.append(process)
            assert process.stdin is not None
            process.stdin.write(order.encode() + b"\n")
            process.stdin.flush()
        yield processes
    finally:
        _end(processes)


def _environment(rank: int, ranks: int, port: int, events: int) -> dict[str, str]:
    threads = str(threads_per_rank(ranks))
    environment = {
        "OMP_NUM_THREADS": threads,
        "RAYON_NUM_THREADS": threads,
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "FP8RS_EVENTS": str(events),
        "PYTHONUNBUFFERED": "1",
    }
    if "lo" in (name for _, name in socket.if_nameindex()):
        # Else gloo resolves the host's own name, which many containers cannot.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def _pass_events(reader: int, pending: bytes, on_event: Callable[[dict[str, Any]], None]) -> bytes:
    ready, _, _ = select.select([reader], [], [], _POLL_SECONDS)
    if ready:
        *lines, pending = (pending + os.read(reader, 1 << 16)).split(b"\n")
        for line in lines:
            on_event(json.loads(line))
    return pending


def _failure(processes: list[subprocess.Popen[bytes]], folder: Path) -> RankFailed:
    """The first cause: a rank that was killed, else the earliest traceback.

    One rank's end makes the others' collectives fail moments later.
    """
    errors = []
    for rank, process in enumerate(processes):
        error = folder / f"error-{rank}.json"
        if error.exists():
            found = json.loads(error.read_text())
            errors.append((found["time"], rank, found["traceback"]))
        elif process.returncode not in (None, 0):
            output = (folder / f"output-{rank}").read_text(errors="replace")
            return RankFailed(rank, f"{_how_it_ended(process.returncode)}\n{output[-4000:]}")
    _, rank, text = min(errors)
    return RankFailed(rank, text)


def _how_it_ended(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdin is not None
        process.stdin.close()
