"""Yield the tensors of a model in a serving format, one FSDP unit at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fp8rs._torch import dtensor_like, own_part, plain_name, reshard, unwrapped
from fp8rs.model.linear_spec import spec_for
from fp8rs.model.state import state_of
from fp8rs.nn.expert_modules import is_transposed
from fp8rs.quantize.cast import quantize_planes
from fp8rs.quantize.formats import INPUT_DTYPES, split_batch
from fp8rs.quantize.planes import Plane, as_bytes
from fp8rs.quantize.recipes import check_module
from fp8rs.quantize.spec import QuantSpec
from fp8rs.tensor.quantized import QuantizedTensor

from .formats import ServingFormat, serving_format
from .names import Fused, Layout, Part, layout_of, persistent_buffers

#: A module's name in the unconverted model, and the module.
Named = tuple[str, nn.Module]


def tensors(
    model: nn.Module,
    format: str = "fp8-block",
    *,
    dtype: torch.dtype = torch.bfloat16,
    scale_fmt: str | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and persistent buffers of a converted model in a serving format.

    All ranks iterate to the end, and each yields every tensor, on the model's device. With FSDP2,
    one unit is unsharded at a time. If the recipe's weights have the requested format, FP8 codes
    are gathered, and the next forward computes on the same bytes. Otherwise weights are gathered
    one at a time in their stored dtype, and quantized. FP8 weights are dequantized first.

    A yielded tensor may share memory with the model. Use or copy it before the next iteration.

    Args:
        model: a model that ``convert_to_float8_training`` has converted. For "bf16", any model.
        format: "fp8-block", "fp8-row", "fp8-tensor", "mxfp8" or "bf16". The page on serving
            describes them.
        dtype: the dtype of floating-point tensors that are not quantized. Tensors that the model
            keeps in a wider dtype are yielded in their own. These are tensors with a wider dtype
            than most of the model, and those that an architecture of transformers keeps in fp32
            (``_keep_in_fp32_modules``, ``_keep_in_fp32_modules_strict``).
        scale_fmt: "ue8m0" for power-of-two scales with "fp8-block".

    Yields:
        Names in the unconverted model's state dict, and tensors. A converted layer X has X.weight,
        torch.float8_e4m3fn (out_features, in_features), followed by its scales. These are
        X.weight_scale_inv, fp32 (ceil(out_features / 128), ceil(in_features / 128)), or
        X.weight_scale, fp32 (out_features, 1) or (1,), or uint8 (out_features, in_features / 32). A
        tied parameter is yielded once, under its first name. Tensors of a transformers model have
        the names and shapes that its ``save_pretrained`` writes. If these are a matrix for each
        expert, each is a layer. A weight Y (E, N, K) of experts that files store as it is has its
        codes in Y and E times the scales of a layer in Y_scale_inv or Y_scale, (E, 1, 1) for
        "fp8-tensor".

    Raises:
        TypeError, ValueError: an argument is not one of these, no layer was converted, a layer does
            not support the format, or a parameter is on the meta device. All are raised before the
            first gather.
    """
    serving = serving_format(format, scale_fmt)
    if dtype not in INPUT_DTYPES:
        raise TypeError(f"dtype is {dtype}; it must be float32, bfloat16 or float16")
    check_module("model", model)
    model = unwrapped(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"{plain_name(name)} is on the meta device, without values: call to_empty() and "
                "load or initialize the model first"
            )
    check_expert_parallel(model)
    layout = layout_of(model)
    if serving.spec is not None:
        check_layers(model, serving, layout)
    return _tensors(model, serving, layout, dtype)


def check_expert_parallel(model: nn.Module) -> None:
    """Raise ValueError if ranks have different experts, so that none can name all of them."""
    for name, module in named_modules(model):
        if getattr(module, "_is_expert_parallel", False):
            raise ValueError(
                f"{name} has the experts of one rank only, because of transformers' expert "
                "parallelism, which fp8rs.export does not support. Save the model with "
                "fp8rs.checkpoint, load it without expert parallelism, and export that"
            )


class Stored(NamedTuple):
    """A parameter to export.

    Attributes:
        name: its name in the unconverted model.
        module: the module that has it.
        key: its name in the module.
        parameter: the parameter, sharded if the model is.
    """

    name: str
    module: nn.Module
    key: str
    parameter: nn.Parameter


def parameters_of(modules: list[Named]) -> Iterator[Stored]:
    """Yield the parameters of modules. A tied parameter comes several times."""
    for name, module in modules:
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield Stored(f"{name}.{key}".lstrip("."), module, key, parameter)


def kept_layers(model: nn.Module) -> tuple[list[str], list[str]]:
    """Return the modules that a server would quantize, but that are not quantized.

    Returns:
        Linear layers, routers and modules with batched parameters, by the names of the model and of
        its files; and the modules with batched parameters among them.
    """
    layers: dict[str, None] = {}
    experts: dict[str, None] = {}
    layout = layout_of(model)
    parameters = list(parameters_of(named_modules(model)))
    quantized = quantized_parameters(parameters, layout)
    for p in parameters:
        if is_layer(p) and p.name not in quantized:
            files = layout.files_of(p.name)
            names = [p.name.rpartition(".")[0], *(part.module for part in files)]
            layers.update(dict.fromkeys(names))
            if p.parameter.dim() > 2:
                experts.update(dict.fromkeys(names))
    return list(layers), list(experts)


def is_layer(p: Stored) -> bool:
    """Return whether a server builds layers from a parameter: linear layers, routers or experts.

    Routers are not linear layers in transformers, but in servers they are.
    """
    dims = p.parameter.dim()
    if dims == 2:
        return p.key == "weight" and not isinstance(p.module, nn.Embedding)
    return dims > 2


def quantized_parameters(parameters: list[Stored], layout: Layout) -> set[str]:
    """Return the names of the parameters whose files are FP8 in formats other than "bf16".

    These are the converted ones. Files that store several parameters together are FP8 only if all
    of these are converted.
    """
    converted = {p.name for p in parameters if is_fp8(p.module, p.key)}
    return {
        name
        for name in converted
        if name not in layout.fused or layout.fused[name].shapes.keys() <= converted
    }


def is_fp8(module: nn.Module, key: str) -> bool:
    """Return whether a module's parameter is converted."""
    converted: Any = module
    return state_of(module) is not None and key in converted._fp8_params


def named_modules(model: nn.Module) -> list[Named]:
    """Return all modules, with names without wrappers."""
    return [(plain_name(name), module) for name, module in model.named_modules()]


def check_layers(model: nn.Module, serving: ServingFormat, layout: Layout) -> None:
    """Raise ValueError if no layer is converted, or a layer does not support the format."""
    weights = [p for p in parameters_of(named_modules(model)) if is_fp8(p.module, p.key)]
    if not weights:
        raise ValueError(
            f"model has no converted layers, which format {serving.name!r} requires. Convert it "
            "with convert_to_float8_training, or export it as 'bf16'"
        )
    for name, module, _, weight in weights:
        if weight.dim() > 2 and is_transposed(module):
            raise ValueError(
                f"{name} has transposed matrices (in_features, out_features), for which format "
                f"{serving.name!r} is not defined. Export the model as 'bf16'"
            )
        fused = layout.fused.get(name)
        if fused is not None and not fused.keeps_rows:
            raise ValueError(
                f"{name} has other rows in transformers' files ({', '.join(fused.files)}), for "
                f"which format {serving.name!r} is not defined. Export the model as 'bf16'"
            )
        if serving.name == "mxfp8" and weight.shape[-1] % 32:
            raise ValueError(
                f"{name.removesuffix('.weight')} has {weight.shape[-1]} input features, but format "
                "'mxfp8' requires a multiple of 32"
            )


class FileDtypes:
    """The dtypes of tensors in high precision.

    Some values are exact only in the dtype that the model keeps them in. For example, a router
    compares sums of its outputs and correction biases of about 7, of which bf16 keeps two digits.

    Args:
        model: the model.
        dtype: the dtype that the user requests.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.requested = dtype

        elements: dict[torch.dtype, int] = {}
        for parameter in model.parameters():
            if parameter.is_floating_point():
                count = elements.get(parameter.dtype, 0)
                elements[parameter.dtype] = count + parameter.numel()
        #: The dtype of most elements of the model.
        self.of_model = max(elements, key=elements.__getitem__, default=dtype)

        # transformers searches for these patterns in the names of tensors.
        patterns: set[str] = set()
        for module in model.modules():
            for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
                patterns.update(getattr(module, attribute, None) or ())
        self._pinned = [re.compile(pattern.replace("*", ".*")) for pattern in sorted(patterns)]

    def of(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the dtype of a floating-point tensor in the files."""
        dtype = tensor.dtype
        is_wider = dtype.itemsize > self.of_model.itemsize
        is_pinned = any(pattern.search(name) for pattern in self._pinned)
        if (is_wider or is_pinned) and dtype.itemsize > self.requested.itemsize:
            return dtype
        return self.requested


# --- one unit ------------------------------------------------------------------------------------


def units(model: nn.Module) -> dict[Any, list[Named]]:
    """Return the modules of each FSDP2 unit, by the module that ``fully_shard`` was called on.

    The key of modules outside any unit is None.
    """
    from torch.distributed.fsdp import FSDPModule

    modules_of: dict[Any, list[Named]] = {}
    unit_of: dict[str, Any] = {}  # by the path of a module
    for path, module in model.named_modules():
        if isinstance(module, FSDPModule):
            unit_of[path] = module
        else:
            parent = path.rpartition(".")[0]
            unit_of[path] = unit_of.get(parent)
        modules_of.setdefault(unit_of[path], []).append((plain_name(path), module))
    return modules_of


@torch.no_grad()
def _tensors(
    model: nn.Module, serving: ServingFormat, layout: Layout, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of each unit. A unit is unsharded only if codes are exported unchanged."""
    reshard(model)  # a weight that a forward left unsharded may be outdated
    dtypes = FileDtypes(model, dtype)
    sharded = dict(_named_tensors(named_modules(model)))
    quantized = quantized_parameters(list(parameters_of(named_modules(model))), layout)
    yielded: set[int] = set()
    for unit, modules in units(model).items():
        fused = []
        for name, _ in _named_tensors(modules):
            if name in layout.fused and id(layout.fused[name]) not in yielded:
                yielded.add(id(layout.fused[name]))
                fused.append(layout.fused[name])

        parameters = []
        for p in parameters_of(modules):
            if id(p.parameter) not in yielded:
                yielded.add(id(p.parameter))
                if p.name not in layout.fused:
                    parameters.append(p)

        exports_codes = [
            is_fp8(p.module, p.key)
            and can_export_codes(serving, p, layout.parts_of(p.name), fsdp=unit is not None)
            for p in parameters
        ]
        gather = unit is not None and any(exports_codes)
        if gather:
            unit.unshard()
        try:
            for p, codes in zip(parameters, exports_codes, strict=True):
                parts = layout.parts_of(p.name)
                yield from _parameter_tensors(p, parts, codes, serving, dtypes)
            for fused_tensors in fused:
                as_fp8 = fused_tensors.shapes.keys() <= quantized
                yield from _fused_tensors(fused_tensors, sharded, as_fp8, serving, dtypes)
            for name, module in modules:
                for key, buffer in persistent_buffers(module):
                    full = f"{name}.{key}".lstrip(".")
                    if full not in layout.fused:
                        values = whole(buffer, dtypes.of(full, buffer))
                        for part in layout.parts_of(full):
                            yield part.name, part.of(values)
        finally:
            if gather:
                unit.reshard()


def _named_tensors(modules: list[Named]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and persistent buffers of modules, by name."""
    for name, module in modules:
        for key, tensor in (*module._parameters.items(), *persistent_buffers(module)):
            if tensor is not None:
                yield f"{name}.{key}".lstrip("."), tensor


def _parameter_tensors(
    p: Stored, parts: list[Part], codes: bool, serving: ServingFormat, dtypes: FileDtypes
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one parameter.

    Args:
        p: the parameter, whose unit is unsharded if codes are exported.
        parts: the tensors of the files that contain it.
        codes: whether to export the codes that the layer computes on.
        serving: the format.
        dtypes: the dtypes of tensors that are not quantized.
    """
    unsharded: Any = p.module._parameters[p.key]  # or the shard, outside of an unsharded unit
    if codes:
        plane = forward_plane(p.module, unsharded)
        for part in parts:
            yield from stored(part.name, plane_of(plane, part), serving)
    elif serving.spec is not None and is_fp8(p.module, p.key):
        values = whole(p.parameter)
        for part in parts:
            yield from stored(part.name, quantized(serving.spec, part.of(values)), serving)
    else:
        dtype = dtypes.of(p.name, p.parameter)
        # FSDP2's mixed-precision policy may have rounded the unsharded parameter.
        exact_itemsize = min(dtype.itemsize, p.parameter.dtype.itemsize)
        is_exact = unsharded.dtype.itemsize >= exact_itemsize
        values = whole(unsharded if is_exact else p.parameter, dtype)
        for part in parts:
            yield part.name, part.of(values)


def _fused_tensors(
    fused: Fused,
    sharded: dict[str, Tensor],
    as_fp8: bool,
    serving: ServingFormat,
    dtypes: FileDtypes,
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of the files that contain several tensors of the model, or other rows.

    Args:
        fused: the tensors.
        sharded: all tensors of the model, sharded if the model is.
        as_fp8: whether the tensors are quantized in a format of FP8.
        serving: the format.
        dtypes: the dtypes of tensors that are not quantized.
    """
    quantizes = as_fp8 and serving.spec is not None
    values = {}
    for name in fused.shapes:
        tensor = sharded[name]
        values[name] = whole(tensor, None if quantizes else dtypes.of(name, tensor))

    for name, value in fused.to_files(values).items():
        if quantizes:
            assert serving.spec is not None
            yield from stored(name, quantized(serving.spec, value), serving)
        else:
            yield name, value


def quantized(spec: QuantSpec, values: Tensor, scale: Tensor | None = None) -> Plane:
    """Quantize a matrix, or each matrix of a batch."""
    row, _ = quantize_planes(spec, values, True, False, scale=scale)
    return cast(Plane, row)


def plane_of(plane: Plane, part: Part) -> Plane:
    """Return the part of a parameter's plane. It begins with a block."""
    if part.is_whole:
        return plane
    matrix = plane if part.matrix is None else plane[part.matrix]
    return matrix.part((part.rows, slice(0, plane.data.shape[-1])))


def stored(name: str, plane: Plane, serving: ServingFormat) -> Iterator[tuple[str, Tensor]]:
    """Yield the codes and scales of a plane, with their names."""
    yield name, plane.data
    yield name + serving.scale_name.removeprefix("weight"), serving.scale(plane)


# --- unchanged codes -----------------------------------------------------------------------------


def can_export_codes(serving: ServingFormat, stored: Stored, parts: list[Part], fsdp: bool) -> bool:
    """Return whether the codes that a layer computes on can be exported in a format.

    They cannot if tensor parallelism splits a block or a row, because its parts have different
    scales, or if a tensor of the files begins within a block. With one scale per tensor, they can
    only if FSDP2 gathers the weight in FP8. All ranks return the same.

    Args:
        serving: the format.
        stored: a sharded weight.
        parts: the tensors of the files that contain it.
        fsdp: whether FSDP2 gathers the weight, along the first sharded dimension of the mesh.
    """
    weight: Any = stored.parameter
    layer: Any = stored.module
    spec = spec_for(layer._fp8_state.key, weight.device).weight
    if not serving.takes(spec):
        return False

    divided = [part for part in parts if not part.is_whole]
    if any(part.matrix is None for part in divided) and weight.dim() > 2:
        return False
    block_height = spec.format.block[0]
    if block_height > 1 and any(part.rows.start % block_height for part in divided):
        return False

    # Tensor parallelism divides these dimensions of the weight, by dimension of the mesh.
    placements = getattr(weight, "placements", ())
    sharded = [(i, p.dim) for i, p in enumerate(placements) if not p.is_replicate()]
    cuts = sharded[1:] if fsdp else sharded
    is_batch = weight.dim() > 2
    if is_batch:
        cuts = [(mesh_dim, dim) for mesh_dim, dim in cuts if dim > 0]  # a matrix has its own scales
        if weight.dim() > 3 and cuts:
            return False
    if spec.format.per_tensor:
        return not cuts or hasattr(own_part(weight), "fsdp_post_all_gather")

    for mesh_dim, dim in cuts:
        block = spec.format.block[dim - is_batch]
        if block <= 0:  # a block is a whole row
            return False
        chunk = -(-weight.shape[dim] // weight.device_mesh.size(mesh_dim))
        if chunk % block:
            return False
    return True


def forward_plane(layer: nn.Module, weight: Any) -> Plane:
    """Return the rowwise plane of the whole weight, with the bytes of the layer's next forward."""
    local = own_part(weight)
    if isinstance(local, QuantizedTensor):
        row = local.plane("rowwise", "export")
    else:
        row = quantized_as_in_forward(layer, local)
    if local is weight:
        return row
    scale = row.scale
    batch, matrix = split_batch(weight.shape, row.batched)
    cuts_batch = batch and any(p.is_shard(0) for p in weight.placements)
    if cuts_batch or not row.format.per_tensor:
        scale = gather_like(weight, scale, row.format.scale_shape(*matrix, batch))
    return Plane(gather_like(weight, row.data, tuple(weight.shape)), scale, row.format)


def gather_like(weight: Any, part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Gather the parts of a tensor that is sharded as a weight.

    Args:
        weight: the weight.
        part: this rank's part of the tensor.
        shape: the shape of the whole tensor.
    """
    together: Any = dtensor_like(weight, as_bytes(part).contiguous(), shape)
    full: Tensor = together.full_tensor()
    return full.view(part.dtype)


def quantized_as_in_forward(layer: Any, weight: Tensor) -> Plane:
    """Quantize a high-precision weight as the layer's next forward does."""
    spec = spec_for(layer._fp8_state.key, weight.device).weight
    scale = None
    if layer._fp8_state.recipe.delayed and weight.dim() == 2:  # batched weights have no history
        next_scale = own_part(layer.fp8_scale)[0, 0]
        amax = torch.ops.fp8rs.amax(weight)
        scale = torch.where(next_scale > 0, next_scale, spec.scale_from_amax(amax))
    return quantized(spec, weight, scale)


# --- high precision ------------------------------------------------------------------------------


def whole(tensor: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Gather a tensor's values on every rank.

    Args:
        tensor: the tensor, sharded or not.
        dtype: the dtype of floating-point values. The default is the tensor's. If it is narrower,
            values are converted before the gather.
    """
    local = own_part(tensor)
    values = local.dequantize() if isinstance(local, QuantizedTensor) else local.detach()
    values = getattr(values, "high_precision", values)
    dtype = dtype if dtype and values.is_floating_point() else values.dtype
    if local is not tensor:
        if dtype.itemsize < values.itemsize:
            values = values.to(dtype)
        values = cast(Any, dtensor_like(tensor, values)).full_tensor()
    return cast(Tensor, values.to(dtype))
