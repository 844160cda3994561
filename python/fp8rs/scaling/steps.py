"""Who is told of optimizer steps: the models whose parameters the optimizer has."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fp8rs._torch import not_traced


class Trained(Protocol):
    """What can be stepped."""

    def owns(self, parameters: set[int]) -> bool:
        """Whether a parameter is among those of these ids."""

    def stepped(self) -> None:
        """An optimizer that has one of its parameters has stepped."""


#: In the order in which they came, which is that of all ranks: what they are told has collectives.
_watching: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_hook: Any = None


def watch(model: Trained) -> None:
    """Have a model told of the steps of its own optimizers, for as long as it lives."""
    global _hook
    if _hook is None:
        # A compiled step calls it: what it does on the host is nothing to be traced.
        _hook = register_optimizer_step_post_hook(not_traced(_after_step))
    if not any(known is model for known in _watching.values()):
        _watching[next(_numbers)] = model


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    models = list(_watching.values())
    if models:
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model in models:
            if model.owns(ids):
                model.stepped()
