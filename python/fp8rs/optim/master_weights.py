"""Runs any torch optimizer on fp32 masters of FP8 weights."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8rs._torch import not_traced, own_part
from fp8rs.optim import fp8_weights
from fp8rs.optim.masters import MASTER_STATE_KEYS, MasterWeightOptimizer
from fp8rs.optim.missing_masters import has_zero_lr
from fp8rs.optim.optim_param import OptimParam


class MasterWeights(MasterWeightOptimizer):
    """Runs an optimizer of your choice on float32 masters of the parameters.

        optimizer = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    A step passes each gradient to its master in float32, calls the optimizer, and quantizes the
    masters into the weights. Weights with one scale per tensor are cast in one launch. With current
    scaling, their maxima are reduced over ranks in one collective per mesh. With delayed scaling,
    they are cast with the next scales, as by ``fp8rs.optim.AdamW``.

    FP8 weights and plain bfloat16 and float16 parameters get masters at their first gradient. These
    start from the same values as the masters of ``fp8rs.optim.AdamW``, and read what other code
    writes to the parameters. All other parameters are stepped in place. Masters of DTensors are
    DTensors with the same mesh and placements, for optimizers that need whole matrices (Muon).

    The groups have the model's parameters and the chosen optimizer's options, for schedulers. The
    state is the chosen optimizer's, with each master under "master". States of the chosen optimizer
    without masters can be loaded.

    Args:
        params: parameters or groups of them.
        optimizer_class: a subclass of ``torch.optim.Optimizer`` that reads its parameters from its
            groups at each step, as torch's do.
        options: keyword arguments of that class.

    Raises:
        TypeError: ``optimizer_class`` is not such a class, or evaluates its closure within a step
            (``torch.optim.LBFGS``).
        Exception: ``optimizer_class`` refuses the parameters or the options.
    """

    _inner: Optimizer | None = None

    def __init__(self, params: Any, optimizer_class: type[Optimizer], **options: Any) -> None:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
            raise TypeError(
                f"optimizer_class is {optimizer_class!r}; it must be a subclass of "
                "torch.optim.Optimizer. Pass its options as keyword arguments"
            )
        closure = inspect.signature(optimizer_class.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise TypeError(
                f"optimizer_class is {optimizer_class.__name__}, which evaluates its closure "
                "within a step; codes are written after it. Use one whose step needs no closure"
            )
        inner = optimizer_class(params, **options)
        super().__init__([dict(group) for group in inner.param_groups], inner.defaults)
        self._inner = inner
        self._release(inner)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which may have any option of the chosen optimizer."""
        inner = self._inner
        if inner is not None:
            inner.add_param_group(dict(param_group))
            param_group = dict(inner.param_groups[-1])
            self._release(inner)
        try:
            super().add_param_group(param_group)
        except Exception:
            if inner is not None:
                inner.param_groups.pop()  # it cannot find that a parameter has a group already
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_inner": self._inner}

    @not_traced
    def _update(self) -> None:
        params: list[OptimParam] = []
        for group in self.param_groups:
            for param in group["params"]:
                params.append(OptimParam(param))
        fp8_weights.reshard(params)

        # torch takes a step with a learning rate of 0 to create the state of a fresh optimizer. It
        # leaves weights without a master as they are.
        is_zero_step = has_zero_lr(self)
        written: list[OptimParam] = []
        tensor_of: dict[Tensor, Tensor] = {}
        for optim_param in params:
            if optim_param.param.grad is None:
                continue
            has_master = "master" in self.state[optim_param.param]
            if optim_param.weight is None or has_master or not is_zero_step:
                written.append(optim_param)

            tensor = self._master(optim_param)
            if tensor is None:  # an alias, which receives the converted gradient
                tensor = optim_param.like(optim_param.local.detach())
            tensor_of[optim_param.param] = tensor
        self._step(tensor_of)

        # Write the masters to their parameters. Others were stepped in place.
        plain_tensors: list[Tensor] = []
        plain_masters: list[Tensor] = []
        fp8_params: list[OptimParam] = []
        fp8_masters: list[Tensor] = []
        for optim_param in written:
            if "master" not in self.state[optim_param.param]:
                continue
            local_master = own_part(tensor_of[optim_param.param])
            if optim_param.weight is None:
                plain_tensors.append(optim_param.local)
                plain_masters.append(local_master)
            else:
                fp8_params.append(optim_param)
                fp8_masters.append(local_master)
        if plain_tensors:
            torch._foreach_copy_(plain_tensors, plain_masters)
        if fp8_params:
            fp8_weights.write_masters(fp8_params, fp8_masters)
        self._mark_written(written)

    def _step(self, tensor_of: dict[Tensor, Tensor]) -> None:
        """Step other tensors in place of the parameters, with the parameters' state.

        Args:
            tensor_of: the tensor to step, by parameter.
        """
        inner = self._inner
        assert inner is not None
        for param, tensor in tensor_of.items():
            assert param.grad is not None
            tensor.grad = param.grad.to(tensor.dtype)
        for group, inner_group in zip(self.param_groups, inner.param_groups, strict=True):
            tensors = [tensor_of[param] for param in group["params"] if param in tensor_of]
            inner_group.update(group, params=tensors)

        # Take masters out of the state, because optimizers initialize a state only if it is empty.
        master_states: dict[Tensor, dict[str, Any]] = {}
        for param in tensor_of:
            state = self.state[param]
            master_states[param] = {}
            for name in MASTER_STATE_KEYS:
                if name in state:
                    master_states[param][name] = state.pop(name)
        for key, state in self.state.items():
            inner.state[tensor_of.get(key, key)] = state

        try:
            inner.step()
        finally:
            param_of = {tensor: param for param, tensor in tensor_of.items()}
            self.state.clear()
            for key, state in inner.state.items():
                self.state[param_of.get(key, key)] = state
            for param, master_state in master_states.items():
                self.state[param].update(master_state)
            for group, inner_group in zip(self.param_groups, inner.param_groups, strict=True):
                for name, value in inner_group.items():
                    if name != "params":
                        group[name] = value
            for tensor in tensor_of.values():
                tensor.grad = None
            self._release(inner)

    @staticmethod
    def _release(inner: Optimizer) -> None:
        """Drop the chosen optimizer's references to tensors, because parameters may be replaced."""
        inner.state.clear()
        for group in inner.param_groups:
            group["params"] = []
