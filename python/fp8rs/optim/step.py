"""Groups the parameters of an AdamW step into calls of ``adamw_``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp8rs.optim import weights
from fp8rs.optim.param import Param, UpdateKind
from fp8rs.quantize.spec import QuantSpec

_adamw = torch.ops.fp8rs.adamw_.default

#: The operator's list arguments, up to ``streams``.
_names = [argument.name for argument in _adamw._schema.arguments]
LISTS = _names[: _names.index("streams") + 1]

#: The lists of tensors in the shape of their parameter that the operator writes.
WRITTEN = ("params", "exp_avgs", "exp_avg_sqs", "masters")

#: The operator's keyword arguments, shared by the parameters of a group on one device.
Options = dict[str, Any]


@dataclass(slots=True)
class ParamUpdate:
    """A parameter in a step, with local tensors.

    Attributes:
        p: the parameter.
        grad, exp_avg, exp_avg_sq, step, master: its gradient and state.
        new_master: whether it had no master before this step.
        index: its index in the optimizer, which selects its random numbers.
        options: the operator's keyword arguments for its group and device.
    """

    p: Param
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    master: Tensor | None
    new_master: bool
    index: int
    options: Options

    @property
    def kind(self) -> UpdateKind:
        """How the step writes the parameter."""
        kind = self.p.kind
        stochastic = self.master is not None and self.options["seed"] is not None
        # The cast of masters with one current scale rounds to nearest.
        return UpdateKind.SEPARATE if kind is UpdateKind.CURRENT_SCALE and stochastic else kind

    @property
    def keeps_codes(self) -> bool:
        """Whether only the moments change, and the codes and scales of an FP8 weight do not.

        torch takes a step with a learning rate of 0 to create the state of a fresh optimizer.
        """
        no_step = self.options["lr"] == 0 and self.options["lr_tensor"] is None
        return self.p.weight is not None and self.new_master and no_step


class AdamWCall:
    """One call of the operator.

    Args:
        options: the keyword arguments, shared by all parameters of the call.
        spec: how scales are computed, if the operator computes them.
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
                batched=spec.batched,
            )
        #: Pairs of tensors, (destination, source), to copy after the call.
        self._back: list[tuple[Tensor, Tensor]] = []

    def add(
        self,
        item: ParamUpdate,
        param: Tensor,
        master: Tensor | None = None,
        offset: int = 0,
        **scales: Tensor,
    ) -> None:
        """Append one parameter to the lists.

        Args:
            item: the gradient and state of the parameter.
            param: the values or codes to update. If needed, they are made contiguous.
            master: the master, in the shape of ``param``, or None.
            offset: the index of the first element in the whole parameter.
            scales: tensors to append to other lists, by the name of the list.
        """
        tensors = [param, item.exp_avg, item.exp_avg_sq, *([] if master is None else [master])]
        tensors, grad, back = make_contiguous(tensors, item.grad)
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

    def add_codes(self, item: ParamUpdate, master: Tensor | None, **scales: Tensor) -> None:
        """Append the codes of an FP8 weight with one plane.

        A shard may have some rows of each matrix of a batch. With stochastic rounding, its matrices
        are appended one by one, because the random numbers depend on the position of each matrix in
        the whole weight.
        """
        plane, offsets = item.p.plane, item.p.element_offsets
        if self._options["seed"] is None or len(offsets) == 1:
            self.add(item, plane.data, master, offsets[0], scales=plane.scale, **scales)
            return
        matrix = item.p.matrix
        parts = {name: getattr(item, name).view(matrix) for name in ("exp_avg", "exp_avg_sq")}
        parts["grad"] = item.grad.reshape(matrix)
        masters = None if master is None else master.view(matrix)
        for i, offset in enumerate(offsets):
            part = replace(item, **{name: t[i] for name, t in parts.items()})
            own = None if masters is None else masters[i]
            self.add(part, plane.matrix[i], own, offset, scales=plane.scale[i])

    def run(self) -> None:
        """Call the operator."""
        _adamw(**self.lists, **self._options)
        for to, values in self._back:
            to.copy_(values)


def make_contiguous(
    tensors: list[Tensor], grad: Tensor
) -> tuple[list[Tensor], Tensor, list[tuple[Tensor, Tensor]]]:
    """Return contiguous tensors, and the copies to make after they are written.

    If all tensors have the same permuted layout, permuting them back needs no copy. Otherwise
    tensors are copied.

    Args:
        tensors: tensors of one shape that are written.
        grad: a tensor of this shape that is only read.

    Returns:
        The contiguous ``tensors`` and ``grad``, and pairs (destination, source) to copy afterwards.
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
    """One step of all parameters on one device."""

    def __init__(self, items: Sequence[ParamUpdate]) -> None:
        self._calls: dict[Any, AdamWCall] = {}
        self._current: list[ParamUpdate] = []
        self._known: list[ParamUpdate] = []
        self._separate: list[tuple[ParamUpdate, Tensor]] = []
        for item in items:
            self._add(item)

    def _add(self, item: ParamUpdate) -> None:
        kind, master = item.kind, item.master
        if kind is UpdateKind.PLAIN:
            self._call(kind, item, master).add(item, item.p.part, master)
        elif kind is UpdateKind.SEPARATE or item.keeps_codes:
            values = item.p.codes.dequantize(torch.float32) if master is None else master
            self._call(UpdateKind.PLAIN, item, None).add(item, values)
            if not item.keeps_codes:
                self._separate.append((item, values))
        elif kind is UpdateKind.CURRENT_SCALE:
            self._current.append(item)
        elif kind is UpdateKind.KNOWN_SCALE:
            self._known.append(item)
        else:
            self._call(kind, item, master, item.p.codes.spec).add_codes(item, master)

    def _call(
        self,
        kind: UpdateKind,
        item: ParamUpdate,
        master: Tensor | None,
        spec: QuantSpec | None = None,
    ) -> AdamWCall:
        key = kind, id(item.options), master is None, spec
        if key not in self._calls:
            self._calls[key] = AdamWCall(item.options, spec)
        return self._calls[key]

    def run(self) -> None:
        """Update all parameters, and write all codes."""
        amaxes = self._measure()
        slots = weights.known_scales([item.p for item in self._known])
        for item, (new, amax, _) in zip(self._known, slots, strict=True):
            call = self._call(UpdateKind.KNOWN_SCALE, item, item.master)
            call.add_codes(item, item.master, new_scales=new, amaxes=amax)
        for call in self._calls.values():
            call.run()
        weights.update_remote_amaxes(slots)
        if self._separate:
            self._write_separate()
        if amaxes is not None:
            weights.reduce_amaxes_([item.p for item in self._current], amaxes)
            self._write_current(amaxes)

    def _measure(self) -> Tensor | None:
        """Append weights with one current scale to the calls, which compute their amaxes.

        Returns:
            The amaxes (n,), fp32, which the calls write. None without such weights.
        """
        if not self._current:
            return None
        # Put weights with masters first, and weights with one spec next to each other, so that one
        # launch computes their scales. The order is the same on all ranks.
        specs: dict[QuantSpec, int] = {}
        for item in self._current:
            specs.setdefault(item.p.codes.spec, len(specs))
        self._current.sort(key=lambda item: (item.master is None, specs[item.p.codes.spec]))
        device = self._current[0].p.part.device
        amaxes = torch.zeros(len(self._current), dtype=torch.float32, device=device)
        for item, amax in zip(self._current, amaxes.unbind(), strict=True):
            call = self._call(UpdateKind.CURRENT_SCALE, item, item.master)
            if item.master is not None:
                call.add(item, item.master, amaxes=amax)
            else:
                call.add_codes(item, None, amaxes=amax)
        return amaxes

    def _write_separate(self) -> None:
        before = [
            (item.options["found_inf"], t, t.clone())
            for item, _ in self._separate
            if item.options["found_inf"] is not None
            for t in weights.stored(item.p)
        ]
        params = [item.p for item, _ in self._separate]
        weights.write_values_(params, [values for _, values in self._separate])
        for item, values in self._separate:
            seed = item.options["seed"]
            if seed is not None:
                item.p.round_(values, seed, item.index, item.step)
        # A skipped step quantized the unchanged values again, which may change codes and scales.
        for found_inf, t, old in before:
            t.copy_(torch.where(found_inf.view(()) != 0, old, t))

    def _write_current(self, amaxes: Tensor) -> None:
        """Write the codes of weights with one current scale, with the scales of these amaxes."""
        masters = [item.master for item in self._current if item.master is not None]
        with_masters, others = self._current[: len(masters)], self._current[len(masters) :]
        if with_masters:
            found_inf = with_masters[0].options["found_inf"]
            params = [item.p for item in with_masters]
            weights.cast_with_amaxes(params, masters, amaxes[: len(masters)], found_inf)
        if others:
            specs = [item.p.codes.spec for item in others]
            self._repeat(others, weights.scales_from(amaxes[len(masters) :], specs))

    def _repeat(self, items: Sequence[ParamUpdate], scales: Tensor) -> None:
        """Run the update of weights without masters again, with their new scales.

        The first run computed only amaxes.
        """
        calls = {}
        for item, scale in zip(items, scales.unbind(), strict=True):
            call = self._call(UpdateKind.CURRENT_SCALE, item, item.master)
            calls[id(item.options)] = call
            call.lists["new_scales"].append(scale)
        for call in calls.values():
            call.lists["amaxes"] = []
            call.run()
