"""The tensors of a model as a server wants them, one FSDP unit after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from fp8rs._torch import dtensor_like, own_part, plain_name
from fp8rs.nn.linear import Float8Linear
from fp8rs.nn.spec import spec_for
from fp8rs.tensor.formats import INPUT_DTYPES
from fp8rs.tensor.planes import Plane, as_bytes
from fp8rs.tensor.quantized import QuantizedTensor
from fp8rs.tensor.spec import quantize_planes

from .formats import ServingFormat, serving_format

#: A module and its name in the unconverted model.
Named = tuple[str, nn.Module]


def tensors(
    model: nn.Module,
    format: str = "fp8-block",
    *,
    dtype: torch.dtype = torch.bfloat16,
    scale_fmt: str | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The parameters and persistent buffers of a converted model, as a server reads them.

    Of a model that FSDP2 shards, one unit is whole at a time: all ranks iterate to the end, and
    each is given every tensor, on the model's device. Where the recipe's weights are in the format
    asked for, FP8 codes are gathered, and what is given are the bytes that the next forward
    computes on. Of other recipes weights are gathered in the dtype that they are stored in, one at
    a time, and quantized anew (FP8 weights: from what their codes stand for).

    What is given may share memory with the model: it is to be used, or copied, before the next one
    is asked for.

    Args:
        model: one with layers that ``convert_to_float8_training`` has converted; for "bf16" any.
        format: "fp8-block", "fp8-row", "fp8-tensor", "mxfp8" or "bf16": see the page on serving.
        dtype: of all floating-point tensors that are not quantized.
        scale_fmt: "ue8m0" has scales of "fp8-block" be powers of two.

    Yields:
        Names, those of the unconverted model's state dict, and tensors. A converted layer X has
        X.weight, torch.float8_e4m3fn (out, in), and after it its scales: X.weight_scale_inv, fp32
        (ceil(out / 128), ceil(in / 128)); X.weight_scale, fp32 (out, 1) or (1,), or uint8
        (out, in / 32). A parameter that is tied comes once, under its first name.

    Raises:
        TypeError, ValueError: an argument is none of these, nothing was converted, a layer does not
            fit the format, a parameter is on the meta device, or FSDP2's policy gathers in a dtype
            that ``dtype`` is wider than. Nothing is gathered then.
    """
    serving = serving_format(format, scale_fmt)
    if dtype not in INPUT_DTYPES:
        raise TypeError(f"dtype is {dtype}; it must be float32, bfloat16 or float16")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"{plain_name(name)} is on the meta device, without values: call to_empty() and "
                "load or initialize the model first"
            )
    if serving.spec is not None:
        check_layers(model, serving)
    return _tensors(model, serving, dtype)


def kept_layers(model: nn.Module) -> list[str]:
    """The names of linear layers, and of experts' stacks of them, that were not converted."""
    return [
        name
        for name, module in named_modules(model)
        if (isinstance(module, nn.Linear) and not isinstance(module, Float8Linear))
        or any(p is not None and p.dim() > 2 for p in module._parameters.values())
    ]


def named_modules(model: nn.Module) -> list[Named]:
    """All modules, by the names that they have without wrappers."""
    return [(plain_name(name), module) for name, module in model.named_modules()]


def check_layers(model: nn.Module, serving: ServingFormat) -> None:
    """Raise ValueError where nothing is converted, or a layer cannot be in the format."""
    layers = [(n, m) for n, m in named_modules(model) if isinstance(m, Float8Linear)]
    if not layers:
        raise ValueError(
            f"model has no converted layers, of which format {serving.name!r} would be: convert it "
            "with convert_to_float8_training, or export it as 'bf16'"
        )
    for name, layer in layers:
        if serving.name == "mxfp8" and layer.in_features % 32:
            raise ValueError(
                f"{name} has {layer.in_features} input features; in format 'mxfp8' they must be a "
                "multiple of 32"
            )


# --- one unit ------------------------------------------------------------------------------------


def units(model: nn.Module) -> list[tuple[nn.Module | None, list[Named]]]:
    """The modules that FSDP2 gathers the parameters of together, with what gathers them."""
    from torch.distributed.fsdp import FSDPModule

    found: dict[int, tuple[nn.Module | None, list[Named]]] = {}
    above: list[tuple[str, nn.Module | None]] = [("", None)]
    for path, module in model.named_modules():
        while above[-1][0] and not f"{path}.".startswith(above[-1][0]):
            above.pop()
        if isinstance(module, FSDPModule):
            above.append((f"{path}." if path else "", cast(nn.Module, module)))
        unit = above[-1][1]
        found.setdefault(id(unit), (unit, []))[1].append((plain_name(path), module))
    return list(found.values())


@torch.no_grad()
def _next(iterator: Iterator[tuple[str, Tensor]]) -> tuple[str, Tensor] | None:
    return next(iterator, None)


def _tensors(
    model: nn.Module, serving: ServingFormat, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    given: set[int] = set()
    found = units(model)
    for unit, _ in found:  # what a forward has left whole may have been written since
        if unit is not None:
            cast(Any, unit).reshard()
    for unit, modules in found:
        each = _of_unit(cast(Any, unit), modules, serving, dtype, given)
        try:
            while (item := _next(each)) is not None:
                yield item
        finally:
            each.close()


def _of_unit(
    unit: Any, modules: list[Named], serving: ServingFormat, dtype: torch.dtype, given: set[int]
) -> Any:
    """The tensors of one unit, which is whole only where its codes are taken as they are."""
    parameters: list[tuple[str, nn.Module, str, nn.Parameter]] = []
    for name, module in modules:
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in given:
                given.add(id(parameter))
                parameters.append((name, module, key, parameter))
    as_they_are = [
        key == "weight"
        and isinstance(module, Float8Linear)
        and takes(serving, module, fsdp=unit is not None)
        for _, module, key, _ in parameters
    ]
    gather = unit is not None and any(as_they_are)
    if gather:
        unit.unshard()
    try:
        for (name, module, key, parameter), its_own in zip(parameters, as_they_are, strict=True):
            full = f"{name}.{key}".lstrip(".")
            if its_own:
                layer = cast(Float8Linear, module)
                yield from stored(full, own_plane(layer, module._parameters[key]), serving)
            elif key == "weight" and isinstance(module, Float8Linear) and serving.spec is not None:
                values = whole(parameter)
                row, _ = quantize_planes(serving.spec, values, True, False)
                yield from stored(full, cast(Plane, row), serving)
            else:
                yield full, plain(full, parameter, dtype, module._parameters[key])
        for name, module in modules:
            for key, buffer in module._buffers.items():
                if buffer is not None and key not in module._non_persistent_buffers_set:
                    full = f"{name}.{key}".lstrip(".")
                    yield full, in_dtype(whole(buffer), dtype)
    finally:
        if gather:
            unit.reshard()


def stored(name: str, plane: Plane, serving: ServingFormat) -> Iterator[tuple[str, Tensor]]:
    """A plane under its names."""
    yield name, plane.data
    yield name.removesuffix("weight") + serving.scale_name, serving.scale(plane)


# --- codes as they are ---------------------------------------------------------------------------


def takes(serving: ServingFormat, layer: Float8Linear, fsdp: bool) -> bool:
    """Whether the codes that a layer computes on can be had whole, in that format.

    They cannot where tensor parallelism cuts a block or a row, whose parts have scales of their
    own; nor a tensor of one scale, but where FSDP2 gathers it in FP8. The answer is the same on all
    ranks.

    Args:
        serving: the format.
        layer: of which FSDP2 has gathered nothing yet.
        fsdp: whether it gathers the weight: along the first dimension that the mesh is sharded on.
    """
    spec = spec_for(layer._fp8_state.key, layer.weight.device).weight
    weight: Any = layer._parameters["weight"]
    placements = getattr(weight, "placements", ())
    cuts = [(i, p.dim) for i, p in enumerate(placements) if not p.is_replicate()][fsdp:]
    if not serving.takes(spec):
        return False
    if spec.format.per_tensor:
        return not cuts or hasattr(own_part(weight), "fsdp_post_all_gather")
    return all(
        (block := spec.format.block[dim]) > 0
        and -(-weight.shape[dim] // weight.device_mesh.size(i)) % block == 0
        for i, dim in cuts
    )


def own_plane(layer: Float8Linear, weight: Any) -> Plane:
    """The rowwise plane that a layer's forward would compute on, of the whole weight."""
    local = own_part(weight)
    if isinstance(local, QuantizedTensor):
        row = local.plane("rowwise", "export")
    else:
        row = quantized_as_in_forward(layer, local)
    if local is weight:
        return row
    scale = row.scale
    if not row.format.per_tensor:
        scale_shape = row.format.scale_shape(*weight.shape)
        scale = whole_of_parts(weight, scale, scale_shape)
    return Plane(whole_of_parts(weight, row.data, tuple(weight.shape)), scale, row.format)


def whole_of_parts(weight: Any, part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """All ranks' parts together, cut as a weight is."""
    together: Any = dtensor_like(weight, as_bytes(part).contiguous(), shape)
    full: Tensor = together.full_tensor()
    return full.view(part.dtype)


def quantized_as_in_forward(layer: Float8Linear, weight: Tensor) -> Plane:
    """A weight in high precision, as the layer's next forward will quantize it."""
    spec = spec_for(layer._fp8_state.key, layer.weight.device).weight
    scale = None
    if layer._fp8_state.recipe.delayed:
        known = own_part(layer.fp8_scale)[0, 0]
        amax = torch.ops.fp8rs.amax(weight)
        scale = torch.where(known > 0, known, spec.scale_from_amax(amax))
    row, _ = quantize_planes(spec, weight, True, False, scale=scale)
    return cast(Plane, row)


# --- high precision ------------------------------------------------------------------------------


def plain(name: str, parameter: Any, dtype: torch.dtype, now: Any) -> Tensor:
    """A parameter that is not quantized for the server.

    Args:
        name: for messages.
        parameter: as it is stored.
        dtype: to give it in.
        now: what stands in its place: with memory of its own while FSDP2 has it whole.
    """
    if now is parameter:
        return in_dtype(whole(parameter, dtype), dtype)
    stored_as, gathered = parameter.dtype, now.dtype
    if gathered.itemsize < min(dtype.itemsize, stored_as.itemsize):
        raise ValueError(
            f"dtype is {dtype}, but {name}, stored in {stored_as}, is gathered in {gathered} by "
            "FSDP2's mixed-precision policy: ask for that"
        )
    return in_dtype(whole(now), dtype)


def whole(tensor: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor's values on every rank, in its own dtype or, to send less, in a narrower one."""
    local = own_part(tensor)
    values = local.dequantize() if isinstance(local, QuantizedTensor) else local.detach()
    values = getattr(values, "high_precision", values)
    if local is tensor:
        return cast(Tensor, values)
    if dtype is not None and values.is_floating_point() and dtype.itemsize < values.itemsize:
        values = values.to(dtype)
    full: Tensor = cast(Any, dtensor_like(tensor, values)).full_tensor()
    return full


def in_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Floating-point values in that dtype; others as they are."""
    return values.to(dtype) if values.is_floating_point() else values
