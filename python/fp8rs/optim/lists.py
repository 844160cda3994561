"""The lists of tensors of one step: which parameters go through which calls of ``adamw_``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fp8rs.optim import casts, weights
from fp8rs.optim.casts import kind
from fp8rs.tensor.quantized import QuantizedTensor
from fp8rs.tensor.spec import QuantSpec

_adamw = torch.ops.fp8rs.adamw_.default

#: The operator's lists: its arguments up to ``streams``.
_names = [argument.name for argument in _adamw._schema.arguments]
LISTS = _names[: _names.index("streams") + 1]

#: Those of each parameter that are laid out alike.
WRITTEN = ("params", "exp_avgs", "exp_avg_sqs", "masters")

#: What a group and a device have in common, and the operator takes by keyword: ``seed`` and
#: ``found_inf`` (of a step that is to be skipped) are looked at here too.
Options = dict[str, Any]


@dataclass(slots=True)
class Item:
    """A parameter in a step: local tensors.

    Attributes:
        param: as the optimizer has it.
        weight: its local part, plain or quantized.
        grad, exp_avg, exp_avg_sq, step, master: what goes with it.
        index: its number in the optimizer.
        options: of its group and device.
    """

    param: Tensor
    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    master: Tensor | None
    index: int
    options: Options

    @property
    def spec(self) -> QuantSpec:
        """How its codes are made."""
        return cast(QuantizedTensor, self.weight).spec


class Call:
    """One call of the operator.

    Args:
        options: of all its parameters.
        spec: of scales that the operator finds itself.
    """

    def __init__(self, options: Options, spec: QuantSpec | None = None) -> None:
        self.lists: dict[str, list[Any]] = {name: [] for name in LISTS}
        self._options: Options = {**options, "block": []}
        if spec is not None:
            self._options.update(
                block=list(spec.format.block),
                rounding=spec.scale_rounding,
                power_2_scale=spec.power_2_scale,
                amax_epsilon=spec.amax_epsilon,
            )
        #: What to copy after it, (to, from).
        self._back: list[tuple[Tensor, Tensor]] = []

    def add(
        self,
        item: Item,
        param: Tensor,
        master: Tensor | None = None,
        offset: int = 0,
        **scales: Tensor,
    ) -> None:
        """Append a tensor, which is laid out first if it is strided; ``scales`` by their list."""
        tensors = [param, item.exp_avg, item.exp_avg_sq, *([] if master is None else [master])]
        tensors, grad, back = laid_out(tensors, item.grad)
        self._back += back
        lists = self.lists
        for name, tensor in zip(WRITTEN, tensors, strict=False):
            lists[name].append(tensor)
        lists["grads"].append(grad)
        lists["steps"].append(item.step)
        lists["offsets"].append(offset)
        lists["streams"].append(item.index)
        for name, scale in scales.items():
            lists[name].append(scale)

    def add_codes(self, item: Item, master: Tensor | None, **scales: Tensor) -> None:
        """The same of the codes of an FP8 weight with one plane."""
        plane = weights.plane(cast(QuantizedTensor, item.weight))
        number = weights.number(item.param)
        self.add(item, plane.data, master, number, scales=plane.scale, **scales)

    def run(self) -> None:
        """Call the operator."""
        _adamw(**self.lists, **self._options)
        for to, values in self._back:
            to.copy_(values)


def laid_out(
    tensors: list[Tensor], grad: Tensor
) -> tuple[list[Tensor], Tensor, list[tuple[Tensor, Tensor]]]:
    """Tensors of one shape as contiguous ones, and what to copy back after they are written.

    A permuted tensor is permuted back, which costs nothing where all are alike; others are copied.
    """
    if all(t.is_contiguous() for t in tensors):
        return tensors, grad.contiguous(), []
    first = tensors[0]
    strides, sizes = first.stride(), tuple(first.shape)
    order = sorted(range(first.dim()), key=lambda d: (-strides[d], -sizes[d]))
    views = [t.permute(order) for t in tensors]
    copies = [v.contiguous() for v in views]
    back = [(v, c) for v, c in zip(views, copies, strict=True) if not v.is_contiguous()]
    return copies, grad.permute(order).contiguous(), back


class Step:
    """One step of some parameters of one device."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._calls: dict[Any, Call] = {}
        self._current: list[Item] = []
        self._known: list[Item] = []
        self._other: list[tuple[Item, Tensor]] = []
        for item in items:
            self._add(item)

    def _add(self, item: Item) -> None:
        weight, master = item.weight, item.master
        how = kind(item.param, weight)
        if how == "current" and master is not None and item.options["seed"] is not None:
            how = "other"  # masters are cast by what rounds to nearest
        if how == "plain":
            self._call(how, item, master).add(item, weight, master)
        elif how == "current":
            self._current.append(item)
        elif how == "known":
            self._known.append(item)
        elif how == "own":
            self._call(how, item, master, item.spec).add_codes(item, master)
        else:
            values = master
            if values is None:
                values = cast(QuantizedTensor, weight).dequantize(torch.float32)
            self._call("plain", item, None).add(item, values)
            self._other.append((item, values))

    def _call(
        self, how: str, item: Item, master: Tensor | None, spec: QuantSpec | None = None
    ) -> Call:
        key = how, id(item.options), master is None, spec
        if key not in self._calls:
            self._calls[key] = Call(item.options, spec)
        return self._calls[key]

    def run(self) -> None:
        """Update all, and write all codes."""
        amaxes = self._measure()
        slots = weights.known_scales([item.param for item in self._known])
        for item, (new, amax, _) in zip(self._known, slots, strict=True):
            call = self._call("known", item, item.master)
            call.add_codes(item, item.master, new_scales=new, amaxes=amax)
        for call in self._calls.values():
            call.run()
        weights.pass_on(slots)
        if self._other:
            self._write_others()
        if amaxes is not None:
            weights.reduce_amaxes_([item.param for item in self._current], amaxes)
            self._write_measured(amaxes)

    def _measure(self) -> Tensor | None:
        """Have the calls find the maxima that scales come from, fp32: one of each weight."""
        if not self._current:
            return None
        # Those with masters first; neighbours share a specification, and so one launch that makes
        # scales; in an order that all ranks have.
        specs: dict[QuantSpec, int] = {}
        for item in self._current:
            specs.setdefault(item.spec, len(specs))
        self._current.sort(key=lambda item: (item.master is None, specs[item.spec]))
        device = self._current[0].weight.device
        amaxes = torch.zeros(len(self._current), dtype=torch.float32, device=device)
        for item, amax in zip(self._current, amaxes.unbind(), strict=True):
            call = self._call("measure", item, item.master)
            if item.master is not None:
                call.add(item, item.master, amaxes=amax)
            else:
                call.add_codes(item, None, amaxes=amax)
        return amaxes

    def _write_others(self) -> None:
        before = [
            (item.options["found_inf"], t, t.clone())
            for item, _ in self._other
            if item.options["found_inf"] is not None
            for t in weights.stored(item.param)
        ]
        params = [item.param for item, _ in self._other]
        weights.write_all_(params, [values for _, values in self._other])
        for item, values in self._other:
            seed = item.options["seed"]
            if seed is not None:
                weights.round_(item.param, values, seed, item.index, item.step)
        # A skipped step has written what the codes or the masters say, rounded anew.
        for found_inf, t, old in before:
            t.copy_(torch.where(found_inf.view(()) != 0, old, t))

    def _write_measured(self, amaxes: Tensor) -> None:
        """Write the codes of the weights that were measured, with the scales of these maxima."""
        masters = [item.master for item in self._current if item.master is not None]
        cast_, others = self._current[: len(masters)], self._current[len(masters) :]
        if cast_:
            params, found_inf = [item.param for item in cast_], cast_[0].options["found_inf"]
            casts.with_maxima(params, masters, amaxes[: len(masters)], found_inf)
        if others:
            self._again(others, casts.scales_from(amaxes[len(masters) :], [i.spec for i in others]))

    def _again(self, items: Sequence[Item], scales: Tensor) -> None:
        """The same update of weights without masters, which now knows the scales to round to."""
        calls = {}
        for item, scale in zip(items, scales.unbind(), strict=True):
            call = calls[id(item.options)] = self._call("measure", item, item.master)
            call.lists["new_scales"].append(scale)
        for call in calls.values():
            call.lists["amaxes"] = []
            call.run()
