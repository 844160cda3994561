"""What the converted linear layers of one model share.

One :class:`ModelState` belongs to one converted root module. It knows the recipe, the layers by
index, whether a forward of the root is running, the activations that siblings share, and the
histories of delayed scaling. :mod:`fp8rs.fsdp` keeps what it needs for the sharded weights in
``state.fsdp``.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fp8rs.gemm.blocks import dgrad_fold, dgrad_operand, operand_format
from fp8rs.quantize.quantizers import (
    BlockQuantizer,
    Planes,
    Quantizer,
    quantizer_for,
    reduce_amax_,
)
from fp8rs.quantize.recipes import DelayedScaling, Recipe, Role, resolve_recipe
from fp8rs.scaling.activations import ActivationCache
from fp8rs.scaling.announcements import RootHook, in_backward, optimizer_steps
from fp8rs.scaling.history import AmaxHistory
from fp8rs.scaling.reductions import reduce_packed_
from fp8rs.tensor.quantized import Plane, QuantizedTensor

if TYPE_CHECKING:
    from torch import nn


#: The operands of a layer, in the order of their slots.
_ROLES: tuple[Role, ...] = ("weight", "input", "grad")


class ModelState:
    """The state of one converted model.

    Args:
        recipe: a recipe or its short name.
        amax_reduction_group: see ``convert_to_float8_training``.

    Attributes:
        recipe: the recipe of every layer.
        linears: weak references to the layers, by index. A layer's index is its weight's too.
        names: their fully qualified names, for messages.
        in_forward: a forward of the root is running, and not as a backward's recomputation.
        forward_id: how many forwards of the root have begun.
        weight_groups: index -> the process groups that the weight is sharded over, where the FSDP
            layer has told (:meth:`set_weight_groups`).
        fp8_gather: whether weights are quantized before FSDP gathers them.
        fsdp: what the FSDP layer attaches; nothing here looks into it, and copies start without.
    """

    def __init__(self, recipe: Recipe | str, *, amax_reduction_group: Any = None) -> None:
        self.recipe = resolve_recipe(recipe)
        if amax_reduction_group is not None and not self.recipe.block_format("input").per_tensor:
            raise ValueError(
                f"amax_reduction_group is for recipes with one scale a tensor, not for "
                f"{self.recipe.name!r}: its scales come from rows or blocks that a rank has whole"
            )
        self.linears: list[weakref.ref[nn.Module]] = []
        self.names: list[str] = []
        self.in_forward = False
        self.forward_id = 0
        self.weight_groups: dict[int, tuple[Any, ...]] = {}
        self.fp8_gather = False
        self.fsdp: Any = None
        self.activations = ActivationCache()
        self.history: AmaxHistory | None = None
        self._group = amax_reduction_group
        self._recording = False
        #: Whether a forward of the root has run with gradients on, and whether none had when a
        #: backward ran one again: then a reentrant checkpoint is around the root.
        self._seen_grad = self._reentrant = False
        self._input_slots: list[int] = []
        self._rolled_at = optimizer_steps.count
        self._root: weakref.ref[nn.Module] | None = None
        self._hook_ids: tuple[int, int] | None = None
        #: Made for one layer by hand, so that a conversion may take that layer over.
        self.alone = False
        self._begin()

    def _begin(self) -> None:
        """Make what belongs to this process."""
        self._quantizers: dict[Role, Quantizer] = {
            # A weight is the same on all ranks, or FSDP's hooks reduce its amax.
            role: quantizer_for(self.recipe, role, None if role == "weight" else self._group)
            for role in _ROLES
        }
        #: Of inputs and gradients, whose format depends on the GEMMs that the device has.
        self._by_device: dict[tuple[Role, torch.device], Quantizer] = {}
        if self.recipe.delayed:
            optimizer_steps.watch()

    # --- layers and the root ---------------------------------------------------------------------

    def add_linear(self, module: nn.Module, name: str) -> int:
        """Register a layer; returns its index. All layers come before the first quantization."""
        if self.history is not None:
            raise RuntimeError(f"{name} cannot join a model whose delayed scaling has begun")
        self.linears.append(weakref.ref(module))
        self.names.append(name)
        self._input_slots.append(len(self._input_slots))
        return len(self.names) - 1

    @property
    def root(self) -> nn.Module | None:
        """The module whose forwards are announced; None if it is not known (yet)."""
        return None if self._root is None else self._root()

    def set_root(self, root: nn.Module) -> None:
        """Say which module's forwards are announced; :meth:`attach` and its hooks' copies do."""
        self._root = weakref.ref(root)

    def attach(self, root: nn.Module) -> None:
        """Have the forwards of ``root`` announced to this state."""
        begin, end = RootHook(self, "begin_forward", root), RootHook(self, "end_forward", root)
        before = root.register_forward_pre_hook(begin, prepend=True)
        after = root.register_forward_hook(end, always_call=True)
        self._hook_ids = (before.id, after.id)

    def detach(self) -> None:
        """Undo :meth:`attach`."""
        root = self.root
        if root is not None and self._hook_ids is not None:
            before, after = self._hook_ids
            root._forward_pre_hooks.pop(before, None)
            root._forward_hooks.pop(after, None)
            root._forward_hooks_always_called.pop(after, None)
        self._root = self._hook_ids = None

    def _link(self, root: nn.Module) -> None:
        """Find the layers of a copied or unpickled model."""
        self.set_root(root)
        linears: dict[int, Any] = {}
        for module in root.modules():
            if getattr(module, "_fp8_state", None) is self:
                linears[cast(int, module._fp8_index)] = weakref.ref(module)
        # A layer that the model has lost leaves a reference that is dead already.
        self.linears = [linears.get(i, lambda: None) for i in range(len(self.names))]

    def keep_first(self) -> None:
        """Move the root's pre-hook before hooks that were prepended later, FSDP's for one."""
        root = self.root
        if root is not None and self._hook_ids is not None:
            hooks = cast(Any, root._forward_pre_hooks)
            if self._hook_ids[0] in hooks:
                hooks.move_to_end(self._hook_ids[0], last=False)

    def begin_forward(self, module: nn.Module, args: Any) -> None:
        """The root's forward pre-hook."""
        if in_backward():
            self._reentrant |= torch.is_grad_enabled() and not self._seen_grad
            return
        if self._root is None or not self.linears:
            self._link(module)
        self.activations.clear()
        self.in_forward = True
        self.forward_id += 1
        # A reentrant checkpoint runs its forward without gradients, as an evaluation is run, and
        # once more with them in the backward. Only the root's mode tells the two apart.
        self._recording = torch.is_grad_enabled() or (self._reentrant and module.training)
        self._seen_grad |= torch.is_grad_enabled()
        if self._recording:
            self._roll_if_stepped()

    def end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """The root's forward hook; it runs after an exception too."""
        if in_backward():
            return
        self.activations.clear()
        self.in_forward = False
        self._recording = False

    @property
    def recording(self) -> bool:
        """Whether amaxes enter the histories now: in training, not in an evaluation.

        A checkpointed block's first forward runs without grad inside a forward with it: what
        counts is how the root's forward began.
        """
        return self._recording or torch.is_grad_enabled()

    # --- delayed scaling -------------------------------------------------------------------------

    # Slots: the weights' come first, by their indices; then inputs, then gradients.

    def histories(self, device: torch.device) -> AmaxHistory:
        """The histories on ``device``, made at the first use. Delayed scaling only."""
        history = self.history
        if history is None:
            recipe = cast(DelayedScaling, self.recipe)
            count = len(self.names)
            dtypes = [recipe.fp8_dtype(role) for role in _ROLES for _ in range(count)]
            history = self.history = AmaxHistory(recipe, dtypes, device)
        elif history.amax.device != device:
            history.to(device)
        return history

    def reduction_group(self) -> Any:
        """The group that delayed scaling's amaxes are reduced over, or None for no reduction."""
        if not dist.is_available() or not dist.is_initialized():
            return None
        group = dist.group.WORLD if self._group is None else self._group
        return group if dist.get_world_size(group) > 1 else None

    def set_weight_groups(self, index: int, groups: tuple[Any, ...]) -> None:
        """Say that weight ``index`` is sharded over ``groups``, one for each mesh dimension.

        Its amax is reduced over all of them too: FSDP's and tensor parallelism's.
        """
        self.weight_groups[index] = groups

    def _roll_if_stepped(self) -> None:
        """Roll the histories at the first training forward after an optimizer step."""
        history = self.history
        if history is None or self._rolled_at == optimizer_steps.count:
            return
        if not history.dirty:
            return
        self._rolled_at = optimizer_steps.count
        history.roll(self._reduce)

    def _reduce(self, amax: Tensor) -> None:
        group = self.reduction_group()
        if group is not None:
            reduce_amax_(amax, group)
            if group is dist.group.WORLD:
                return  # every rank that has a shard is in it
        done = None if group is None else group.group_name
        reduce_packed_(
            amax,
            (
                (range(i, i + 1), [g for g in groups if g.group_name != done and g.size() > 1])
                for i, groups in sorted(self.weight_groups.items())
            ),
        )

    # --- quantizing ------------------------------------------------------------------------------

    def begin_layer(self) -> bool:
        """A layer's forward begins; returns whether its amaxes enter the histories.

        To be asked outside autograd functions, which hide whether gradients are wanted.
        """
        if not self.recipe.delayed:
            return False
        if not self.in_forward and not in_backward() and torch.is_grad_enabled():
            # A part of the model is called on its own, so no hook of the root has run.
            self._roll_if_stepped()
        return self.recording

    @property
    def weight_quantizer(self) -> Quantizer:
        """What quantizes weights, with scales from the data, wherever the histories do not."""
        return self._quantizers["weight"]

    def quantizer(self, role: Role, index: int, x: Tensor, record: bool) -> Quantizer:
        """The quantizer for ``x``, an operand of layer ``index``."""
        if not self.recipe.delayed:
            return self._quantizers[role] if role == "weight" else self._operand(role, x.device)
        count = len(self.names)
        if role == "weight":
            slot = index
        elif role == "input":
            slot = count + self._input_slots[index]
        else:
            slot = 2 * count + index
        return self.histories(x.device).quantizer(slot, x, record, self.reduction_group)

    def _operand(self, role: Role, device: torch.device) -> Quantizer:
        """The quantizer of inputs or gradients on ``device``."""
        found = self._by_device.get((role, device))
        if found is None:
            recipe, found = self.recipe, self._quantizers[role]
            format = operand_format(found.format, device, recipe.emulate)
            if format != found.format:
                found = quantizer_for(recipe, role, self._group, format)
            self._by_device[role, device] = found
        return found

    def quantize_input(self, index: int, x: Tensor, columnwise: bool, record: bool) -> Planes:
        """The planes of layer ``index``'s input: rowwise, and columnwise if asked for.

        Siblings get the planes that the first one made. Under delayed scaling they adopt its
        history for good.
        """
        found = self.activations.find(x, index)
        if found is not None:
            row, col = found.planes
            assert row is not None
            self._input_slots[index] = self._input_slots[found.owner]
            if not columnwise:
                return row, None
            if col is not None:
                return row, col
            if row.format.square:
                return row, row.transposed("columnwise", "wgrad")
        planes = self.quantizer("input", index, x, record).planes(x, True, columnwise)
        self.activations.put(x, index, planes)
        return planes

    def quantize_weight(self, index: int, weight: Tensor, record: bool) -> Plane:
        """The rowwise plane of layer ``index``'s weight.

        A gathered quantized weight has it. A weight subclass that is not quantized
        (fp8rs.fsdp.MasterWeight, outside FSDP) is quantized from its ``high_precision`` tensor.
        """
        if isinstance(weight, QuantizedTensor):
            self._check_live(index, weight)
            return weight.plane("rowwise", "a linear layer's forward")
        weight = high_precision(weight)
        row, _ = self.quantizer("weight", index, weight, record).planes(weight, True, False)
        assert row is not None
        return row

    def weight_columnwise(self, index: int, weight: Tensor, scale: Tensor | None) -> Plane:
        """The columnwise plane of layer ``index``'s weight, for its backward.

        It is made for this once, where a gathered weight has none. A high-precision weight is
        quantized again, with the ``scale`` of the forward: were its plane kept from there, an
        FSDP rank would hold every layer's.
        """
        emulate = self.recipe.emulate
        if isinstance(weight, QuantizedTensor):
            self._check_live(index, weight)
            if weight.columnwise is not None and not weight.columnwise.format.per_row:
                return weight.columnwise
            return dgrad_operand(weight.plane("rowwise", "dgrad"), emulate)
        assert scale is not None
        weight = high_precision(weight)
        quantizer = self._quantizers["weight"]
        if quantizer.format.per_row:
            row, _ = quantizer.planes_again(weight, scale, True, False)
            assert row is not None
            return dgrad_operand(row, emulate)
        _, col = quantizer.planes_again(weight, scale, False, True)
        assert col is not None
        return col

    def weight_fold(self, index: int, weight: Tensor, scale: Tensor | None) -> Tensor | None:
        """(1, out_features) factors of the gradient that dgrad quantizes, or None for none.

        They are the scales of a weight that has one a row, so that its one plane serves dgrad too.
        """
        if isinstance(weight, QuantizedTensor):
            self._check_live(index, weight)
            row = weight.rowwise
            return None if row is None else dgrad_fold(row.format, row.scale)
        return None if scale is None else dgrad_fold(self._quantizers["weight"].format, scale)

    def _check_live(self, index: int, weight: QuantizedTensor) -> None:
        weight.any_plane().check_live(f"the weight of {self.names[index] or 'the layer'}")

    def quantize_grad(
        self,
        index: int,
        dy: Tensor,
        rowwise: bool,
        columnwise: bool,
        fold: Tensor | None = None,
    ) -> Planes:
        """The planes of layer ``index``'s output gradient, from one read.

        ``fold`` multiplies what goes into the rowwise plane (:meth:`weight_fold`).
        """
        quantizer = self.quantizer("grad", index, dy, True)
        if fold is None:
            return quantizer.planes(dy, rowwise, columnwise)
        return cast(BlockQuantizer, quantizer).planes(dy, rowwise, columnwise, fold)

    # --- copies ----------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelState:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(self.__dict__)
        # Process groups and quantizers are shared. The copied root's hooks tell which it is; the
        # copied layers are found at the first forward.
        new.names = list(self.names)
        new.weight_groups = dict(self.weight_groups)
        new.fsdp = None
        new.activations = ActivationCache()
        new.history = copy.deepcopy(self.history, memo)
        new._input_slots = list(self._input_slots)
        new._root = None
        new.linears = []
        return new

    def __getstate__(self) -> dict[str, Any]:
        """What of the state means something in another process: not groups, nor who refers to it.

        The layers are found again, as those of a copy are.
        """
        if self._group is not None:
            warnings.warn(
                "a pickle cannot hold the amax_reduction_group of a converted model: amaxes of "
                "the model that is loaded are reduced as if none had been given",
                stacklevel=2,
            )
        state = {**self.__dict__, "linears": [], "weight_groups": {}}
        state.update(dict.fromkeys(("_root", "_group", "fsdp")), in_forward=False)
        state["_rolled_at"] = self._rolled_at == optimizer_steps.count
        del state["_quantizers"], state["_by_device"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # Steps are counted in each process: what matters is whether one came after the last roll.
        self._rolled_at = optimizer_steps.count - (not state["_rolled_at"])
        self._begin()


def high_precision(weight: Tensor) -> Tensor:
    """The plain tensor behind a weight that is not quantized: itself, or what it wraps."""
    if type(weight) in (Tensor, torch.nn.Parameter):
        return weight
    inner: Tensor | None = getattr(weight, "high_precision", None)
    return weight if inner is None else inner
