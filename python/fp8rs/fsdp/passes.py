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
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8rs._torch import gathered_with, in_backward, is_gathered_for_forward
from fp8rs.nn.model_state import ModelState

from . import at_rest
from .checks import refuse_partial_reshard, refuse_recast
from .gathered import Pass, Ready, Shard
from .maker import Maker
from .param import ParamHandle, mark_writes, wait_for_writes
from .placement import Placement
from .scales import SharedScales


class WeightPasses:
    """Quantizes the sharded weights of one converted model for their gathers.

    Args:
        state: the model's.
        maker: quantizes them.
        scales: agrees on scales of FP8 weights.
        weights: gives the weights that are sharded at the moment, in an order of all ranks.
        meet: called with a mesh before its first pass: its ranks compare what they converted.

    Attributes:
        latest: what each weight was last quantized to.
    """

    def __init__(
        self,
        state: ModelState,
        maker: Maker,
        scales: SharedScales,
        weights: Callable[[], Sequence[ParamHandle]],
        meet: Callable[[Any], None],
    ) -> None:
        self._state = weakref.ref(state)
        self._maker, self._scales = maker, scales
        self._weights, self._meet = weights, meet
        self.latest: dict[ParamHandle, Shard] = {}
        #: Scales that were found for these weights ahead of a forward, for that one alone.
        self._precomputed: tuple[list[ParamHandle], Tensor, Ready] | None = None
        self._checked = False
        self._units: dict[ParamHandle, frozenset[ParamHandle]] = {}

    @property
    def state(self) -> ModelState:
        state = self._state()
        assert state is not None
        return state

    # --- a gather --------------------------------------------------------------------------------

    def gather(self, weight: ParamHandle, data: Tensor) -> Shard:
        """The bytes for a gather of a weight, quantized now or before.

        Args:
            weight: whose.
            data: its shard, or the copy that FSDP2 has made of an offloaded one.
        """
        shard = self.latest.get(weight)
        if shard is None or not self._is_of_own_backward(shard):
            self._check()
            if shard is None or shard.taken or self._is_of_earlier_forward(shard):
                self._begin_pass(weight)
            elif weight.written:
                like = [s for s in self._shards(shard.placement) if s.weight.written]
                self._quantize(like).make()
            shard = self.latest[weight]
            shard.taken = True
        if shard.left_to is not None:
            shard.left_to.make(self._unit(weight))
        assert shard.ready is not None
        shard.ready.used_here()
        if shard.offloaded:
            self._take_copy(shard, data)
        return shard

    def _take_copy(self, shard: Shard, data: Tensor) -> None:
        """Make the bytes of an offloaded shard, of the copy that FSDP2 has made of it.

        At the forward's gather: the backward's takes these bytes, though the master may have been
        written since.
        """
        if at_rest.is_at_rest(shard):
            shard.inputs = at_rest.inputs(shard.codec, data, shard.placement)
        else:
            shard.inputs = self._maker.make_offloaded(data, shard)
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
        if not weight.written:
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

    def _begin_pass(self, weight: ParamHandle) -> None:
        """Quantize all weights that take part in the forward that begins.

        In an announced forward these are all of the model. Else those that are sharded as the one
        at hand: what the ranks of another mesh do meanwhile is not known.
        """
        parameter: Any = weight.parameter
        self._meet(parameter.device_mesh)
        whole = self.state.clock.in_forward
        self._quantize(self._shards(None if whole else weight.placement), True)

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
                self._scales.agree_on(resting)
                at_rest.lay_out(self._maker.codec, resting)
                made = Pass(resting)
            if masters:
                known = self._take_precomputed([s.weight for s in masters]) if whole else None
                made = self._maker.make(masters, known, training)
        for shard in shards:
            if clock.in_forward:
                shard.forward, shard.differentiable = clock.forward, clock.differentiable
            else:
                shard.differentiable = grad or training
            shard.weight.written = False
            self.latest[shard.weight] = shard
        return made

    def _shards(self, like: Placement | None = None) -> list[Shard]:
        """The shards of all sharded weights, or of those that are sharded over the same ranks."""
        shards = map(self._maker.shard, self._weights())
        return [s for s in shards if like is None or s.placement.shard_groups == like.shard_groups]

    def _unit(self, weight: ParamHandle) -> frozenset[ParamHandle] | None:
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

    def replaced(self, weight: ParamHandle) -> None:
        """Another tensor is in a weight's place: free what was kept of the one before.

        Not what is on its way: a backward still has the bytes that its forward had.
        """
        self.latest.pop(weight, None)
        self._units.clear()  # others' have it too

    def forget(self, weight: ParamHandle) -> None:
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

    # --- ahead of a forward ----------------------------------------------------------------------

    def precompute(self) -> None:
        """Find what can be found of the next forward's quantization now."""
        shards = [s for s in self._shards() if not at_rest.is_at_rest(s)]
        if not shards:
            return
        with torch.inference_mode(False), torch.no_grad():
            found = self._maker.precompute(shards)
            if found is not None:
                ready = Ready(found.device, [found])
                self._precomputed = [s.weight for s in shards], found, ready

    def _take_precomputed(self, weights: list[ParamHandle]) -> Tensor | None:
        """What was found for these weights, in this order, once."""
        known, self._precomputed = self._precomputed, None
        if known is None or known[0] != weights:
            return None
        known[2].used_here()
        return known[1]
