"""The private names of fp8rs that tests use. Other test modules import them from here."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

from torch import Tensor, nn

from fp8rs import _core as core
from fp8rs import doctor
from fp8rs._torch import (
    dtensor_like,
    fsdp_param_groups,
    outside_selective_checkpoints,
    own_store,
    reshard,
)
from fp8rs.comm import fsdp_comm
from fp8rs.fsdp.gather_unit import GatherUnit, UnitParam
from fp8rs.model.handle import ParamHandle
from fp8rs.model.input_cache import QuantizedInputCache
from fp8rs.model.linear_spec import spec_for
from fp8rs.model.state import ModelState
from fp8rs.nn import function, fused, rotary
from fp8rs.nn.debug import Debug
from fp8rs.scaling.steps import StepTracker
from fp8rs.tensor import aten
from fp8rs.tensor.plane_storage import PlaneStorage

__all__ = [
    "VIEW_HANDLERS",
    "WRITE_HANDLERS",
    "composed_modules",
    "core",
    "counted_fusions",
    "debug_of",
    "dtensor_like",
    "forget_layer_specs",
    "forget_units",
    "fsdp_param_groups",
    "gather_unit_of",
    "gathered_bytes",
    "gemms_of",
    "handle_of",
    "handle_of_tensor",
    "handles_of",
    "has_prepared_codes",
    "keeps_codes",
    "local_of",
    "notify_freed",
    "on_host",
    "outside_selective_checkpoints",
    "own_store",
    "quantize_operand",
    "refuse",
    "replace_devices",
    "replace_notice_logger",
    "replace_quantize_operand",
    "reshard",
    "run_in_fp8",
    "run_in_high_precision",
    "state_of",
    "storage_of",
    "units_of",
]

quantize_operand = function._quantize
refuse = aten._refuse

#: The handlers of `aten` operators that return views.
VIEW_HANDLERS = aten.any_view, aten._detach, aten._decompose

#: The handlers of `aten` operators that write, except operators of `fallback`.
WRITE_HANDLERS = (
    aten._refuse,
    aten._detach_,
    aten._erfinv_,
    aten._copy,
    aten._foreach_copy,
    aten._record_stream,
)


@contextmanager
def composed_modules() -> Iterator[None]:
    """Let transformer modules compose norms, activations and rotations, as compiled ones do."""
    with (
        mock.patch.object(fused, "_input_quantization", return_value=None),
        mock.patch.object(rotary, "is_plain", return_value=False),
    ):
        yield


@contextmanager
def counted_fusions() -> Iterator[list[bool]]:
    """Record for each norm and gated activation in a forward of modules whether it is fused."""
    decide = fused._input_quantization
    decisions: list[bool] = []

    def recorded(x: Tensor, layers: Sequence[nn.Module]) -> object:
        quantization = decide(x, layers)
        decisions.append(quantization is not None)
        return quantization

    with mock.patch.object(fused, "_input_quantization", recorded):
        yield decisions


def local_of(t: Tensor) -> Tensor:
    """Return the local tensor object of a DTensor. Return any other tensor itself."""
    return getattr(t, "_local_tensor", t)


def storage_of(t: Tensor) -> PlaneStorage:
    """Return the storage that an FP8 tensor, sharded or not, shares with its views."""
    return local_of(t)._storage


def state_of(module: nn.Module) -> ModelState:
    """Return the state that the converted layers of a model share."""
    return module._fp8_state


def debug_of(module: nn.Module) -> Debug | None:
    """Return the debug options of a layer, or None if they are the defaults."""
    return module._fp8_debug


def handle_of(module: nn.Module, name: str = "weight") -> ParamHandle:
    """Return the handle of a module's FP8 parameter."""
    return module._fp8_params[name]


def handles_of(module: nn.Module) -> dict[str, ParamHandle]:
    """Return the handles of a module's FP8 parameters by name."""
    return getattr(module, "_fp8_params", {})


def gemms_of(module: nn.Module) -> str | None:
    """Return which GEMMs of a module of experts are in FP8. None for other modules."""
    return getattr(module, "_gemms", None)


def run_in_fp8(module: nn.Module) -> None:
    """Choose FP8 GEMMs for a converted module of experts."""
    module._gemms = "fp8"


def run_in_high_precision(module: nn.Module) -> None:
    """Make a module of experts run GEMMs in high precision."""
    module._gemms = "gather"


def forget_layer_specs() -> None:
    """Clear the cached specs of layers."""
    spec_for.cache_clear()
    function._plain_call.cache_clear()


def handle_of_tensor(t: Tensor) -> ParamHandle:
    """Return the handle that a local tensor with all-gather hooks refers to."""
    return local_of(t)._handle


def gather_unit_of(handle: ParamHandle) -> GatherUnit:
    """Return a gather unit of one parameter, which can record writes but not gather."""
    unit = GatherUnit([handle], [], None, StepTracker(), lambda unit: None, None, ())
    handle.set_unit(unit)  # a weak reference
    return unit


def units_of(model: nn.Module) -> list[GatherUnit]:
    """Return the gather units of a sharded model."""
    return state_of(model.head).sharded_model.units


def forget_units(model: nn.Module) -> None:
    """Make a sharded model build its gather units again."""
    state_of(model.head).sharded_model._forget_units()


def param_of_unit(handle: ParamHandle) -> UnitParam:
    """Return what the gather unit of a parameter stores for it."""
    return handle.unit._params[handle.unit._index[handle]]


def keeps_codes(module: nn.Module, name: str = "weight") -> bool:
    """Return whether the codes of a forward are kept for the backward of a sharded parameter."""
    handle = handle_of(module, name)
    return handle.unit_if_any is not None and param_of_unit(handle).codes_for_backward is not None


def has_prepared_codes(module: nn.Module, name: str = "weight") -> bool:
    """Return whether a cast has prepared codes that no hook of the parameter has returned."""
    handle = handle_of(module, name)
    return handle.unit_if_any is not None and param_of_unit(handle).codes_for_hook is not None


def gathered_bytes(module: nn.Module, name: str = "weight") -> tuple[Tensor, ...]:
    """Return the tensors that the pre-all-gather hook of a module's sharded parameter gathers."""
    parameter = getattr(module, name)
    inputs, _ = local_of(parameter).fsdp_pre_all_gather(parameter.device_mesh)
    return inputs


def notify_freed(cache: QuantizedInputCache, tensor: object) -> None:
    """Call the callback that runs when a cached input is freed."""
    cache._freed(tensor)


def on_host(name: str) -> AbstractContextManager[object]:
    """Replace the name of this rank's host."""
    return mock.patch.object(fsdp_comm, "_host", return_value=name)


def replace_quantize_operand(monkeypatch, quantize) -> None:
    """Replace the function that quantizes an operand of the linear function."""
    monkeypatch.setattr(function, "_quantize", quantize)


def replace_notice_logger(monkeypatch, logger) -> None:
    """Replace the logger of notices, such as that of a conversion."""
    monkeypatch.setattr(importlib.import_module("fp8rs.model.notice"), "_log", logger)


def replace_devices(monkeypatch, devices: list[doctor.Device]) -> None:
    """Replace the GPUs that `fp8rs doctor` finds."""
    monkeypatch.setattr(doctor, "_devices", lambda: devices)
