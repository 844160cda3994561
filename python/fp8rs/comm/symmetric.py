"""All-gathers and reduce-scatters through symmetric memory of the GPUs of one host.

`PeerMemory` is CUDA memory of which each rank of a group has a part. Every rank maps all parts
(torch's symmetric memory, CUDA backend, without multicast). A copy from another rank's part is a
plain copy between GPUs. The copy engines run it, so it takes no SM. Ranks synchronize with
`PeerMemory.barrier`, a kernel on the current stream that ends when the streams of all ranks have
reached it.

A `DoubleBuffer` has two halves, which are used in turn. Number its all-gathers (or
reduce-scatters) k = 0, 1, ... Each has one barrier, also numbered k. All ranks run the same ones
in the same order, on streams that events order. So on each rank, everything before barrier k
happens before everything after it on all ranks.

All-gather k (`CopyEngineAllGather`): write this rank's shard to half k % 2, barrier k, read half
k % 2 of the other ranks.

- The other rank's shard is complete: that rank wrote it before its barrier k, and it is read after
  this rank's barrier k.
- It is not overwritten during the read. Its owner writes that half next in all-gather k + 2, after
  barrier k + 1, which this rank reaches after its reads of all-gather k.

Reduce-scatter k (`CopyEngineTransport`): copy the gradients to half k % 2 on the computation's
stream, barrier k, read this rank's row from half k % 2 of every rank into the other half of this
rank, sum there.

- No rank reads the other half, (k - 1) % 2, at that time. Other ranks read it in reduce-scatter
  k - 1, before their barrier k.
- Half k % 2 is free when it is written next, by the reads of reduce-scatter k + 1 and by the copy
  of the gradients for reduce-scatter k + 2. Other ranks read it in reduce-scatter k, before their
  barrier k + 1. The reads of reduce-scatter k + 1 come after that barrier. The copy runs on another
  stream, which waits for the end of reduce-scatter k + 1 (`DoubleBuffer.wait`). FSDP2 makes it wait
  in any case, unless several inputs of reduce-scatters may be in flight. The sum of reduce-scatter
  k + 1 has then been computed.

If a rank raises an error or runs something else, it does not reach the barrier. The barriers of
the other ranks time out and end the CUDA context of their processes with a message. If a rank
gathers another module than the other ranks, it must not pair with them. Each module therefore has
its own channel of the barrier, as far as there are enough channels, and a rank on another channel
waits until the time-out. No rank reads the bytes of another module.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8rs._torch import outside_selective_checkpoints, symmetric_memory

from .reduce_scatter import Transport, sum_rows


class PeerMemory:
    """Memory of which each rank of a group has a part.

    Attributes:
        parts: the parts of all ranks, each uint8 of shape ``(nbytes,)``.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, nbytes: int, timeout: timedelta
    ) -> None:
        """Allocate it. All ranks of the group call this and wait for each other.

        Args:
            group: the ranks.
            device: this rank's device.
            nbytes: bytes of a part.
            timeout: how long a barrier waits.
        """
        symmetric = symmetric_memory()
        own = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        # torch zeroes the memory and its signals on the default stream, after the work that is
        # pending there. It must not erase the signal of a rank that is ahead.
        torch.cuda.synchronize(device)
        self._handle = symmetric.rendezvous(own, group)
        self.parts: list[Tensor] = [
            self._handle.get_remote_tensor(rank, (nbytes,), torch.uint8)
            if rank != group.rank()
            else own
            for rank in range(group.size())
        ]
        self._channels = symmetric.get_signal_pad_size() // (4 * group.size())
        self._milliseconds = round(timeout.total_seconds() * 1000)

    def barrier(self, channel: int) -> None:
        """Make the current stream wait for the streams of all ranks, on the same channel."""
        self._handle.barrier(channel % self._channels, self._milliseconds)


class DoubleBuffer:
    """Peer memory with two halves that are used in turn. It grows to the largest size requested.

    Attributes:
        turn: the half that is used next.
        nbytes: bytes of this rank's part, both halves together.
        gathered: bytes of the outputs of all-gathers so far.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> None:
        """Create a buffer without memory. `reserve` allocates it."""
        self.group = group
        self.turn = 0
        self.nbytes = 0
        self.gathered = 0
        self._device = device
        self._timeout = timeout
        self._memory: PeerMemory | None = None
        self._done: Any = None

    def reserve(self, nbytes: int) -> None:
        """Grow to halves of ``nbytes`` bytes. All ranks call this, and wait if memory grows."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "collectives through symmetric memory cannot be captured in a CUDA graph: they use "
                "two halves of a buffer in turn, and a graph would use one. Do not capture them, "
                'or use set_fsdp_comm(model, all_gather="torch", reduce_scatter="bf16")'
            )
        if 2 * nbytes > self.nbytes:
            # Allocating waits until all ranks have finished their reads. Then the old memory can be
            # freed.
            self.nbytes = 2 * (-(-nbytes // 16) * 16)
            self._memory = PeerMemory(self.group, self._device, self.nbytes, self._timeout)

    def half(self, rank: int, which: int) -> Tensor:
        """Return a half of a rank's part: uint8, flat."""
        assert self._memory is not None
        size = self.nbytes // 2
        return self._memory.parts[rank].narrow(0, which * size, size)

    def wait(self) -> None:
        """Make the current stream wait for the work before the last `finish`."""
        if self._done is not None:
            self._stream().wait_event(self._done)

    def barrier(self, channel: int) -> None:
        """Make the current stream wait for the streams of all ranks, on the same channel."""
        assert self._memory is not None
        self._memory.barrier(channel)

    def finish(self) -> None:
        """End the use of this half, after its work has been queued on the current stream."""
        self._done = self._stream().record_event()
        self.turn = 1 - self.turn

    def peers(self) -> list[int]:
        """Return the other ranks, rotated so that no two ranks read from the same one at once."""
        ranks, own = self.group.size(), self.group.rank()
        return [(own + step) % ranks for step in range(1, ranks)]

    def _stream(self) -> Any:
        return torch.get_device_module(self._device).current_stream()


class CopyEngineAllGather:
    """An all-gather of one module, for ``set_custom_all_gather``."""

    def __init__(self, buffer: DoubleBuffer, channel: int) -> None:
        """Gather through ``buffer``, which modules over the same ranks share."""
        self._buffer = buffer
        self._channel = channel

    @outside_selective_checkpoints
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return the output. It need not be in symmetric memory."""
        return torch.empty(*size, dtype=dtype, device=device)

    @outside_selective_checkpoints
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather. Later work on the current stream sees the result."""
        buffer = self._buffer
        # An integer reshard_after_forward gathers over fewer ranks in the backward.
        if group.size() != buffer.group.size():
            work: dist.Work | None = dist.all_gather_into_tensor(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
            return work
        shard = input_tensor.view(torch.uint8)
        whole = output_tensor.view(torch.uint8).view(group.size(), -1)
        n = shard.numel()
        buffer.reserve(n)
        buffer.wait()  # The last all-gather may have run on another stream.
        buffer.half(group.rank(), buffer.turn)[:n].copy_(shard)
        buffer.barrier(self._channel)
        for peer in buffer.peers():
            whole[peer].copy_(buffer.half(peer, buffer.turn)[:n])
        own = whole[group.rank()]
        if own.data_ptr() != shard.data_ptr():  # FSDP2's input is a part of its output.
            own.copy_(shard)
        buffer.gathered += whole.numel()
        buffer.finish()
        return None


class CopyEngineTransport(Transport):
    """Sends the gradients of one module through symmetric memory."""

    def __init__(self, buffer: DoubleBuffer, channel: int) -> None:
        """Send through ``buffer``, which modules over the same ranks share."""
        self._buffer = buffer
        self._channel = channel

    def allocate(self, numel: int, device: torch.device, group: dist.ProcessGroup) -> Tensor:
        """Return the next half, and make the current stream wait until it is free."""
        buffer, ranks = self._buffer, group.size()
        buffer.reserve(2 * ranks * _pitch(numel // ranks))
        buffer.wait()
        return buffer.half(group.rank(), buffer.turn)[: 2 * numel].view(torch.bfloat16)

    def reduce(
        self, outs: Sequence[Tensor], sent: Tensor, divisor: float, group: dist.ProcessGroup
    ) -> None:
        """Read this rank's row of every rank's half into the other half, and sum the rows."""
        buffer, ranks, own = self._buffer, group.size(), group.rank()
        n, turn = sent.numel() // ranks, buffer.turn
        buffer.barrier(self._channel)
        pitch = _pitch(n)
        received = buffer.half(own, 1 - turn).view(torch.bfloat16)
        rows = received[: ranks * pitch].view(ranks, pitch)[:, :n]
        for rank in (*buffer.peers(), own):
            row = buffer.half(rank, turn).view(torch.bfloat16)[own * n : (own + 1) * n]
            rows[rank].copy_(row)
        sum_rows(outs, rows, divisor)
        buffer.finish()


def _pitch(n: int) -> int:
    """Return the elements from one row to the next, so that each row is aligned to 16 bytes."""
    return -(-n // 8) * 8


# --- availability ---------------------------------------------------------------------------------


def unavailable(group: dist.ProcessGroup, device: torch.device) -> tuple[str, str]:
    """Return why symmetric memory is not available, and why not to use all-to-all, or "".

    All ranks of the group call this, and get the same result.
    """
    if device.type != "cuda":
        return f"symmetric memory needs CUDA, and the model is on {device.type}", ""
    backend = symmetric_memory().get_backend(device)
    wrong = "" if backend == "CUDA" else f"the backend of symmetric memory is {backend}, not CUDA"
    found = _gather((_host(), _uuid(device.index), wrong), group)
    hosts = {host for host, _, _ in found}
    if len(hosts) > 1:
        where = f"its {len(found)} ranks are on {len(hosts)} hosts"
        # A ring reduces within each host before it uses the network. All-to-all sends the
        # gradients of every rank over the network.
        ring = "" if len(hosts) == len(found) else f"{where}, which a ring crosses less often"
        return where, ring
    peers = [uuid for _, uuid, _ in found]
    if len(set(peers)) < len(peers):
        wrong = wrong or "two ranks share a GPU"
    # Ranks agree on each check before the next one, which all of them must run.
    for check in (
        lambda: wrong or _no_peer_access(device, peers),
        lambda: _allocation_error(group, device),
    ):
        for rank, reason in enumerate(_gather(check(), group)):
            if reason:
                return f"rank {rank} of the group: {reason}", ""
    return "", ""


def _gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _uuid(ordinal: int) -> str:
    properties: Any = torch.cuda.get_device_properties(ordinal)
    return str(properties.uuid)


def _no_peer_access(device: torch.device, uuids: list[str]) -> str:
    for ordinal in range(torch.cuda.device_count()):
        is_peer = ordinal != device.index and _uuid(ordinal) in uuids
        if is_peer and not torch.cuda.can_device_access_peer(device, ordinal):
            return f"cuda:{device.index} has no peer access to cuda:{ordinal}"
    return ""


def _allocation_error(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return torch's error for a small allocation. Containers may not share memory."""
    try:
        PeerMemory(group, device, 1 << 10, timedelta(minutes=1)).barrier(0)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""
