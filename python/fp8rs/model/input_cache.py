"""Quantize an input once for all layers that are called with it (q, k and v; w1 and w3).

Each thread caches the planes of the last input while the input tensor is alive. Another layer
reuses them if it is called with the same tensor at the same version, memory, shape and stream.

Writes through ``.data`` and writes of collectives into a receive buffer do not change a tensor's
version. Therefore the cache serves each weight once, and is cleared when a model's forward begins.
The cache does not serve across dispatch modes either. A mode that records operators for selective
checkpointing must see the same operators in the recomputation.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fp8rs._torch import current_stream_id, dispatch_mode, memory_of
from fp8rs.quantize.planes import Planes


def input_token(x: Tensor, key: Any) -> tuple[Any, ...] | None:
    """Return a token that is equal for as long as planes of ``x`` are valid for ``key``.

    Inference tensors have no version, so that a write would go unnoticed. Their token is None.
    """
    if x.is_inference():
        return None
    mode = dispatch_mode()
    # Two weak references to one mode are one object. One to a dead mode equals no other.
    mode_reference = None if mode is None else weakref.ref(mode)
    stream = current_stream_id(x.device.index) if x.is_cuda else 0
    # Assigning to ``x.data`` may keep the address and change shape, strides and dtype.
    geometry = (x.shape, x.stride(), x.dtype)
    return id(x), x._version, memory_of(x), geometry, stream, mode_reference, key


@dataclass(eq=False, slots=True)
class CachedInput:
    """The planes of one input.

    Attributes:
        tensor: refers to the input. Its id is unique while it is alive.
        token: the input's `input_token` when it was quantized.
        planes: the rowwise and columnwise planes.
        amax: with delayed scaling, where the input's amax was recorded.
        users: the ids of the weights that the planes have served.
    """

    tensor: weakref.ref[Tensor]
    token: tuple[Any, ...]
    planes: Planes
    amax: Tensor | None
    users: set[int]


class QuantizedInputCache:
    """Holds the last quantized input of one thread.

    Attributes:
        entry: the cached input. It is always replaced as a whole, because a tensor may be freed by
            another thread at any time.
        generation: an object that `clear` replaces. A backward on a GPU runs in a thread of
            autograd's and looks up its input with the generation of its forward.
    """

    __slots__ = ("entry", "generation")

    entry: CachedInput | None

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop the cached input, so that layers quantize it again."""
        self.entry = None
        self.generation = object()

    def put(
        self,
        x: Tensor,
        token: tuple[Any, ...] | None,
        planes: Planes,
        amax: Tensor | None,
        user: int,
    ) -> None:
        """Cache the planes of ``x`` for weights other than ``user``, the id of a weight."""
        if token is not None:
            self.entry = CachedInput(weakref.ref(x, self._freed), token, planes, amax, {user})

    def get(self, token: tuple[Any, ...] | None, user: int) -> CachedInput | None:
        """Return the cached input if it has this token and did not serve this weight yet."""
        entry = self.entry
        if entry is not None and entry.token == token and user not in entry.users:
            return entry
        return None

    def _freed(self, tensor: object) -> None:
        """Drop the planes of a tensor that was freed, unless another tensor replaced it."""
        entry = self.entry
        if entry is not None and entry.tensor is tensor:
            self.entry = None


class _Thread(threading.local):
    """The state of each thread."""

    def __init__(self) -> None:
        self.input_cache = QuantizedInputCache()


this_thread = _Thread()
