"""The private names of fp8rs that tests read."""

from torch import Tensor, nn

from fp8rs.fsdp.param import ParamHandle
from fp8rs.tensor.store import Store


def local_of(t: Tensor) -> Tensor:
    """Return the local tensor of a DTensor as the object that it is, or another tensor itself."""
    return getattr(t, "_local_tensor", t)


def store_of(t: Tensor) -> Store:
    """Return what an FP8 tensor, sharded or not, shares with its views."""
    return local_of(t)._store


def handle_of(module: nn.Module, name: str = "weight") -> ParamHandle:
    """Return the handle of a module's FP8 parameter."""
    return module._fp8_params[name]


def handle_of_tensor(t: Tensor) -> ParamHandle:
    """Return the handle that a local tensor with all-gather hooks refers to."""
    return local_of(t)._handle


def gathered_bytes(module: nn.Module, name: str = "weight") -> tuple[Tensor, ...]:
    """Call the pre-all-gather hook of a module's sharded parameter: the tensors to gather."""
    parameter = getattr(module, name)
    inputs, _ = local_of(parameter).fsdp_pre_all_gather(parameter.device_mesh)
    return inputs
