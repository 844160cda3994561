"""Operators of the optimizer, and random numbers that depend on positions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fp8rs._core import adamw as native_adamw
from fp8rs._core import random_uniform as native_random_uniform
from fp8rs.ops.define import python_op


@python_op(
    native_adamw,
    mutates_args=[
        "exp_avgs",
        "exp_avg_sqs",
        "params",
        "masters",
        "scales",
        "amaxes",
        "exp_avg_ranges",
        "exp_avg_sq_ranges",
    ],
)
def adamw_(
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    params: list[Tensor],
    masters: list[Tensor],
    steps: list[Tensor],
    scales: list[Tensor],
    new_scales: list[Tensor],
    amaxes: list[Tensor],
    exp_avg_ranges: list[Tensor],
    exp_avg_sq_ranges: list[Tensor],
    offsets: Sequence[int],
    streams: Sequence[int],
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
    seed: int | None,
    block: Sequence[int],
    rounding: str = "ceil",
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
    batched: bool = False,
) -> None:
    """Update parameters by one step of AdamW. All tensors are contiguous, of any shape.

    Let g, m, v and w be the gradient, the moments and the parameter (or its master), in float32.
    Each operation is rounded once and none is contracted:

        g = g * (1 / grad_scale), or its negative to maximize
        w = w * (1 - lr * weight_decay)
        m = m + (g - m) * (1 - beta1)       # g - (g - m) * beta1 if 1 - beta1 >= 0.5
        v = v * beta2 + (1 - beta2) * g * g
        w = w - lr / (1 - beta1**step) * m / (sqrt(v) / sqrt(1 - beta2**step) + eps)

    Factors without an element are computed in float64 and rounded to float32 once. CPU and CUDA
    give the same bytes.

    Args:
        grads: float32, bfloat16 or float16.
        exp_avgs: the first moments; float32, bfloat16 (rounded to nearest), or uint8 codes.
        exp_avg_sqs: the second moments, with the dtype of ``exp_avgs``.
        params: all float32, bfloat16 or float16, rounded to nearest; or all FP8 codes.
        masters: float32, or empty. If present, the step starts from the masters.
        steps: the number of this step, counted from 1; float32, one element each.
        scales: the scales of codes. They are written, and without masters also read. Each is
            float32 with one element, or has one element per block (float32 or float8_e8m0fnu).
            Empty for plain parameters.
        new_scales: for parameters with one scale, the scales to quantize with; float32, one element
            each. If empty for such parameters, only ``amaxes`` is written.
        amaxes: float32, one element each, or empty. They become the maxima of the updated values.
            With ``new_scales``, they are raised to these maxima. If a maximum is not finite, its
            amax stays and the parameter's scale becomes NaN.
        exp_avg_ranges: the ranges of first moments that are codes: the largest and the smallest
            magnitude of each block of 128 elements of a row; float32, with 2 * columns / 128
            columns. Rows then have a multiple of 128 elements. Empty for other moments.
        exp_avg_sq_ranges: the same of the second moments.
        offsets: the index of each parameter's first element in the whole parameter. Offset, stream,
            seed and step select the numbers of stochastic rounding. With moments that are codes, an
            offset is a multiple of four, because rows have whole blocks.
        streams: the number of each whole parameter.
        lr_tensor: replaces ``lr``; float32, one element.
        grad_scale: the factor that gradients were multiplied by; float32, one element.
        found_inf: if it is not zero, nothing is written; float32, one element.
        lr: the learning rate.
        beta1: decay factor of the first moments.
        beta2: decay factor of the second moments.
        eps: added to the denominator.
        weight_decay: decay of parameters, multiplied by the learning rate.
        maximize: whether the objective is maximized.
        seed: round codes stochastically with this seed. None rounds to nearest.
        block: (rows, columns) of the blocks that have scales, -1 for the whole extent. The scales
            are computed in the same pass. Empty if parameters have one scale each or none.
        rounding: "ceil" or "floor" for E8M0 scales, as in ``quantize_blocks``.
        power_2_scale: round float32 scales of blocks up to powers of two.
        amax_epsilon: lower bound of the maxima that float32 scales of blocks are computed from.
        batched: parameters of three or more dimensions are batches of matrices along the first
            one, with scales and maxima for each matrix.
    """


@python_op(native_random_uniform, mutates_args=["x"])
def random_uniform_(
    x: Tensor,
    seed: int,
    offset: int = 0,
    low: float = 0.0,
    high: float = 1.0,
    stream: int = 0,
    step: Tensor | None = None,
) -> None:
    """Fill ``x`` with random numbers in [low, high) that depend only on the seed and positions.

    Element i, in row-major order, gets the number of counter ``offset`` + i. Parts of a tensor that
    are filled with their own offsets therefore equal the tensor that is filled at once, on CPU and
    CUDA. The number is low + u * (high - low) in float32, rounded to the dtype of ``x``, where u is
    a multiple of 2**-24 in [0, 1) (Philox4x32-10). Rounding may give ``high``.

    Args:
        x: float32, bfloat16 or float16. Any strides that form a strided matrix.
        seed: 64 bits.
        offset: the counter of the first element.
        low: lower bound, finite and at most ``high``.
        high: upper bound, finite.
        stream: selects an independent sequence; 32 bits. ``adamw_`` uses a parameter's number.
        step: selects an independent sequence; float32, one element, an integer. With equal seed,
            stream, step and counter, ``adamw_`` rounds with the number in [0, 1).
    """
