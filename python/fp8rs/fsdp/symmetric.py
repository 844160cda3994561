"""Memory that ranks of one host read from each other: gathers and reductions by copy engine.

A `Block` is a piece of CUDA memory of which each rank of a group has one, mapped into all of them
(torch's symmetric memory, CUDA backend, without multicast). A copy out of a peer's is a plain copy
of the driver's between GPUs: the copy engines make it, and no SM takes part. What is left is the
order, of which there is one means, `Block.barrier`: a kernel on the current stream that ends when
all ranks' streams have come to it.

Both uses halve a block, and use the halves in turn. Number the gathers (or reductions) of a block k
= 0, 1, ...; each has one barrier, k. All ranks make the same ones in the same order, on streams
that an event puts in a row, so that on each rank what comes before barrier k happened before what
comes after it, and all of that on all ranks in the order of barriers.

Gather k (`CopyEngineGather`): write the own shard to half k % 2; barrier k; read the peers' halves.

- A peer's shard is there: the peer wrote it before its barrier k, I read it after mine.
- It is not overwritten while I read: its owner writes that half again in gather k + 2, after its
  barrier k + 1, to which I come only after my reads of gather k.

Reduction k (`CopyEngineWire`): the gradients are copied to half k % 2, on the computation's stream;
barrier k; read my part of each peer's half into my other half; add up there.

- Nobody reads my other half, (k - 1) % 2: peers read it in reduction k - 1, before their barrier k.
- My half k % 2 is free when the next gradients are copied there, for reduction k + 2, or received
  there, in reduction k + 1: peers read it in reduction k, before their barrier k + 1. The receiving
  comes after mine. The copy is on another stream, and waits for the end of reduction k + 1
  (`Halves.wait`; FSDP2 has it wait for that anyway, unless it was told to hold more than one
  reduction's input). What was received in reduction k + 1 has been added up then.

Who comes to fewer barriers, because it raised or was told to run something else, never answers:
the others' barrier gives up after a time-out, and ends the process's CUDA context with a message.
A rank that runs on but gathers something else than the others must not pair with them: each module
has its own channel of the barrier (as far as there are so many), and a rank that waits on another
one waits for the time-out. So what is read is either what was meant, or nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8rs._torch import symmetric_memory

from .reduction import add_up


class Block:
    """Memory of which each rank of a group has a piece of ``nbytes`` bytes.

    Attributes:
        parts: the pieces by rank, this rank's own among them: uint8.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, nbytes: int, timeout: timedelta
    ) -> None:
        """Make it: all ranks of the group do, and wait for each other."""
        symmetric = symmetric_memory()
        own = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(own, group)
        ranks = range(group.size())
        remote = self._handle.get_remote_tensor
        self.parts: list[Tensor] = [
            own if rank == group.rank() else remote(rank, (nbytes,), torch.uint8) for rank in ranks
        ]
        self._channels = symmetric.get_signal_pad_size() // (4 * group.size())
        self._milliseconds = round(timeout.total_seconds() * 1000)

    def barrier(self, channel: int) -> None:
        """Have the current stream wait until all ranks' have come here, on the same channel."""
        self._handle.barrier(channel % self._channels, self._milliseconds)


class Halves:
    """A block of two halves, as large as what was asked for: all ranks ask for the same.

    Attributes:
        nbytes: of this rank's piece, both halves together.
        turn: the half that is next.
        moved: bytes that a gather's ranks held after it, summed over gathers.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> None:
        """No memory yet: it is made at first use."""
        self.group = group
        self.turn = 0
        self.moved = 0
        self._device = device
        self._half = 0
        self._timeout = timeout
        self._block: Block | None = None
        self._done: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's piece, both halves together."""
        return self.planned if self._block is not None else 0

    @property
    def planned(self) -> int:
        """The same, if it were there."""
        return 2 * self._half

    def plan(self, nbytes: int) -> None:
        """Halves of so many bytes will be needed: the first memory that is made will be enough."""
        self._half = max(self._half, -(-nbytes // 16) * 16)

    def reserve(self, nbytes: int) -> None:
        """Have halves of ``nbytes`` bytes; all ranks call it, and wait where more is made."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "gathers and reductions by symmetric memory cannot be captured in a CUDA graph: "
                "they use two halves of it in turn, and a graph would use the same one each time. "
                'Use set_links(model, gather="torch", reduction="torch"), or no capture'
            )
        if self._block is None or nbytes > self._half:
            # This rank has read what it was to. So has each other when it comes to the new block,
            # where all wait for all; then the old one is given back.
            if self._block is not None and self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.plan(nbytes)
            self._block = Block(self.group, self._device, self.planned, self._timeout)

    def half(self, rank: int, which: int) -> Tensor:
        """A half of a rank's piece: uint8."""
        assert self._block is not None
        return self._block.parts[rank].narrow(0, which * self._half, self._half)

    def wait(self) -> None:
        """Have the current stream wait for what `finish` ended."""
        if self._done is not None:
            self._stream().wait_event(self._done)

    def barrier(self, channel: int) -> None:
        """As `Block.barrier`."""
        assert self._block is not None
        self._block.barrier(channel)

    def finish(self) -> None:
        """What this turn was for has been queued on the current stream."""
        self._done = self._stream().record_event()
        self.turn = 1 - self.turn

    def peers(self) -> list[int]:
        """The other ranks, each rank's in another order: no two read from the same one at once."""
        ranks, own = self.group.size(), self.group.rank()
        return [(own + step) % ranks for step in range(1, ranks)]

    def _stream(self) -> Any:
        return torch.get_device_module(self._device).current_stream()


class CopyEngineGather:
    """What ``set_custom_all_gather`` takes, for one module."""

    def __init__(self, halves: Halves, channel: int) -> None:
        """Gather through ``halves``, which all modules over the same ranks share."""
        self._halves = halves
        self._channel = channel

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Memory for what is gathered: no symmetric one, of which little is needed so."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather; what comes next on the current stream finds the result."""
        halves = self._halves
        if group.size() != halves.group.size():  # of a reshard_after_forward over fewer ranks
            work: dist.Work | None = dist.all_gather_into_tensor(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
            return work
        shard = input_tensor.view(torch.uint8)
        whole = output_tensor.view(torch.uint8).view(group.size(), -1)
        n = shard.numel()
        halves.reserve(n)
        halves.wait()  # for the last gather's stream
        halves.half(group.rank(), halves.turn)[:n].copy_(shard)
        halves.barrier(self._channel)
        for peer in halves.peers():
            whole[peer].copy_(halves.half(peer, halves.turn)[:n])
        own = whole[group.rank()]
        if own.data_ptr() != shard.data_ptr():  # FSDP2 has it in place
            own.copy_(shard)
        halves.moved += whole.numel()
        halves.finish()
        return None


class CopyEngineWire:
    """A `fp8rs.fsdp.reduction.Wire` for one module."""

    def __init__(self, halves: Halves, channel: int) -> None:
        """Send through ``halves``, which all modules over the same ranks share."""
        self._halves = halves
        self._channel = channel

    def room(self, numel: int, device: torch.device, group: dist.ProcessGroup) -> Tensor:
        """The half that is next, when it is free."""
        halves, ranks = self._halves, group.size()
        halves.reserve(2 * ranks * _pitch(numel // ranks))
        halves.wait()
        return halves.half(group.rank(), halves.turn)[: 2 * numel].view(torch.bfloat16)

    def sum(
        self, outs: Sequence[Tensor], sent: Tensor, divisor: float, group: dist.ProcessGroup
    ) -> None:
        """Read this rank's parts of all halves into the other half, and add them up."""
        halves, ranks, own = self._halves, group.size(), group.rank()
        n, turn = sent.numel() // ranks, halves.turn
        halves.barrier(self._channel)
        pitch = _pitch(n)
        room = halves.half(own, 1 - turn).view(torch.bfloat16)
        rows = room[: ranks * pitch].view(ranks, pitch)[:, :n]
        for rank in (*halves.peers(), own):
            part = halves.half(rank, turn).view(torch.bfloat16)[own * n : (own + 1) * n]
            rows[rank].copy_(part)
        add_up(outs, rows, divisor)
        halves.finish()


def _pitch(n: int) -> int:
    """Elements from a row to the next, so that each begins at a multiple of 16 bytes."""
    return -(-n // 8) * 8


# --- whether there is such memory ----------------------------------------------------------------


def lacks(group: dist.ProcessGroup, device: torch.device) -> tuple[str, str]:
    """Why ranks cannot read each other's memory, and why they should not send all to all, or "".

    All ranks of the group ask, and agree.
    """
    if device.type != "cuda":
        return f"symmetric memory is for CUDA, and the model is on {device.type}", ""
    backend = symmetric_memory().get_backend(device)
    wrong = "" if backend == "CUDA" else f"the backend of symmetric memory is {backend}, not CUDA"
    properties: Any = torch.cuda.get_device_properties(device)
    said = _gathered((_host(), str(properties.uuid), wrong), group)
    hosts = {host for host, _, _ in said}
    if len(hosts) > 1:
        where = f"its {len(said)} ranks are on {len(hosts)} hosts"
        # A ring adds up within a host what crosses the network once; all to all, each rank's does.
        return where, "" if len(hosts) == len(said) else f"{where}, which a ring crosses less often"
    peers = [uuid for _, uuid, _ in said]
    if len(set(peers)) < len(peers):
        wrong = wrong or "two ranks share a GPU"
    steps: tuple[Callable[[], str], ...] = (
        lambda: wrong or _unreachable(device, peers),
        lambda: _fails(group, device),
    )
    # One after the other: where a rank would not come to the second, none must.
    for step in steps:
        reasons = _gathered(step(), group)
        for rank, reason in enumerate(reasons):
            if reason:
                return f"rank {rank} of the group: {reason}", ""
    return "", ""


def _gathered(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    said: list[Any] = [None] * group.size()
    dist.all_gather_object(said, mine, group=group)
    return said


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _unreachable(device: torch.device, uuids: list[str]) -> str:
    """Which of the GPUs that this process sees its own cannot read."""
    for ordinal in range(torch.cuda.device_count()):
        properties: Any = torch.cuda.get_device_properties(ordinal)
        if ordinal == device.index or str(properties.uuid) not in uuids:
            continue
        if not torch.cuda.can_device_access_peer(device, ordinal):
            return f"cuda:{device.index} has no peer access to cuda:{ordinal}"
    return ""


def _fails(group: dist.ProcessGroup, device: torch.device) -> str:
    """What torch says where it cannot make a block. (Containers may not share memory.)"""
    try:
        Block(group, device, 1 << 10, timedelta(minutes=1)).barrier(0)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""
