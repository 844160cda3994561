"""The linear layer as a pure function of tensors and one key, for eager and compiled code.

    y = x @ weight.T + bias

It reads and writes only its arguments. The key selects a `LinearSpec`, which describes the
quantization of the operands and the GEMMs. Each operand is quantized by its own operator before the
GEMM, so that a compiler merges equal calls of sibling layers, which share their input.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fp8rs._torch import (
    allow_in_graph,
    dispatch_when_traced,
    gradients_needed,
    has_tangent,
    is_traced,
)
from fp8rs.gemm.operands import contracted_multiple, dgrad_column_scale, dgrad_operand
from fp8rs.gemm.table import scaled_mm
from fp8rs.model.input_cache import input_token, this_thread
from fp8rs.model.spec import GRAD, INPUT, WEIGHT, LinearSpec, spec_for
from fp8rs.ops.inductor import fuse_maxima
from fp8rs.quantize.cast import quantize_planes
from fp8rs.quantize.planes import Plane, Planes
from fp8rs.quantize.spec import QuantSpec
from fp8rs.tensor.quantized import QuantizedTensor

from .backward import gathered_weight, read_weight, refuse_double_backward
from .grouped import gated_mlp, grouped
from .observe import OperandStats

_amax = torch.ops.fp8rs.amax.default
_note_amax = torch.ops.fp8rs._note_amax.default
_unsafe_view = torch.ops.aten._unsafe_view.default


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    key: str,
    out_dtype: torch.dtype,
    scales: tuple[Tensor, ...] | None = None,
    amaxes: tuple[Tensor, ...] | None = None,
    ready: tuple[bool, bool, bool] = (False, False, False),
    record: bool = False,
    stats: OperandStats | None = None,
) -> Tensor:
    """Compute x @ weight.T + bias on quantized operands. Differentiable once.

    Args:
        x: (..., in), fp32, bf16 or fp16, or a QuantizedTensor in the recipe's format for inputs.
        weight: (out, in), in high precision or a QuantizedTensor.
        bias: (out,) or None.
        key: the key of the `LinearSpec` (`fp8rs.model.spec.register`).
        out_dtype: dtype of y. Gradients have the dtypes of their tensors.
        scales: with delayed scaling, the scales of weight, input and gradient; fp32, one element
            each, 0 before the first scale.
        amaxes: with delayed scaling, the slots that are raised to the finite amaxes of weight,
            input and gradient, and one that is never read; fp32, one element each.
        ready: which scales are known not to be 0. Other operands are read for their amax.
        record: whether amaxes are written.
        stats: accumulates statistics of the operands.

    Raises:
        ValueError: an operand lacks a plane, or a quantized input is in another format than the
            recipe's.
        UnsupportedError: the device cannot run the recipe.
    """
    spec = spec_for(key, x.device)
    delayed = None if scales is None or amaxes is None else _Delayed(scales, amaxes, ready, record)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        # One tuple for everything but the tensors: an argument costs a third of a microsecond.
        y: Tensor = _Linear.apply(x, weight, bias, (spec, out_dtype, delayed, stats))
        return y
    if has_tangent(x, weight, bias):  # the operators would drop it
        raise RuntimeError(
            "FP8 linear layers do not support forward-mode differentiation (torch.func.jvp, "
            "jacfwd): apply it before the conversion"
        )
    return _forward(spec, x, weight, bias, out_dtype, delayed, False, stats)[0]


@functools.cache
def prepare_compilers() -> None:
    """Allow compilers to put the layers' functions into graphs, and Inductor to fuse quantization.

    Called when a layer is created, because it imports both, which takes two seconds.
    """
    for function in (linear, grouped, gated_mlp):
        allow_in_graph(function)
    dispatch_when_traced(torch._grouped_mm)  # for `fp8rs.nn.experts.GroupedGemms`
    fuse_maxima()


@dataclass(eq=False, slots=True)
class _Delayed:
    """A layer's slots, and how this call uses them: see `linear`."""

    scales: tuple[Tensor, ...]
    amaxes: tuple[Tensor, ...]
    ready: tuple[bool, bool, bool]
    record: bool

    def scale(self, role: int, x: Tensor, spec: QuantSpec) -> Tensor:
        """Return the scale of an operand: the slot's, or one computed from ``x`` if it is 0."""
        scale = self.scales[role]
        if self.ready[role]:
            return scale
        return torch.where(scale > 0, scale, spec.scale_from_amax(_amax(x)))

    def amax(self, role: int) -> Tensor:
        """Return the slot for the amax of an operand."""
        return self.amaxes[role if self.record else -1]


def _quantize(
    spec: QuantSpec,
    role: int,
    x: Tensor,
    rowwise: bool,
    columnwise: bool,
    delayed: _Delayed | None,
    column_scale: Tensor | None = None,
) -> Planes:
    """Return the planes of an operand as one matrix."""
    values = _whole_blocks(x, spec) if columnwise else x
    if delayed is None:
        row, col = quantize_planes(spec, values, rowwise, columnwise, column_scale=column_scale)
    else:
        scale, amax = delayed.scale(role, x, spec), delayed.amax(role)
        row, col = quantize_planes(spec, values, rowwise, columnwise, scale=scale, amax=amax)
    if row is not None:
        row.data = row.matrix
        if values is not x:
            row = row.first_rows(math.prod(x.shape[:-1]))
    return row, col


def _whole_blocks(x: Tensor, spec: QuantSpec) -> Tensor:
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


def _as_long(a: Plane, b: Plane) -> tuple[Plane, Plane]:
    """Pad the operand with fewer tokens. An input that was passed quantized is not padded."""
    more = b.data.shape[1] - a.data.shape[1]
    if more == 0:
        return a, b
    return (a.with_columns(more), b) if more > 0 else (a, b.with_columns(-more))


# --- the input ------------------------------------------------------------------------------------


def _input_planes(
    spec: LinearSpec, x: Tensor, user: int, columnwise: bool, delayed: _Delayed | None
) -> tuple[Planes, Tensor]:
    """Return the input's planes, columnwise only if requested, and the scale of its values.

    With delayed scaling, a cached rowwise plane has a copy of that scale, made by the operator that
    records the amax for this layer.
    """
    if isinstance(x, QuantizedTensor):
        _check_quantized(spec, x)
        given = x.plane("rowwise", "a linear layer's forward")
        noted = scale = given.scale
        column = None
        if columnwise:
            column = x.columnwise or given.transposed("columnwise", "wgrad")
        if delayed is not None and delayed.record:
            known = x._storage.delayed
            assert known is not None
            noted = _note_amax(scale, known[1], delayed.amax(INPUT))
        return (Plane(given.matrix, noted, given.format), column), scale
    record = None if delayed is None else delayed.record
    cache, token = this_thread.input_cache, input_token(x, (spec.input, spec.wgrad_input, record))
    if (cached := cache.get(token, user)) is not None:
        row, col = cached.planes
        if row is not None and (not columnwise or col is not None or row.format.square):
            if columnwise and col is None:
                col = row.transposed("columnwise", "wgrad")
                cached.planes = row, col
            cached.users.add(user)
            scale = row.scale
            if delayed is not None and delayed.record:
                # Record the amax that the layer which quantized the input has recorded.
                noted = _note_amax(scale, cached.amax, delayed.amax(INPUT))
                row = Plane(row.data, noted, row.format)
            return (row, col if columnwise else None), scale
    both = columnwise and spec.wgrad_input is None
    planes = _quantize(spec.input, INPUT, x, True, both, delayed)
    if columnwise and spec.wgrad_input is not None:
        planes = planes[0], _quantize(spec.wgrad_input, INPUT, x, False, True, delayed)[1]
    cache.put(x, token, planes, None if delayed is None else delayed.amax(INPUT), user)
    return planes, cast(Plane, planes[0]).scale


def _check_quantized(spec: LinearSpec, x: QuantizedTensor) -> None:
    wanted = spec.input
    if spec.delayed and x._storage.delayed is None:
        why = "the recipe has delayed scaling, whose history records each input"
    elif spec.wgrad_input is not None:
        why = "the recipe quantizes it in one format for the forward and in another for wgrad"
    elif (x.format, x.fp8_dtype) != (wanted.format, wanted.fp8_dtype):
        why = f"on this device the recipe requires {wanted.format.name!r} of {wanted.fp8_dtype}"
    else:
        return
    raise ValueError(
        f"input is a quantized tensor in format {x.format.name!r} of {x.fp8_dtype}, but {why}: "
        "pass input.dequantize()"
    )


def _input_again(
    spec: LinearSpec, x: Tensor, scale: Tensor | None, forward: tuple[int, object], dy: Tensor
) -> Plane:
    """Quantize a saved input columnwise, with the scale of the forward if it has one per tensor.

    Layers with the same input share the plane, as in the forward. They do not if hooks on saved
    tensors (checkpointing, offloading) return a different tensor for each layer.

    Args:
        spec: the layer's spec.
        x: (..., in), the saved input.
        scale: the input's scale in the forward, or None.
        forward: the id of the weight, and the cache's generation in the forward.
        dy: (..., out), the gradient of the output.
    """
    quant = spec.wgrad_input or spec.input
    user, generation = forward
    key = (quant, None if scale is None else id(scale), generation)
    cache, token = this_thread.input_cache, input_token(x, key)
    if (cached := cache.get(token, user)) is not None:
        cached.users.add(user)
        return cast(Plane, cached.planes[1])
    values = _in_backward(x, dy) if is_traced(x) else x
    planes = quantize_planes(quant, _whole_blocks(values, quant), False, True, scale=scale)
    cache.put(x, token, planes, None, user)
    return cast(Plane, planes[1])


def _in_backward(x: Tensor, dy: Tensor) -> Tensor:
    """Return ``x`` in a form that a compiler recomputes in the backward.

    Custom operators need materialized inputs, so the partitioner would save ``x`` instead of
    recomputing it. A ``where`` that depends on ``dy`` is pointwise. The compiler fuses it with the
    producer of ``x`` in the backward.
    """
    if dy.shape[-1] == 0:
        return x
    known = dy[..., :1]
    return torch.where(known == known, x, x)


# --- the GEMMs ------------------------------------------------------------------------------------


def _forward(
    spec: LinearSpec,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    delayed: _Delayed | None,
    columnwise: bool,
    stats: OperandStats | None,
) -> tuple[Tensor, Planes, tuple[Tensor, Tensor]]:
    """Return the output, the input's planes, and the scales of input and weight."""
    (x_row, x_col), x_scale = _input_planes(spec, x, id(weight), columnwise, delayed)
    if isinstance(weight, QuantizedTensor):
        w_row = weight.plane("rowwise", "a linear layer's forward")
    else:
        w_row = cast(Plane, _quantize(spec.weight, WEIGHT, weight, True, False, delayed)[0])
    assert x_row is not None
    if stats is not None:
        x_row = stats.add(INPUT, x, x_row)
        w_row = stats.add(WEIGHT, weight, w_row)
    y = scaled_mm(
        x_row,
        w_row,
        bias=bias,
        out_dtype=out_dtype,
        use_fast_accum=spec.fast_accumulation[0],
        emulate=spec.emulate,
    )
    shape = x.shape
    if len(shape) != 2:
        # Autograd forbids in-place operations on views that a Function returns.
        y = _unsafe_view(y, [*shape[:-1], w_row.data.shape[0]])
    return y, (x_row, x_col), (x_scale, w_row.scale)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        how: tuple[LinearSpec, torch.dtype, _Delayed | None, OperandStats | None],
    ) -> Tensor:
        spec, out_dtype, delayed, stats = how
        needs_x, needs_w = ctx.needs_input_grad[:2]
        save_input = spec.save_input
        if save_input is None:
            save_input = is_traced(x)
        columnwise = needs_w and not (save_input and not isinstance(x, QuantizedTensor))
        y, (x_row, x_col), (row_scale, w_scale) = _forward(
            spec, x, weight, bias, out_dtype, delayed, columnwise, stats
        )
        # Save plain tensors, which checkpointing and offloading hooks support.
        gathered = gathered_weight(weight)
        saved_x = x_scale = saved_w = saved_w_scale = x_format = None
        if columnwise:
            assert x_col is not None
            saved_x, x_scale, x_format = x_col.data, x_col.scale, x_col.format
        elif needs_w:
            assert x_row is not None
            saved_x, x_scale = x, row_scale if x_row.format.per_tensor else None
        if needs_x and gathered is None:
            saved_w, saved_w_scale = weight, w_scale
        ctx.save_for_backward(saved_x, x_scale, saved_w, saved_w_scale)
        bias_dtype = None if bias is None else bias.dtype
        dtypes = x.dtype, weight.dtype, bias_dtype
        forward = id(weight), this_thread.input_cache.generation
        ctx.rest = spec, delayed, stats, gathered, x_format, x.shape, dtypes, forward
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("FP8 linear layers")
        spec: LinearSpec
        spec, delayed, stats, gathered, x_format, x_shape, dtypes, forward = ctx.rest
        x_dtype, weight_dtype, bias_dtype = dtypes
        saved_x, x_scale, weight, w_scale = ctx.saved_tensors
        needs_x, needs_w, needs_bias, _ = gradients_needed(ctx)
        dx = dw = db = None
        row = col = column_scale = None
        values = dy
        if needs_x:
            weight = read_weight(gathered, weight, "a linear layer")
        if isinstance(dy, QuantizedTensor):
            # Tensor parallelism gathered it and recorded its amax.
            row, col = dy.rowwise if needs_x else None, dy.columnwise if needs_w else None
            if row is not None:
                row = Plane(row.matrix, row.scale, row.format)
            assert not needs_bias  # the bias is added after tensor parallelism's reduction
            dy = dy.any_plane().data.view(torch.uint8)  # orders operators after it
        elif needs_x or needs_w:
            column_scale = _weight_column_scale(spec, weight, w_scale) if needs_x else None
            row, col = _quantize(spec.grad, GRAD, dy, needs_x, needs_w, delayed, column_scale)
        if stats is not None:
            row, col = stats.add_gradient(values, row, col, column_scale)
        if row is not None:
            dx = scaled_mm(
                row,
                _weight_for_dgrad(spec, weight, w_scale, dy),
                out_dtype=x_dtype,
                use_fast_accum=spec.fast_accumulation[1],
                emulate=spec.emulate,
            )
            if len(x_shape) != 2:
                dx = _unsafe_view(dx, list(x_shape))
        if col is not None:
            if x_format is not None:
                x_col = Plane(saved_x, x_scale, x_format)
            else:
                x_col = _input_again(spec, saved_x, x_scale, forward, dy)
            col, x_col = _as_long(col, x_col)
            dw = scaled_mm(
                col,
                x_col,
                out_dtype=weight_dtype,
                use_fast_accum=spec.fast_accumulation[2],
                emulate=spec.emulate,
            )
        if needs_bias:
            rows = dy.flatten(0, -2) if dy.dim() > 1 else dy.unsqueeze(0)
            db = rows.sum(0, dtype=bias_dtype)
        return dx, dw, db, None


def _weight_for_dgrad(spec: LinearSpec, weight: Tensor, scale: Tensor | None, dy: Tensor) -> Plane:
    """Return the weight's plane for dgrad.

    It is computed in the backward, after ``dy``. Saved from the forward, the planes of all layers
    would be in memory at once. A high-precision weight is quantized again with the forward's scale.
    """
    if isinstance(weight, QuantizedTensor):
        col = weight.columnwise
        if col is not None and not col.format.per_row:
            return col
        return dgrad_operand(weight.plane("rowwise", "dgrad"), spec.emulate, dy)
    if spec.weight.format.per_row:
        again, _ = quantize_planes(spec.weight, weight, True, False, after=dy)
        return dgrad_operand(cast(Plane, again), spec.emulate, dy)
    known = scale if spec.weight.format.per_tensor else None
    _, col = quantize_planes(spec.weight, weight, False, True, scale=known, after=dy)
    return cast(Plane, col)


def _weight_column_scale(spec: LinearSpec, weight: Tensor, scale: Tensor | None) -> Tensor | None:
    """Return the column scale, (1, out_features), for the gradient that dgrad quantizes, or None.

    If the weight has one scale per row, these scales are multiplied into the gradient, so that the
    rowwise plane of the weight is enough for dgrad.
    """
    if isinstance(weight, QuantizedTensor):
        row = weight.rowwise
        return None if row is None else dgrad_column_scale(row.format, row.scale)
    return None if scale is None else dgrad_column_scale(spec.weight.format, scale)
