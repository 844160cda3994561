"""Warnings about code that updates FP8 weights in small steps without high-precision masters."""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fp8rs._torch import not_traced
from fp8rs.optim.masters import MasterWeightOptimizer
from fp8rs.optim.optim_param import OptimParam

if TYPE_CHECKING:
    from fp8rs.model.state import ModelState

#: The optimizers that have taken their first step, with the states (`fp8rs.model.state`) of the
#: models whose FP8 weights they step without masters.
_stepped: weakref.WeakKeyDictionary[Optimizer, list[weakref.ref[ModelState]]] = (
    weakref.WeakKeyDictionary()
)


@functools.cache
def warn_without_masters() -> None:
    """Warn from now on when an optimizer without masters takes its first step on FP8 weights."""
    register_optimizer_step_pre_hook(not_traced(_before_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer not in _stepped and not has_zero_lr(optimizer):
        _stepped[optimizer] = _warn_at_first_step(optimizer)
    for reference in _stepped.get(optimizer, ()):
        state = reference()
        if state is not None:
            state.lost_writes.in_step = True  # until the hook after the step


def _warn_at_first_step(optimizer: Optimizer) -> list[weakref.ref[ModelState]]:
    """Warn if an optimizer keeps no masters of FP8 weights. Return the states of their models."""
    if isinstance(optimizer, MasterWeightOptimizer):
        return []
    handles = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            handle = OptimParam(param).handle
            if param.requires_grad and handle is not None:
                handles.append(handle)

    if handles:
        kind = type(optimizer).__name__
        warnings.warn(
            f"{kind} steps {len(handles)} FP8 weights, and keeps no masters. It loses the part of "
            "each step that is less than half the distance to the next code, which is 3 to 6% of a "
            "weight, and training stalls (two layers, 400 steps of AdamW at lr 1e-3: the loss went "
            "from 0.30 to 0.24, with masters to 0.02). Use fp8rs.optim.AdamW, or any optimizer on "
            f"fp32 masters by fp8rs.optim.MasterWeights(params, {kind}, ...), or convert with "
            "fp8_weights=False",
            stacklevel=6,
        )
    # A model has one state, so keep each once.
    states = dict.fromkeys(handle.state_if_any for handle in handles)
    return [weakref.ref(state) for state in states if state is not None]


def has_zero_lr(optimizer: Optimizer) -> bool:
    """Return whether all learning rates are 0. torch takes such a step to initialize a state."""
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if rate is None:
            return False
        # Comparing a tensor on the device would synchronize with it.
        is_on_device = isinstance(rate, Tensor) and rate.is_cuda
        if is_on_device or rate != 0:
            return False
    return True
