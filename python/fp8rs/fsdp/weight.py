"""One weight: a parameter of a module, whichever tensor stands for it at the moment."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch import Tensor, nn

from fp8rs._torch import local_tensor
from fp8rs.tensor.quantized import QuantizedTensor

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
        unagreed: of an FP8 weight: scales that shards share may differ between ranks.
        keep_init: of an FP8 weight: its first values are kept from before they are rounded.
        init_value: those, of the shard or the whole, on the CPU.
    """

    __slots__ = (
        "__weakref__",
        "_module",
        "init_value",
        "keep_init",
        "moved",
        "name",
        "unagreed",
        "written",
    )

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = weakref.ref(module)
        self.name = name
        self.written = self.moved = self.unagreed = False
        self.keep_init = False
        self.init_value: Tensor | None = None

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

    def wrote(self, agreed: bool = False) -> None:
        """The shard is being written, by this rank for itself unless ``agreed``."""
        self.written = self.moved = True
        self.unagreed = not agreed
        if agreed and self.state.histories is not None and self.state.fsdp is not None:
            self.state.fsdp.shared = False

    def forget_init(self) -> None:
        """Free the values from before the first rounding, and keep no others."""
        self.init_value, self.keep_init = None, False

    @property
    def slots(self) -> tuple[Tensor, Tensor] | None:
        """Of delayed scaling: the next scale (0: none yet), and where amaxes are noted."""
        if self.state.histories is None:
            return None
        module: Any = self.module
        return module.fp8_scale[0, 0], module.fp8_amax[0, 0]

    @property
    def shards(self) -> Any:
        """The model's sharded weights; None where this one is whole."""
        return self.state.fsdp if hasattr(self.parameter, "_local_tensor") else None

    def write(self, tensor: QuantizedTensor, values: Tensor) -> bool:
        """Of an FP8 weight: write ``values`` with scales that all ranks agree on.

        Returns:
            False, with nothing written, where other ranks may not be writing: see
            `WeightPasses.together`.
        """
        whole = tensor.shape == self.parameter_part.shape
        if self.keep_init and self.init_value is None and whole and not values.is_meta:
            self.init_value = values.detach().to("cpu", copy=True)
        passes = getattr(self.module, "_fp8_state", None) and self.state.fsdp
        return passes is not None and bool(passes.write(self, tensor, values))

    @property
    def parameter_part(self) -> Tensor:
        """This rank's part of the parameter."""
        parameter: Any = self.parameter
        part: Tensor = local_tensor(parameter) if hasattr(parameter, "_local_tensor") else parameter
        return part

    def __deepcopy__(self, memo: dict[int, Any]) -> Weight:
        """That of the copied module, if one is being copied; else the same."""
        copy = memo.get(id(self._module()))
        if copy is None:
            return self
        found = memo.get(id(self))
        if found is None:
            found = memo[id(self)] = Weight(copy, self.name)
            found.unagreed, found.keep_init = self.unagreed, self.keep_init
            found.init_value = self.init_value  # which nobody writes
        return cast(Weight, found)


class Local(Protocol):
    """A sharded parameter's local tensor: a `MasterWeight`, or an FP8 weight's shard."""

    @property
    def _weight(self) -> Weight:
        """Whose shard this is."""

    @property
    def shard(self) -> Tensor:
        """The plain shard, or the quantized one."""


def local_of(parameter: Any) -> Any:
    """The local tensor behind a parameter that is gathered in FP8; None if it is another."""
    local = local_tensor(parameter) if hasattr(parameter, "_local_tensor") else parameter
    return local if isinstance(getattr(local, "_weight", None), Weight) else None
