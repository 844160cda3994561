"""Delayed scaling of one model: when its histories roll, and over which ranks."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fp8rs._torch import constant_when_traced, in_backward
from fp8rs.quantize.recipes import DelayedScaling
from fp8rs.scaling.histories import Histories, keep_local
from fp8rs.scaling.reductions import check_same, mesh_groups, reduce_packed_
from fp8rs.scaling.step_tracker import StepTracker
from fp8rs.tensor.spec import QuantSpec

#: A model warns after this many forwards in training mode without an optimizer step.
WARN_AFTER = 100


class DelayedScalingState:
    """The delayed-scaling state of one model.

    Args:
        recipe: the model's recipe.
        specs: how weights, inputs and gradients are quantized.
        tracker: counts the model's forwards and steps.
        layers: returns the layers by index, with None for a layer that no longer exists.
        group: the process group to reduce amaxes over, or None.

    Attributes:
        histories: the amax histories of all layers.
        mark: identifies the model in this process. Compilers treat the string as a constant.
    """

    def __init__(
        self,
        recipe: DelayedScaling,
        specs: Sequence[QuantSpec],
        tracker: StepTracker,
        layers: Callable[[], Sequence[nn.Module | None]],
        group: Any,
    ) -> None:
        self.histories = Histories(recipe, specs, layers)
        self.mark = f"model {next(_marks)}"
        _models[self.mark] = self
        self.layers = layers
        self._tracker, self._group = tracker, group
        #: The meshes that layers are sharded over, with the layers' indices, in order of arrival.
        self._meshes: dict[Any, dict[int, None]] = {}
        self._compared = False
        #: The groups that each weight is sharded over, by the layer's index.
        self._weight_groups: dict[int, tuple[Any, ...]] = {}
        self._forwards = 0
        self._saw_step = False

    # --- forwards and steps ----------------------------------------------------------------------

    def forward_begins(self) -> None:
        """Notify that a forward of the model begins in training mode."""
        self._forwards += 1
        if self._forwards == WARN_AFTER and not self._saw_step:
            warnings.warn(
                f"a model with delayed scaling has begun {WARN_AFTER} forwards in training mode "
                "and has seen no optimizer step, so its scales are never updated. Steps of "
                "torch.optim.Optimizer and its subclasses are seen through a hook. After any other "
                "update of the parameters, call fp8rs.optimizer_stepped(model)",
                stacklevel=2,
            )
        self._record()

    def layer_begins(self, training: bool) -> None:
        """Notify that a layer is called in eager mode.

        If a part of the model is called by itself, no hook of the root has run.
        """
        if training and not self._tracker.in_forward and not in_backward():
            self._record()

    def _record(self) -> None:
        # Before a graph captures slots of a layer. Its backward would write to the old slots.
        self.histories.ensure_packed()
        self._tracker.recorded()

    def stepped(self) -> None:
        """Notify that an optimizer with a parameter of this model has stepped."""
        self._saw_step = True
        tracker = self._tracker
        tracker.stepped(silent=self._forwards_are_unannounced)
        if tracker.unannounced:
            tracker.recorded()
        if tracker.roll_is_due:
            tracker.rolled()
            self.histories.roll(self._reduce, unsure=tracker.unannounced)

    @property
    def _forwards_are_unannounced(self) -> bool:
        """Whether forwards may have begun unannounced, because they are compiled.

        This is so if the model was compiled together with its hooks. It is also so if only layers
        were compiled, unless the model's own forward announces itself in training mode.
        """
        tracker, compiled = self._tracker, _compiled.get(self.mark, ())
        return "model" in compiled or (
            "layer" in compiled and not (tracker.forward_id and tracker.training)
        )

    # --- ranks -----------------------------------------------------------------------------------

    def add_mesh(self, mesh: Any, index: int) -> None:
        """Note that FSDP2 or tensor parallelism shards operands of a layer over a mesh."""
        self._meshes.setdefault(mesh, {})[index] = None

    def set_weight_groups(self, index: int, groups: tuple[Any, ...]) -> None:
        """Set the groups that a layer's weight is sharded over, one for each mesh dimension.

        Its amax is also reduced over all of them.
        """
        self._weight_groups[index] = groups

    def _reduce(self, amax: Tensor) -> None:
        """Reduce the amaxes of all layers in place.

        With a group, all amaxes are reduced over it. Without one, a sharded layer's amaxes are
        reduced over its mesh, whose ranks run its forwards together. Other amaxes are not reduced:
        ranks with uneven inputs, other pipeline stages or other experts might not take part.
        """
        if dist.is_available() and dist.is_initialized():
            reduce_packed_(amax, self._parts(amax))

    def _parts(self, amax: Tensor) -> Iterator[tuple[range, list[Any]]]:
        """Yield ranges of the amaxes, and the groups to reduce each over."""
        size, group = amax.numel(), self._group
        if group is None:
            for mesh, layers in self._meshes.items():
                groups = mesh_groups(mesh)
                for index in layers:
                    yield range(index, size, size // 3), groups
            return
        if not self._compared:
            check_same(size // 3, group, amax.device)
            self._compared = True
        yield range(size), [group]
        if group is not dist.group.WORLD:  # it contains every rank that has a shard
            for index, groups_of_weight in sorted(self._weight_groups.items()):
                yield range(index, index + 1), [g for g in groups_of_weight if g is not group]

    # --- copies ----------------------------------------------------------------------------------

    @property
    def pending(self) -> tuple[bool, bool]:
        """Whether a roll is due, and whether amaxes were recorded since the last one."""
        return self._tracker.roll_is_due, self._tracker.has_recorded

    def restore(self, roll_is_due: bool, recorded: bool) -> None:
        """Continue where the copied model was, as `pending` described it."""
        if recorded:
            self._tracker.recorded()
        if roll_is_due:
            self._tracker.stepped()


_marks = itertools.count()
#: The models by their marks.
_models: weakref.WeakValueDictionary[str, DelayedScalingState] = weakref.WeakValueDictionary()
#: By mark: "model" or "layer", whose compiled forwards are not announced.
_compiled: dict[str, set[str]] = {}


@constant_when_traced
def note_compiled(mark: str, what: str) -> bool:
    """Note that the forward of a "model" or of one of its layers ("layer") is being compiled.

    It runs at trace time. Dynamo sets no attributes inside an activation checkpoint, so the fact is
    kept outside of the model.
    """
    _compiled.setdefault(mark, set()).add(what)
    return True


@constant_when_traced
def keep_buffers_local(mark: str) -> bool:
    """Make the buffers of all layers of a model local tensors (see `keep_local`).

    It runs at trace time, because the next eager call would replace buffers in the first graph.
    """
    for layer in _models[mark].layers():
        if layer is not None:
            keep_local(layer._buffers)
    return True
