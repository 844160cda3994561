"""The quantized activation that sibling layers share."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fp8rs.quantize.quantizers import Planes


@dataclass(slots=True, eq=False)
class _Activation:
    ref: weakref.ref[Tensor]
    version: int
    planes: Planes
    #: Index of the layer that made the planes.
    owner: int
    users: set[int]


class ActivationCache:
    """The last quantized activation, for siblings (q, k and v; w1 and w3) that share an input.

    An entry serves a *different* layer that is given the same tensor object at the same version.
    The layer that made it, or one it served, quantizes anew: it is being called again, and what
    was written through ``.data`` meanwhile has moved no version. One entry is kept, and it goes
    when its tensor does.
    """

    def __init__(self) -> None:
        # One object, so that threads (nn.DataParallel's) never see half of two entries.
        self._entry: _Activation | None = None

    def clear(self) -> None:
        """Forget the entry."""
        self._entry = None

    def find(self, x: Tensor, user: int) -> _Activation | None:
        """The entry of ``x`` if ``user`` may have it."""
        entry = self._entry
        if entry is None or entry.ref() is not x:
            return None
        if x._version != entry.version or user in entry.users:
            return None
        entry.users.add(user)
        return entry

    def put(self, x: Tensor, user: int, planes: Planes) -> None:
        """Remember the planes of ``x``, made by ``user``."""
        if x.is_inference():  # such tensors have no version: a write would go unnoticed
            self._entry = None
            return
        ref = weakref.ref(x, self._dropped)
        self._entry = _Activation(ref, x._version, planes, user, {user})

    def _dropped(self, ref: weakref.ref[Tensor]) -> None:
        if self._entry is not None and self._entry.ref is ref:
            self._entry = None

    def __deepcopy__(self, memo: Any) -> ActivationCache:
        return ActivationCache()

    def __reduce__(self) -> Any:
        return (ActivationCache, ())
