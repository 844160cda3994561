"""The worker processes of multi-rank tests. They are started once and run one case after another.

Four processes serve most world sizes: a case on two ranks uses the first two. The first case on
eight ranks starts four more. They are forked from a server that has imported `PRELOAD`, so that
four of them cost about as much as one. If a rank raises, its traceback is returned. If a case
hangs, it is stopped after its timeout, or shortly after one of its ranks has failed. The report
then contains every rank's stack, and the workers are replaced.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

WORKERS = 4
"""The number of workers that are started at first."""

MOST_WORKERS = 8
"""The largest world size of a case. Cases on more than `WORKERS` ranks require GPUs."""

CASES = 120
"""The number of cases after which the workers are replaced. torch caches results by mesh in several
places, and a mesh keeps its process groups. Each has gloo threads that wake up a hundred times a
second. After a thousand cases, these threads use most of a core."""

PRELOAD = [
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "fp8rs.fsdp",
]
"""The modules that the fork server imports before it forks: all that take at least 0.1 s. None of
them starts a thread or initializes CUDA, which would not survive a fork."""

START_SECONDS = 120
"""The longest time that a worker may take to start. Importing torch on a busy machine is slow."""


@dataclass(frozen=True)
class Rig:
    """The rank, world size and device type of a case."""

    rank: int
    world_size: int
    device_type: str

    @property
    def device(self):
        """The device of this rank."""
        import torch

        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, self.rank)

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None):
        """Return a device mesh of this shape over all ranks. The default is one dimension."""
        from torch.distributed.device_mesh import init_device_mesh

        shape = shape or (self.world_size,)
        names = names or ("replicate", "shard")[-len(shape) :]
        if self.device_type == "cuda" and len(shape) > 1:
            # If the group is bound to a device, torch 2.11 exits the process when it splits a group
            # that has both gloo and NCCL.
            from torch import distributed as dist

            dist.group.WORLD.bound_device_id = None
        return init_device_mesh(self.device_type, shape, mesh_dim_names=names)


class RankFailure(AssertionError):
    """A case failed on one or more ranks. The message contains their tracebacks."""


class NotConnected(Exception):
    """A rank could not join the process group.

    torch has incremented its count of groups nevertheless and derives the names of later groups
    from it, so this process cannot join any later group.
    """


def serve(rank: int, pipe: Connection, paths: list[str], log: str, port: int) -> None:
    """Run cases from the pipe until it closes. Ranks connect to each other through the port."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["RAYON_NUM_THREADS"] = "1"
    # Required by deterministic algorithms on CUDA.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    stderr = open(log, "w", buffering=1)  # noqa: SIM115 - lives as long as the process
    faulthandler.register(signal.SIGUSR1, file=stderr, all_threads=True)
    # Dump the stack if a signal ends the process.
    faulthandler.enable(stderr)
    sys.path[:] = paths
    # By default gloo resolves the host name, which some machines send to a DNS server.
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    from torch.distributed import TCPStore

    from fp8rs.gemm import estimates

    warnings.filterwarnings("error", module="fp8rs")
    # Tests have small layers, for which gemms="auto" would choose high precision on a GPU.
    estimates.MEASURED_DEVICES = ()
    torch.set_num_threads(1)
    # A collection after each case then visits only the objects of that case.
    gc.freeze()
    store = TCPStore("127.0.0.1", port)
    pipe.send("ready")
    while True:
        try:
            case = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            run_case(rank, store, pipe, *case)
        except NotConnected:
            # The parent reports that this process has ended.
            stderr.write(traceback.format_exc())
            return


def run_case(
    rank: int,
    store: Any,
    pipe: Connection,
    number: int,
    module: str,
    name: str,
    world_size: int,
    device_type: str,
    arguments: dict[str, Any],
) -> None:
    """Run one case on this rank and send its result. Its process groups are destroyed afterwards.

    Raises NotConnected if the ranks cannot connect.
    """
    import torch
    from torch import distributed as dist

    from .folders import remove_folders

    rig = Rig(rank, world_size, device_type)
    try:
        connect(rig, dist.PrefixStore(f"case {number}", store))
    except BaseException as error:
        raise NotConnected(name) from error
    torch.manual_seed(0)
    answer = None
    try:
        function = getattr(importlib.import_module(module), name)
        result = getattr(function, "case", function)(rig, **arguments)
        # A rank that leaves early would close connections that a slower rank still uses.
        dist.barrier()
        answer = True, result
    except BaseException:
        # With NCCL, destroying the groups waits while other ranks are in a collective.
        pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
    remove_folders()
    # DTensor caches the results of sharding propagation, including meshes. A mesh of the next
    # case compares equal, but the process groups of the cached mesh are gone.
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    # A sharded model is a reference cycle. It keeps its mesh and therefore process groups,
    # whose threads wake up a hundred times a second. A collection after each case costs less.
    if number % 10 == 0:
        gc.collect()
    torch.cuda.empty_cache()  # the ranks of all test processes share the GPUs
    if answer is not None:
        pipe.send(answer)


def connect(rig: Rig, store: Any) -> None:
    """Create the default process group and wait until every rank has connected.

    A rank that fails at once closes its connections. A rank that is still connecting would then
    report an error of gloo instead of the error of the case.
    """
    import torch
    from torch import distributed as dist

    options: dict[str, Any] = {}
    if rig.device_type == "cuda":
        torch.cuda.set_device(rig.rank)
        options["device_id"] = rig.device
    dist.init_process_group(
        "gloo" if rig.device_type == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=rig.rank,
        world_size=rig.world_size,
        **options,
    )
    store.set(f"connected {rig.rank}", "")
    store.wait([f"connected {rank}" for rank in range(rig.world_size)])


class Pool:
    """The parent's side of the pool: starts the worker processes and sends them cases."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="fp8rs-ranks-")
        self.workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self.cases = 0
        self.store: Any = None
        atexit.register(self.stop)

    def start(self, world_size: int) -> None:
        """Start the workers that a case requires, unless they are running."""
        running = len(self.workers)
        if running >= world_size:
            return
        from torch.distributed import TCPStore

        if not running:
            # The server of the store runs in this process.
            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        for rank in range(running, max(world_size, WORKERS)):
            parent_pipe, worker_pipe = context.Pipe()
            process = context.Process(
                target=serve,
                args=(rank, worker_pipe, list(sys.path), str(self.log(rank)), self.store.port),
                daemon=True,
            )
            process.start()
            worker_pipe.close()
            self.workers.append((process, parent_pipe))
        for process, pipe in self.workers[running:]:
            if not pipe.poll(START_SECONDS) or pipe.recv() != "ready":
                self.stop()
                raise RankFailure(f"worker {process.name} did not start")

    def stop(self) -> None:
        """Kill the workers, whether or not they are running a case."""
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
        for process, _ in self.workers:
            process.join(10)
        self.workers = []

    def log(self, rank: int) -> Path:
        """The file to which a rank writes its stack."""
        return Path(self.folder.name) / f"rank{rank}.log"

    def run(
        self,
        module: str,
        name: str,
        world_size: int,
        device_type: str,
        arguments: dict[str, Any],
        seconds: float,
        retry: bool = True,
    ) -> list[Any]:
        """Run a case on the first `world_size` workers. Return the results by rank.

        Raises RankFailure with the traceback of each failing rank, or with the stacks of all ranks
        if the case takes longer than `seconds`.

        A worker has been ended by a signal about once in 20,000 cases, for an unknown reason. With
        `retry`, such a case is repeated once, and pytest's summary shows how the process ended.
        """
        if self.cases % CASES == 0:
            self.stop()
        self.start(world_size)
        self.cases += 1
        workers = self.workers[:world_size]
        for _, pipe in workers:
            pipe.send((self.cases, module, name, world_size, device_type, arguments))
        ended: list[int] = []
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        pending = {pipe: rank for rank, (_, pipe) in enumerate(workers)}
        deadline = time.monotonic() + seconds
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                stacks = self.stacks(sorted(pending.values()))
                self.stop()
                if failures:
                    raise RankFailure(f"{report(failures)}{stacks}")
                raise RankFailure(f"{name} hung for {seconds:.0f} s\n{stacks}")
            for pipe in ready:
                rank = pending.pop(pipe)
                try:
                    passed, value = pipe.recv()
                except EOFError:
                    process = self.workers[rank][0]
                    process.join(10)
                    ended.append(process.exitcode or 0)
                    passed = False
                    value = f"the process died, exit code {ended[-1]}{self.tail(rank)}"
                if passed:
                    results[rank] = value
                else:
                    failures[rank] = value
                    # Other ranks may wait for this one in a collective, so shorten their timeout.
                    deadline = min(deadline, time.monotonic() + 3)
        if ended or (failures and device_type == "cuda"):
            self.stop()
        if retry and any(code < 0 for code in ended):
            text = f"a signal ended a rank of {name}: {report(failures)}"
            warnings.warn(text, stacklevel=2)
            return self.run(module, name, world_size, device_type, arguments, seconds, False)
        if failures:
            # All ranks have answered, so none of them hangs.
            raise RankFailure(report(failures))
        return [results[rank] for rank in range(world_size)]

    def stacks(self, ranks: list[int]) -> str:
        """Let the given ranks dump their Python stacks, and return them."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.workers[rank][0].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return "".join(f"\n--- rank {rank} is at{self.tail(rank)}" for rank in ranks)

    def tail(self, rank: int) -> str:
        """Return the end of a rank's log."""
        log = self.log(rank)
        return "\n" + log.read_text()[-4000:] if log.exists() else ""


def report(failures: dict[int, str]) -> str:
    """Join the tracebacks of the ranks. Equal ones appear once."""
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(failures.items()):
        by_text.setdefault(text, []).append(rank)
    return "".join(f"\n--- rank {ranks}\n{text}" for text, ranks in by_text.items())


_pool: Pool | None = None


def pool() -> Pool:
    """Return the pool of this session."""
    global _pool
    if _pool is None:
        _pool = Pool()
    return _pool
