"""The linear layer as a pure function of tensors and one key, for eager and compiled code.

    y = x @ weight.T + bias

It reads and writes only its arguments. The key selects a `LinearSpec`, which describes the
quantization of the operands and the GEMMs, some of which may run in high precision. Each operand is
quantized by its own operator before the GEMM, so that a compiler merges equal calls of sibling
layers, which share their input.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8rs._torch import (
    allow_in_graph,
    depends_on_data,
    dispatch_when_traced,
    gradients_needed,
    has_tangent,
    is_traced,
)
from fp8rs.gemm.estimates import is_measured
from fp8rs.gemm.operands import contracted_multiple, dgrad_column_scale, dgrad_operand
from fp8rs.gemm.table import scaled_mm
from fp8rs.model.input_cache import input_token, this_thread
from fp8rs.model.linear_spec import (
    DGRAD,
    FORWARD,
    GRAD,
    INPUT,
    WEIGHT,
    WGRAD,
    HighPrecision,
    LinearSpec,
    spec_for,
)
from fp8rs.ops.inductor import fuse_maxima
from fp8rs.quantize.cast import quantize_planes
from fp8rs.quantize.formats import BlockFormat
from fp8rs.quantize.planes import Plane, Planes
from fp8rs.quantize.spec import QuantSpec
from fp8rs.tensor.quantized import QuantizedTensor

from .backward import gathered_weight, read_weight, refuse_double_backward
from .grouped_function import gated_mlp, grouped
from .high_precision import (
    high_precision_dgrad,
    high_precision_linear,
    high_precision_wgrad,
    values_of,
)
from .observe import OperandStats

_amax = torch.ops.fp8rs.amax.default
_note_amax = torch.ops.fp8rs._note_amax.default
_unsafe_view = torch.ops.aten._unsafe_view.default


class DelayedSlots(NamedTuple):
    """A layer's scales and amaxes of delayed scaling, and how one call uses them.

    Attributes:
        scales: the scales of weight, input and gradient; fp32, one element each, 0 before the first
            scale.
        amaxes: the slots that are raised to the finite amaxes of weight, input and gradient, and
            one that is never read; fp32, one element each.
        ready: which scales are known not to be 0. Other operands are read for their amax.
        record: whether amaxes are written.
    """

    scales: tuple[Tensor, ...]
    amaxes: tuple[Tensor, ...]
    ready: tuple[bool, bool, bool]
    record: bool

    def scale_of(self, role: int, x: Tensor, spec: QuantSpec) -> Tensor:
        """Return the scale of an operand: the slot's, or one computed from ``x`` if it is 0."""
        scale = self.scales[role]
        if self.ready[role]:
            return scale
        return torch.where(scale > 0, scale, spec.scale_from_amax(_amax(x)))

    def amax_of(self, role: int) -> Tensor:
        """Return the slot for the amax of an operand."""
        return self.amaxes[role if self.record else -1]


@dataclass(eq=False, slots=True)
class LinearCall:
    """The arguments of one call of the linear layer that are not tensors to differentiate.

    Attributes:
        spec: how operands are quantized and multiplied.
        out_dtype: dtype of the output.
        delayed: the slots of delayed scaling, or None for other recipes.
        stats: accumulates statistics of the operands, or None.
    """

    spec: LinearSpec
    out_dtype: torch.dtype
    delayed: DelayedSlots | None = None
    stats: OperandStats | None = None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    key: str,
    out_dtype: torch.dtype,
    delayed: DelayedSlots | None = None,
) -> Tensor:
    """Compute x @ weight.T + bias on quantized operands. Differentiable once.

    Args:
        x: (..., in), fp32, bf16 or fp16, or a QuantizedTensor in the recipe's format for inputs.
        weight: (out, in), in high precision or a QuantizedTensor.
        bias: (out,) or None.
        key: the key of the `LinearSpec` (`fp8rs.model.linear_spec.register`).
        out_dtype: dtype of y. Gradients have the dtypes of their tensors.
        delayed: with delayed scaling, the layer's slots.

    Raises:
        ValueError: an operand lacks a plane, or a quantized input is in another format than the
            recipe's.
        UnsupportedError: the device cannot run the recipe.
    """
    if delayed is None:
        call = _plain_call(key, x.device, out_dtype)
    else:
        call = linear_call(key, x.device, out_dtype, delayed)
    return run_linear(x, weight, bias, call)


def linear_call(
    key: str,
    device: torch.device,
    out_dtype: torch.dtype,
    delayed: DelayedSlots | tuple[Any, ...] | None = None,
    stats: OperandStats | None = None,
    high_precision: HighPrecision | None = None,
) -> LinearCall:
    """Return the `LinearCall` of a key on a device.

    Args:
        key: the key of the `LinearSpec`.
        device: the device.
        out_dtype: dtype of the output.
        delayed: with delayed scaling, the layer's slots.
        stats: accumulates statistics of the operands, or None.
        high_precision: whether each GEMM runs in high precision, besides those of the recipe.
    """
    if delayed is None and stats is None and high_precision is None:
        return _plain_call(key, device, out_dtype)
    if delayed is not None and not isinstance(delayed, DelayedSlots):
        delayed = DelayedSlots(*delayed)  # in a graph named tuples arrive as plain tuples
    spec = spec_for(key, device)
    if high_precision is not None:
        spec = spec.with_high_precision(high_precision)
    return LinearCall(spec, out_dtype, delayed, stats)


@functools.lru_cache(maxsize=256)
def _plain_call(key: str, device: torch.device, out_dtype: torch.dtype) -> LinearCall:
    """Return the call of layers without delayed scaling, which is the same in every step."""
    return LinearCall(spec_for(key, device), out_dtype)


def run_linear(x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
    """Compute `linear` with arguments from `linear_call`."""
    if prefers_high_precision(call.spec, x):
        return high_precision_linear(x, weight, bias, call.out_dtype)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        # One object for everything but the tensors: an argument costs a third of a microsecond.
        out: Tensor = _Linear.apply(x, weight, bias, call)
        return out
    if has_tangent(x, weight, bias):  # the operators would drop it
        raise RuntimeError(
            "FP8 linear layers do not support forward-mode differentiation (torch.func.jvp, "
            "jacfwd): apply it before the conversion"
        )
    y, _, _ = _forward(call, x, weight, bias, False)
    return y


def prefers_high_precision(spec: LinearSpec, x: Tensor) -> bool:
    """Return whether all GEMMs of an input run in high precision, because it has few tokens.

    A graph has a guard on the comparison, and so at most two versions. An input that is quantized
    already, and one whose size a compiler does not know, have FP8 GEMMs.

    Args:
        spec: the spec of the layer.
        x: the layer's input or output, (..., features).
    """
    if not spec.min_tokens or not is_measured(x.device.type):
        return False
    if isinstance(x, QuantizedTensor):
        return False
    tokens = math.prod(x.shape[:-1])  # Size.numel would specialize a symbolic size
    return not depends_on_data(tokens) and tokens < spec.min_tokens


@functools.cache
def prepare_compilers() -> None:
    """Allow compilers to put the layers' functions into graphs, and Inductor to fuse quantization.

    Called when a layer is created, because it imports both, which takes two seconds.
    """
    for function in (linear, grouped, gated_mlp):
        allow_in_graph(function)
    dispatch_when_traced(torch._grouped_mm)  # for `fp8rs.nn.expert_modules.GroupedGemms`
    fuse_maxima()


# --- operands -------------------------------------------------------------------------------------


def _quantize(
    spec: QuantSpec,
    role: int,
    x: Tensor,
    rowwise: bool,
    columnwise: bool,
    delayed: DelayedSlots | None,
    column_scale: Tensor | None = None,
) -> Planes:
    """Return the planes of an operand as one matrix."""
    values = _pad_tokens(x, spec) if columnwise else x
    if delayed is None:
        row, col = quantize_planes(spec, values, rowwise, columnwise, column_scale=column_scale)
    else:
        scale = delayed.scale_of(role, x, spec)
        amax = delayed.amax_of(role)
        row, col = quantize_planes(spec, values, rowwise, columnwise, scale=scale, amax=amax)

    if row is not None:
        row.data = row.matrix
        if values is not x:
            row = row.first_rows(math.prod(x.shape[:-1]))
    return row, col


def _pad_tokens(x: Tensor, spec: QuantSpec) -> Tensor:
    """Return ``x``, or a 2-D copy padded with zero tokens to the multiple that wgrad requires.

    GEMMs require multiples of 16 tokens or whole blocks. Padding before quantization is cheaper
    than unaligned codes, which the GEMM would have to copy. A graph with a symbolic number of
    tokens always copies.
    """
    multiple = contracted_multiple(spec.format, x.device)
    tokens = math.prod(x.shape[:-1])  # Size.numel would specialize a symbolic size
    if multiple == 1 or (isinstance(tokens, int) and tokens % multiple == 0):
        return x
    # Append as many zeros as any number of tokens needs, and cut off what this one does not need. A
    # graph would depend on whether the exact number is 0. Selective checkpointing may cache the
    # zeros, so nothing is written to them.
    zeros = x.new_zeros((multiple - 1, x.shape[-1]))
    padded = torch.cat([x.reshape(tokens, x.shape[-1]), zeros])
    missing = -tokens % multiple
    # A slice would get a symbolic size of its own if the number of tokens depends on data.
    return padded.narrow(0, 0, tokens + missing)


def _pad_to_longer(a: Plane, b: Plane) -> tuple[Plane, Plane]:
    """Pad the operand with fewer tokens. An input that was passed quantized is not padded."""
    difference = b.data.shape[1] - a.data.shape[1]
    if difference > 0:
        a = a.with_columns(difference)
    elif difference < 0:
        b = b.with_columns(-difference)
    return a, b


# --- the input ------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _InputPlanes:
    """The planes of an input.

    Attributes:
        row: the rowwise plane, for the forward. With delayed scaling, its scale may be a copy that
            was made by the operator that records the amax for this layer.
        col: the columnwise plane, for wgrad. None unless it was requested.
        scale: the scale of the values.
    """

    row: Plane
    col: Plane | None
    scale: Tensor


def _quantize_input(call: LinearCall, x: Tensor, weight_id: int, columnwise: bool) -> _InputPlanes:
    """Return the input's planes, columnwise only if requested."""
    if isinstance(x, QuantizedTensor):
        return _planes_of_quantized_input(call, x, columnwise)

    spec = call.spec
    delayed = call.delayed
    record = None if delayed is None else delayed.record
    cache = this_thread.input_cache
    token = input_token(x, (spec.input, spec.wgrad_input, record))

    # Another layer may have quantized this input.
    cached = cache.get(token, weight_id)
    if cached is not None:
        row, col = cached.planes
        if row is not None and (not columnwise or col is not None or row.format.square):
            if columnwise and col is None:
                col = row.transposed("columnwise", "wgrad")
                cached.planes = row, col
            cached.users.add(weight_id)
            scale = row.scale
            if delayed is not None and delayed.record:
                # Record the amax that the layer which quantized the input has recorded.
                recorded_scale = _note_amax(scale, cached.amax, delayed.amax_of(INPUT))
                row = Plane(row.data, recorded_scale, row.format)
            return _InputPlanes(row, col if columnwise else None, scale)

    if columnwise and spec.wgrad_input is not None:
        row, _ = _quantize(spec.input, INPUT, x, True, False, delayed)
        _, col = _quantize(spec.wgrad_input, INPUT, x, False, True, delayed)
    else:
        row, col = _quantize(spec.input, INPUT, x, True, columnwise, delayed)
    planes = row, col
    cache.put(x, token, planes, None if delayed is None else delayed.amax_of(INPUT), weight_id)

    assert row is not None
    return _InputPlanes(row, col, row.scale)


def _planes_of_quantized_input(
    call: LinearCall, x: QuantizedTensor, columnwise: bool
) -> _InputPlanes:
    """Return the planes of an input that the caller quantized.

    Raises:
        ValueError: it is not in the recipe's format for inputs.
    """
    delayed = call.delayed
    _check_quantized_input(call.spec, x)
    row = x.plane("rowwise", "a linear layer's forward")
    col = None
    if columnwise:
        col = x.columnwise or row.transposed("columnwise", "wgrad")

    scale = row.scale
    recorded_scale = scale
    if delayed is not None and delayed.record:
        input_slots = x._storage.delayed
        assert input_slots is not None
        recorded_scale = _note_amax(scale, input_slots[1], delayed.amax_of(INPUT))
    return _InputPlanes(Plane(row.matrix, recorded_scale, row.format), col, scale)


def _check_quantized_input(spec: LinearSpec, x: QuantizedTensor) -> None:
    required = spec.input
    if spec.delayed and x._storage.delayed is None:
        reason = "the recipe has delayed scaling, whose history records each input"
    elif spec.wgrad_input is not None:
        reason = "the recipe quantizes it in one format for the forward and in another for wgrad"
    elif (x.format, x.fp8_dtype) != (required.format, required.fp8_dtype):
        reason = (
            f"on this device the recipe requires {required.format.name!r} of {required.fp8_dtype}"
        )
    else:
        return
    raise ValueError(
        f"input is a quantized tensor in format {x.format.name!r} of {x.fp8_dtype}, but {reason}: "
        "pass input.dequantize()"
    )


def _quantize_saved_input(
    ctx: Any, x: Tensor, scale: Tensor | None, ordering_token: Tensor
) -> Plane:
    """Quantize a saved input columnwise, with the scale of the forward if it has one per tensor.

    Layers with the same input share the plane, as in the forward. They do not if hooks on saved
    tensors (checkpointing, offloading) return a different tensor for each layer.

    Args:
        ctx: the context of `_Linear`.
        x: (..., in), the saved input.
        scale: the input's scale in the forward, or None.
        ordering_token: a tensor that exists only in the backward.
    """
    spec: LinearSpec = ctx.call.spec
    quant_spec = spec.wgrad_input or spec.input
    cache = this_thread.input_cache
    key = (quant_spec, None if scale is None else id(scale), ctx.cache_generation)
    token = input_token(x, key)

    cached = cache.get(token, ctx.weight_id)
    if cached is not None:
        cached.users.add(ctx.weight_id)
        _, col = cached.planes
    else:
        values = _recompute_in_backward(x, ordering_token) if is_traced(x) else x
        values = _pad_tokens(values, quant_spec)
        planes = quantize_planes(quant_spec, values, False, True, scale=scale)
        cache.put(x, token, planes, None, ctx.weight_id)
        _, col = planes
    assert col is not None
    return col


def _recompute_in_backward(x: Tensor, ordering_token: Tensor) -> Tensor:
    """Return ``x`` in a form that a compiler recomputes in the backward.

    Custom operators and GEMMs need materialized inputs, so the partitioner would save ``x`` instead
    of recomputing it. A ``where`` that depends on a tensor of the backward is pointwise. The
    compiler fuses it with the producer of ``x`` in the backward.
    """
    if ordering_token.shape[-1] == 0:
        return x
    column = ordering_token[..., :1]
    return torch.where(column == column, x, x)


# --- the layer ------------------------------------------------------------------------------------


def _forward(
    call: LinearCall, x: Tensor, weight: Tensor, bias: Tensor | None, columnwise: bool
) -> tuple[Tensor, _InputPlanes, Plane]:
    """Return the output, the input's planes and the weight's rowwise plane.

    The operands are quantized even if the forward's GEMM runs in high precision, because dgrad and
    wgrad use their scales and histories record their amaxes.
    """
    spec = call.spec
    input = _quantize_input(call, x, id(weight), columnwise)
    if isinstance(weight, QuantizedTensor):
        w_row = weight.plane("rowwise", "a linear layer's forward")
    else:
        quantized, _ = _quantize(spec.weight, WEIGHT, weight, True, False, call.delayed)
        assert quantized is not None
        w_row = quantized
    if call.stats is not None:
        input.row = call.stats.add(INPUT, x, input.row)
        w_row = call.stats.add(WEIGHT, weight, w_row)

    if spec.high_precision[FORWARD]:
        cast_bias = None if bias is None else bias.to(call.out_dtype)
        x_values = values_of(x, call.out_dtype)
        y = F.linear(x_values, values_of(weight, call.out_dtype), cast_bias)
        return y, input, w_row

    y = scaled_mm(
        input.row,
        w_row,
        bias=bias,
        out_dtype=call.out_dtype,
        use_fast_accum=spec.fast_accumulation[FORWARD],
        emulate=spec.emulate,
    )
    shape = x.shape
    if len(shape) != 2:
        # Autograd forbids in-place operations on views that a Function returns.
        y = _unsafe_view(y, [*shape[:-1], w_row.data.shape[0]])
    return y, input, w_row


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall
    ) -> Tensor:
        needs_x, needs_w = ctx.needs_input_grad[:2]
        spec = call.spec
        fp8_wgrad = needs_w and not spec.high_precision[WGRAD]
        save_input = spec.save_input
        if save_input is None:
            # A compiler may recompute the input in the backward, and then saves nothing.
            save_input = is_traced(x)
        save_codes = fp8_wgrad and (not save_input or isinstance(x, QuantizedTensor))
        y, input, w_row = _forward(call, x, weight, bias, save_codes)

        # The input for wgrad, as a plain tensor, which checkpointing and offloading hooks support.
        saved_x: Tensor | None = None
        x_scale: Tensor | None = None
        x_format: BlockFormat | None = None
        if save_codes:
            assert input.col is not None
            saved_x = input.col.data
            x_scale = input.col.scale
            x_format = input.col.format
        elif fp8_wgrad:
            # The backward quantizes the input again, with the scale of the forward.
            saved_x = x
            if input.row.format.per_tensor:
                x_scale = input.scale
        elif needs_w:
            saved_x = values_of(x, call.out_dtype)

        # The weight for dgrad. Autograd saves a plain weight only (`fp8rs.nn.backward`).
        saved_weight: Tensor | None = None
        w_scale: Tensor | None = None
        gathered = gathered_weight(weight)
        if needs_x and gathered is None:
            saved_weight = weight
            if not spec.high_precision[DGRAD]:
                w_scale = w_row.scale
        ctx.save_for_backward(saved_x, x_scale, saved_weight, w_scale)

        ctx.call = call
        ctx.gathered_weight = gathered
        ctx.x_format = x_format
        ctx.x_shape = x.shape
        ctx.x_dtype = x.dtype
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        # The layer and its forward, for the cache of quantized inputs.
        ctx.weight_id = id(weight)
        ctx.cache_generation = this_thread.input_cache.generation
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("FP8 linear layers")
        call: LinearCall = ctx.call
        spec = call.spec
        saved_x, x_scale, weight, w_scale = ctx.saved_tensors
        needs_x, needs_w, needs_bias, _ = gradients_needed(ctx)
        if needs_x:
            weight = read_weight(ctx.gathered_weight, weight, "a linear layer")

        fp8_dgrad = needs_x and not spec.high_precision[DGRAD]
        fp8_wgrad = needs_w and not spec.high_precision[WGRAD]

        # dgrad multiplies the rowwise plane of the gradient, wgrad the columnwise one.
        dy_row: Plane | None = None
        dy_col: Plane | None = None
        column_scale = None
        ordering_token = dy
        if isinstance(dy, QuantizedTensor):
            # Tensor parallelism gathered it and recorded its amax.
            assert not needs_bias  # the bias is added after tensor parallelism's reduction
            if fp8_dgrad and dy.rowwise is not None:
                row = dy.rowwise
                dy_row = Plane(row.matrix, row.scale, row.format)
            if fp8_wgrad:
                dy_col = dy.columnwise
            ordering_token = dy.any_plane().data.view(torch.uint8)
        elif fp8_dgrad or fp8_wgrad:
            if fp8_dgrad:
                column_scale = _weight_column_scale(spec, weight, w_scale)
            dy_row, dy_col = _quantize(
                spec.grad, GRAD, dy, fp8_dgrad, fp8_wgrad, call.delayed, column_scale
            )
        if call.stats is not None:
            dy_row, dy_col = call.stats.add_gradient(dy, dy_row, dy_col, column_scale)

        dx = dw = db = None
        if dy_row is not None:
            dx = scaled_mm(
                dy_row,
                _weight_for_dgrad(spec, weight, w_scale, ordering_token),
                out_dtype=ctx.x_dtype,
                use_fast_accum=spec.fast_accumulation[DGRAD],
                emulate=spec.emulate,
            )
            if len(ctx.x_shape) != 2:
                dx = _unsafe_view(dx, list(ctx.x_shape))
        elif needs_x and not fp8_dgrad:
            dx = high_precision_dgrad(dy, weight, call.out_dtype).to(ctx.x_dtype)

        if dy_col is not None:
            if ctx.x_format is not None:
                x_col = Plane(saved_x, x_scale, ctx.x_format)
            else:
                x_col = _quantize_saved_input(ctx, saved_x, x_scale, ordering_token)
            dy_col, x_col = _pad_to_longer(dy_col, x_col)
            dw = scaled_mm(
                dy_col,
                x_col,
                out_dtype=ctx.weight_dtype,
                use_fast_accum=spec.fast_accumulation[WGRAD],
                emulate=spec.emulate,
            )
        elif needs_w and not fp8_wgrad:
            if is_traced(saved_x):
                saved_x = _recompute_in_backward(saved_x, ordering_token)
            dw = high_precision_wgrad(dy, saved_x, call.out_dtype).to(ctx.weight_dtype)

        if needs_bias:
            rows = dy.flatten(0, -2) if dy.dim() > 1 else dy.unsqueeze(0)
            db = rows.sum(0, dtype=ctx.bias_dtype)
        return dx, dw, db, None


def _weight_for_dgrad(
    spec: LinearSpec, weight: Tensor, scale: Tensor | None, ordering_token: Tensor
) -> Plane:
    """Return the weight's plane for dgrad.

    It is computed in the backward, after ``ordering_token``. Saved from the forward, the planes of
    all layers would be in memory at once. A high-precision weight is quantized again with the
    forward's scale.
    """
    if isinstance(weight, QuantizedTensor):
        col = weight.columnwise
        if col is not None and not col.format.per_row:
            return col
        return dgrad_operand(weight.plane("rowwise", "dgrad"), spec.emulate, ordering_token)

    quant_spec = spec.weight
    if quant_spec.format.per_row:
        row, _ = quantize_planes(quant_spec, weight, True, False, after=ordering_token)
        assert row is not None
        return dgrad_operand(row, spec.emulate, ordering_token)

    if not quant_spec.format.per_tensor:
        scale = None
    _, col = quantize_planes(quant_spec, weight, False, True, scale=scale, after=ordering_token)
    assert col is not None
    return col


def _weight_column_scale(spec: LinearSpec, weight: Tensor, scale: Tensor | None) -> Tensor | None:
    """Return the column scale, (1, out_features), for the gradient that dgrad quantizes, or None.

    If the weight has one scale per row, these scales are multiplied into the gradient, so that the
    rowwise plane of the weight is enough for dgrad.
    """
    if isinstance(weight, QuantizedTensor):
        row = weight.rowwise
        return None if row is None else dgrad_column_scale(row.format, row.scale)
    return None if scale is None else dgrad_column_scale(spec.weight.format, scale)
