"""Runs any torch optimizer on fp32 masters of FP8 weights."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8rs._torch import not_traced, own_part
from fp8rs.optim import weights
from fp8rs.optim.masters import MASTER_STATE_KEYS, MasterWeightOptimizer
from fp8rs.optim.missing_masters import has_zero_lr
from fp8rs.optim.param import Param


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
        params = [Param(param) for group in self.param_groups for param in group["params"]]
        weights.prepare(params)
        params = [p for p in params if p.param.grad is not None]
        # torch takes a step with a learning rate of 0 to create the state of a fresh optimizer.
        kept = {p for p in params if p.weight is not None and "master" not in self.state[p.param]}
        kept = kept if has_zero_lr(self) else set()
        masters = {p: master for p in params if (master := self._master(p)) is not None}
        # Plain parameters are stepped through an alias, which receives the converted gradient.
        self._step(
            {p.param: masters[p] if p in masters else p.like(p.part.detach()) for p in params}
        )
        plain = [p for p in masters if p.weight is None]
        if plain:
            torch._foreach_copy_([p.part for p in plain], [own_part(masters[p]) for p in plain])
        fp8 = [p for p in masters if p.weight is not None and p not in kept]
        if fp8:
            weights.write_masters(fp8, [own_part(masters[p]) for p in fp8])
        self._wrote([p for p in params if p not in kept])

    def _step(self, given: dict[Tensor, Tensor]) -> None:
        """Step other tensors in place of the parameters, with the parameters' state.

        Args:
            given: the tensor to step, by parameter.
        """
        inner = self._inner
        assert inner is not None
        for param, tensor in given.items():
            assert param.grad is not None
            tensor.grad = param.grad.to(tensor.dtype)
        for group, own in zip(self.param_groups, inner.param_groups, strict=True):
            own.update(group, params=[given[p] for p in group["params"] if p in given])
        kept = {}
        for param in given:  # optimizers initialize a state only if it is empty
            state = self.state[param]
            kept[param] = {name: state.pop(name) for name in MASTER_STATE_KEYS if name in state}
        inner.state.update({given.get(key, key): value for key, value in self.state.items()})
        try:
            inner.step()
        finally:
            params = {tensor: param for param, tensor in given.items()}
            self.state.clear()
            self.state.update({params.get(key, key): value for key, value in inner.state.items()})
            for param, state in kept.items():
                self.state[param].update(state)
            for group, own in zip(self.param_groups, inner.param_groups, strict=True):
                group.update({name: own[name] for name in own if name != "params"})
            for tensor in given.values():
                tensor.grad = None
            self._release(inner)

    @staticmethod
    def _release(inner: Optimizer) -> None:
        """Drop the chosen optimizer's references to tensors, because parameters may be replaced."""
        inner.state.clear()
        for group in inner.param_groups:
            group["params"] = []
