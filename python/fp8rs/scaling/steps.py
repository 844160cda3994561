"""Counts a model's forwards, and notifies models when their optimizers step."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from fp8rs._torch import in_backward, not_traced


class StepTracker:
    """Counts the forward passes of one model.

    A forward with gradients inside a backward is a recomputation (activation checkpointing of the
    whole model) and counts as the forward that it repeats. A forward without gradients inside a
    backward is a forward of its own, such as a teacher's in a backward hook of its student.

    The counts must be equal on all ranks, because they decide whether a rank joins a collective.
    State that may differ between ranks, such as tensor versions, does not belong here.

    Attributes:
        forward_id: number of forwards that have begun.
        in_forward: a forward is running.
        training: the last forward was in training mode, so its amaxes are recorded.
        grad: gradients were enabled when the last forward began.
    """

    def __init__(self) -> None:
        self.forward_id = 0
        self.in_forward = False
        self.training = False
        self.grad = False

    @property
    def in_backward(self) -> bool:
        """Whether this thread is inside a backward, except in forwards that backward hooks run."""
        return in_backward() and not self.in_forward

    def begin_forward(self, *, training: bool, grad: bool, in_backward: bool) -> bool:
        """Begin a forward of the model. Return False if it is a recomputation.

        Args:
            training: the model is in training mode.
            grad: gradients are enabled.
            in_backward: this thread is inside a backward, of any model.
        """
        if in_backward and grad and self.forward_id:
            return False
        self.forward_id += 1
        self.in_forward = True
        self.training = training
        self.grad = grad
        return True

    def end_forward(self) -> None:
        """End a forward that returned or raised."""
        self.in_forward = False


# --- optimizer steps ------------------------------------------------------------------------------


class StepSubscriber(Protocol):
    """A model that is notified of its optimizers' steps: the `fp8rs.model.state.ModelState`."""

    def owns(self, parameters: set[int]) -> bool:
        """Return whether the model has a parameter with one of these ids."""

    def stepped(self) -> None:
        """Notify that an optimizer with a parameter of the model has stepped."""


#: The models in order of registration, which is equal on all ranks, because notifications run
#: collectives.
_models: weakref.WeakValueDictionary[int, StepSubscriber] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_hook: RemovableHandle | None = None


def subscribe(model: StepSubscriber) -> None:
    """Call ``model.stepped()`` after each step of an optimizer with one of its parameters."""
    global _hook
    if _hook is None:
        # Compiled steps call the hook too. It runs on the host and is not traced.
        _hook = register_optimizer_step_post_hook(not_traced(_after_step))
    if not any(subscriber is model for subscriber in _models.values()):
        _models[next(_numbers)] = model


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    models = list(_models.values())
    if not models:
        return

    parameter_ids: set[int] = set()
    for group in optimizer.param_groups:
        parameter_ids.update(map(id, group["params"]))
    for model in models:
        if model.owns(parameter_ids):
            model.stepped()
