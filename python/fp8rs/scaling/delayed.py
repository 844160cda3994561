"""Delayed scaling of one model: when its histories roll, and which ranks roll together."""

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

#: Forwards in training mode after which a model that was never told of a step warns.
PATIENCE = 100


class Delayed:
    """What a model with delayed scaling has beside its layers.

    Args:
        recipe: the model's.
        specs: how weights, inputs and gradients are quantized.
        tracker: counts the model's forwards and steps.
        layers: gives the layers, with None for one that is gone; the places are the indices.
        group: the process group that amaxes are reduced over, if one was asked for.

    Attributes:
        histories: the model's.
        mark: names the model in this process; a string, which compilers take as a constant.
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
        #: What layers are sharded over, with their indices, in the order in which they came.
        self._meshes: dict[Any, dict[int, None]] = {}
        self._compared = False
        #: Index -> the groups that the layer's weight is sharded over.
        self._weight_groups: dict[int, tuple[Any, ...]] = {}
        self._forwards = 0
        self._was_told = False

    # --- forwards and steps ----------------------------------------------------------------------

    def forward_begins(self) -> None:
        """A forward of the model begins, in training mode."""
        self._forwards += 1
        if self._forwards == PATIENCE and not self._was_told:
            warnings.warn(
                f"a model with delayed scaling has begun {PATIENCE} forwards in training mode, and "
                "was told of no optimizer's step: its scales stay those of the first data. Steps "
                "of torch.optim.Optimizer and its subclasses are told by torch; after others, and "
                "after updates by hand, call fp8rs.optimizer_stepped(model)",
                stacklevel=2,
            )
        self._record()

    def layer_begins(self, training: bool) -> None:
        """A layer is called, in eager mode.

        Where a part of the model is called on its own, no hook of the root has run.
        """
        if training and not self._tracker.in_forward and not in_backward():
            self._record()

    def _record(self) -> None:
        # Before any layer's slots go into a graph: the backward would write to those from before.
        self.histories.keep_packed()
        self._tracker.recorded()

    def stepped(self) -> None:
        """An optimizer that has one of the model's parameters has stepped."""
        self._was_told = True
        tracker = self._tracker
        tracker.stepped(silent=self._runs_silently)
        if tracker.unannounced:
            tracker.recorded()
        if tracker.roll_is_due:
            tracker.rolled()
            self.histories.roll(self._reduce, unsure=tracker.unannounced)

    @property
    def _runs_silently(self) -> bool:
        """Whether forwards may have begun without a word, since they are compiled.

        With the hooks of the model; or its layers, of a model whose own forward does not train: of
        one whose does, they are compiled parts, and it is that which begins.
        """
        tracker, compiled = self._tracker, _compiled.get(self.mark, ())
        return "model" in compiled or (
            "layer" in compiled and not (tracker.forward_id and tracker.training)
        )

    # --- ranks -----------------------------------------------------------------------------------

    def is_sharded_over(self, mesh: Any, index: int) -> None:
        """The operands of a layer are sharded over a mesh: by FSDP2, or by tensor parallelism."""
        self._meshes.setdefault(mesh, {})[index] = None

    def set_weight_groups(self, index: int, groups: tuple[Any, ...]) -> None:
        """Say that weight ``index`` is sharded over ``groups``, one for each mesh dimension.

        Its amax is reduced over all of them too: FSDP's and tensor parallelism's.
        """
        self._weight_groups[index] = groups

    def _reduce(self, amax: Tensor) -> None:
        """Reduce the amaxes of all layers.

        Over the group that was asked for. Else those of a layer over the ranks of its mesh, which
        run its forwards together anyway. Else not: ranks that take no part in a forward (uneven
        inputs, another pipeline stage, other experts) would be waited for in vain.
        """
        if dist.is_available() and dist.is_initialized():
            reduce_packed_(amax, self._parts(amax))

    def _parts(self, amax: Tensor) -> Iterator[tuple[range, list[Any]]]:
        """Places in the amaxes, and what these are reduced over."""
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
        if group is not dist.group.WORLD:  # where every rank that has a shard is
            for index, groups_of_weight in sorted(self._weight_groups.items()):
                yield range(index, index + 1), [g for g in groups_of_weight if g is not group]

    # --- copies ----------------------------------------------------------------------------------

    @property
    def left_to_do(self) -> tuple[bool, bool]:
        """For a copy: whether a roll is due, and whether amaxes are not yet rolled."""
        return self._tracker.roll_is_due, self._tracker.has_recorded

    def begin_with(self, roll_is_due: bool, recorded: bool) -> None:
        """Begin as the copy of a model of which this was left to do."""
        if recorded:
            self._tracker.recorded()
        if roll_is_due:
            self._tracker.stepped()


_marks = itertools.count()
#: The models by their marks.
_models: weakref.WeakValueDictionary[str, Delayed] = weakref.WeakValueDictionary()
#: By the marks of models: of what a forward has been compiled with all hooks, and is unannounced.
_compiled: dict[str, set[str]] = {}


@constant_when_traced
def note_compiled(mark: str, what: str) -> bool:
    """Note that the forward of a "model" or a "layer" of it is being compiled.

    Run while it is traced, not where it runs.

    (An attribute of the model cannot tell: within an activation checkpoint Dynamo sets none.)
    """
    _compiled.setdefault(mark, set()).add(what)
    return True


@constant_when_traced
def keep_buffers_local(mark: str) -> bool:
    """Have no layer of a model be traced with buffers that are DTensors: see `keep_local`.

    Run while the model is traced, as the first graph would else be of buffers that the next eager
    use replaces.
    """
    for layer in _models[mark].layers():
        if layer is not None:
            keep_local(layer._buffers)
    return True
