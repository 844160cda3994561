"""One weight: a parameter of a module, whichever tensor stands for it at the moment."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch import Tensor, nn

from fp8rs._torch import local_tensor

if TYPE_CHECKING:
    from fp8rs.nn.registry import ModelState


class Weight:
    """A parameter's place: (module, name). All else is found through that.

    FSDP2 replaces the sharded tensors as it likes, so nothing is remembered on them; every
    `MasterWeight` of one parameter refers to one `Weight`. It compares by identity, and a copy of a
    tensor alone keeps it: as metadata of a traced tensor it is a constant.

    Attributes:
        name: of the parameter in its module.
        written: the shard was written since it was last quantized. Every rank sees the writes that
            all ranks make, those to an empty shard too.
        moved: the shard was written since the histories of delayed scaling were last rolled.
    """

    __slots__ = ("__weakref__", "_module", "moved", "name", "written")

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = weakref.ref(module)
        self.name = name
        self.written = self.moved = False

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
        """The index of the layer among those of the converted model."""
        return cast(int, self.module._fp8_index)

    @property
    def fqn(self) -> str:
        """The fully qualified name, for messages."""
        return f"{self.state.names[self.index]}.{self.name}".lstrip(".")

    @property
    def parameter(self) -> Tensor:
        """The module's parameter: sharded or, while FSDP2 has it gathered, not."""
        return cast(Tensor, self.module._parameters[self.name])

    def wrote(self) -> None:
        """The shard is being written."""
        self.written = self.moved = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Weight:
        """That of the copied module, if one is being copied; else the same."""
        copy = memo.get(id(self._module()))
        if copy is None:
            return self
        found = memo.get(id(self))
        if found is None:
            found = memo[id(self)] = Weight(copy, self.name)
        return cast(Weight, found)


class Master(Protocol):
    """What the gather asks of a sharded parameter's local tensor (a `MasterWeight`)."""

    _weight: Weight

    @property
    def high_precision(self) -> Tensor:
        """The plain shard."""


def local_master(parameter: Any) -> Any:
    """The `MasterWeight` behind a sharded parameter; None if there is none."""
    local = local_tensor(parameter) if hasattr(parameter, "_local_tensor") else parameter
    return local if isinstance(getattr(local, "_weight", None), Weight) else None
