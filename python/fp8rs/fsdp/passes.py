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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fp8rs._torch import gathered_with, in_backward, is_gathered_for_forward
from fp8rs.nn.registry import ModelState
from fp8rs.quantize.spec import quant_spec
from fp8rs.scaling.reductions import reduce_packed_
from fp8rs.tensor.quantized import QuantizedTensor

from . import at_rest
from .checks import refuse_partial_reshard, refuse_recast
from .cuts import cut_rows
from .gathered import Pass, Ready, Shard
from .maker import maker_for
from .placement import Placement
from .weight import Local, Weight, local_of, mark_writes, wait_for_writes


class WeightPasses:
    """Quantizes the sharded weights of one converted model for their gathers.

    Args:
        state: the model's.
        weights: gives the weights that are sharded at the moment, in an order of all ranks.
        reach: called with a mesh before its first pass: see `Agreement.reach`.

    Attributes:
        latest: what each weight was last quantized to.
    """

    def __init__(
        self,
        state: ModelState,
        weights: Callable[[], Sequence[Weight]],
        reach: Callable[[Any], None],
    ) -> None:
        self._state = weakref.ref(state)
        self._weights, self._reach = weights, reach
        self.maker = maker_for(quant_spec(state.recipe, "weight"), state.delayed)
        self.latest: dict[Weight, Shard] = {}
        self._precomputed = Precomputed()
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

    def gather(self, local: Local) -> Shard:
        """The bytes for a gather of a shard, quantized now or before."""
        weight = local._weight
        shard = self.latest.get(weight)
        if shard is None or not self._is_of_own_backward(shard):
            self._check()
            if shard is None or shard.taken or self._is_of_earlier_forward(shard):
                self._begin_pass(weight)
            elif weight.freshness.written:
                like = [s for s in self._shards(shard.placement) if s.weight.freshness.written]
                self._quantize(like).make()
            shard = self.latest[weight]
            shard.taken = True
        if shard.left_to is not None:
            shard.left_to.make(self._unit(weight))
        assert shard.ready is not None
        shard.ready.used_here()
        if shard.offloaded:
            self._take_copy(shard, local)
        return shard

    def _take_copy(self, shard: Shard, local: Local) -> None:
        """Make the bytes of an offloaded shard, of the copy that FSDP2 has made of it.

        At the forward's gather: the backward's takes these bytes, though the master may have been
        written since.
        """
        if at_rest.is_at_rest(shard):
            shard.inputs = at_rest.inputs(self.maker.codec, local.shard, shard.placement)
        else:
            shard.inputs = self.maker.make_offloaded(local.shard, shard)
        shard.ready = Ready(shard.inputs[0].device, shard.made)
        shard.offloaded = False

    def _is_of_own_backward(self, shard: Shard) -> bool:
        """Whether this gather is of a backward whose forward had these bytes.

        Another model's backward may call this one, or a part of it (a teacher, in a hook): that is
        a forward. Without writes since it may have the same bytes all the same.

        Raises:
            RuntimeError: an FP8 weight was written since: its bytes are no more.
        """
        clock, weight = self.state.clock, shard.weight
        if clock.in_forward or not (shard.taken and shard.differentiable and in_backward()):
            return False
        if not weight.freshness.written:
            return True
        root = self.state.root
        if clock.recomputing or (root is not None and is_gathered_for_forward(root, weight.module)):
            return False
        if at_rest.is_at_rest(shard):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: the FP8 weight {weight.fqn}, which is gathered for a "
                "backward, was written since its forward. Write weights after the backward, or "
                "keep master weights"
            )
        return True

    def _is_of_earlier_forward(self, shard: Shard) -> bool:
        """Whether a forward has been announced since the bytes were made."""
        clock = self.state.clock
        return clock.in_forward and shard.forward != clock.forward

    # --- a pass ----------------------------------------------------------------------------------

    def _begin_pass(self, weight: Weight) -> None:
        """Quantize all weights that take part in the forward that begins.

        In an announced forward these are all of the model. Else those that are sharded as the one
        at hand: what the ranks of another mesh do meanwhile is not known.
        """
        parameter: Any = weight.parameter
        self._reach(parameter.device_mesh)
        whole = self.state.clock.in_forward
        own = weight.placement
        self._quantize(self._shards(None if whole else own), True)

    def _quantize(self, shards: list[Shard], whole: bool = False) -> Pass:
        """Quantize shards, but for what is left to each one's gather.

        Args:
            shards: of the weights.
            whole: these are all, for which scales may have been precomputed.
        """
        clock, grad = self.state.clock, torch.is_grad_enabled()
        weights = [s.weight for s in shards]
        training = clock.training if clock.in_forward else any(w.module.training for w in weights)
        with torch.inference_mode(False), torch.no_grad():
            wait_for_writes(weights)
            for weight in weights:
                self.forget(weight)  # whose memory serves the new bytes
            resting = [s for s in shards if at_rest.is_at_rest(s)]
            masters = [s for s in shards if not at_rest.is_at_rest(s)]
            if resting:
                self._agree(resting)
                at_rest.lay_out(self.maker.codec, resting)
                made = Pass(resting)
            if masters:
                known = self._precomputed.take([s.weight for s in masters]) if whole else None
                made = self.maker.make(masters, known, training)
        for shard in shards:
            if clock.in_forward:
                shard.forward, shard.differentiable = clock.forward, clock.differentiable
            else:
                shard.differentiable = grad or training
            shard.weight.freshness.quantized()
            self.latest[shard.weight] = shard
        return made

    def _shards(self, like: Placement | None = None) -> list[Shard]:
        """The shards of all sharded weights, or of those that are sharded over the same ranks."""
        shards = map(self._shard, self._weights())
        return [s for s in shards if like is None or s.placement.shard_groups == like.shard_groups]

    def _shard(self, weight: Weight, values: Tensor | None = None) -> Shard:
        """A weight's shard as it is, or is to be."""
        placement = weight.placement
        if values is None:
            # The module's own: the one at hand is a copy of it where FSDP2 offloads.
            values = local_of(weight.parameter).shard
        device = on_mesh(values.device, placement)
        shard = Shard(weight, values, placement, self.maker.codec, device)
        self.maker.check(shard)
        return shard

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

    # --- events ----------------------------------------------------------------------------------

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

    def moved(self) -> None:
        """Parameters have been moved or cast: look at them before the next gather."""
        self._checked = False

    def replaced(self, weight: Weight) -> None:
        """Another tensor is in a weight's place: free what was kept of the one before.

        Not what is on its way: a backward still has the bytes that its forward had.
        """
        self.latest.pop(weight, None)
        self._units.clear()  # others' have it too

    def forget(self, weight: Weight) -> None:
        """Have a weight's bytes made no more."""
        before = self.latest.pop(weight, None)
        if before is not None:
            before.left_to = None

    def _check(self) -> None:
        """Refuse what FSDP2 was asked for and cannot be, once."""
        if not self._checked:
            refuse_partial_reshard(self.state)
            refuse_recast(self.state)
            self.state.keep_first()
            self._checked = True

    def precompute(self) -> None:
        """Find what can be found of the next forward's quantization now."""
        shards = [s for s in self._shards() if not at_rest.is_at_rest(s)]
        if not shards:
            return
        with torch.inference_mode(False), torch.no_grad():
            found = self.maker.precompute(shards)
            if found is not None:
                self._precomputed.put([s.weight for s in shards], found)

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
        shards = list(map(self._shard, weights, values))
        with torch.inference_mode(False), torch.no_grad():
            for shard, planes in zip(shards, self.maker.planes(shards), strict=True):
                at_rest.put(local_of(shard.weight.parameter), planes)
                shard.weight.wrote(agreed=True)

    def is_cut(self, weight: Weight) -> bool:
        """Whether some block of the weight has elements on several ranks."""
        p = weight.placement
        return bool(cut_rows(p.whole[0], p.padded, p.ranks, self.maker.codec.height))

    def reduce_(self, weights: Sequence[Weight], amaxes: Tensor) -> None:
        """Make shards' maxima (n,), fp32, those of the whole weights, in place."""
        placed = [weight.placement for weight in weights]
        # A group need not have a backend for where weights are offloaded to.
        values = amaxes.to(on_mesh(amaxes.device, placed[0]))
        reduce_packed_(values, ((range(i, i + 1), p.groups) for i, p in enumerate(placed)))
        if values is not amaxes:
            amaxes.copy_(values)

    def _resting(self) -> list[Weight]:
        """The FP8 weights."""
        return [w for w in self._weights() if isinstance(local_of(w.parameter), QuantizedTensor)]

    def stepped(self) -> None:
        """An optimizer has stepped: scales of FP8 weights are to be those of all ranks."""
        self.agree()
        self._share()

    def _share(self) -> None:
        """Have scales known beforehand be NaN on all ranks where they are so on one."""
        if self.shared:
            return
        self.shared = True
        shards = list(map(self._shard, self._resting()))
        if not shards:
            return  # what was written are whole weights
        scales = [at_rest.scale_of(s) for s in shards]
        values = torch.stack(scales).to(shards[0].device)
        reduced = self.maker.reduce(shards, values)
        torch._foreach_copy_(scales, list(reduced.unbind()))

    def agree(self, weights: Sequence[Weight] | None = None) -> None:
        """Have FP8 weights' scales agree, where a rank may have written some by itself.

        Args:
            weights: which ones; None is all.
        """
        with torch.inference_mode(False), torch.no_grad():
            weights = self._resting() if weights is None else weights
            if any(w.unagreed for w in weights):
                self._agree(list(map(self._shard, weights)))

    def _agree(self, shards: Sequence[Shard]) -> None:
        if any(s.weight.unagreed for s in shards):
            at_rest.agree(self.maker.codec, shards, self.maker.reduce)


class Precomputed:
    """Scales that were found ahead of a forward, for that one alone."""

    def __init__(self) -> None:
        self._known: tuple[list[Weight], Tensor, Ready] | None = None

    def put(self, weights: list[Weight], found: Tensor) -> None:
        """Keep what was found for these weights, in this order."""
        self._known = weights, found, Ready(found.device, [found])

    def take(self, weights: list[Weight]) -> Tensor | None:
        """What was found for these weights, once."""
        known, self._known = self._known, None
        if known is None or known[0] != weights:
            return None
        known[2].used_here()
        return known[1]


def on_mesh(device: torch.device, placement: Placement) -> torch.device:
    """The device of a shard's mesh: the shard's own, unless that is offloaded."""
    if device.type == placement.device_type:
        return device
    accelerator = torch.get_device_module(placement.device_type)
    return torch.device(placement.device_type, accelerator.current_device())
