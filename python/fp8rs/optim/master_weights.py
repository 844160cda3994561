"""Any optimizer of torch's kind for FP8 weights: it steps fp32 masters."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8rs._torch import not_traced, own_part
from fp8rs.optim import casts, weights
from fp8rs.optim.masters import OWN, WithMasters, distributed_like


class MasterWeights(WithMasters):
    """An optimizer of your choice, run on float32 masters of the parameters.

        optimizer = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    A step hands each gradient to its master in float32, has the optimizer step the masters, and
    writes what the quantizers make of them into the weights. With one scale a tensor all weights
    are cast in one launch, and their maxima reduced over ranks in one collective a mesh (current
    scaling); delayed scaling casts with the scales that it knows, as ``fp8rs.optim.AdamW`` does.

    FP8 weights and plain bfloat16 and float16 parameters have masters, from their first gradient
    on. These begin and follow others' writes as those of ``fp8rs.optim.AdamW`` do. Other parameters
    are stepped where they are. Masters of DTensors are DTensors on the same mesh with the same
    placements, so that an optimizer that wants whole matrices (Muon) finds them.

    To all others this is the one optimizer that there is: its groups have the model's parameters
    and the chosen optimizer's options, which schedulers change. Its state is the chosen
    optimizer's, and has each master under "master". A state of the chosen optimizer without masters
    is taken too.

    Args:
        params: parameters or groups of them.
        optimizer_class: a subclass of ``torch.optim.Optimizer`` that finds its parameters in its
            groups at each step, as torch's do.
        options: of that class.

    Raises:
        TypeError: ``optimizer_class`` is no such class, or evaluates its closure within a step
            (``torch.optim.LBFGS``).
        Exception: what ``optimizer_class`` raises for the parameters or the options.
    """

    _inner: Optimizer | None = None

    def __init__(self, params: Any, optimizer_class: type[Optimizer], **options: Any) -> None:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
            raise TypeError(
                f"optimizer_class is {optimizer_class!r}; it must be a subclass of "
                "torch.optim.Optimizer, with its options beside it"
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
        self._let_go(inner)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the chosen optimizer's; the group may have any of its options."""
        inner = self._inner
        if inner is not None:
            inner.add_param_group(dict(param_group))
            param_group = dict(inner.param_groups[-1])
            self._let_go(inner)
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_inner": self._inner}

    @not_traced
    def _update(self) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        weights.prepare(params)
        params = [param for param in params if param.grad is not None]
        masters = {p: master for p in params if (master := self._master(p)) is not None}
        self._step({p: masters[p] if p in masters else alias(p) for p in params})
        low = [p for p in masters if weights.quantized(p) is None]
        if low:
            torch._foreach_copy_([own_part(p) for p in low], [own_part(masters[p]) for p in low])
        quantized = [p for p in masters if weights.quantized(p) is not None]
        if quantized:
            casts.write(quantized, [own_part(masters[p]) for p in quantized])
        self._wrote(params)

    def _step(self, given: dict[Tensor, Tensor]) -> None:
        """Have the chosen optimizer step ``given`` in the parameters' places, with their state."""
        inner = self._inner
        assert inner is not None
        for param, tensor in given.items():
            assert param.grad is not None
            tensor.grad = param.grad.to(tensor.dtype)
        for group, own in zip(self.param_groups, inner.param_groups, strict=True):
            own.update(group, params=[given[p] for p in group["params"] if p in given])
        kept = {}
        for param in given:  # optimizers begin where a state is empty
            state = self.state[param]
            kept[param] = {name: state.pop(name) for name in OWN if name in state}
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
            self._let_go(inner)

    @staticmethod
    def _let_go(inner: Optimizer) -> None:
        """Have the chosen optimizer hold no tensor between steps: parameters may be replaced."""
        inner.state.clear()
        for group in inner.param_groups:
            group["params"] = []


def alias(param: Any) -> Tensor:
    """A tensor over the memory of a plain parameter that is none of the model's."""
    return distributed_like(param, own_part(param).detach())
