"""One pass over all weights of a model a forward, and who uses its bytes.

The first gather of a forward quantizes every sharded weight of the model: one launch for the
amaxes, one all-reduce, one launch for the casts. Later gathers of that forward and of its backward
take the bytes that it left. (Of a large model each gather launches the casts of what it gathers, so
that the first need not wait for all.)

A gather outside a backward begins a new pass where the weight has none in this forward, or has
taken its bytes of this pass already: forwards that nobody announces (a method other than `forward`,
a part of the model, `unshard()`) have passes too. Weights that were written since the pass are
quantized again at the first gather of one of them, all that were written at once.

Whether to quantize is decided only by what is equal on all ranks: which forward this is, which
gather, whether a backward of this model runs, and which weights were written by operators that all
ranks ran. Tensor versions say nothing (they do not move for optimizer steps), and a rank that
judges a cache differently from its peers hangs them in a collective.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fp8rs._torch import gathered_with, in_backward, is_gathered_for_forward, spec
from fp8rs.nn.registry import ModelState
from fp8rs.quantize.spec import quant_spec
from fp8rs.scaling.reductions import reduce_packed_
from fp8rs.tensor.quantized import QuantizedTensor

from . import agreement, at_rest
from .checks import refuse_partial_reshard, refuse_recast
from .cuts import cut_rows
from .gathered import Gathered, MadeOn, Unmade, made_of
from .maker import Launch, Measured, Shard, maker_for
from .placement import Placement, place
from .weight import Local, Weight, local_of, mark_writes, wait_for_writes


class WeightPasses:
    """The sharded weights of one converted model. Attached to its state as ``state.fsdp``.

    Attributes:
        latest: what each weight was last quantized to.
    """

    def __init__(self, state: ModelState) -> None:
        self._state = weakref.ref(state)
        self.maker = maker_for(quant_spec(state.recipe, "weight"), state.delayed)
        self.latest: dict[Weight, Gathered] = {}
        self._number = 0
        self._forward = -1
        self._precomputed: tuple[list[Weight], Any, MadeOn] | None = None
        self._placed: dict[Weight, tuple[Any, Placement]] = {}
        self._checked = False
        self._units: dict[Weight, frozenset[Weight]] = {}
        self._together = False
        #: Scales known beforehand, that FP8 weights were written with, have been compared.
        self.shared = True

    @property
    def state(self) -> ModelState:
        state = self._state()
        assert state is not None
        return state

    # --- a gather --------------------------------------------------------------------------------

    def gather(self, local: Local) -> Gathered:
        """The bytes for a gather of a shard, quantized now or before."""
        weight = local._weight
        found = self.latest.get(weight)
        if found is None or not self._of_own_backward(found):
            if not self._checked:
                refuse_partial_reshard(self.state)
                refuse_recast(self.state)
                self.state.keep_first()
                self._checked = True
            if found is None or found.taken or self._is_new_forward(found):
                self._begin_pass(weight)
            elif weight.written:
                self._quantize(
                    [s for s in self._shards(self.latest[weight].placement) if s.weight.written]
                )
            found = self.latest[weight]
            found.taken = True
        if found.unmade is not None:
            found.unmade.make(self._unit(weight))
        found.made_on.used_here()
        if found.offloaded:
            # At the forward's gather, whose copy of the shard is at hand; the backward's takes
            # these bytes, though the master may have been written since.
            shard = found.shard
            if at_rest.is_at_rest(shard):
                shard.inputs = at_rest.inputs(self.maker.codec, local.shard, shard.placement)
            else:
                shard.inputs = self.maker.make_offloaded(local.shard, shard)
            found.made_on = MadeOn(shard.inputs[0].device, made_of(shard))
            found.offloaded = False
        return found

    def _of_own_backward(self, found: Gathered) -> bool:
        """Whether this gather is of a backward whose forward had these bytes.

        Another model's backward may call this one, or a part of it (a teacher, in a hook): that is
        a forward. Without writes since it may have the same bytes all the same.

        Raises:
            RuntimeError: an FP8 weight was written since: its bytes are no more.
        """
        clock = self.state.clock
        if clock.in_forward or not (found.taken and found.differentiable and in_backward()):
            return False
        weight = found.shard.weight
        if not weight.written:
            return True
        root = self.state.root
        if clock.recomputing or (root is not None and is_gathered_for_forward(root, weight.module)):
            return False
        if at_rest.is_at_rest(found.shard):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: the FP8 weight {weight.fqn}, which is gathered for a "
                "backward, was written since its forward. Write weights after the backward, or "
                "keep master weights"
            )
        return True

    def _is_new_forward(self, found: Gathered) -> bool:
        """Whether a forward has been announced since the weight's bytes were made."""
        return self.state.clock.in_forward and self.state.clock.forward != self._forward

    def _begin_pass(self, weight: Weight) -> None:
        """Quantize all weights that take part in the forward that begins.

        In an announced forward these are all of the model. Else those that are sharded as the one
        at hand: what the ranks of another mesh do meanwhile is not known.
        """
        parameter: Any = weight.parameter
        agreement.of(self.state).reach(self.state, parameter.device_mesh)
        clock = self.state.clock
        self._number += 1
        whole = clock.in_forward
        if whole:
            self._forward = clock.forward
        own = self._place(weight)
        shards = self._shards(None if whole else own)
        self._quantize(shards, whole=True)

    def forward_begins(self) -> None:
        """A forward of the model begins: what it gathers need not wait for more than was written.

        Else it would wait for what FSDP2 gathers first, its root's own parameters, and for what is
        computed with them.

        What is refused is refused here, before FSDP2 begins its forward: after an error within that
        the gathers of the next one do not wait for what has been written in between.
        """
        mark_writes(self.latest)
        if not self._checked:
            refuse_recast(self.state)

    def _quantize(self, shards: list[Shard], whole: bool = False) -> None:
        """Quantize shards; ``whole``: for a pass, where each has time until its own gather."""
        clock, grad = self.state.clock, torch.is_grad_enabled()
        with torch.inference_mode(False), torch.no_grad():
            weights = [s.weight for s in shards]
            wait_for_writes(weights)
            for weight in weights:
                before = self.latest.pop(weight, None)  # its memory serves the new bytes
                if before is not None:
                    before.unmade = None
            modules = [weight.module for weight in weights]
            training = clock.training if clock.in_forward else any(m.training for m in modules)
            resting = [s for s in shards if at_rest.is_at_rest(s)]
            masters = [s for s in shards if not at_rest.is_at_rest(s)] if resting else shards
            launch = self._make(masters, training, whole) if masters else None
            if resting:
                self._agree(resting)
                at_rest.lay_out(self.maker.codec, resting)
            made = [t for s in shards for t in made_of(s)]
            if launch is not None:
                made.extend(launch.reads)
            made_on = MadeOn(shards[0].device, made)
            differentiable = clock.differentiable if clock.in_forward else grad or training
            for s in shards:
                s.weight.written = False
                self.latest[s.weight] = Gathered(
                    self.maker.codec, s, made_on, self._number, False, differentiable, s.offloaded
                )
            if launch is not None:
                unmade = Unmade(launch, [self.latest[s.weight] for s in masters], made_on)
                if not whole:
                    unmade.make()

    def _make(self, shards: Sequence[Shard], training: bool, whole: bool) -> Launch | None:
        """Quantize master weights' shards: see `Maker.make`."""
        precomputed = self._take_precomputed([s.weight for s in shards]) if whole else None
        measured = None if precomputed is not None else self._measure(shards)
        return self.maker.make(
            shards,
            measured,
            precomputed,
            training,
            lambda values: self._reduce(shards, Measured(values, [1] * len(shards))),
        )

    def _unit(self, weight: Weight) -> frozenset[Weight] | None:
        """The weights that FSDP2 gathers together with this one; None if that is not known."""
        known = self._units.get(weight)
        if known is None:
            root = self.state.root
            modules = [] if root is None else gathered_with(root, weight.module)
            if not modules:
                return None  # what gathers it is above the converted root
            own = {w for w in self._weights() if any(w.module is m for m in modules)}
            known = self._units[weight] = frozenset({weight, *own})
        return known

    def applied(self) -> None:
        """Parameters have been moved or cast: look at them before the next gather."""
        self._checked = False

    def replaced(self, module: nn.Module, name: str) -> None:
        """Another tensor is put in the place of a parameter: free what was kept of the one before.

        Not what is on its way: a backward still has the bytes that its forward had.
        """
        for known in (self.latest, self._placed):
            for weight in [w for w in known if w._module() is module and w.name == name]:
                del known[weight]
        self._units.clear()  # others' have it too

    # --- FP8 weights -----------------------------------------------------------------------------

    @contextmanager
    def together(self) -> Iterator[None]:
        """All ranks run what is in here: whole FP8 weights that it writes have agreed scales."""
        before, self._together = self._together, True
        try:
            yield
        finally:
            self._together = before

    def write(self, weight: Weight, tensor: QuantizedTensor, values: Tensor) -> bool:
        """Quantize ``values`` into a whole shard with all ranks; False if these may not do so."""
        if not self._is_whole(weight, tensor):
            return False
        self.write_all([weight], [values])
        return True

    def take(self, weight: Weight, tensor: QuantizedTensor, src: QuantizedTensor) -> bool:
        """Take over another shard's codes and scales; False if all ranks may not be doing so.

        Whether they can be taken over is decided by what is equal on all ranks, and not by how
        much of this rank's shard is padding.
        """
        if src._store.has != tensor._store.has or not self._is_whole(weight, tensor):
            return False
        with torch.inference_mode(False), torch.no_grad():
            at_rest.put(tensor, at_rest.planes_of(src))
            weight.wrote()
        return True

    def _is_whole(self, weight: Weight, tensor: QuantizedTensor) -> bool:
        """Whether a tensor is a whole shard, and all ranks are about to write theirs."""
        local: Any = local_of(weight.parameter)
        if not self._together or not isinstance(local, QuantizedTensor):
            return False
        return local._store is tensor._store and local.shape == tensor.shape

    def write_all(self, weights: Sequence[Weight], values: Sequence[Tensor]) -> None:
        """Quantize values into whole sharded FP8 weights, on all ranks: one all-reduce."""
        shards = []
        for weight, value in zip(weights, values, strict=True):
            placement = self._place(weight)
            shard = Shard(weight, value, placement, on_mesh(value.device, placement))
            self.maker.check(shard)
            shards.append(shard)
        with torch.inference_mode(False), torch.no_grad():
            for shard, planes in zip(shards, self.maker.planes(shards, self._reduce), strict=True):
                at_rest.put(local_of(shard.weight.parameter), planes)
                shard.weight.wrote(agreed=True)

    def number(self, weight: Weight) -> int:
        """The number of the first element of this rank's shard: see `Placement.number`."""
        return self._place(weight).number

    def is_cut(self, weight: Weight) -> bool:
        """Whether some block of the weight has elements on several ranks."""
        p = self._place(weight)
        return bool(cut_rows(p.whole[0], p.padded, p.ranks, self.maker.codec.height))

    def reduce_(self, weights: Sequence[Weight], amaxes: Tensor) -> None:
        """Make shards' maxima (n,), fp32, those of the whole weights, in place."""
        placed = [self._place(weight) for weight in weights]
        # A group need not have a backend for where weights are offloaded to.
        values = amaxes.to(on_mesh(amaxes.device, placed[0]))
        reduce_packed_(values, ((range(i, i + 1), p.groups) for i, p in enumerate(placed)))
        if values is not amaxes:
            amaxes.copy_(values)

    def _resting(self) -> list[Shard]:
        """The shards of all FP8 weights."""
        return [s for s in self._shards() if at_rest.is_at_rest(s)]

    def stepped(self) -> None:
        """An optimizer has stepped: scales of FP8 weights are to be those of all ranks."""
        self.agree()
        self._share()

    def _share(self) -> None:
        """Have scales known beforehand be NaN on all ranks where they are so on one."""
        if self.shared:
            return
        self.shared = True
        shards = self._resting()
        scales = [at_rest.scale_of(s) for s in shards]
        values = torch.stack(scales).to(shards[0].device)
        reduced = self._reduce(shards, Measured(values, [1] * len(scales)))
        torch._foreach_copy_(scales, list(reduced.unbind()))

    def agree(self, weights: Sequence[Weight] | None = None) -> None:
        """Have FP8 weights' scales agree, where a rank may have written some by itself.

        Args:
            weights: which ones; None is all.
        """
        with torch.inference_mode(False), torch.no_grad():
            self._agree(self._resting() if weights is None else list(map(self._shard, weights)))

    def _agree(self, shards: Sequence[Shard]) -> None:
        if any(s.weight.unagreed for s in shards):
            at_rest.agree(self.maker.codec, shards, self._reduce)

    # --- maxima ----------------------------------------------------------------------------------

    def _measure(self, shards: Sequence[Shard]) -> Tensor | None:
        """The shards' maxima over all ranks, as far as the maker needs them."""
        measured = self.maker.measure(shards)
        return None if measured is None else self._reduce(shards, measured)

    def _reduce(self, shards: Sequence[Shard], measured: Measured) -> Tensor:
        """The maxima over the ranks of each weight: one all-reduce for each group of ranks."""
        starts = accumulate(measured.sizes, initial=0)
        return reduce_packed_(
            measured.values,
            (
                (range(start, start + size), self.maker.groups(shard))
                for shard, start, size in zip(shards, starts, measured.sizes, strict=False)
            ),
        )

    # --- shards ----------------------------------------------------------------------------------

    def _weights(self) -> list[Weight]:
        """Every weight that is sharded at the moment, once, in the order of the layers."""
        found: dict[Weight, None] = {}
        for module in self.state.layers():
            parameter: Any = None if module is None else module._parameters.get("weight")
            if isinstance(parameter, DTensor):
                local = local_of(parameter)
                if local is not None:
                    found[local._weight] = None
        return list(found)

    def _shards(self, like: Placement | None = None) -> list[Shard]:
        """The shards of all sharded weights, or of those that are sharded over the same ranks."""
        shards = []
        for weight in self._weights():
            shard = self._shard(weight)
            if like is None or shard.placement.shard_groups == like.shard_groups:
                shards.append(shard)
        return shards

    def _place(self, weight: Weight) -> Placement:
        parameter: Any = weight.parameter
        if local_of(parameter) is None:
            raise RuntimeError(
                f"{weight.fqn} is gathered, but its module holds no sharded parameter"
            )
        # Asking a mesh for its groups is slow; the specification stays the same object.
        known = self._placed.get(weight)
        if known is None or known[0] is not spec(parameter):
            known = self._placed[weight] = (spec(parameter), place(parameter))
            if (delayed := self.state.delayed) is not None:
                delayed.is_sharded_over(parameter.device_mesh)
                delayed.set_weight_groups(weight.index, known[1].groups)
        return known[1]

    def _shard(self, weight: Weight) -> Shard:
        placement = self._place(weight)
        # The module's own shard: the one at hand is a copy of it where FSDP2 offloads.
        data = local_of(weight.parameter).shard
        device = on_mesh(data.device, placement)
        shard = Shard(weight, data, placement, device)
        self.maker.check(shard)
        return shard

    # --- precomputed scales ----------------------------------------------------------------------

    def precompute(self) -> None:
        """Find what can be found of the next forward's quantization now."""
        shards = self._shards() if self.maker.precomputes else []
        shards = [s for s in shards if not at_rest.is_at_rest(s)]
        if not shards:
            return
        with torch.inference_mode(False), torch.no_grad():
            measured = self._measure(shards)
            assert measured is not None
            found = self.maker.precompute(measured)
            self._precomputed = (
                [s.weight for s in shards],
                found,
                MadeOn(found.device, [found]),
            )

    def _take_precomputed(self, weights: list[Weight]) -> Any:
        """What was precomputed for these weights, once."""
        if self._precomputed is None:
            return None
        known, found, made_on = self._precomputed
        self._precomputed = None
        if known != weights:
            return None
        made_on.used_here()
        return found


def on_mesh(device: torch.device, placement: Placement) -> torch.device:
    """The device of a shard's mesh: the shard's own, unless that is offloaded."""
    if device.type == placement.device_type:
        return device
    accelerator = torch.get_device_module(placement.device_type)
    return torch.device(placement.device_type, accelerator.current_device())


def of(state: ModelState) -> WeightPasses:
    """The passes of a model, made at the first use."""
    if state.fsdp is None:
        state.fsdp = WeightPasses(state)
    passes: WeightPasses = state.fsdp
    return passes


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Find the scales of all sharded FP8 weights now, for the next forward.

    Call it after the optimizer's step: it takes the amaxes and their one all-reduce out of the
    forward. The scales hold for one forward of each converted model in ``module``; weights
    must not be written between this call and that forward. Models without FP8 all-gather and
    recipes without dynamic scales are left as they are.

    Args:
        module: a module that contains converted layers, usually FSDP2's root.
    """
    states = {id(s): s for m in module.modules() if (s := getattr(m, "_fp8_state", None))}
    for state in states.values():
        of(state).precompute()
