"""Notifies models of the steps of optimizers that have their parameters."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fp8rs._torch import not_traced


class Trained(Protocol):
    """A model that is notified of optimizer steps."""

    def owns(self, parameters: set[int]) -> bool:
        """Return whether the model has a parameter with one of these ids."""

    def stepped(self) -> None:
        """Handle a step of an optimizer that has parameters of the model."""


#: The subscribed models in the order of subscription. The order must be equal on all ranks,
#: because `stepped` runs collectives.
_models: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_hook: Any = None


def subscribe(model: Trained) -> None:
    """Notify a model, while it is alive, of the steps of its optimizers."""
    global _hook
    if _hook is None:
        # A compiled step also calls the hook, which must not be traced.
        _hook = register_optimizer_step_post_hook(not_traced(_after_step))
    if not any(known is model for known in _models.values()):
        _models[next(_numbers)] = model


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    models = list(_models.values())
    if models:
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model in models:
            if model.owns(ids):
                model.stepped()
