"""Layers that are called with one input (q, k and v; w1 and w3) quantize it once.

A thread keeps what the last input was quantized to, for as long as that lives. It serves layers
with another weight while the input is what it was: the same tensor, version, memory and stream. A
weight that has been served is being called again, and what was written past torch meanwhile
(through ``.data``, by a collective) has moved no version: it quantizes anew. So does what follows
the beginning of a model's forward (:func:`forget_inputs`), and what is run under another dispatch
mode: one that records operators for a checkpoint has to see in the recomputation what it has seen
before.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch import Tensor

from fp8rs._torch import current_stream_id, dispatch_mode, memory_of
from fp8rs.tensor.spec import Planes


def token_of(x: Tensor, key: Any) -> tuple[Any, ...] | None:
    """Equals another one while the planes that were made of ``x`` for ``key`` may serve again.

    None for inference tensors: they have no version, and a write would go unnoticed.
    """
    if x.is_inference():
        return None
    mode = dispatch_mode()
    # References to one mode are one object, and to one that has died equal no other.
    running = None if mode is None else weakref.ref(mode)
    return id(x), x._version, memory_of(x), current_stream_id(x), running, key


class Kept:
    """The planes of one input.

    Attributes:
        token: of the input, when it was quantized.
        amax: where the amax of the input was noted, with delayed scaling.
        users: the ids of the weights that the planes have served.
        tensor: refers to the input, while whose id is no other's.
    """

    __slots__ = ("amax", "planes", "tensor", "token", "users")

    def __init__(
        self,
        tensor: weakref.ref[Tensor],
        token: tuple[Any, ...],
        planes: Planes,
        amax: Tensor | None,
        user: int,
    ) -> None:
        self.tensor, self.token, self.planes, self.amax = tensor, token, planes, amax
        self.users = {user}


class Inputs:
    """What a thread keeps.

    Attributes:
        kept: replaced whole, since a tensor may die in another thread at any moment.
        era: another object since each :meth:`forget`. A backward, which on a GPU runs in a thread
            of autograd's, asks for planes with that of its forward.
    """

    __slots__ = ("era", "kept")

    kept: Kept | None

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Keep nothing."""
        self.kept = None
        self.era = object()

    def keep(
        self,
        x: Tensor,
        token: tuple[Any, ...] | None,
        planes: Planes,
        amax: Tensor | None,
        user: int,
    ) -> None:
        """Have the planes of ``x`` for others than ``user``, a weight's id."""
        if token is not None:
            self.kept = Kept(weakref.ref(x, self._died), token, planes, amax, user)

    def of(self, token: tuple[Any, ...] | None, user: int) -> Kept | None:
        """What a sibling has left for this weight, of the tensor that the token was made of."""
        kept = self.kept
        if kept is not None and kept.token == token and user not in kept.users:
            return kept
        return None

    def _died(self, tensor: object) -> None:
        """A tensor has been freed: so are its planes, unless another's came since."""
        kept = self.kept
        if kept is not None and kept.tensor is tensor:
            self.kept = None


class _Threads(threading.local):
    """What each thread has."""

    def __init__(self) -> None:
        self.inputs = Inputs()


here = _Threads()


def forget_inputs() -> None:
    """Have layers of this thread quantize their next input, whatever others have left."""
    here.inputs.forget()
