"""What the state of a converted model is told: forwards of its root, optimizer steps, backwards."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from torch import nn

    from fp8rs.scaling.state import ModelState


def in_backward() -> bool:
    """Whether this thread is inside a backward pass (a recomputation included)."""
    return bool(torch._C._current_graph_task_id() != -1)


class _OptimizerSteps:
    """Counts optimizer steps of the process, from the first use on."""

    def __init__(self) -> None:
        self.count = 0
        self._watching = False

    def watch(self) -> None:
        if not self._watching:
            self._watching = True
            register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.count += 1


optimizer_steps = _OptimizerSteps()


class RootHook:
    """A method of the state as a hook of the root.

    It is copied and pickled with the root, and then tells the state which that is: fully_shard
    wants to know before the first forward.
    """

    def __init__(self, state: ModelState, method: str, root: nn.Module) -> None:
        self._of = state, method, weakref.ref(root)
        self._call = getattr(state, method)
        state.set_root(root)

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> Any:
        state, method, root = self._of
        return RootHook, (state, method, root())
