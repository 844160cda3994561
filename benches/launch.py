"""Run a function on several ranks of this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

Report = Callable[[dict[str, Any]], None]

_COLLECTIVE_TIMEOUT = timedelta(minutes=5)


class RankFailed(RuntimeError):
    """A rank ended with an error. The message has its traceback, or the end of its output."""

    def __init__(self, rank: int, detail: str) -> None:
        super().__init__(f"rank {rank} failed:\n{detail.rstrip()}")
        self.rank = rank


def launch(
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int,
    device: str,
    on_event: Report = lambda event: None,
    limit_seconds: float = float("inf"),
) -> list[Any]:
    """Call ``function(*arguments, report)`` on all ranks of a process group.

    Each rank is a process, with the environment variables of the first call. All of them have ended
    when this function returns or raises, or when this process is killed.

    Args:
        function: a function of a module that the ranks can import. Its result is pickled.
        arguments: its arguments, which are pickled.
        ranks: number of ranks.
        device: "cpu" (gloo) or "cuda" (NCCL, one GPU for each rank).
        on_event: called with each event that rank 0 passes to ``report``.
        limit_seconds: time limit.

    Returns:
        The results by rank.

    Raises:
        RankFailed: a rank failed.
        TimeoutError: the time limit passed.
    """
    deadline = time.monotonic() + limit_seconds
    # This process holds the store, on a port that the system chooses.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    # A server imports torch once and forks the ranks. It does not initialize CUDA, which would not
    # survive a fork.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fp8rs.demo.train"])
    messages: Any = context.SimpleQueue()
    results: dict[int, Any] = {}
    errors: list[tuple[int, str]] = []
    with tempfile.TemporaryDirectory(prefix="fp8rs-") as folder:
        processes = []
        outputs = []
        for rank in range(ranks):
            output = Path(folder, str(rank))
            arguments_of_rank = (rank, ranks, device, store.port, messages, output)
            process = context.Process(target=_rank, args=(*arguments_of_rank, function, arguments))
            outputs.append(output)
            processes.append(process)

        try:
            for process in processes:
                process.start()

            while True:
                # A rank sends its last message before it ends, so read messages after exit codes.
                exit_codes = [process.exitcode for process in processes]
                while not messages.empty():
                    kind, rank, value = messages.get()
                    if kind == "event":
                        on_event(value)
                    elif kind == "result":
                        results[rank] = value
                    else:
                        errors.append((rank, value))

                if any(exit_codes):
                    raise _failure([process.exitcode for process in processes], errors, outputs)
                if None not in exit_codes:
                    return [results[rank] for rank in range(ranks)]
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not done after {limit_seconds:.0f} s")
                time.sleep(0.05)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


def threads_per_rank(ranks: int) -> int:
    """Divide the cores of this process among the ranks, at least one for each."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // ranks)


def _failure(
    exit_codes: list[int | None], errors: list[tuple[int, str]], outputs: list[Path]
) -> RankFailed:
    """Return the first cause: a rank that a signal ended, else the first traceback.

    When one rank ends, the collectives of the other ranks fail moments later.
    """
    for rank, exit_code in enumerate(exit_codes):
        if exit_code is not None and exit_code < 0:
            reason = f"ended by {signal.Signals(-exit_code).name}"
            return RankFailed(rank, f"{reason}\n{_end_of(outputs[rank])}")

    if errors:
        rank, error_traceback = errors[0]
        return RankFailed(rank, error_traceback)

    failed_ranks = [rank for rank, exit_code in enumerate(exit_codes) if exit_code]
    rank = failed_ranks[0]
    reason = f"ended with exit code {exit_codes[rank]}"
    return RankFailed(rank, f"{reason}\n{_end_of(outputs[rank])}")


def _end_of(output: Path) -> str:
    return output.read_text(errors="replace")[-4000:]


def _rank(
    rank: int,
    ranks: int,
    device: str,
    port: int,
    messages: Any,
    output: Path,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> NoReturn:
    """Run one rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The launcher handles Ctrl-C and ends the ranks.
    with output.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    threads = threads_per_rank(ranks)
    for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ.setdefault(name, str(threads))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    os.environ["RANK"] = str(rank)
    os.environ["LOCAL_RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = str(ranks)
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    if "lo" in (name for _, name in socket.if_nameindex()):
        # Otherwise gloo resolves the name of the host, which fails in many containers.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def report(event: dict[str, Any]) -> None:
        if rank == 0:
            messages.put(("event", rank, event))

    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=dist.TCPStore("127.0.0.1", port, is_master=False),  # type: ignore[attr-defined]
            rank=rank,
            world_size=ranks,
            timeout=_COLLECTIVE_TIMEOUT,
            device_id=torch.device("cuda", rank) if device == "cuda" else None,
        )
        messages.put(("result", rank, function(*arguments, report)))
        dist.destroy_process_group()
    except BaseException:
        messages.put(("error", rank, traceback.format_exc()))
        _exit(1)  # Destroying the process group could wait for the other ranks.
    _exit(0)


def _exit(code: int) -> NoReturn:
    """End this process without the interpreter's finalization.

    Threads of torch that take the GIL during finalization can abort a process that is done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_launcher() -> None:
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os._exit(3)
