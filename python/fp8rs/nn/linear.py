"""A linear layer whose three GEMMs run on FP8 operands."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fp8rs.gemm.table import scaled_mm
from fp8rs.quantize.recipes import Recipe, describe
from fp8rs.scaling.state import ModelState
from fp8rs.tensor.formats import INPUT_DTYPES
from fp8rs.tensor.quantized import Plane, QuantizedTensor


class Linear(torch.nn.Linear):
    """y = x @ weight.T + bias, with operands quantized as a recipe says.

    The parameters are those of torch.nn.Linear, in high precision. Forward, dgrad and wgrad run
    on FP8 operands; what is saved for the backward is the input's FP8 columnwise plane, not the
    input. The input may have any number of dims from one, and any sizes; its dtype (or
    autocast's) is the output's.

    Args:
        in_features, out_features, bias, device, dtype: as in torch.nn.Linear.
        recipe: a recipe or its short name.

    Layers that :func:`fp8rs.convert_to_float8_training` makes share one
    :class:`~fp8rs.scaling.state.ModelState`; a layer made by hand has its own.
    """

    _fp8_state: ModelState
    _fp8_index: int
    #: The dtype that autograd wanted the weight's gradient in when it last named one (FSDP may set
    #: one of its own). FSDP2 lets any through while a backward runs, where a reentrant checkpoint's
    #: forward finds it: the gradient keeps the dtype that it has without the checkpoint.
    _weight_grad_dtype: torch.dtype | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | str = "current",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._own(ModelState(recipe))

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, *, recipe: Recipe | str = "current") -> Linear:
        """A layer with the parameters (the same objects), hooks and mode of ``linear``."""
        if not isinstance(linear, torch.nn.Linear):
            raise TypeError(f"linear must be a torch.nn.Linear, not {type(linear).__name__}")
        state = ModelState(recipe)
        new = cls.__new__(cls)
        for name, value in linear.__dict__.items():
            new.__dict__[name] = value.copy() if isinstance(value, dict) else value
        new._own(state)
        return new

    def _own(self, state: ModelState) -> None:
        """Be the root and only layer of ``state``."""
        self._join(state, "")
        state.attach(self)
        state.alone = True

    def _join(self, state: ModelState, name: str) -> None:
        """Be one of the layers of ``state``, from now on."""
        self._fp8_state = state
        self._fp8_index = state.add_linear(self, name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._fp8_state.fp8_gather:
            # Pickles hold plain weights: without this one would be gathered in high precision.
            from fp8rs.fsdp.state_dicts import restore

            restore(self)

    @property
    def recipe(self) -> Recipe:
        """The recipe that the operands are quantized by."""
        return self._fp8_state.recipe

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features).

        Raises:
            ValueError: the last dim is not in_features, or the input is 0-d.
            TypeError: the input is not float32, bfloat16 or float16.
            UnsupportedError: the device cannot run the recipe.
        """
        weight, bias = self.weight, self.bias
        record = self._fp8_state.begin_layer()
        if torch.is_grad_enabled():
            needs_x, needs_w = input.requires_grad, weight.requires_grad
            if needs_x or needs_w or (bias is not None and bias.requires_grad):
                out = _LinearFunction.apply(input, weight, bias, self, needs_x, needs_w, record)
                return cast(Tensor, out)
        return _forward(self, input, weight, bias, False, record)[0]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={describe(self.recipe)}"


def _forward(
    layer: Linear, x: Tensor, weight: Tensor, bias: Tensor | None, needs_w: bool, record: bool
) -> tuple[Tensor, Plane | None, Tensor]:
    """The output, the input's columnwise plane where wgrad needs it, and the weight's scale."""
    shape = x.shape
    if not shape or shape[-1] != layer.in_features:
        raise ValueError(
            f"input has shape {tuple(shape)}, but its last dim must be {layer.in_features}"
        )
    dtype = x.dtype
    if dtype not in INPUT_DTYPES:
        raise TypeError(f"input must be float32, bfloat16 or float16, not {dtype}")
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)

    grad_dtype = getattr(weight, "grad_dtype", weight.dtype)
    if grad_dtype is not None and grad_dtype != layer._weight_grad_dtype:
        layer._weight_grad_dtype = grad_dtype

    state, index = layer._fp8_state, layer._fp8_index
    recipe = state.recipe
    x_row, x_col = state.quantize_input(index, x, needs_w, record)
    w_row = state.quantize_weight(index, weight, record)
    assert x_row is not None
    y = scaled_mm(
        x_row,
        w_row,
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=recipe.fast_accumulation[0],
        emulate=recipe.emulate,
    )
    if len(shape) != 2:
        y = y.view(*shape[:-1], layer.out_features)
    return y, x_col, w_row.scale


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: Linear,
        needs_x: bool,
        needs_w: bool,
        record: bool,
    ) -> Tensor:
        y, x_col, w_scale = _forward(layer, x, weight, bias, needs_w, record)
        ctx.layer = layer
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.weight_grad_dtype = layer._weight_grad_dtype or weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        # Saved are plain tensors, as checkpointing and offloading hooks know them. A gathered
        # weight is not among them: FSDP frees and refills its planes, and only it may keep them.
        ctx.gathered = weight if isinstance(weight, QuantizedTensor) else None
        saved: list[Tensor | None] = [None, None, None, None]
        ctx.x_format = None
        if needs_w:
            assert x_col is not None
            ctx.x_format = x_col.format
            saved[:2] = x_col.data, x_col.scale
        if needs_x and ctx.gathered is None:
            saved[2:] = weight, w_scale
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "fp8rs.nn.Linear has no double backward: "
                "call backward or torch.autograd.grad without create_graph=True"
            )
        x_codes, x_scale, weight, w_scale = ctx.saved_tensors
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        state, index = ctx.layer._fp8_state, ctx.layer._fp8_index
        recipe = state.recipe
        dx = dw = db = None
        row = col = None
        if needs_x or needs_w:
            if ctx.gathered is not None:
                weight = ctx.gathered
            fold = state.weight_fold(index, weight, w_scale) if needs_x else None
            row, col = state.quantize_grad(index, dy, needs_x, needs_w, fold)
        if row is not None:
            dx = scaled_mm(
                row,
                state.weight_columnwise(index, weight, w_scale),
                out_dtype=ctx.x_dtype,
                use_fast_accum=recipe.fast_accumulation[1],
                emulate=recipe.emulate,
            ).view(ctx.x_shape)
        if col is not None:
            dw = scaled_mm(
                col,
                Plane(x_codes, x_scale, ctx.x_format),
                out_dtype=ctx.weight_grad_dtype,
                use_fast_accum=recipe.fast_accumulation[2],
                emulate=recipe.emulate,
            )
        if needs_bias:
            db = dy.reshape(-1, dy.shape[-1]).sum(0, dtype=ctx.bias_dtype)
        return dx, dw, db, None, None, None, None
