"""The grouped linear layer of mixture-of-experts models, as pure functions of tensors and one key.

    y[i] = x[i] @ weight[g].T + bias[g]    for each row i of group g

Rows of one group are consecutive. With FP8 GEMMs, inputs and gradients are quantized with a scale
per row for forward and dgrad, and with a scale per column of each group for wgrad. A weight has one
scale per expert, or one per row with a rowwise recipe. Codes are E4M3, because grouped FP8 GEMMs on
Hopper support no other format. A gathered weight's codes are used as they are.

Otherwise the GEMMs run in the dtype of ``x`` on the dequantized weight. This is the case for
recipes whose weights have blocks or are MXFP8, and on GPUs other than Hopper. wgrad alone can also
run in the dtype of ``x``, which is then saved for the backward instead of codes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from fp8rs._torch import autocast_dtype, gradients_needed
from fp8rs.gemm import estimates
from fp8rs.gemm.grouped import ALIGNMENT, MAX_GROUPS, has_grouped_gemm, reads_format
from fp8rs.model.spec import GroupedSpec, grouped_spec_for
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


def grouped(
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
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
        offs: int32 (E,), the row after the last one of each group.
        bias: (E, out) or None.
        key: the key of a recipe (`fp8rs.model.spec.register`).
        transposed: whether the matrices are stored transposed.
        gemms: which GEMMs run on FP8 operands, if recipe and device have such GEMMs.
        zero_tail: whether rows after the last group are 0 in the output and in the gradient of
            ``x``. Otherwise they may have any value on CUDA.

    Returns:
        (rows, out), with the dtype of ``x``.
    """
    spec = grouped_spec_for(key)
    if not weight.shape[0]:  # no row belongs to a group
        y: Tensor = x[:, :0] @ _values(weight, x.dtype, not transposed).sum(0)[:0]
        return y if bias is None else y + bias.to(y.dtype).sum(0)
    choice = estimates.HIGH_PRECISION
    if gemms != "gather" and _has_fp8_gemms(spec, weight):
        choice = estimates.FP8 if gemms == "fp8" else _choose(x, weight, spec)
    if not torch.is_grad_enabled():  # ctx.needs_input_grad would be True all the same
        weight = weight.detach()
    if choice != estimates.FP8:  # torch's GEMMs of other layouts require aligned groups
        x = x.contiguous()
    out: Tensor = _Grouped.apply(x, weight, offs, bias, _How(spec, transposed, zero_tail, choice))
    return out


def _choose(x: Tensor, weight: Tensor, spec: GroupedSpec) -> estimates.GroupedChoice:
    sizes = weight.shape[0], prod(weight.shape[1:-1]), weight.shape[-1]
    gathered = isinstance(weight, QuantizedTensor)
    given = estimates.GroupedWeight(*sizes, gathered, spec.weight.format.per_row)
    return cast(estimates.GroupedChoice, _estimate(estimates.choose, x.shape[0], given))


def prefers_gated_mlp(rows: int, gate_up: Tensor, down: Tensor, gemms: Gemms) -> bool:
    """Whether experts run as `gated_mlp`, and not as two calls of `grouped`.

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
        given = estimates.GroupedWeight(experts, hidden, width, isinstance(down, QuantizedTensor))
        if not _estimate(estimates.gated_mlp_is_faster, rows, given):
            return False
    return has_grouped_gemm(down.device) and _are_supported(gate_up) and _are_supported(down)


def _estimate(function: Callable[..., Any], rows: int, weight: estimates.GroupedWeight) -> Any:
    """Call a function of `fp8rs.gemm.estimates`, which may take as long as ten operators.

    If a compiler does not know the number of rows, it is assumed to be typical. A choice that
    depends on a symbolic size would compile again for other numbers of tokens.
    """
    if not torch.compiler.is_compiling() and type(rows) is int:
        return _cached(function, rows, weight)
    from torch.fx.experimental.symbolic_shapes import has_static_value

    known = rows if has_static_value(rows) else estimates.TYPICAL_ROWS * weight.experts
    return function(known, weight)


@lru_cache(maxsize=1024)
def _cached(function: Callable[..., Any], rows: int, weight: estimates.GroupedWeight) -> Any:
    return function(rows, weight)


def gated_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    places: Tensor,
    offs: Tensor,
    activation: str,
    key: str,
    zero_tail: bool,
) -> Tensor:
    """Compute the gated MLP of each token's experts on FP8 operands. Differentiable once.

    Each token is quantized once for the first GEMM, and its codes are copied to its rows. The
    permuted tokens never exist in high precision. The activation is quantized as it is computed.
    `prefers_gated_mlp` says whether the device supports this.

    Args:
        x: the tokens (T, H), float32, bfloat16 or float16.
        gate_up: (E, 2 * I, H), the gate's rows first, with one scale per expert.
        down: (E, H, I), with one scale per expert.
        index: int32 (rows,), the token of each row. Rows are sorted by expert.
        places: (T, k), the rows of each token.
        offs: int32 (E,), the row after the last one of each expert.
        activation: "silu" or "gelu_tanh".
        key: the key of a recipe.
        zero_tail: as for `grouped`.

    Returns:
        (rows, H), with the dtype of ``x``.
    """
    if not torch.is_grad_enabled():  # as in `grouped`
        gate_up, down = gate_up.detach(), down.detach()
    how = _How(grouped_spec_for(key), False, zero_tail, estimates.FP8)
    y: Tensor = _GatedMlp.apply(x, gate_up, down, index, places, offs, activation, how)
    return y


def check_sizes(weight: Tensor) -> None:
    """Check that FP8 GEMMs support the sizes of a weight.

    Raises:
        ValueError: they do not.
    """
    if not _are_supported(weight):
        n, k, experts = prod(weight.shape[1:-1]), weight.shape[-1], weight.shape[0]
        raise ValueError(
            f"weight has {experts} matrices of {n} x {k}; there must be fewer than {MAX_GROUPS} "
            f"experts, and both sizes must be multiples of {ALIGNMENT}"
        )


def _are_supported(weight: Tensor) -> bool:
    n, k = prod(weight.shape[1:-1]), weight.shape[-1]
    return not (n % ALIGNMENT or k % ALIGNMENT) and weight.shape[0] < MAX_GROUPS


def check(
    x: Tensor, weight: Tensor, offs: Tensor, bias: Tensor | None, transposed: bool = False
) -> None:
    """Check the arguments of `grouped`, except the values of ``offs``.

    Raises:
        ValueError: a shape or device does not fit.
        TypeError: an argument is not a tensor, or a dtype is not supported.
    """
    for name, given in (("x", x), ("offs", offs), ("bias", bias)):
        if not isinstance(given, Tensor) and (name != "bias" or given is not None):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(given).__name__}")
    if weight.dim() < 3:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; it must be (experts, out, in)")
    experts, n, k = weight.shape[0], prod(weight.shape[1:-1]), weight.shape[-1]
    if transposed:
        n, k = k, n
    if x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be (rows, {k}) for the weight")
    if offs.shape != (experts,):
        raise ValueError(f"offs has shape {tuple(offs.shape)}; it must be ({experts},)")
    if offs.dtype != torch.int32:
        raise TypeError(f"offs is {offs.dtype}; it must be torch.int32")
    for name, given in (("x", x), ("weight", weight)):
        if given.dtype not in INPUT_DTYPES:
            raise TypeError(f"{name} is {given.dtype}; it must be float32, bfloat16 or float16")
    if bias is not None and bias.shape != (experts, n):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; it must be ({experts}, {n})")
    for name, other in (("weight", weight), ("offs", offs), ("bias", bias)):
        if other is not None and other.device != x.device:
            raise ValueError(f"{name} is on {other.device} and x is on {x.device}")
    if autocast_dtype(x.device.type) is not None:
        return
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and other.dtype != x.dtype:
            raise TypeError(f"{name} is {other.dtype} and x is {x.dtype}: both must have one dtype")


class _How(NamedTuple):
    """The arguments of an autograd Function that are not tensors."""

    spec: GroupedSpec
    transposed: bool
    zero_tail: bool
    choice: estimates.GroupedChoice


# --- operands ------------------------------------------------------------------------------------


def _has_fp8_gemms(spec: GroupedSpec, weight: Tensor) -> bool:
    """Whether FP8 GEMMs read the codes of a weight, on its device.

    Views that are not whole matrices have no codes of their own, for example of gate and up in one
    parameter.
    """
    of: Any = spec.weight
    if isinstance(weight, QuantizedTensor):
        if weight.rowwise is None:
            return False
        of = weight
    known = reads_format(of.format) and of.fp8_dtype == _E4M3
    return known and _are_supported(weight) and has_grouped_gemm(weight.device)


class _Operand(NamedTuple):
    """A weight as an operand of a GEMM.

    Attributes:
        codes: (E, n, k), contiguous.
        scale: fp32 (E, n) or (E, 1).
        factors: fp32 (E, k) by which the columns of the other operand are multiplied, or None.
        known: the scales as quantized.
    """

    codes: Tensor
    scale: Tensor
    factors: Tensor | None
    known: Tensor


def _operand(
    spec: QuantSpec,
    weight: Tensor,
    transposed: bool,
    known: Tensor | None = None,
    after: Tensor | None = None,
) -> _Operand:
    """Return a weight, or its transpose, as an operand.

    If the weight has a scale per row, the GEMM with the transpose contracts over these rows. Their
    scales are multiplied into the other operand.

    Args:
        spec: how a high-precision weight is quantized.
        weight: as it is stored.
        transposed: whether the transpose is requested.
        known: the scales of a weight that was quantized before, for one scale per expert.
        after: a tensor that a compiler must have before this is computed.
    """
    if isinstance(weight, QuantizedTensor):
        plane = weight.plane("rowwise", "a grouped GEMM")
        if after is None:  # in a backward, `read_weight` has checked it
            check_has_memory(weight, "experts")
    else:
        values = weight if weight.dim() == 3 else weight.flatten(1, -2)
        directly = transposed and spec.format.per_tensor
        if not spec.format.per_tensor:
            known = None
        row, col = quantize_planes(spec, values, not directly, directly, scale=known, after=after)
        if directly:
            assert col is not None
            return _Operand(col.data, col.scale.view(-1, 1), None, col.scale)
        assert row is not None
        plane = row
    codes, scale = plane.data.flatten(1, -2), plane.scale
    per_row = scale.view(codes.shape[0], 1 if plane.format.per_tensor else codes.shape[1])
    if not transposed:
        return _Operand(codes.contiguous(), per_row, None, scale)
    codes = _transpose(codes.contiguous(), after, True)
    if plane.format.per_tensor:
        return _Operand(codes, per_row, None, scale)
    return _Operand(codes, per_row.new_ones(per_row.shape[0], 1), per_row, scale)


def _values(weight: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
    """Return the values of a weight as (E, rows, cols), or of its transpose."""
    values = weight.dequantize(dtype) if isinstance(weight, QuantizedTensor) else weight.to(dtype)
    values = (values if values.dim() == 3 else values.flatten(1, -2)).contiguous()
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
    bounds: tuple[Tensor, Tensor],
    rowwise: bool,
    columnwise: bool,
    factors: Tensor | None = None,
    index: Tensor | None = None,
) -> _Codes:
    """Quantize rows. ``factors`` are multiplied into the columns of the rowwise codes only."""
    options: dict[str, Any] = {"index": index, **spec.scale_options}
    if factors is None or not rowwise:
        return _Codes(*_quantize_groups(x, *bounds, _E4M3, rowwise, columnwise, **options))
    group, _ = _groups(bounds[0], x.shape[0])
    codes = _Codes(*_quantize_groups(x * factors[group], *bounds, _E4M3, True, False, **options))
    if columnwise:
        _, _, col, col_scale = _quantize_groups(x, *bounds, _E4M3, False, True, **options)
        codes = codes._replace(col=col, col_scale=col_scale)
    return codes


# --- GEMMs ---------------------------------------------------------------------------------------


class _Grouped(torch.autograd.Function):
    """One grouped GEMM. In high precision, the dequantized weight is not kept for the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, offs: Tensor, bias: Tensor | None, how: _How
    ) -> Tensor:
        needs_x, needs_w = ctx.needs_input_grad[:2]
        ends, padded_ends = _group_bounds(offs.contiguous(), x)
        codes = needs_w and how.choice.wgrad
        # Without FP8 codes for wgrad, the input itself is saved.
        saved_x, x_scale, known = x if needs_w else None, None, None
        y: Tensor
        if how.choice.rows:
            b = _operand(how.spec.weight, weight, how.transposed)
            a = _quantize(how.spec, x, (ends, padded_ends), True, codes, b.factors)
            y = _grouped_mm(a.row, a.row_scale, b.codes, b.scale, ends, x.dtype, how.zero_tail)
            known = b.known
            if codes:
                saved_x, x_scale = a.col, a.col_scale
        else:
            y = _grouped_mm_plain(
                x, _values(weight, x.dtype, not how.transposed), ends, how.zero_tail
            )
        if bias is not None:
            y = y + _of_rows(bias.to(y.dtype), ends, x.shape[0])
        ctx.gathered = gathered_weight(weight)
        saved_weight = (weight, known) if needs_x and ctx.gathered is None else (None, None)
        ctx.save_for_backward(saved_x, x_scale, *saved_weight, ends, padded_ends)
        ctx.rest = how, weight.shape, x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("grouped linear layers")
        x, x_scale, weight, known, ends, padded_ends = ctx.saved_tensors
        how, shape, x_dtype, weight_dtype, bias_dtype = ctx.rest
        needs_x, needs_w, _, needs_bias, _ = gradients_needed(ctx)
        fp8_dgrad, fp8_wgrad = needs_x and how.choice.rows, needs_w and how.choice.wgrad
        dx = dw = db = factors = None
        dy = dy.contiguous()
        if needs_x:
            weight = read_weight(ctx.gathered, weight, "experts")
        if fp8_dgrad:
            b = _operand(how.spec.weight, weight, not how.transposed, known, dy)
            factors = b.factors
        if fp8_dgrad or fp8_wgrad:
            bounds = ends, padded_ends
            grads = _quantize(how.spec, dy, bounds, fp8_dgrad, fp8_wgrad, factors)
        if fp8_dgrad:
            dx = _grouped_mm(
                grads.row, grads.row_scale, b.codes, b.scale, ends, x_dtype, how.zero_tail
            )
        elif needs_x:
            values = _values(weight, dy.dtype, how.transposed)
            dx = _grouped_mm_plain(dy, values, ends, how.zero_tail)
        if fp8_wgrad:
            pair = (grads.col, grads.col_scale), (x, x_scale)
            left, right = pair[::-1] if how.transposed else pair
            dw = _grouped_wgrad(*left, *right, padded_ends, weight_dtype).view(shape)
        elif needs_w:
            operands = (x.t(), dy) if how.transposed else (dy.t(), x)
            dw = _grouped_mm_plain(*operands, ends, False).to(weight_dtype).view(shape)
        if needs_bias:
            db = _sums(dy, ends, bias_dtype)
        return dx, dw, None, db, None


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        index: Tensor,
        places: Tensor,
        offs: Tensor,
        activation: str,
        how: _How,
    ) -> Tensor:
        needs_x, needs_gate_up, needs_down = ctx.needs_input_grad[:3]
        spec = how.spec
        # The bounds depend on the number of rows only, which `index` has too.
        ends, padded_ends = _group_bounds(offs.contiguous(), index)
        bounds = ends, padded_ends
        a = _quantize(spec, x, bounds, True, needs_gate_up, index=index)
        b = _operand(spec.weight, gate_up, False)
        h = _grouped_mm(a.row, a.row_scale, b.codes, b.scale, ends, x.dtype, False)
        g = _Codes(
            *_quantize_gated(h, *bounds, activation, _E4M3, True, needs_down, **spec.scale_options)
        )
        c = _operand(spec.weight, down, False)
        y: Tensor = _grouped_mm(g.row, g.row_scale, c.codes, c.scale, ends, x.dtype, how.zero_tail)
        if any(ctx.needs_input_grad):
            ctx.gathered = gathered_weight(gate_up), gathered_weight(down)
            first = (gate_up, b.known) if ctx.gathered[0] is None else (None, None)
            second = (down, c.known) if ctx.gathered[1] is None else (None, None)
            ctx.save_for_backward(
                *((a.col, a.col_scale) if needs_gate_up else (None, None)),
                *((g.col, g.col_scale) if needs_down else (None, None)),
                h if needs_x or needs_gate_up else None,
                *(*first, *second, places, ends, padded_ends),
            )
            ctx.rest = how, activation, x.dtype, (gate_up.dtype, down.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("experts")
        how, activation, x_dtype, weight_dtypes = ctx.rest
        x_col, x_scale, g_col, g_scale, h, *weights, places, ends, padded_ends = ctx.saved_tensors
        gate_up, gate_up_known, down, down_known = weights
        needs_x, needs_gate_up, needs_down, *_ = gradients_needed(ctx)
        spec, bounds = how.spec, (ends, padded_ends)
        dx = d_gate_up = d_down = None
        dy = dy.contiguous()
        before = needs_x or needs_gate_up
        grads = _quantize(spec, dy, bounds, before, needs_down)
        if needs_down:
            d_down = _grouped_wgrad(
                grads.col, grads.col_scale, g_col, g_scale, padded_ends, weight_dtypes[1]
            )
        # Tensors of all rows and of all weights are large. Each is freed after its last use.
        if before:
            down = read_weight(ctx.gathered[1], down, "experts")
            c = _operand(spec.weight, down, True, down_known, dy)
            dg = _grouped_mm(grads.row, grads.row_scale, c.codes, c.scale, ends, h.dtype, False)
            del c, grads
            options = spec.scale_options
            dh = _Codes(
                *_quantize_gated(
                    h, *bounds, activation, _E4M3, needs_x, needs_gate_up, dy=dg, **options
                )
            )
            del dg
        if needs_x:
            gate_up = read_weight(ctx.gathered[0], gate_up, "experts")
            b = _operand(spec.weight, gate_up, True, gate_up_known, dy)
            rows = _grouped_mm(dh.row, dh.row_scale, b.codes, b.scale, ends, x_dtype, how.zero_tail)
            del b
            dx = _combine_rows(rows, places)
            del rows
        if needs_gate_up:
            d_gate_up = _grouped_wgrad(
                dh.col, dh.col_scale, x_col, x_scale, padded_ends, weight_dtypes[0]
            )
        return dx, d_gate_up, d_down, *[None] * 5


# --- biases --------------------------------------------------------------------------------------


def _groups(ends: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the group of each row, and whether it has one (rows, 1)."""
    index = torch.arange(rows, device=ends.device, dtype=ends.dtype)
    group = torch.searchsorted(ends, index, right=True)
    inside = (group < ends.shape[0]).unsqueeze(1)
    return group.clamp_max(max(ends.shape[0] - 1, 0)), inside


def _of_rows(bias: Tensor, ends: Tensor, rows: int) -> Tensor:
    """Return the bias of each row, 0 for rows without a group."""
    group, inside = _groups(ends, rows)
    return torch.where(inside, bias[group], 0)


def _sums(dy: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum the rows of each group in fp32."""
    group, inside = _groups(ends, dy.shape[0])
    sums = dy.new_zeros((ends.shape[0], dy.shape[1]), dtype=torch.float32)
    return sums.index_add_(0, group, torch.where(inside, dy.float(), 0)).to(dtype)
