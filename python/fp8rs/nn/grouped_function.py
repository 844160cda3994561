"""The grouped linear layer of mixture-of-experts models, as pure functions of tensors and one key.

    y[i] = x[i] @ weight[g].T + bias[g]    for each row i of group g

Rows of one group are consecutive. With FP8 GEMMs, inputs and gradients are quantized with a scale
per row for forward and dgrad, and with a scale per column of each group for wgrad. A weight has one
scale per expert, or one per row with a rowwise recipe. Codes are E4M3, because grouped FP8 GEMMs on
Hopper support no other format. A gathered weight's codes are used as they are.

Without FP8 GEMMs, the GEMMs run in the dtype of ``x`` on the dequantized weight. This is the case
if the caller chooses it, for recipes whose weights have blocks or are MXFP8, and on GPUs other than
Hopper. wgrad alone can also run in the dtype of ``x``, which is then saved for the backward instead
of codes. It always does with a recipe that runs wgrad in high precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from fp8rs._torch import autocast_dtype, gradients_needed
from fp8rs.gemm import estimates
from fp8rs.gemm.grouped import ALIGNMENT, MAX_GROUPS, has_grouped_gemm, reads_format
from fp8rs.model.linear_spec import GroupedSpec, grouped_spec_for
from fp8rs.quantize.cast import quantize_planes
from fp8rs.quantize.formats import INPUT_DTYPES
from fp8rs.quantize.spec import QuantSpec
from fp8rs.tensor.quantized import QuantizedTensor

from .backward import check_has_memory, gathered_weight, read_weight, refuse_double_backward

#: Which GEMMs of a weight run on FP8 operands: all ("fp8"), none ("gather"), or those that
#: `fp8rs.gemm.estimates` finds faster for the number of rows ("auto").
Gemms = Literal["auto", "fp8", "gather"]

_E4M3 = torch.float8_e4m3fn
_combine_rows = torch.ops.fp8rs.combine_rows.default
_group_bounds = torch.ops.fp8rs.group_bounds.default
_grouped_mm = torch.ops.fp8rs.grouped_mm.default
_grouped_mm_plain = torch.ops.fp8rs.grouped_mm_plain.default
_grouped_wgrad = torch.ops.fp8rs.grouped_wgrad.default
_quantize_gated = torch.ops.fp8rs.quantize_gated.default
_quantize_groups = torch.ops.fp8rs.quantize_groups.default
_transpose = torch.ops.fp8rs.transpose.default


class GroupBounds(NamedTuple):
    """Where groups end.

    Attributes:
        ends: int32 (E,), the row after the last one of each group.
        padded_ends: int32 (E,), the same with each group padded to the multiple that wgrad
            requires.
    """

    ends: Tensor
    padded_ends: Tensor


def bounds_of(offs: Tensor, x: Tensor) -> GroupBounds:
    """Check ``offs``, int32 (E,), which are offsets into the rows of ``x``. Return the bounds."""
    return GroupBounds(*_group_bounds(offs.contiguous(), x))


def grouped(
    x: Tensor,
    weight: Tensor,
    bounds: GroupBounds,
    bias: Tensor | None,
    key: str,
    transposed: bool = False,
    gemms: Gemms = "fp8",
    zero_tail: bool = True,
) -> Tensor:
    r"""Compute the grouped linear layer. Differentiable once.

    Args:
        x: (rows, in), float32, bfloat16 or float16.
        weight: (E, out, in) or (E, \*, in), in high precision or a QuantizedTensor, as it is
            stored. If ``transposed``, (E, in, out).
        bounds: where the groups end.
        bias: (E, out) or None.
        key: the key of a recipe (`fp8rs.model.linear_spec.register`).
        transposed: whether the matrices are stored transposed.
        gemms: which GEMMs run on FP8 operands, if recipe and device have such GEMMs.
        zero_tail: whether rows after the last group are 0 in the output and in the gradient of
            ``x``. Otherwise they may have any value on CUDA.

    Returns:
        (rows, out), with the dtype of ``x``.
    """
    spec = grouped_spec_for(key)
    if not weight.shape[0]:  # no row belongs to a group
        y: Tensor = x[:, :0] @ _weight_values(weight, x.dtype, not transposed).sum(0)[:0]
        return y if bias is None else y + bias.to(y.dtype).sum(0)

    choice = estimates.HIGH_PRECISION
    if gemms != "gather" and _has_fp8_gemms(spec, weight):
        choice = spec.fp8_gemms if gemms == "fp8" else _fastest_choice(spec, x, weight)
    if choice != estimates.FP8:  # torch's GEMMs of other layouts require aligned groups
        x = x.contiguous()
    if not torch.is_grad_enabled():  # ctx.needs_input_grad would be True all the same
        weight = weight.detach()
    call = GroupedCall(spec, transposed, zero_tail, choice)
    ends, padded_ends = bounds  # in a graph named tuples arrive as plain tuples
    out: Tensor = _Grouped.apply(x, weight, ends, padded_ends, bias, call)
    return out


def _fastest_choice(spec: GroupedSpec, x: Tensor, weight: Tensor) -> estimates.GroupedChoice:
    """Return which GEMMs of a weight are faster on FP8 operands."""
    estimated_weight = estimates.GroupedWeight(
        experts=weight.shape[0],
        n=prod(weight.shape[1:-1]),
        k=weight.shape[-1],
        gathered=isinstance(weight, QuantizedTensor),
        row_scales=spec.weight.format.per_row,
        fp8_wgrad=spec.fp8_gemms.wgrad,
    )
    choice = _estimate(estimates.choose, x.shape[0], estimated_weight)
    return cast(estimates.GroupedChoice, choice)


def prefers_gated_mlp(rows: int, gate_up: Tensor, down: Tensor, gemms: Gemms) -> bool:
    """Return whether experts run as `gated_mlp`, and not as two calls of `grouped`.

    With "fp8", they do if the device has FP8 GEMMs for both weights. With "auto", it must also be
    faster.

    Args:
        rows: the number of rows.
        gate_up: the first weight, (E, 2 * I, H).
        down: the second weight, (E, H, I).
        gemms: "fp8" or "auto".
    """
    if gemms == "auto":
        experts, hidden, width = down.shape
        weight = estimates.GroupedWeight(experts, hidden, width, isinstance(down, QuantizedTensor))
        if not _estimate(estimates.gated_mlp_is_faster, rows, weight):
            return False
    return has_grouped_gemm(down.device) and _are_supported(gate_up) and _are_supported(down)


def _estimate(function: Callable[..., Any], rows: int, weight: estimates.GroupedWeight) -> Any:
    """Return a choice of `fp8rs.gemm.estimates`.

    A choice may take as long as ten operators, so eager code computes it once per number of rows.
    If a compiler does not know the number of rows, it is assumed to be typical. A choice that
    depends on a symbolic size would compile again for other numbers of tokens.
    """
    if not torch.compiler.is_compiling() and type(rows) is int:
        return _estimate_once(function, rows, weight)
    from torch.fx.experimental.symbolic_shapes import has_static_value

    if not has_static_value(rows):
        rows = estimates.TYPICAL_ROWS * weight.experts
    return function(rows, weight)


@lru_cache(maxsize=1024)
def _estimate_once(function: Callable[..., Any], rows: int, weight: estimates.GroupedWeight) -> Any:
    return function(rows, weight)


def gated_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    row_tokens: Tensor,
    token_rows: Tensor,
    bounds: GroupBounds,
    activation: str,
    key: str,
    zero_tail: bool,
) -> Tensor:
    """Compute the gated MLP of each token's experts on FP8 operands. Differentiable once.

    All GEMMs run on FP8 operands, so the recipe must allow it for wgrad too.

    Each token is quantized once for the first GEMM, and its codes are copied to its rows. The
    permuted tokens never exist in high precision. The activation is quantized as it is computed.
    `prefers_gated_mlp` says whether the device supports this.

    Args:
        x: the tokens (T, H), float32, bfloat16 or float16.
        gate_up: (E, 2 * I, H), the gate's rows first, with one scale per expert.
        down: (E, H, I), with one scale per expert.
        row_tokens: int64 (rows,), the token of each row. Rows are sorted by expert.
        token_rows: (T, k), the rows of each token.
        bounds: where the rows of each expert end.
        activation: "silu" or "gelu_tanh".
        key: the key of a recipe.
        zero_tail: as for `grouped`.

    Returns:
        (rows, H), with the dtype of ``x``.
    """
    if not torch.is_grad_enabled():  # as in `grouped`
        gate_up = gate_up.detach()
        down = down.detach()
    call = GroupedCall(grouped_spec_for(key), False, zero_tail, estimates.FP8)
    ends, padded_ends = bounds  # as in `grouped`
    y: Tensor = _GatedMlp.apply(
        x, gate_up, down, row_tokens, token_rows, ends, padded_ends, activation, call
    )
    return y


def check_sizes(weight: Tensor) -> None:
    """Check that FP8 GEMMs support the sizes of a weight.

    Raises:
        ValueError: they do not.
    """
    if not _are_supported(weight):
        experts = weight.shape[0]
        n = prod(weight.shape[1:-1])
        k = weight.shape[-1]
        raise ValueError(
            f"weight has {experts} matrices of {n} x {k}; there must be fewer than {MAX_GROUPS} "
            f"experts, and both sizes must be multiples of {ALIGNMENT}"
        )


def _are_supported(weight: Tensor) -> bool:
    """Return whether FP8 GEMMs support the sizes of a weight."""
    n = prod(weight.shape[1:-1])
    k = weight.shape[-1]
    return n % ALIGNMENT == 0 and k % ALIGNMENT == 0 and weight.shape[0] < MAX_GROUPS


def check_arguments(
    x: Tensor, weight: Tensor, offs: Tensor, bias: Tensor | None, transposed: bool = False
) -> None:
    """Check the arguments of `grouped`, except the values of ``offs``.

    Raises:
        ValueError: a shape or device does not fit.
        TypeError: an argument is not a tensor, or a dtype is not supported.
    """
    arguments: dict[str, Any] = {"x": x, "weight": weight, "offs": offs}
    if bias is not None:
        arguments["bias"] = bias
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}")

    # Shapes and dtypes of each argument.
    if weight.dim() < 3:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; it must be (experts, out, in)")
    experts = weight.shape[0]
    n = prod(weight.shape[1:-1])
    k = weight.shape[-1]
    if transposed:
        n, k = k, n
    if x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be (rows, {k}) for the weight")
    if offs.shape != (experts,):
        raise ValueError(f"offs has shape {tuple(offs.shape)}; it must be ({experts},)")
    if offs.dtype != torch.int32:
        raise TypeError(f"offs is {offs.dtype}; it must be torch.int32")
    for name in ("x", "weight"):
        dtype = arguments[name].dtype
        if dtype not in INPUT_DTYPES:
            raise TypeError(f"{name} is {dtype}; it must be float32, bfloat16 or float16")
    if bias is not None and bias.shape != (experts, n):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; it must be ({experts}, {n})")

    # All arguments have one device, and operands one dtype unless autocast casts them.
    device = x.device
    for name, value in arguments.items():
        if value.device != device:
            raise ValueError(f"{name} is on {value.device} and x is on {device}")
    if autocast_dtype(device.type) is not None:
        return
    dtype = x.dtype
    for name, value in arguments.items():
        if name != "offs" and value.dtype != dtype:
            raise TypeError(f"{name} is {value.dtype} and x is {dtype}: both must have one dtype")


@dataclass(eq=False, slots=True)
class GroupedCall:
    """The arguments of one call of the grouped layer that are not tensors.

    Attributes:
        spec: how operands are quantized.
        transposed: whether the weight's matrices are stored transposed.
        zero_tail: whether rows after the last group are 0.
        choice: which GEMMs run on FP8 operands.
    """

    spec: GroupedSpec
    transposed: bool
    zero_tail: bool
    choice: estimates.GroupedChoice


# --- operands ------------------------------------------------------------------------------------


def _has_fp8_gemms(spec: GroupedSpec, weight: Tensor) -> bool:
    """Return whether FP8 GEMMs that the recipe allows can read a weight's codes on its device.

    Views that are not whole matrices have no codes of their own, for example of gate and up in one
    parameter.
    """
    if not spec.fp8_gemms.rows:
        return False
    if isinstance(weight, QuantizedTensor):
        if weight.rowwise is None:
            return False
        has_readable_codes = reads_format(weight.format) and weight.fp8_dtype == _E4M3
    else:
        has_readable_codes = reads_format(spec.weight.format) and spec.weight.fp8_dtype == _E4M3
    return has_readable_codes and _are_supported(weight) and has_grouped_gemm(weight.device)


class _WeightOperand(NamedTuple):
    """A weight as an operand of a GEMM.

    Attributes:
        codes: (E, n, k), contiguous.
        scale: fp32 (E, n) or (E, 1).
        factors: fp32 (E, k) by which the columns of the other operand are multiplied, or None.
        quantized_scale: the scales that the weight was quantized with, in their own shape.
    """

    codes: Tensor
    scale: Tensor
    factors: Tensor | None
    quantized_scale: Tensor


def _weight_operand(
    spec: QuantSpec,
    weight: Tensor,
    transposed: bool,
    quantized_scale: Tensor | None = None,
    after: Tensor | None = None,
) -> _WeightOperand:
    """Return a weight, or its transpose, as an operand.

    If the weight has a scale per row, the GEMM with the transpose contracts over these rows. Their
    scales are multiplied into the other operand.

    Args:
        spec: how a high-precision weight is quantized.
        weight: as it is stored.
        transposed: whether the transpose is requested.
        quantized_scale: the scales of a weight that was quantized before, for one scale per expert.
        after: a tensor that a compiler must have before this is computed.
    """
    if isinstance(weight, QuantizedTensor):
        plane = weight.plane("rowwise", "a grouped GEMM")
        if after is None:  # in a backward, `read_weight` has checked it
            check_has_memory(weight, "experts")
    else:
        values = weight if weight.dim() == 3 else weight.flatten(1, -2)
        per_tensor = spec.format.per_tensor
        if not per_tensor:
            quantized_scale = None  # scales of rows are computed again
        if transposed and per_tensor:
            # One pass quantizes and transposes.
            _, col = quantize_planes(spec, values, False, True, scale=quantized_scale, after=after)
            assert col is not None
            return _WeightOperand(col.data, col.scale.view(-1, 1), None, col.scale)
        row, _ = quantize_planes(spec, values, True, False, scale=quantized_scale, after=after)
        assert row is not None
        plane = row

    codes = plane.data.flatten(1, -2).contiguous()
    per_tensor = plane.format.per_tensor
    scale = plane.scale.view(codes.shape[0], 1 if per_tensor else codes.shape[1])
    factors: Tensor | None = None
    if transposed:
        codes = _transpose(codes, after, True)
        if not per_tensor:
            factors = scale
            scale = scale.new_ones(scale.shape[0], 1)
    return _WeightOperand(codes, scale, factors, plane.scale)


def _weight_values(weight: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
    """Return the values of a weight as (E, rows, cols), or of its transpose."""
    values = weight.dequantize(dtype) if isinstance(weight, QuantizedTensor) else weight.to(dtype)
    if values.dim() > 3:
        values = values.flatten(1, -2)
    values = values.contiguous()
    return values.transpose(-2, -1) if transposed else values


class _Codes(NamedTuple):
    """Rows quantized in one or both directions."""

    row: Tensor
    row_scale: Tensor
    col: Tensor
    col_scale: Tensor


def _quantize(
    spec: GroupedSpec,
    x: Tensor,
    bounds: GroupBounds,
    rowwise: bool,
    columnwise: bool,
    factors: Tensor | None = None,
    row_tokens: Tensor | None = None,
) -> _Codes:
    """Quantize rows.

    Args:
        spec: how they are quantized.
        x: the rows, or the tokens that ``row_tokens`` refers to.
        bounds: the bounds of the groups.
        rowwise: whether to make rowwise codes.
        columnwise: whether to make columnwise codes.
        factors: fp32 (E, cols), multiplied into the columns of ``x`` before the rowwise
            quantization only. Not supported with ``row_tokens``.
        row_tokens: int64 (rows,), the token of each row, or None.
    """
    ends, padded_ends = bounds
    options: dict[str, Any] = {"index": row_tokens, **spec.scale_options}
    if factors is None or not rowwise:
        return _Codes(
            *_quantize_groups(x, ends, padded_ends, _E4M3, rowwise, columnwise, **options)
        )

    group, _ = _group_of_rows(ends, x.shape[0])
    codes = _Codes(
        *_quantize_groups(x * factors[group], ends, padded_ends, _E4M3, True, False, **options)
    )
    if columnwise:
        _, _, col, col_scale = _quantize_groups(x, ends, padded_ends, _E4M3, False, True, **options)
        codes = codes._replace(col=col, col_scale=col_scale)
    return codes


# --- GEMMs ---------------------------------------------------------------------------------------


class _Grouped(torch.autograd.Function):
    """One grouped GEMM. In high precision, the dequantized weight is not kept for the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        ends: Tensor,
        padded_ends: Tensor,
        bias: Tensor | None,
        call: GroupedCall,
    ) -> Tensor:
        needs_x, needs_w = ctx.needs_input_grad[:2]
        save_codes = needs_w and call.choice.wgrad

        # Without FP8 codes for wgrad, the input itself is saved.
        saved_x = x if needs_w else None
        x_scale = w_scale = None
        y: Tensor
        if call.choice.rows:
            w = _weight_operand(call.spec.weight, weight, call.transposed)
            w_scale = w.quantized_scale
            bounds = GroupBounds(ends, padded_ends)
            x_codes = _quantize(call.spec, x, bounds, True, save_codes, w.factors)
            y = _grouped_mm(
                x_codes.row, x_codes.row_scale, w.codes, w.scale, ends, x.dtype, call.zero_tail
            )
            if save_codes:
                saved_x = x_codes.col
                x_scale = x_codes.col_scale
        else:
            values = _weight_values(weight, x.dtype, not call.transposed)
            y = _grouped_mm_plain(x, values, ends, call.zero_tail)
        if bias is not None:
            y = y + _bias_of_rows(bias.to(y.dtype), ends, x.shape[0])

        gathered = gathered_weight(weight)
        saved_weight = None
        if needs_x and gathered is None:
            saved_weight = weight
        else:
            w_scale = None
        ctx.save_for_backward(saved_x, x_scale, saved_weight, w_scale, ends, padded_ends)
        ctx.call = call
        ctx.gathered_weight = gathered
        ctx.weight_shape = weight.shape
        ctx.x_dtype = x.dtype
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("grouped linear layers")
        call: GroupedCall = ctx.call
        x, x_scale, weight, w_scale, ends, padded_ends = ctx.saved_tensors
        needs_x, needs_w, _, _, needs_bias, _ = gradients_needed(ctx)
        fp8_dgrad = needs_x and call.choice.rows
        fp8_wgrad = needs_w and call.choice.wgrad
        dy = dy.contiguous()
        if needs_x:
            weight = read_weight(ctx.gathered_weight, weight, "experts")

        factors = None
        if fp8_dgrad:
            w = _weight_operand(call.spec.weight, weight, not call.transposed, w_scale, dy)
            factors = w.factors
        if fp8_dgrad or fp8_wgrad:
            bounds = GroupBounds(ends, padded_ends)
            grads = _quantize(call.spec, dy, bounds, fp8_dgrad, fp8_wgrad, factors)

        dx = dw = db = None
        if fp8_dgrad:
            dx = _grouped_mm(
                grads.row, grads.row_scale, w.codes, w.scale, ends, ctx.x_dtype, call.zero_tail
            )
        elif needs_x:
            values = _weight_values(weight, dy.dtype, call.transposed)
            dx = _grouped_mm_plain(dy, values, ends, call.zero_tail)

        # The gradient of a transposed weight is transposed.
        if fp8_wgrad:
            if call.transposed:
                operands = (x, x_scale, grads.col, grads.col_scale)
            else:
                operands = (grads.col, grads.col_scale, x, x_scale)
            dw = _grouped_wgrad(*operands, padded_ends, ctx.weight_dtype).view(ctx.weight_shape)
        elif needs_w:
            if call.transposed:
                dw = _grouped_mm_plain(x.t(), dy, ends, False)
            else:
                dw = _grouped_mm_plain(dy.t(), x, ends, False)
            dw = dw.to(ctx.weight_dtype).view(ctx.weight_shape)

        if needs_bias:
            db = _sum_groups(dy, ends, ctx.bias_dtype)
        return dx, dw, None, None, db, None


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        row_tokens: Tensor,
        token_rows: Tensor,
        ends: Tensor,
        padded_ends: Tensor,
        activation: str,
        call: GroupedCall,
    ) -> Tensor:
        needs_x, needs_gate_up, needs_down = ctx.needs_input_grad[:3]
        spec = call.spec
        bounds = GroupBounds(ends, padded_ends)

        # gate_up_out is (rows, 2 * I), and activated has the codes of the activation (rows, I).
        x_codes = _quantize(spec, x, bounds, True, needs_gate_up, row_tokens=row_tokens)
        w_gate_up = _weight_operand(spec.weight, gate_up, False)
        gate_up_out = _grouped_mm(
            x_codes.row, x_codes.row_scale, w_gate_up.codes, w_gate_up.scale, ends, x.dtype, False
        )
        activated = _Codes(
            *_quantize_gated(
                gate_up_out, *bounds, activation, _E4M3, True, needs_down, **spec.scale_options
            )
        )
        w_down = _weight_operand(spec.weight, down, False)
        y: Tensor = _grouped_mm(
            activated.row,
            activated.row_scale,
            w_down.codes,
            w_down.scale,
            ends,
            x.dtype,
            call.zero_tail,
        )
        if not any(ctx.needs_input_grad):
            return y

        ctx.gathered_gate_up = gathered_weight(gate_up)
        ctx.gathered_down = gathered_weight(down)
        saves_gate_up = ctx.gathered_gate_up is None
        saves_down = ctx.gathered_down is None
        ctx.save_for_backward(
            x_codes.col if needs_gate_up else None,
            x_codes.col_scale if needs_gate_up else None,
            activated.col if needs_down else None,
            activated.col_scale if needs_down else None,
            gate_up_out if needs_x or needs_gate_up else None,
            gate_up if saves_gate_up else None,
            w_gate_up.quantized_scale if saves_gate_up else None,
            down if saves_down else None,
            w_down.quantized_scale if saves_down else None,
            token_rows,
            *bounds,
        )
        ctx.call = call
        ctx.activation = activation
        ctx.x_dtype = x.dtype
        ctx.gate_up_dtype = gate_up.dtype
        ctx.down_dtype = down.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("experts")
        (
            x_col,
            x_scale,
            activated_col,
            activated_scale,
            gate_up_out,
            gate_up,
            gate_up_scale,
            down,
            down_scale,
            token_rows,
            ends,
            padded_ends,
        ) = ctx.saved_tensors
        call: GroupedCall = ctx.call
        spec = call.spec
        bounds = GroupBounds(ends, padded_ends)
        needs_x, needs_gate_up, needs_down, *_ = gradients_needed(ctx)
        needs_d_gate_up_out = needs_x or needs_gate_up
        dx = d_gate_up = d_down = None

        dy = dy.contiguous()
        grads = _quantize(spec, dy, bounds, needs_d_gate_up_out, needs_down)
        if needs_down:
            d_down = _grouped_wgrad(
                grads.col,
                grads.col_scale,
                activated_col,
                activated_scale,
                padded_ends,
                ctx.down_dtype,
            )

        # Tensors of all rows and of all weights are large. Each is freed after its last use.
        if needs_d_gate_up_out:
            down = read_weight(ctx.gathered_down, down, "experts")
            w_down = _weight_operand(spec.weight, down, True, down_scale, dy)
            d_activated = _grouped_mm(
                grads.row,
                grads.row_scale,
                w_down.codes,
                w_down.scale,
                ends,
                gate_up_out.dtype,
                False,
            )
            del w_down, grads
            d_gate_up_out = _Codes(
                *_quantize_gated(
                    gate_up_out,
                    *bounds,
                    ctx.activation,
                    _E4M3,
                    needs_x,
                    needs_gate_up,
                    dy=d_activated,
                    **spec.scale_options,
                )
            )
            del d_activated
        if needs_x:
            gate_up = read_weight(ctx.gathered_gate_up, gate_up, "experts")
            w_gate_up = _weight_operand(spec.weight, gate_up, True, gate_up_scale, dy)
            dx_rows = _grouped_mm(
                d_gate_up_out.row,
                d_gate_up_out.row_scale,
                w_gate_up.codes,
                w_gate_up.scale,
                ends,
                ctx.x_dtype,
                call.zero_tail,
            )
            del w_gate_up
            dx = _combine_rows(dx_rows, token_rows)
            del dx_rows
        if needs_gate_up:
            d_gate_up = _grouped_wgrad(
                d_gate_up_out.col,
                d_gate_up_out.col_scale,
                x_col,
                x_scale,
                padded_ends,
                ctx.gate_up_dtype,
            )
        return dx, d_gate_up, d_down, None, None, None, None, None, None


# --- biases --------------------------------------------------------------------------------------


def _group_of_rows(ends: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the group of each row, and whether it has one (rows, 1)."""
    row_indices = torch.arange(rows, device=ends.device, dtype=ends.dtype)
    group = torch.searchsorted(ends, row_indices, right=True)
    inside = (group < ends.shape[0]).unsqueeze(1)
    return group.clamp_max(max(ends.shape[0] - 1, 0)), inside


def _bias_of_rows(bias: Tensor, ends: Tensor, rows: int) -> Tensor:
    """Return the bias of each row, 0 for rows without a group."""
    group, inside = _group_of_rows(ends, rows)
    return torch.where(inside, bias[group], 0)


def _sum_groups(dy: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum the rows of each group in fp32."""
    group, inside = _group_of_rows(ends, dy.shape[0])
    sums = dy.new_zeros((ends.shape[0], dy.shape[1]), dtype=torch.float32)
    return sums.index_add_(0, group, torch.where(inside, dy.float(), 0)).to(dtype)
