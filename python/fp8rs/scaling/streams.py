"""Orders work on CUDA streams: scales are written on one stream and read on others."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fp8rs._torch import current_stream_id, in_fake_mode


class StreamDependency:
    """Tensors that one CUDA stream wrote and others read. A no-op for other devices."""

    def __init__(self, device: torch.device, tensors: Iterable[Tensor]) -> None:
        self._stream: torch.cuda.Stream | None = None
        # Under FakeTensorMode, nothing runs on a stream.
        if device.type == "cuda" and not in_fake_mode():
            # With a number, torch does not parse a device.
            self._stream = torch.cuda.current_stream(device.index)
            self._event = self._stream.record_event()
            self._tensors = _storages(tensors)
            #: The ids of streams that need not wait: the writing one, and those that have waited.
            self._streams = {self._stream.cuda_stream}

    def for_tensors(self, tensors: Iterable[Tensor]) -> StreamDependency:
        """Return the dependency of reads of some of the tensors. It keeps only these alive."""
        dependency = StreamDependency.__new__(StreamDependency)
        dependency._stream = self._stream
        if self._stream is not None:
            dependency._event = self._event
            dependency._tensors = _storages(tensors)
            dependency._streams = {self._stream.cuda_stream}
        return dependency

    def wait(self) -> None:
        """Make the current stream wait for the writes, and keep the memory alive for its reads."""
        if self._stream is None:
            return
        stream_id = current_stream_id(self._stream.device_index)
        if stream_id not in self._streams:
            self._streams.add(stream_id)
            current = torch.cuda.current_stream(self._stream.device_index)
            current.wait_event(self._event)
            for tensor in self._tensors:
                tensor.record_stream(current)


def _storages(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return one tensor for each storage. Views of one buffer share its storage."""
    tensor_of_address = {}
    for tensor in tensors:
        tensor_of_address[tensor.untyped_storage().data_ptr()] = tensor
    return list(tensor_of_address.values())


def note_current_stream(stream_ids: set[int]) -> None:
    """Add the id of the current CUDA stream to ``stream_ids``, if CUDA is in use."""
    if torch.cuda.is_initialized():
        stream_ids.add(current_stream_id(torch.cuda.current_device()))


def stream_of(stream_id: int) -> torch.cuda.Stream:
    """Return the CUDA stream of the current device with an id of `current_stream_id`."""
    if stream_id == 0:
        return torch.cuda.default_stream()
    return torch.cuda.ExternalStream(stream_id)
