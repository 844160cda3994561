"""Parallel styles for `parallelize_module`: torch's styles with all-gathers in FP8.

Names and arguments are torchao's, so that torchtitan's plans work unchanged.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
)

from fp8rs._core import UnsupportedError
from fp8rs._torch import allow_in_graph
from fp8rs.model.linear_spec import DGRAD, FORWARD, GRAD, INPUT, WGRAD, spec_for
from fp8rs.nn.function import prefers_high_precision
from fp8rs.nn.linear import Float8Linear
from fp8rs.quantize.formats import INPUT_DTYPES
from fp8rs.quantize.recipes import describe

from .gather import Operand, check_rows, gather_input, reduce_output


def _operand(layer: Float8Linear, role: int, columnwise: bool) -> Operand:
    """Return how an operand is quantized in the layer's forward, which has not begun yet."""
    state = layer._fp8_state
    if state.delayed is None:
        return Operand(state.key, role, columnwise)
    slots = layer._begin_delayed(state.delayed)
    return Operand(
        state.key,
        role,
        columnwise,
        slots.scales[role],
        slots.amax_of(role),
        slots.ready[role],
    )


def _gather_for(layer: Float8Linear, x: DTensor, columnwise: bool) -> DTensor:
    """Gather the input of a layer, quantized by the layer's recipe.

    If a GEMM that reads the input runs in high precision, the input is gathered in its own dtype.
    The layer quantizes it for the other GEMM.

    Args:
        layer: the layer.
        x: its input, sharded by rows.
        columnwise: whether a weight that reads the input is trained.
    """
    spec = spec_for(layer._fp8_state.key, x.device)
    in_high_precision = (
        prefers_high_precision(spec, x)
        or spec.high_precision[FORWARD]
        or (columnwise and spec.high_precision[WGRAD])
    )
    if in_high_precision:
        check_rows(x.placements[0], x.ndim)
        return x.redistribute(placements=[Replicate()])
    if spec.wgrad_input is not None:
        raise UnsupportedError(
            f"the recipe {describe(layer.recipe)} quantizes inputs in one format for the forward "
            "and in another for wgrad, but only one format can be gathered. Use "
            "fp8rs.Float8BlockScaling() without wgrad_input_block"
        )
    return gather_input(x, _operand(layer, INPUT, columnwise))


def _prepare_layer(style: Any, module: nn.Module, mesh: DeviceMesh) -> None:
    """Check that a style supports a layer, and note the mesh."""
    name = type(style).__name__
    if not isinstance(module, Float8Linear):
        raise ValueError(
            f"{name} requires a converted layer, but got {type(module).__name__}. Convert the "
            "model before parallelize_module, or use torch's style"
        )
    if mesh.ndim != 1:
        raise ValueError(f"{name} requires a mesh of one dimension, but got {mesh}")
    state = module._fp8_state
    if state.delayed is not None:
        # All ranks must use the same scale for gathered codes.
        state.delayed.add_mesh(mesh, module._fp8_index)
    allow_in_graph(gather_input)
    allow_in_graph(reduce_output)


class Float8ColwiseParallel(ColwiseParallel):
    """``ColwiseParallel`` for a converted layer. A sharded input is gathered in FP8.

    Arguments, as in torch's class:

    - ``input_layouts``: placement of the input, Replicate() by default. An input that is sharded
      along any dimension but the last is quantized, and its codes and scales are gathered.
    - ``output_layouts``, ``use_local_output``: unchanged.

    Raises:
        ValueError: the module is not a converted layer.
        UnsupportedError: in the forward: the input is sharded along its features, or the recipe has
            two formats for the input.
    """

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: Any, inputs: Any, device_mesh: Any
    ) -> Any:
        x = _distributed(inputs[0], device_mesh, input_layouts)
        if x.placements == desired_input_layouts:
            return x
        return _gather_for(mod, x, torch.is_grad_enabled() and mod.weight.requires_grad)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _prepare_layer(self, module, device_mesh)
        return super()._apply(module, device_mesh)


class Float8RowwiseParallel(RowwiseParallel):
    """``RowwiseParallel`` for a converted layer. The output's gradient is gathered in FP8.

    Partial sums are reduced in the output's dtype. With sharded `output_layouts` (sequence
    parallelism), the gradient is quantized and gathered in the backward. Recipes with one scale per
    row of the weight gather it in high precision.

    Arguments, as in torch's class:

    - ``input_layouts``: placement of the input, Shard(-1) by default, or Replicate().
    - ``output_layouts``: Replicate() by default, or Shard of any dimension but the last.
    - ``use_local_output``: unchanged.

    Raises:
        ValueError: the module is not a converted layer.
        UnsupportedError: the input's placement requires a collective in high precision.
    """

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: Any, inputs: Any, device_mesh: Any
    ) -> Any:
        x = _distributed(inputs[0], device_mesh, input_layouts)
        if x.placements[0].is_replicate():
            return x.redistribute(placements=desired_input_layouts)
        if not x.placements[0].is_shard(x.ndim - 1) and not x.placements[0].is_shard(-1):
            raise UnsupportedError(
                f"a row-parallel layer got an input with placement {x.placements[0]}, which would "
                "be redistributed in high precision. Supported are Shard(-1) and Replicate()"
            )
        return x

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _prepare_layer(self, module, device_mesh)
        cast(Float8Linear, module)._fp8_reduce = partial(_reduce, self.output_layouts[0])
        return super()._apply(module, device_mesh)


def _reduce(layout: Placement, layer: Float8Linear, y: DTensor) -> DTensor:
    """Reduce the partial sums of a row-parallel layer.

    With one scale per row of the weight, the gradient is gathered in high precision: the row scales
    are multiplied into it before it is quantized, and they differ between ranks. It is also
    gathered in high precision if dgrad or wgrad runs in high precision.
    """
    spec = spec_for(layer._fp8_state.key, y.device)
    needs_weight = torch.is_grad_enabled() and layer.weight.requires_grad
    in_high_precision = (
        prefers_high_precision(spec, y)
        or spec.weight.format.per_row
        or spec.high_precision[DGRAD]
        or (needs_weight and spec.high_precision[WGRAD])
    )
    if not isinstance(layout, Shard) or in_high_precision:
        return y.redistribute(placements=[layout])
    return reduce_output(y, layout.dim, _operand(layer, GRAD, needs_weight))


class PrepareFloat8ModuleInput(PrepareModuleInput):
    """``PrepareModuleInput`` that quantizes and gathers an input once for all layers of a module.

    Floating-point inputs that go from Shard to Replicate() are quantized by the recipe of the
    module's column-parallel FP8 layers and gathered in FP8, once for q, k and v, or for w1 and w3.
    Other inputs are redistributed as in torch's class.

    Args:
        float8_dtype: torch.float8_e4m3fn, the dtype of inputs in every recipe.
        fwd_config_submodule_fqn: the layer whose recipe is used, and whose scale with delayed
            scaling. The first column-parallel layer by default.
        layouts: the arguments of torch's class. With ``use_local_output``, each layer reduces its
            input's gradient.

    Raises:
        ValueError: `float8_dtype` is another one, the module has no such layer, or its layers have
            several recipes.
        UnsupportedError: in the forward: an input requires a collective in high precision.
    """

    def __init__(
        self,
        *,
        float8_dtype: torch.dtype = torch.float8_e4m3fn,
        fwd_config_submodule_fqn: str | None = None,
        **layouts: Any,
    ) -> None:
        super().__init__(**layouts)
        if float8_dtype != torch.float8_e4m3fn:
            raise ValueError(f"float8_dtype must be torch.float8_e4m3fn, not {float8_dtype}")
        self.fwd_config_submodule_fqn = fwd_config_submodule_fqn

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names = []
        for name, layer in module.named_modules():
            if isinstance(layer, Float8Linear):
                names.append(name)
        config_fqn = self.fwd_config_submodule_fqn
        if config_fqn is not None:
            if config_fqn not in names:
                raise ValueError(f"fwd_config_submodule_fqn {config_fqn!r} is not one of {names}")
            names = [config_fqn]

        recipe_keys = {layer._fp8_state.key for layer in _layers(module, names)}
        if len(recipe_keys) != 1:
            raise ValueError(
                f"{type(self).__name__} requires a module whose FP8 layers have one recipe, but "
                f"{names} have {len(recipe_keys)}. Choose a layer with fwd_config_submodule_fqn"
            )
        allow_in_graph(gather_input)
        # By name, because copies of the module share this hook.
        module.register_forward_pre_hook(
            partial(self._prepare, names, device_mesh), with_kwargs=True
        )
        return module

    def _prepare(
        self, names: list[str], mesh: DeviceMesh, module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Run as the module's forward pre-hook."""
        if self.input_layouts is not None:
            if len(args) != len(self.input_layouts):
                raise ValueError(
                    f"the module was called with {len(args)} inputs, but input_layouts has "
                    f"{len(self.input_layouts)}"
                )
            desired_layouts = cast(Any, self.desired_input_layouts)
            new_args = []
            for x, layout, desired in zip(args, self.input_layouts, desired_layouts, strict=True):
                new_args.append(self._input(names, mesh, module, x, layout, desired))
            args = tuple(new_args)

        new_kwargs = dict(kwargs)
        for name, layout in self.input_kwarg_layouts.items():
            if name in kwargs:
                desired = self.desired_input_kwarg_layouts.get(name)
                new_kwargs[name] = self._input(names, mesh, module, kwargs[name], layout, desired)
        return args, new_kwargs

    def _input(
        self,
        names: list[str],
        mesh: DeviceMesh,
        module: nn.Module,
        x: Any,
        layout: Placement | None,
        desired: Placement | None,
    ) -> Any:
        """Return an input in its desired layout. ``names`` are the layers that read it."""
        if layout is None or x is None:
            return x
        x = _distributed(x, mesh, (layout,))
        if desired is not None and x.placements != (desired,):
            placement = x.placements[0]
            if x.dtype not in INPUT_DTYPES or placement.is_replicate():
                x = x.redistribute(placements=(desired,))
            elif desired.is_replicate():
                x = self._gather(names, module, x)
            else:
                raise UnsupportedError(
                    f"an input that goes from {placement} to {desired} would be "
                    "redistributed in high precision. Supported is Shard to Replicate(). "
                    "Otherwise use torch's style"
                )
        return x.to_local() if self.use_local_output else x

    def _gather(self, names: list[str], module: nn.Module, x: DTensor) -> DTensor:
        """Quantize and gather an input by the recipe of the first of the layers that read it."""
        layers = _layers(module, names)
        if self.fwd_config_submodule_fqn is None:
            layers = [layer for layer in layers if _is_column_parallel(layer)]
        if not layers:
            raise ValueError(f"{type(self).__name__}: none of {names} is column-parallel")
        is_trained = any(layer.weight.requires_grad for layer in layers)
        columnwise = torch.is_grad_enabled() and is_trained
        return _gather_for(layers[0], x, columnwise)


def _layers(module: nn.Module, names: list[str]) -> list[Float8Linear]:
    return [cast(Float8Linear, module.get_submodule(name)) for name in names]


def _distributed(x: Any, mesh: DeviceMesh, layouts: Any) -> DTensor:
    """Return an input as a DTensor. A plain tensor is this rank's part."""
    if isinstance(x, DTensor):
        return x
    return DTensor.from_local(x, mesh, layouts, run_check=False)


def _is_column_parallel(layer: Any) -> bool:
    # Tensor parallelism is the last mesh dimension.
    placements: Any = getattr(layer.weight, "placements", ())
    return bool(placements) and placements[-1].is_shard(0)
