"""One pass over all weights of a model a forward, and who uses its bytes.

The first gather of a root forward quantizes every sharded weight of the model: one launch
for the amaxes, one all-reduce, one launch for the casts. Later gathers of that forward and of
its backward take the bytes that it left. A gather outside a forward of the converted root (a
submodule called by itself, `unshard()`) quantizes its weight alone.

Whether to quantize is decided only by what is equal on all ranks: which forward this is, and
whether a backward runs. Tensor versions say nothing (they do not move for optimizer steps),
and a rank that judges a cache differently from its peers hangs them in a collective.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fp8rs.scaling.announcements import in_backward
from fp8rs.scaling.reductions import reduce_packed_
from fp8rs.scaling.state import ModelState

from .checks import refuse_partial_reshard
from .layouts import Layout, Measured, Shard, layout_for
from .placement import Placement, place
from .slot import local_master

if TYPE_CHECKING:
    from .master_weight import MasterWeight


class Ready:
    """When bytes and scales are ready, for streams other than the one that made them."""

    def __init__(self, device: torch.device, made: Sequence[Tensor]) -> None:
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.current_stream(device)
            self.event = torch.cuda.Event()
            self.event.record(self.stream)
            # Most are views of one buffer, which is kept as a whole.
            self.made = list({t.untyped_storage().data_ptr(): t for t in made}.values())
            self.users = {self.stream.cuda_stream}

    def used_here(self) -> None:
        """The current stream is about to read them: wait, and keep their memory for it."""
        if self.stream is None:
            return
        current = torch.cuda.current_stream(self.stream.device)
        if current.cuda_stream in self.users:
            return
        self.users.add(current.cuda_stream)
        current.wait_event(self.event)
        for tensor in self.made:
            tensor.record_stream(current)


@dataclass(eq=False, slots=True)
class Gathered:
    """The metadata of one gather: what the post hook needs beside the gathered tensors."""

    layout: Layout
    placement: Placement
    inputs: tuple[Tensor, ...]
    known: Any
    offloaded: bool
    ready: Ready


class WeightPasses:
    """The sharded weights of one converted model. Attached to its state as ``state.fsdp``."""

    def __init__(self, state: ModelState) -> None:
        self._state = weakref.ref(state)
        self.layout = layout_for(state)
        #: What each weight was last quantized to, by its index; a backward's gathers take it.
        self.latest: dict[int, Gathered] = {}
        self._forward = -1
        self._in_pass: set[int] = set()
        self._precomputed: tuple[list[int], Any, Ready] | None = None
        self._placed: dict[int, tuple[Any, Placement]] = {}
        self._checked = self._warned = False

    @property
    def state(self) -> ModelState:
        state = self._state()
        assert state is not None
        return state

    # --- a gather --------------------------------------------------------------------------------

    def gather(self, master: MasterWeight) -> Gathered:
        """The bytes for a gather of ``master``, quantized now or before."""
        state, index = self.state, master._slot.index
        if state.forward_id == 0 and not self._warned:
            self._warn_of_a_silent_root()
        if in_backward() and index in self.latest:
            found = self.latest[index]
        else:
            if not self._checked:
                refuse_partial_reshard(state)
                state.keep_first()
                self._checked = True
            if state.in_forward:
                if self._forward != state.forward_id:
                    self._forward = state.forward_id
                    self._in_pass = self._quantize(self._shards(), whole=True)
                if index not in self._in_pass:
                    # It was gathered already when the pass began, and has been resharded since.
                    self._in_pass |= self._quantize([self._shard(master)], whole=False)
            else:
                self._quantize([self._shard(master)], whole=False)
            found = self.latest[index]
        found.ready.used_here()
        if found.offloaded:
            # At the forward's gather, whose copy of the shard is at hand; the backward's takes
            # these bytes, though the master may have been written since.
            found.inputs = self.layout.quantize_offloaded(master, found.inputs, found.known)
            found.ready = Ready(found.inputs[0].device, made_of(found.inputs, found.known))
            found.offloaded = False
        return found

    def _warn_of_a_silent_root(self) -> None:
        """Warn, once, where training goes on without forwards of the converted root.

        A gather before its first forward means nothing by itself: `unshard()` may come early.
        """
        root = self.state.root
        no_forward = getattr(getattr(root, "forward", None), "__func__", None) is nn.Module.forward
        if no_forward or in_backward():
            self._warned = True
            kind = "module" if root is None else type(root).__name__.removeprefix("FSDP")
            warnings.warn(
                f"FP8 layers were converted as parts of a {kind} whose forward "
                f"{'does not exist' if no_forward else 'has not run'}, so that each weight is "
                "quantized and reduced over the ranks by itself: convert the module whose "
                "forward the training loop calls",
                stacklevel=2,
            )

    def _quantize(self, shards: list[Shard], whole: bool) -> set[int]:
        """Quantize shards; returns their weights' indices.

        ``whole``: they are all that the model has, for a new forward.
        """
        layout, state = self.layout, self.state
        with torch.inference_mode(False), torch.no_grad():
            indices = [s.slot.index for s in shards]
            for index in indices:
                self.latest.pop(index, None)  # its memory serves the new bytes
            precomputed = self._take_precomputed(indices) if whole else None
            measured = None if precomputed is not None else self._measure(shards)
            layout.quantize(
                shards,
                measured,
                precomputed,
                state.recording if state.in_forward else True,
                lambda values: self._reduce(shards, Measured(values, [1] * len(shards))),
            )
            made = [t for s in shards for t in made_of(s.inputs, s.known)]
            ready = Ready(shards[0].device, made)
            for s in shards:
                self.latest[s.slot.index] = Gathered(
                    layout, s.placement, s.inputs, s.known, s.offloaded, ready
                )
        return set(indices)

    def _measure(self, shards: Sequence[Shard]) -> Tensor | None:
        """The shards' maxima over all ranks, as far as the layout needs them."""
        measured = self.layout.measure(shards)
        return None if measured is None else self._reduce(shards, measured)

    def _reduce(self, shards: Sequence[Shard], measured: Measured) -> Tensor:
        """The maxima over the ranks of each weight: one all-reduce for each group of ranks."""
        starts = accumulate(measured.sizes, initial=0)
        return reduce_packed_(
            measured.values,
            (
                (range(start, start + size), self.layout.groups(shard))
                for shard, start, size in zip(shards, starts, measured.sizes, strict=False)
            ),
        )

    # --- shards ----------------------------------------------------------------------------------

    def _shards(self) -> list[Shard]:
        """Every weight that is sharded at the moment, in the order of the indices."""
        shards = []
        for reference in self.state.linears:
            module = reference()
            parameter: Any = None if module is None else module._parameters["weight"]
            if isinstance(parameter, DTensor):
                master = local_master(parameter)
                if master is not None:
                    shards.append(self._shard(master))
        return shards

    def _shard(self, master: MasterWeight) -> Shard:
        slot = master._slot
        parameter = slot.parameter
        if not isinstance(parameter, DTensor):
            raise RuntimeError(
                f"{slot.name} is gathered, but its module holds no sharded parameter"
            )
        # Asking a mesh for its groups is slow; the specification stays the same object.
        spec, index = parameter._spec, slot.index
        known = self._placed.get(index)
        if known is None or known[0] is not spec:
            known = self._placed[index] = (spec, place(parameter))
            if known[1].groups:
                self.state.set_weight_groups(index, known[1].groups)
        placement = known[1]
        # The module's own shard: the one at hand is a copy of it where FSDP2 offloads.
        data = local_master(parameter).high_precision
        device = data.device
        if device.type != placement.device_type:
            accelerator = torch.get_device_module(placement.device_type)
            device = torch.device(placement.device_type, accelerator.current_device())
        shard = Shard(slot, data, master.padded_numel, placement, device)
        self.layout.check(shard)
        return shard

    # --- precomputed scales ----------------------------------------------------------------------

    def precompute(self) -> None:
        """Find what can be found of the next forward's quantization now."""
        shards = self._shards() if self.layout.precomputes else []
        if not shards:
            return
        with torch.inference_mode(False), torch.no_grad():
            measured = self._measure(shards)
            assert measured is not None
            found = self.layout.precompute(measured)
            self._precomputed = (
                [s.slot.index for s in shards],
                found,
                Ready(found.device, [found]),
            )

    def _take_precomputed(self, indices: list[int]) -> Any:
        """What was precomputed for these weights, once."""
        if self._precomputed is None:
            return None
        known, found, ready = self._precomputed
        self._precomputed = None
        if known != indices:
            return None
        ready.used_here()
        return found


def made_of(inputs: Sequence[Tensor], known: Any) -> list[Tensor]:
    """The tensors that a gather reads."""
    return [*inputs, known] if isinstance(known, Tensor) else [*inputs]


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
