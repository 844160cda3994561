"""What is known of one weight, whichever tensor stands for it at the moment."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import state_dicts

if TYPE_CHECKING:
    from fp8rs.scaling.state import ModelState


class WeightSlot:
    """The place of a weight: its module. All else is found through that.

    FSDP2 replaces the sharded tensors as it likes, so nothing is remembered on them; every
    `MasterWeight` of one parameter refers to one slot.
    """

    __slots__ = ("__weakref__", "_module")

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    @property
    def module(self) -> nn.Module:
        """The layer that the weight belongs to. RuntimeError if it is gone."""
        module = self._module()
        if module is None:
            raise RuntimeError("the module that this weight belongs to no longer exists")
        return module

    @property
    def state(self) -> ModelState:
        """The state of the converted model."""
        return cast("ModelState", self.module._fp8_state)

    @property
    def index(self) -> int:
        """The weight's index among those of the converted model."""
        return cast(int, self.module._fp8_index)

    @property
    def name(self) -> str:
        """The weight's fully qualified name, for messages."""
        name = self.state.names[self.index]
        return f"{name}.weight" if name else "weight"

    @property
    def parameter(self) -> Tensor:
        """The module's parameter: sharded or, while FSDP2 has it gathered, not."""
        return cast(Tensor, self.module._parameters["weight"])

    def on_shard(self) -> None:
        """The weight is being cut: FSDP2 has just put its hooks before ours on the module."""
        module = self._module()
        if module is not None and hasattr(module, "_fp8_state"):
            self.state.keep_first()

    def copied(self, memo: dict[int, Any]) -> WeightSlot:
        """The slot of a deep copy: that of the copied module, or this one without such."""
        module = self._module()
        copy = memo.get(id(module))
        if copy is None:
            return self
        found = memo.get(id(self))
        if found is None:
            found = memo[id(self)] = WeightSlot(copy)
        return cast(WeightSlot, found)


def local_master(parameter: Any) -> Any:
    """The `MasterWeight` behind a parameter, sharded or not; None if there is none."""
    from .master_weight import MasterWeight

    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return local if isinstance(local, MasterWeight) else None


def shard_quantized(linear: nn.Module) -> None:
    """Have a converted layer's weight quantized before FSDP2 gathers it.

    The parameter is replaced by a `MasterWeight` of the same values and memory, and the
    module's state dicts are kept plain. A DTensor parameter (tensor parallel) has its local
    tensor wrapped.

    Args:
        linear: a layer that ``convert_to_float8_training`` has registered with its state.
    """
    linear._parameters["weight"] = wrap_parameter(
        cast(nn.Parameter, linear._parameters["weight"]), WeightSlot(linear)
    )
    state_dicts.register(linear)
    cast("ModelState", linear._fp8_state).fp8_gather = True


def wrap_parameter(parameter: Tensor, slot: WeightSlot) -> nn.Parameter:
    """The same parameter with a `MasterWeight` inside."""
    from .master_weight import MasterWeight

    requires_grad = parameter.requires_grad
    value = parameter.detach()
    if isinstance(value, DTensor):
        local = value._local_tensor
        # The padding is read off the storage, which must therefore be the shard's own.
        if local.untyped_storage().nbytes() != local.numel() * local.itemsize:
            local = local.clone()
        value = DTensor.from_local(
            MasterWeight(local, slot),
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    else:
        value = MasterWeight(value, slot)
    new = nn.Parameter(value, requires_grad=requires_grad)
    for name, attribute in vars(parameter).items():
        if not name.startswith("_"):
            setattr(new, name, attribute)  # a caller's own marks on the parameter
    return new
