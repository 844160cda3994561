"""Notifies models of the steps of optimizers that have their parameters."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fp8rs._torch import not_traced

#: In order of registration, which is equal on all ranks. Notifications run collectives.
_models: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_hook: Any = None


def subscribe(model: Any) -> None:
    """Call ``model.stepped()`` after each step of an optimizer with one of its parameters.

    ``model.owns(ids)`` returns whether the model has a parameter with one of these ids.
    """
    global _hook
    if _hook is None:
        # Compiled steps call the hook too. It runs on the host and is not traced.
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
