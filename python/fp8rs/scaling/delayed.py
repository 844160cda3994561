"""The delayed scaling of one model: when histories roll, and which ranks reduce amaxes."""

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

#: A model that saw no optimizer step warns after this number of forwards in training mode.
WARN_AFTER = 100


class DelayedScalingState:
    """The delayed-scaling state of one model.

    Args:
        recipe: the model's recipe.
        specs: how weights, inputs and gradients are quantized.
        tracker: counts the model's forwards and steps.
        layers: returns the layers by index, with None for a layer that was freed.
        group: the process group that reduces amaxes (``amax_reduction_group``), or None.

    Attributes:
        histories: the histories of the model's layers.
        mark: identifies the model in this process. It is a string, because compilers treat strings
            as constants.
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
        #: The indices of the layers that are sharded over each mesh, in the order of sharding.
        self._meshes: dict[Any, dict[int, None]] = {}
        self._compared = False
        #: The groups that each layer's weight is sharded over, by the layer's index.
        self._weight_groups: dict[int, tuple[Any, ...]] = {}
        self._forwards = 0
        self._saw_step = False

    # --- forwards and steps ----------------------------------------------------------------------

    def forward_begins(self) -> None:
        """Handle the beginning of a forward of the model in training mode."""
        self._forwards += 1
        if self._forwards == WARN_AFTER and not self._saw_step:
            warnings.warn(
                f"a model with delayed scaling ran {WARN_AFTER} forwards in training mode without "
                "an optimizer step, so its scales still come from the first data. Only steps of "
                "torch.optim.Optimizer and its subclasses are detected. After other updates, call "
                "fp8rs.optimizer_stepped(model)",
                stacklevel=2,
            )
        self._record()

    def layer_begins(self, training: bool) -> None:
        """Handle a layer's forward in eager mode.

        If a part of the model is called directly, the root's hooks did not run.
        """
        if training and not self._tracker.in_forward and not in_backward():
            self._record()

    def _record(self) -> None:
        # Pack before a layer passes its amaxes to autograd. Packing replaces the buffers, and the
        # backward would write to the old ones.
        self.histories.ensure_packed()
        self._tracker.recorded()

    def stepped(self) -> None:
        """Handle a step of an optimizer that has parameters of the model."""
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
        """Whether a compiled forward may have run without a call of the root's hooks.

        This is so if the root was compiled together with its hooks. It is also so if layers were
        compiled and the root's own forward does not run in training mode.
        """
        tracker, compiled = self._tracker, _compiled.get(self.mark, ())
        return "model" in compiled or (
            "layer" in compiled and not (tracker.forward_id and tracker.training)
        )

    # --- ranks -----------------------------------------------------------------------------------

    def add_mesh(self, mesh: Any, index: int) -> None:
        """Register a mesh over which FSDP2 or tensor parallelism shards a layer's operands."""
        self._meshes.setdefault(mesh, {})[index] = None

    def set_weight_groups(self, index: int, groups: tuple[Any, ...]) -> None:
        """Set the groups over which a layer's weight is sharded, one for each mesh dimension.

        The amax of the weight is reduced over all of them: FSDP's and tensor parallelism's.
        """
        self._weight_groups[index] = groups

    def _reduce(self, amax: Tensor) -> None:
        """Reduce the amaxes of all layers in place.

        Reduce over ``amax_reduction_group`` if given, otherwise over the mesh that shards the
        layer. Unsharded layers are not reduced: other ranks may not run them (uneven inputs,
        pipeline stages, experts), and a collective would hang.
        """
        if dist.is_available() and dist.is_initialized():
            reduce_packed_(amax, self._parts(amax))

    def _parts(self, amax: Tensor) -> Iterator[tuple[range, list[Any]]]:
        """Yield ranges of the amaxes, each with the groups that reduce it."""
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
        if group is not dist.group.WORLD:  # which contains the groups of all shards
            for index, groups_of_weight in sorted(self._weight_groups.items()):
                yield range(index, index + 1), [g for g in groups_of_weight if g is not group]

    # --- copies ----------------------------------------------------------------------------------

    @property
    def pending(self) -> tuple[bool, bool]:
        """For copies: whether a roll is due, and whether amaxes were recorded since the last."""
        return self._tracker.roll_is_due, self._tracker.has_recorded

    def restore(self, roll_is_due: bool, recorded: bool) -> None:
        """Set the state of a copy from ``pending`` of the original."""
        if recorded:
            self._tracker.recorded()
        if roll_is_due:
            self._tracker.stepped()


_marks = itertools.count()
#: All models by their marks.
_models: weakref.WeakValueDictionary[str, DelayedScalingState] = weakref.WeakValueDictionary()
#: Which forwards were compiled together with their hooks ("model", "layer"), by model mark.
_compiled: dict[str, set[str]] = {}


@constant_when_traced
def note_compiled(mark: str, what: str) -> bool:
    """Record that the forward of a "model" or of one of its "layer"s is being compiled.

    Runs at trace time. Inside an activation checkpoint, Dynamo does not set attributes of modules,
    so the record is global.
    """
    _compiled.setdefault(mark, set()).add(what)
    return True


@constant_when_traced
def keep_buffers_local(mark: str) -> bool:
    """Make the buffers of all layers of a model local (`keep_local`) before they are traced.

    Runs at trace time. Otherwise the first graph would use DTensor buffers that the next eager call
    replaces.
    """
    for layer in _models[mark].layers():
        if layer is not None:
            keep_local(layer._buffers)
    return True
