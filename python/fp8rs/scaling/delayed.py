"""Delayed scaling of one model: when its histories roll, and over which ranks amaxes are reduced.

The host has to know which layers have scales, but it does not wait for the device. A copy to the
host starts after a roll, and is read at the next roll.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8rs._torch import after_backward, constant_when_traced, in_backward, is_traced
from fp8rs.quantize.recipes import DelayedScaling
from fp8rs.quantize.spec import QuantSpec
from fp8rs.scaling.histories import Pack, are_intact, keep_local, packed
from fp8rs.scaling.reductions import check_same, mesh_groups, reduce_packed_
from fp8rs.scaling.steps import StepTracker
from fp8rs.scaling.streams import StreamDependency

#: A model warns after this many forwards in training mode without an optimizer step.
WARN_AFTER = 100


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
        copies: pending copies to the host of flags that say which scales exist. Each has the
            layers' indices, the flags, and the event after the copy.
        compiled: contains "model" if the model's forward is compiled, and "layer" if forwards of
            layers are. Compiled forwards do not notify this object.
    """

    def __init__(
        self,
        recipe: DelayedScaling,
        specs: Sequence[QuantSpec],
        tracker: StepTracker,
        layers: Callable[[], Sequence[nn.Module | None]],
        group: Any,
    ) -> None:
        self.recipe = recipe
        self.layers: Callable[[], Sequence[Any]] = layers
        self.mark = f"model {next(_marks)}"
        _models[self.mark] = self
        self.recorded = False
        self.rolls = 0
        self.compiled: set[str] = set()
        self._specs, self.tracker, self._group = list(specs), tracker, group
        self._forwards = self._stepped_at = 0
        self._saw_step = False
        self._packs: list[Pack] = []
        #: The forward in which the packs were last compared with the buffers.
        self._checked_in = -1
        #: The last writes to all buffers of each pack: when it was built, or when it rolled.
        self._written: list[StreamDependency] = []
        self.copies: list[tuple[list[int], Tensor, torch.cuda.Event | None]] = []
        #: The meshes that layers are sharded over, with the layers' indices, in order of arrival.
        self._meshes: dict[Any, dict[int, None]] = {}
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

    def records(self, layers: Iterable[nn.Module]) -> bool:
        """Return whether to record the amaxes of weights that are gathered now.

        Args:
            layers: the layers of these weights.
        """
        tracker = self.tracker
        return tracker.training if tracker.in_forward else any(m.training for m in layers)

    def stepped(self) -> None:
        """Notify that an optimizer with a parameter of this model has stepped."""
        self._saw_step = True
        forward_id, training = self.tracker.forward_id, self.tracker.training
        # Compiled forwards do not notify this object. If only layers are compiled, a forward of the
        # model in training mode still does.
        silent = "model" in self.compiled or (
            "layer" in self.compiled and not (forward_id and training)
        )
        unannounced = silent and (self._stepped_at == forward_id or not training)
        self._stepped_at = forward_id
        if self.recorded or unannounced:
            self.recorded = False
            roll = partial(self.roll, unsure=unannounced)
            if in_backward():
                # Layers before this one record the amaxes of their gradients later.
                after_backward(roll)
            else:
                roll()

    # --- buffers ---------------------------------------------------------------------------------

    def packs(self) -> list[Pack]:
        """Return the packs of the buffers, one per device.

        The packs are built again if buffers were moved or replaced. Within a forward of the model,
        this is checked once.
        """
        in_forward, forward_id = self.tracker.in_forward, self.tracker.forward_id
        if not (self._packs and in_forward and self._checked_in == forward_id):
            self._checked_in = forward_id
            layers = self.layers()
            if not are_intact(self._packs, layers):
                self._packs = packed(layers)
                self._note_writes(self._packs)
        return self._packs

    def moved(self) -> None:
        """Notify that a layer's buffers were replaced."""
        self._packs = []

    def pack(self, device: torch.device) -> Pack:
        """Return the pack of a device, for use on the current stream.

        The stream first waits for the operations that built or rolled the pack, because FSDP2
        gathers on its own streams.

        Raises:
            RuntimeError: no buffers are on the device.
        """
        for pack in self.packs():
            if pack.scale.device == device:
                for writes in self._written:
                    writes.wait()
                return pack
        raise RuntimeError(
            f"delayed scaling's buffers are on {[str(p.scale.device) for p in self._packs]}, but "
            f"weights are quantized on {device}: move the model (`model.to({str(device)!r})`)"
        )

    # --- the roll --------------------------------------------------------------------------------

    @torch.no_grad()
    def roll(self, unsure: bool = False) -> None:
        """End a step: reduce the amaxes, add them to the histories, compute the next scales.

        Args:
            unsure: whether it is unknown if a forward has run. If no amax was recorded, nothing
                changes then.
        """
        with torch.inference_mode(False):
            self._read_copies()
            packs = [pack for pack in self.packs() if not pack.scale.is_meta]
            if not packs:
                return
            home, count = packs[0].amax.device, len(self.layers())
            if len(packs) == 1 and len(packs[0].indices) == count:
                values = packs[0].latest().contiguous()
            else:
                values = torch.zeros(3, count, dtype=torch.float32, device=home)
                for pack in packs:
                    values[:, pack.indices] = pack.latest().to(home)
            self._reduce(values.view(-1))
            seen = values.any() if unsure else None  # stays on the device
            for pack in packs:
                latest = values if len(pack.indices) == count else values[:, pack.indices]
                pack.roll(latest, self._specs, self.recipe.amax_compute_algo, seen)
            self._start_copies(packs)
            self._note_writes(packs)

    def _note_writes(self, packs: Sequence[Pack]) -> None:
        """Record that the current streams have written all buffers of packs."""
        self._written = [
            StreamDependency(pack.scale.device, (pack.scale, pack.amax, pack.history))
            for pack in packs
        ]

    def scales_lost(self) -> None:
        """Notify that a layer lost its scales. Pending copies to the host are discarded."""
        self.rolls, self.copies = 0, []

    def _start_copies(self, packs: Sequence[Pack]) -> None:
        """Start a copy to the host for each device with layers that are not known to have scales.

        Copies start only after rolls 1, 2, 3, 6, 12 and so on, because some layers may never get a
        scale.
        """
        self.rolls += 1
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # the host does not see replays of a graph
        rounds, rest = divmod(self.rolls, 3)
        if self.rolls > 3 and (rest or rounds.bit_count() != 1):
            return
        layers = self.layers()
        for pack in packs:
            if not all(all(getattr(layers[i], "fp8_ready", ())) for i in pack.indices):
                known, event = pack.scale[:, :, 0] > 0, None
                if known.is_cuda:
                    known = known.to("cpu", non_blocking=True)
                    event = torch.cuda.current_stream(pack.scale.device).record_event()
                self.copies.append((pack.indices, known, event))

    def _read_copies(self) -> None:
        """Set ``fp8_ready`` of layers from the copies that were started at the last roll."""
        copies, self.copies = self.copies, []
        layers = self.layers()
        for indices, known, event in copies:
            if event is not None:
                event.synchronize()  # the copy started a step ago, so this does not wait long
            # Fake scales have no values. In a real run, trained layers have scales by now.
            fake = is_traced(known)
            answers = [(True, True, True)] * len(indices) if fake else known.tolist()
            for index, ready in zip(indices, answers, strict=True):
                if layers[index] is not None:
                    layers[index].fp8_ready = tuple(ready)

    # --- ranks -----------------------------------------------------------------------------------

    def add_mesh(self, mesh: Any, index: int) -> None:
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
            reduce_packed_(amax, self._parts(amax))

    def _parts(self, amax: Tensor) -> Iterator[tuple[range, list[Any]]]:
        """Yield ranges of the amaxes, and the groups to reduce each over."""
        size, group = amax.numel(), self._group
        end = size
        if group is not None:
            if not self._compared:
                check_same(size // 3, group, amax.device)
                self._compared = True
            yield range(size), [group]
            if group is dist.group.WORLD:  # it contains every rank that has a shard
                return
            end = size // 3
        for mesh, layers in self._meshes.items():
            groups = [g for g in mesh_groups(mesh) if g is not group]
            for index in layers:
                yield range(index, end, size // 3), groups


_marks = itertools.count()
#: The models by their marks.
_models: weakref.WeakValueDictionary[str, DelayedScalingState] = weakref.WeakValueDictionary()


@constant_when_traced
def note_compiled(mark: str, what: str) -> bool:
    """Record that the forward of a "model" or of one of its layers ("layer") is being compiled.

    This function runs at trace time. Dynamo does not support setting attributes inside an
    activation checkpoint, so the model is looked up by its mark.
    """
    _models[mark].compiled.add(what)
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
