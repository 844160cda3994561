"""Delayed scaling of one model: when its histories roll, and over which ranks amaxes are reduced.

The host has to know which layers have scales, but it does not wait for the device. A copy to the
host starts after a roll, and is read at the next roll.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8rs._torch import after_backward, constant_when_traced, in_backward, is_traced
from fp8rs.quantize.recipes import DelayedScaling
from fp8rs.quantize.spec import QuantSpec
from fp8rs.scaling.histories import Pack, WeightAmaxes, are_intact, keep_local, pack_buffers
from fp8rs.scaling.reductions import (
    MaximaRange,
    check_same_layers,
    index_tensor,
    mesh_groups,
    reduce_packed_,
)
from fp8rs.scaling.steps import StepTracker
from fp8rs.scaling.streams import StreamDependency

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: A model warns after this many forwards in training mode without an optimizer step.
WARN_AFTER = 100


@dataclass(eq=False, slots=True)
class ReadyFlags:
    """Which scales the layers of one pack have, on their way to the host.

    Attributes:
        layers: the indices of the layers.
        has_scale: bool (layers, 3), for weights, inputs and gradients.
        copied: the event after the copy to the host. None if the buffers are on the host.
    """

    layers: list[int]
    has_scale: Tensor
    copied: torch.cuda.Event | None


class DelayedScalingState:
    """The delayed-scaling state of one model.

    Histories roll at the first step after amaxes were recorded: the amaxes are added to them, and
    the next scales are computed. A step is one roll, however many micro-batches it has, and the
    steps of two optimizers are one roll. Steps within a backward roll at its end, or with reentrant
    checkpointing at the end of a checkpoint's backward.

    Args:
        recipe: the model's recipe.
        specs: how weights, inputs and gradients are quantized.
        tracker: counts the model's forwards.
        layers: returns the layers by index, with None for a layer that no longer exists.
        group: the process group to reduce amaxes over, or None.

    Attributes:
        mark: identifies the model in this process. Compilers treat the string as a constant.
        recorded: amaxes have been recorded since the last roll.
        rolls: number of rolls since a layer last lost its scales.
        copies: pending copies to the host of flags that say which scales exist.
        compiled: contains "model" if the model's forward is compiled, and "layer" if forwards of
            layers are. Compiled forwards do not notify this object.
    """

    def __init__(
        self,
        recipe: DelayedScaling,
        specs: Sequence[QuantSpec],
        tracker: StepTracker,
        layers: Callable[[], Sequence[nn.Module | None]],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.recipe = recipe
        self.layers: Callable[[], Sequence[Any]] = layers
        self.mark = f"model {next(_marks)}"
        _models[self.mark] = self
        self.recorded = False
        self.rolls = 0
        self.compiled: set[str] = set()
        self.copies: list[ReadyFlags] = []
        self.tracker = tracker
        self._specs = list(specs)
        self._group = group
        #: The number of forwards in training mode, to warn if no step follows.
        self._forwards = 0
        #: Whether an optimizer has stepped.
        self._saw_step = False
        #: The forward that had begun when an optimizer last stepped.
        self._stepped_forward_id = 0
        self._packs: list[Pack] = []
        #: The forward in which the packs were last compared with the buffers.
        self._checked_forward_id = -1
        #: The last writes to all buffers of each pack: when it was built, or when it rolled.
        self._pack_writes: list[StreamDependency] = []
        #: The meshes that layers are sharded over, with the layers' indices, in order of arrival.
        self._meshes: dict[DeviceMesh, dict[int, None]] = {}
        #: Whether the ranks of the group have compared their numbers of layers.
        self._compared = False

    # --- forwards and steps ----------------------------------------------------------------------

    def forward_begins(self) -> None:
        """Notify that a forward of the model begins in training mode."""
        # Pack before an autograd graph refers to a layer's buffers. Otherwise its backward would
        # write to the buffers from before.
        self.packs()
        self.recorded = True
        self._forwards += 1
        if self._forwards == WARN_AFTER and not self._saw_step:
            warnings.warn(
                f"a model with delayed scaling has begun {WARN_AFTER} forwards in training mode "
                "and has seen no optimizer step, so its scales are never updated. Steps of "
                "torch.optim.Optimizer and its subclasses are seen through a hook. After any other "
                "update of the parameters, call fp8rs.optimizer_stepped(model)",
                stacklevel=2,
            )

    def layer_begins(self, training: bool) -> None:
        """Notify that a layer is called in eager mode.

        If a part of the model is called by itself, no hook of the root has run.
        """
        if training and not self.tracker.in_forward and not in_backward():
            # As in `forward_begins`, but comparing the buffers of all layers in each call of a
            # layer would take too long.
            if not self._packs:
                self.packs()
            self.recorded = True

    def stepped(self) -> None:
        """Notify that an optimizer with a parameter of this model has stepped."""
        self._saw_step = True
        maybe_unseen = self._may_have_run_unseen_forward()
        self._stepped_forward_id = self.tracker.forward_id
        if not self.recorded and not maybe_unseen:
            return

        self.recorded = False
        roll = partial(self.roll, maybe_no_forward=maybe_unseen)
        if in_backward():
            # Layers before this one record the amaxes of their gradients later.
            after_backward(roll)
        else:
            roll()

    def _may_have_run_unseen_forward(self) -> bool:
        """Return whether a forward may have run since the last step without notifying this object.

        Compiled forwards do not notify it. Only the device knows whether they recorded amaxes.
        """
        forward_id = self.tracker.forward_id
        training = self.tracker.training
        if training and forward_id != self._stepped_forward_id:
            # The last forward of the model began after the last step, and recorded amaxes.
            return False
        if "model" in self.compiled:
            return True
        if "layer" not in self.compiled:
            return False
        # Layers are compiled but the model is not. A forward of the model in training mode would
        # have notified this object. Only if there was none may layers run by themselves.
        return not (training and forward_id > 0)

    # --- weights that FSDP2 gathers --------------------------------------------------------------

    def weight_scales(
        self,
        layers: Sequence[int],
        device: torch.device,
        measure: Callable[[list[int]], Tensor],
    ) -> Tensor:
        """Return the scales (n,) for the next cast of the weights of layers.

        A weight without a history has the scale of its current values. Their amax begins the
        history, also for a layer that never runs. Whether a weight has a history is known twice:

        - on the device, by its scale in the pack, which is 0 without a history;
        - on the host, by ``fp8_ready`` of its layer, which is True only if that scale is not 0, but
          becomes True some steps later (see `_start_copies`). The host does not wait for the
          device, so it measures the weights that may have no history, and the device selects.

        Args:
            layers: the indices of the layers.
            device: the device that the weights are quantized on.
            measure: returns the amaxes (m,) of the weights at these positions in ``layers``.
        """
        scales = self._pack(device).weight_scales(layers)
        modules = self.layers()
        maybe_new = []  # positions in `layers`
        for position, layer in enumerate(layers):
            if not modules[layer].fp8_ready[0]:
                maybe_new.append(position)
        if not maybe_new:
            return scales

        amaxes = measure(maybe_new)
        current_scales = self._specs[0].scale_from_amax(amaxes)
        positions = index_tensor(tuple(maybe_new), scales.device)
        history_scales = scales[positions]
        has_history = history_scales > 0
        # A weight with values that are not finite needs the scale of these values, on all ranks.
        keeps_history = has_history & amaxes.isfinite()
        scales[positions] = torch.where(keeps_history, history_scales, current_scales)

        if self.records_weights(layers):
            layers_maybe_new = [layers[position] for position in maybe_new]
            self.weight_amaxes(layers_maybe_new, device).raise_to(amaxes)
        return scales

    def weight_amaxes(self, layers: Sequence[int], device: torch.device) -> WeightAmaxes:
        """Return the amaxes of the weights of layers that were recorded since the last roll.

        Args:
            layers: the indices of the layers.
            device: the device that the weights are quantized on.
        """
        return self._pack(device).weight_amaxes(layers)

    def records_weights(self, layers: Sequence[int]) -> bool:
        """Return whether to record the amaxes of weights that are gathered now.

        Args:
            layers: the indices of the layers.
        """
        if self.tracker.in_forward:
            return self.tracker.training
        # A part of the model is called by itself.
        modules = self.layers()
        return any(modules[index].training for index in layers)

    # --- buffers ---------------------------------------------------------------------------------

    def packs(self) -> list[Pack]:
        """Return the packs of the buffers, one per device.

        The packs are built again if buffers were moved or replaced. Within a forward of the model,
        this is checked once.
        """
        forward_id = self.tracker.forward_id
        is_checked = self.tracker.in_forward and self._checked_forward_id == forward_id
        if self._packs and is_checked:
            return self._packs

        self._checked_forward_id = forward_id
        layers = self.layers()
        if not are_intact(self._packs, layers):
            self._packs = pack_buffers(layers)
            self._note_writes(self._packs)
        return self._packs

    def packs_on_current_stream(self) -> list[Pack]:
        """Return the packs for use on the current stream.

        The stream first waits for the operations that built or rolled them. FSDP2 gathers on its
        own streams, which wait for other streams only when the root's forward begins.
        """
        packs = self.packs()
        for writes in self._pack_writes:
            writes.wait()
        return packs

    def moved(self) -> None:
        """Notify that a layer's buffers were replaced."""
        self._packs = []
        self._pack_writes = []

    def _pack(self, device: torch.device) -> Pack:
        """Return the pack of a device, for use on the current stream.

        Raises:
            RuntimeError: no buffers are on the device.
        """
        for pack in self.packs_on_current_stream():
            if pack.scale.device == device:
                return pack
        raise RuntimeError(
            f"delayed scaling's buffers are on {[str(p.scale.device) for p in self._packs]}, but "
            f"weights are quantized on {device}: move the model (`model.to({str(device)!r})`)"
        )

    # --- the roll --------------------------------------------------------------------------------

    @torch.no_grad()
    def roll(self, maybe_no_forward: bool = False) -> None:
        """End a step: reduce the amaxes, add them to the histories, compute the next scales.

        Args:
            maybe_no_forward: the step may have come without a forward. If no amax was recorded,
                nothing changes then.
        """
        with torch.inference_mode(False):
            self._read_copies()
            packs = [pack for pack in self.packs() if not pack.scale.is_meta]
            if not packs:
                return

            amaxes = self._latest_amaxes(packs)  # (3, layers)
            self._reduce(amaxes.view(-1))
            any_recorded = amaxes.any() if maybe_no_forward else None  # stays on the device
            for pack in packs:
                has_all_layers = len(pack.indices) == amaxes.shape[1]
                amaxes_of_pack = amaxes if has_all_layers else amaxes[:, pack.indices]
                algo = self.recipe.amax_compute_algo
                pack.roll(amaxes_of_pack, self._specs, algo, any_recorded)
            self._start_copies(packs)
            self._note_writes(packs)

    def _latest_amaxes(self, packs: Sequence[Pack]) -> Tensor:
        """Return the amaxes (3, layers) of all layers since the last roll, contiguous.

        They are on the device of the first pack. Layers that no longer exist have 0.
        """
        layer_count = len(self.layers())
        first_pack = packs[0]
        if len(packs) == 1 and len(first_pack.indices) == layer_count:
            return first_pack.latest().contiguous()
        device = first_pack.amax.device
        amaxes = torch.zeros(3, layer_count, dtype=torch.float32, device=device)
        for pack in packs:
            amaxes[:, pack.indices] = pack.latest().to(device)
        return amaxes

    def _note_writes(self, packs: Sequence[Pack]) -> None:
        """Record that the current streams have written all buffers of packs."""
        self._pack_writes = []
        for pack in packs:
            buffers = (pack.scale, pack.amax, pack.history)
            self._pack_writes.append(StreamDependency(pack.scale.device, buffers))

    def scales_lost(self) -> None:
        """Notify that a layer lost its scales. Pending copies to the host are discarded."""
        self.rolls = 0
        self.copies = []

    def _start_copies(self, packs: Sequence[Pack]) -> None:
        """Start a copy to the host for each device with layers that are not known to have scales.

        Copies start only after rolls 1, 2, 3, 6, 12 and so on, because some layers may never get a
        scale.
        """
        self.rolls += 1
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # the host does not see replays of a graph
        if self.rolls > 3:
            multiple, remainder = divmod(self.rolls, 3)
            is_power_of_2 = multiple.bit_count() == 1
            if remainder or not is_power_of_2:
                return

        layers = self.layers()
        for pack in packs:
            if all(all(getattr(layers[index], "fp8_ready", ())) for index in pack.indices):
                continue
            has_scale = pack.scale[:, :, 0] > 0
            copied = None
            if has_scale.is_cuda:
                has_scale = has_scale.to("cpu", non_blocking=True)
                copied = torch.cuda.current_stream(pack.scale.device).record_event()
            self.copies.append(ReadyFlags(pack.indices, has_scale, copied))

    def _read_copies(self) -> None:
        """Set ``fp8_ready`` of layers from the copies that were started at the last roll."""
        copies = self.copies
        self.copies = []
        layers = self.layers()
        for flags in copies:
            if flags.copied is not None:
                flags.copied.synchronize()  # the copy started a step ago: this does not wait long
            if is_traced(flags.has_scale):
                # Fake scales have no values. In a real run, trained layers have scales by now.
                rows = [[True, True, True]] * len(flags.layers)
            else:
                rows = flags.has_scale.tolist()
            for index, row in zip(flags.layers, rows, strict=True):
                if layers[index] is not None:
                    layers[index].fp8_ready = tuple(row)

    # --- ranks -----------------------------------------------------------------------------------

    def add_mesh(self, mesh: DeviceMesh, index: int) -> None:
        """Record that FSDP2 or tensor parallelism shards operands of a layer over a mesh."""
        self._meshes.setdefault(mesh, {})[index] = None

    def _reduce(self, amax: Tensor) -> None:
        """Reduce the amaxes of all layers in place.

        Weights come first, then inputs, then gradients, each in the order of the layers.

        With a group, all amaxes are reduced over it, and the amax of a sharded weight also over its
        mesh. Without one, a sharded layer's amaxes are reduced over its mesh, whose ranks run its
        forwards together. Other amaxes are not reduced: ranks with uneven inputs, other pipeline
        stages or other experts might not take part.
        """
        if dist.is_available() and dist.is_initialized():
            reduce_packed_(amax, self._shared_amaxes(amax))

    def _shared_amaxes(self, amax: Tensor) -> Iterator[MaximaRange]:
        """Yield which of the amaxes are reduced over which groups."""
        size = amax.numel()
        layer_count = size // 3
        end = size
        group = self._group
        if group is not None:
            if not self._compared:
                check_same_layers(layer_count, group, amax.device)
                self._compared = True
            yield MaximaRange(range(size), [group])
            if group is dist.group.WORLD:  # it contains every rank that has a shard
                return
            end = layer_count  # the other operands are reduced over the group alone

        for mesh, layers in self._meshes.items():
            groups = [mesh_group for mesh_group in mesh_groups(mesh) if mesh_group is not group]
            for index in layers:
                # The weight's amax, and without a group the input's and the gradient's.
                yield MaximaRange(range(index, end, layer_count), groups)


_marks = itertools.count()
#: The models by their marks.
_models: weakref.WeakValueDictionary[str, DelayedScalingState] = weakref.WeakValueDictionary()


@constant_when_traced
def note_compiled(mark: str, part: str) -> bool:
    """Record that the forward of a "model" or of one of its layers ("layer") is being compiled.

    This function runs at trace time. Dynamo does not support setting attributes inside an
    activation checkpoint, so the model is looked up by its mark.
    """
    _models[mark].compiled.add(part)
    return True


@constant_when_traced
def keep_buffers_local(mark: str) -> bool:
    """Make the buffers of all layers of a model local tensors (see `keep_local`).

    This function runs at trace time. Otherwise the next eager call would replace the buffers that
    the first graph refers to.
    """
    for layer in _models[mark].layers():
        if layer is not None:
            keep_local(layer._buffers)
    return True
