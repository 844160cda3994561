"""The worker processes: started once, sent one case after the other.

Four processes serve every world size: a case on two ranks uses the first two. They come
from a fork server that has imported `PRELOAD` already, which is what makes four of them cost
about as much as one. A rank's exception comes back with its traceback; a case that hangs
is ended after its time-out (or shortly after a rank of it has failed) and reported with
every rank's stack, and the workers are replaced.
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
"""Ranks of the largest case."""

CASES = 120
"""Cases that one set of workers runs. What keeps a mesh (torch remembers results by mesh in several
places, a model that FSDP2 sharded is a cycle) keeps its groups, each with threads of gloo's that
wake up a hundred times a second: after a thousand cases they take most of a processor."""

PRELOAD = [
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "fp8rs.fsdp",
]
"""What the fork server imports once, where four workers would each: of all that cases import, what
takes a tenth of a second and more. None of it starts a thread or asks for a GPU: no fork would
survive that."""

START_SECONDS = 120
"""Longest wait for a worker's first sign of life; importing torch on a busy machine is slow."""


@dataclass(frozen=True)
class Rig:
    """What a case learns about where it runs."""

    rank: int
    world_size: int
    device_type: str

    @property
    def device(self):
        """The rank's own device."""
        import torch

        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, self.rank)

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None):
        """A device mesh of this shape over all ranks (default: one dimension)."""
        from torch.distributed.device_mesh import init_device_mesh

        shape = shape or (self.world_size,)
        names = names or ("replicate", "shard")[-len(shape) :]
        if self.device_type == "cuda" and len(shape) > 1:
            # torch 2.11 ends the process where it splits a group of gloo and NCCL, which it does
            # where the group is bound to a device.
            from torch import distributed as dist

            dist.group.WORLD.bound_device_id = None
        return init_device_mesh(self.device_type, shape, mesh_dim_names=names)


class RankFailure(AssertionError):
    """A case failed on one or more ranks; the message holds their tracebacks."""


class NotConnected(Exception):
    """A rank could not join the others. torch has counted its group all the same, and names later
    groups by that count: this process would wait for the others under a name of its own."""


def serve(rank: int, pipe: Connection, paths: list[str], log: str, port: int) -> None:
    """A worker's life: take cases from the pipe until it closes. Ranks meet at the port."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic algorithms
    stderr = open(log, "w", buffering=1)  # noqa: SIM115 - lives as long as the process
    faulthandler.register(signal.SIGUSR1, file=stderr, all_threads=True)
    faulthandler.enable(stderr)  # a signal that ends the process leaves its stack
    sys.path[:] = paths
    # Else gloo resolves the host's own name, for which some machines ask others.
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    from torch.distributed import TCPStore

    warnings.filterwarnings("error", module="fp8rs")
    torch.set_num_threads(1)
    gc.freeze()  # what is collected after each case is that case's
    store = TCPStore("127.0.0.1", port)
    pipe.send("ready")
    while True:
        try:
            case = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            pipe.send((True, run_case(rank, store, *case)))
        except NotConnected:
            stderr.write(traceback.format_exc())  # the parent reports it with this process's end
            return
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def run_case(
    rank: int,
    store: Any,
    number: int,
    module: str,
    name: str,
    world_size: int,
    device_type: str,
    arguments: dict[str, Any],
) -> Any:
    """Run one case on this rank, in process groups that live as long as it does.

    Raises what the case raises, and NotConnected if the ranks do not meet."""
    import torch
    from torch import distributed as dist

    function = getattr(importlib.import_module(module), name)
    function = getattr(function, "case", function)
    rig = Rig(rank, world_size, device_type)
    try:
        connect(rig, dist.PrefixStore(f"case {number}", store))
    except BaseException as error:
        raise NotConnected(name) from error
    torch.manual_seed(0)
    try:
        result = function(rig, **arguments)
        # A rank that leaves early tears down connections that a slower one still uses.
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()
        # DTensor remembers results of its operators with the meshes that they were on, which
        # compare equal to the next case's but whose groups are gone.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
        # A sharded model is a cycle: it keeps its mesh, and with it groups, whose threads wake up a
        # hundred times a second. To collect after each case costs more than they do.
        if number % 10 == 0:
            gc.collect()


def connect(rig: Rig, store: Any) -> None:
    """Make the default process group, and wait until every rank has.

    A rank that fails at once closes its connections: one that is still making them would not
    reach the case, and raise an error of gloo's in place of the case's."""
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
    """The parent's side: the worker processes and how to talk to them."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="fp8rs-ranks-")
        self.workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self.cases = 0
        self.store: Any = None
        atexit.register(self.stop)

    def start(self) -> None:
        """Start the workers if none run."""
        if self.workers:
            return
        from torch.distributed import TCPStore

        # Its server runs here, beside the tests.
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        for rank in range(WORKERS):
            here, there = context.Pipe()
            process = context.Process(
                target=serve,
                args=(rank, there, list(sys.path), str(self.log(rank)), self.store.port),
                daemon=True,
            )
            process.start()
            there.close()
            self.workers.append((process, here))
        for process, pipe in self.workers:
            if not pipe.poll(START_SECONDS) or pipe.recv() != "ready":
                self.stop()
                raise RankFailure(f"worker {process.name} did not start")

    def stop(self) -> None:
        """End the workers, whatever they are doing."""
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
        for process, _ in self.workers:
            process.join(10)
        self.workers = []

    def log(self, rank: int) -> Path:
        """Where a rank writes its stack when asked."""
        return Path(self.folder.name) / f"rank{rank}.log"

    def run(
        self,
        module: str,
        name: str,
        world_size: int,
        device_type: str,
        arguments: dict[str, Any],
        seconds: float,
        again: bool = True,
    ) -> list[Any]:
        """Run a case on the first `world_size` workers; its results by rank.

        Raises RankFailure with each failing rank's traceback, or with every rank's stack
        when the case takes longer than `seconds`.

        A signal has ended a process once in some 20,000 cases, why is not known. So with `again` a
        case in which that happens runs once more, and pytest's summary shows how the process ended.
        """
        if self.cases % CASES == 0:
            self.stop()
        self.start()
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
                    passed, value = (
                        False,
                        f"the process died, exit code {ended[-1]}{self.tail(rank)}",
                    )
                if passed:
                    results[rank] = value
                else:
                    failures[rank] = value
                    # Peers may wait for this rank in a collective: do not wait long for them.
                    deadline = min(deadline, time.monotonic() + 3)
        if ended:
            self.stop()
        if again and any(code < 0 for code in ended):
            text = f"a signal ended a rank of {name}: {report(failures)}"
            warnings.warn(text, stacklevel=2)
            return self.run(module, name, world_size, device_type, arguments, seconds, False)
        if failures:
            raise RankFailure(report(failures))  # every rank answered: none is stuck
        return [results[rank] for rank in range(world_size)]

    def stacks(self, ranks: list[int]) -> str:
        """Ask ranks for their Python stacks."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.workers[rank][0].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return "".join(f"\n--- rank {rank} is at{self.tail(rank)}" for rank in ranks)

    def tail(self, rank: int) -> str:
        """The end of what a rank wrote in its log."""
        log = self.log(rank)
        return "\n" + log.read_text()[-4000:] if log.exists() else ""


def report(failures: dict[int, str]) -> str:
    """The ranks' tracebacks, each once: ranks often fail in the same way."""
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(failures.items()):
        by_text.setdefault(text, []).append(rank)
    return "".join(f"\n--- rank {ranks}\n{text}" for text, ranks in by_text.items())


_pool: Pool | None = None


def pool() -> Pool:
    """The session's workers."""
    global _pool
    if _pool is None:
        _pool = Pool()
    return _pool
