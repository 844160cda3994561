"""Who is told of optimizer steps: the models whose parameters the optimizer has."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class Trained(Protocol):
    """What can be stepped."""

    def owns(self, parameters: set[int]) -> bool:
        """Whether a parameter is among those of these ids."""

    def stepped(self) -> None:
        """An optimizer that has one of its parameters has stepped."""


_watching: weakref.WeakSet[Any] = weakref.WeakSet()
_hook: Any = None


def watch(model: Trained) -> None:
    """Have a model told of the steps of its own optimizers, for as long as it lives."""
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_after_step)
    _watching.add(model)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    models = list(_watching)
    if models:
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model in models:
            if model.owns(ids):
                model.stepped()
