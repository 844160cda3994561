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
            self._stream = torch.cuda.current_stream(device)
            self._event = self._stream.record_event()
            # Views of one buffer share its storage.
            self._tensors = list({t.untyped_storage().data_ptr(): t for t in tensors}.values())
            self._streams = {self._stream.cuda_stream}

    def wait(self) -> None:
        """Make the current stream wait for the writes, and keep the memory alive for its reads."""
        if self._stream is None:
            return
        stream_id = current_stream_id(self._stream.device.index)
        if stream_id not in self._streams:
            self._streams.add(stream_id)
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_event(self._event)
            for tensor in self._tensors:
                tensor.record_stream(current)
