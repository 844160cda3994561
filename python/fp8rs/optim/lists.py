"""The lists of tensors of one step: which parameters go through which calls of ``adamw_``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from fp8rs.optim import casts, weights
from fp8rs.optim.casts import codes, kind, scale
from fp8rs.tensor.quantized import QuantizedTensor
from fp8rs.tensor.spec import QuantSpec

_adamw = torch.ops.fp8rs.adamw_.default


@dataclass(slots=True)
class Item:
    """A parameter in a step: local tensors.

    Attributes:
        param: as the optimizer has it.
        weight: its local part, plain or quantized.
        grad, exp_avg, exp_avg_sq, step, master: what goes with it.
        index: its number in the optimizer.
    """

    param: Tensor
    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    master: Tensor | None
    index: int


@dataclass(slots=True)
class Options:
    """What a group and a device have in common."""

    lr: float
    lr_tensor: Tensor | None
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    maximize: bool
    seed: int | None
    grad_scale: Tensor | None
    found_inf: Tensor | None


@dataclass(slots=True)
class Lists:
    """The arguments of one call. ``back`` is what to copy after it, (to, from)."""

    grads: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    masters: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)
    new_scales: list[Tensor] = field(default_factory=list)
    amaxes: list[Tensor] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    back: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(
        self,
        item: Item,
        param: Tensor,
        master: Tensor | None = None,
        scale: Tensor | None = None,
        new_scale: Tensor | None = None,
        amax: Tensor | None = None,
        offset: int = 0,
    ) -> None:
        """Append a tensor; what is strided is laid out first."""
        tensors = [param, item.exp_avg, item.exp_avg_sq, *([] if master is None else [master])]
        tensors, grad, back = laid_out(tensors, item.grad)
        self.back += back
        self.params.append(tensors[0])
        self.exp_avgs.append(tensors[1])
        self.exp_avg_sqs.append(tensors[2])
        self.masters += tensors[3:]
        self.grads.append(grad)
        self.steps.append(item.step)
        self.scales += [] if scale is None else [scale]
        self.new_scales += [] if new_scale is None else [new_scale]
        self.amaxes += [] if amax is None else [amax]
        self.offsets.append(offset)
        self.streams.append(item.index)

    def run(self, options: Options, spec: QuantSpec | None = None) -> None:
        """Call the operator; ``spec`` is that of scales that it finds itself."""
        blocks: dict[str, Any] = {"block": []}
        if spec is not None:
            blocks = {
                "block": list(spec.format.block),
                "rounding": spec.scale_rounding,
                "power_2_scale": spec.power_2_scale,
                "amax_epsilon": spec.amax_epsilon,
            }
        _adamw(
            self.grads,
            self.exp_avgs,
            self.exp_avg_sqs,
            self.params,
            self.masters,
            self.steps,
            self.scales,
            self.new_scales,
            self.amaxes,
            self.offsets,
            self.streams,
            options.lr_tensor,
            options.grad_scale,
            options.found_inf,
            lr=options.lr,
            beta1=options.betas[0],
            beta2=options.betas[1],
            eps=options.eps,
            weight_decay=options.weight_decay,
            maximize=options.maximize,
            seed=options.seed,
            **blocks,
        )
        for to, values in self.back:
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
    """One step of some parameters of one device: :meth:`add` all, then :meth:`run`."""

    def __init__(self) -> None:
        self._calls: dict[Any, tuple[Options, QuantSpec | None, Lists]] = {}
        self._current: list[tuple[Options, Item, QuantizedTensor]] = []
        self._known: list[tuple[Options, Item, QuantizedTensor]] = []
        self._other: list[tuple[Options, Item, Tensor]] = []

    def add(self, options: Options, item: Item) -> None:
        """Take a parameter in; nothing is computed."""
        weight, master = item.weight, item.master
        how = kind(item.param, weight)
        if how == "current" and master is not None and options.seed is not None:
            how = "other"  # masters are cast by what rounds to nearest
        if how in ("current", "known"):
            assert isinstance(weight, QuantizedTensor)
            entries = self._current if how == "current" else self._known
            entries.append((options, item, weight))
            return
        key: tuple[Any, ...] = (how, id(options), master is None)
        if how == "plain":
            self._lists(key, options).add(item, weight, master)
        elif how == "other":
            assert isinstance(weight, QuantizedTensor)
            values = weight.dequantize(torch.float32) if master is None else master
            self._lists(("plain", id(options), True), options).add(item, values)
            self._other.append((options, item, values))
        else:
            assert isinstance(weight, QuantizedTensor)
            spec = weight.spec
            offset = weights.number(item.param)
            self._lists((*key, spec), options, spec).add(
                item, codes(weight), master, scale(weight), offset=offset
            )

    def _lists(self, key: Any, options: Options, spec: QuantSpec | None = None) -> Lists:
        if key not in self._calls:
            self._calls[key] = options, spec, Lists()
        return self._calls[key][2]

    def run(self) -> None:
        """Update all, and write all codes."""
        amaxes = self._measure()
        slots = weights.known_scales([item.param for _, item, _ in self._known])
        for (options, item, weight), (new, amax, _) in zip(self._known, slots, strict=True):
            offset = weights.number(item.param)
            self._lists(("known", id(options), item.master is None), options).add(
                item, codes(weight), item.master, scale(weight), new, amax, offset
            )
        for options, spec, lists in self._calls.values():
            lists.run(options, spec)
        weights.pass_on(slots)
        if self._other:
            self._write_others()
        if amaxes is not None:
            weights.reduce_amaxes_([item.param for _, item, _ in self._current], amaxes)
            self._write_measured(amaxes)

    def _measure(self) -> Tensor | None:
        """Have the calls find the maxima that scales come from, fp32: one of each weight."""
        if not self._current:
            return None
        # Neighbours share a specification, and so one launch that makes scales; in an order that
        # all ranks have.
        specs: dict[QuantSpec, int] = {}
        for _, _, weight in self._current:
            specs.setdefault(weight.spec, len(specs))
        self._current.sort(key=lambda entry: (specs[entry[2].spec], entry[1].master is None))
        device = self._current[0][2].device
        amaxes = torch.zeros(len(self._current), dtype=torch.float32, device=device)
        for (options, item, weight), amax in zip(self._current, amaxes.unbind(), strict=True):
            lists = self._lists(("measure", id(options), item.master is None), options)
            if item.master is not None:
                lists.add(item, item.master, amax=amax)
            else:
                offset = weights.number(item.param)
                lists.add(item, codes(weight), None, scale(weight), None, amax, offset)
        return amaxes

    def _write_others(self) -> None:
        before = [
            (options.found_inf, t, t.clone())
            for options, item, _ in self._other
            if options.found_inf is not None
            for t in weights.stored(item.param)
        ]
        weights.write_all_(
            [item.param for _, item, _ in self._other], [values for _, _, values in self._other]
        )
        for options, item, values in self._other:
            if options.seed is not None:
                weights.round_(item.param, values, options.seed, item.index, item.step)
        # A skipped step has written what the codes or the masters say, rounded anew.
        for found_inf, t, old in before:
            t.copy_(torch.where(found_inf.view(()) != 0, old, t))

    def _write_measured(self, amaxes: Tensor) -> None:
        """Write the codes of the weights that were measured, with the scales of these maxima."""
        with_masters = [i for i, entry in enumerate(self._current) if entry[1].master is not None]
        others = [i for i in range(len(self._current)) if i not in set(with_masters)]
        if with_masters:
            entries = [self._current[i] for i in with_masters]
            casts.with_maxima(
                [item.param for _, item, _ in entries],
                [cast(Tensor, item.master) for _, item, _ in entries],
                torch.stack([amaxes[i] for i in with_masters]) if others else amaxes,
                entries[0][0].found_inf,
            )
        if others:
            # The same update again, which now knows the scales to round to.
            specs = [self._current[i][2].spec for i in others]
            maxima = amaxes if not with_masters else torch.stack([amaxes[i] for i in others])
            for i, new in zip(others, casts.scales_from(maxima, specs).unbind(), strict=True):
                options = self._current[i][0]
                self._lists(("measure", id(options), True), options).new_scales.append(new)
            for (how, *_), (options, _, lists) in self._calls.items():
                if how == "measure" and lists.new_scales:
                    lists.amaxes = []
                    lists.run(options)
