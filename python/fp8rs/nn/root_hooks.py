"""Hooks on the forward of a converted model's root.

Torch numbers hooks, and compiled graphs guard on the numbers, so that a graph would serve one model
only. These hooks therefore have names, which are equal for all models.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, cast

from torch import nn

from fp8rs._torch import keep_from_ddp
from fp8rs.scaling.histories import BUFFERS

from .model_state import ModelState
from .quantized_weight import refuse_codes


class RootHook:
    """A method of a model's state as a hook of the root.

    If the root is copied or unpickled, the copied hook sets the root of the copied state.
    ``fully_shard`` needs the root before the first forward.
    """

    def __init__(self, state: ModelState, method: str, root: nn.Module) -> None:
        self.state = state
        self._method, self._root = method, weakref.ref(root)
        self._call = getattr(state, method)
        state.set_root(root)

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> Any:
        return RootHook, (self.state, self._method, self._root())


def attach(state: ModelState, root: nn.Module) -> None:
    """Make ``root`` the root of a model: register hooks on its forward and on its loads."""
    before, after = cast(Any, root._forward_pre_hooks), cast(Any, root._forward_hooks)
    name: Any = next(key for n in itertools.count() if (key := f"fp8rs {n}") not in before)
    before[name] = RootHook(state, "begin_forward", root)
    after[name] = RootHook(state, "end_forward", root)
    root._forward_hooks_always_called[name] = True
    move_first(state)
    # On the root too, so that nothing has been loaded when it raises.
    hooks: Any = root._load_state_dict_pre_hooks.values()
    if refuse_codes not in (known.hook for known in hooks):
        root.register_load_state_dict_pre_hook(refuse_codes)
    if state.delayed is not None:
        keep_from_ddp(root, [f"{n}.{b}".lstrip(".") for n in state.names for b in BUFFERS])


def detach(state: ModelState) -> None:
    """Remove the hooks on the root's forward."""
    root = state.root
    for name in _names(state):
        assert root is not None
        del root._forward_pre_hooks[name], root._forward_hooks[name]
        del root._forward_hooks_always_called[name]


def move_first(state: ModelState) -> None:
    """Move the root's pre-hook before hooks that were prepended later, such as FSDP's."""
    for name in _names(state):
        hooks: Any = state.root._forward_pre_hooks  # type: ignore[union-attr]
        hooks.move_to_end(name, last=False)


def _names(state: ModelState) -> list[Any]:
    """Return the names of a model's hooks."""
    hooks = {} if state.root is None else state.root._forward_pre_hooks
    return [n for n, h in hooks.items() if isinstance(h, RootHook) and h.state is state]
