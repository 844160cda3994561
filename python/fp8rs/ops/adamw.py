"""The operators of the optimizer, and random numbers by position."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fp8rs import _core
from fp8rs.ops.define import in_python


@in_python(_core.adamw, writes=["exp_avgs", "exp_avg_sqs", "params", "masters", "scales", "amaxes"])
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
    """One step of AdamW for each parameter, all contiguous and of any shape.

    With g, m, v and w the gradient, the moments and the parameter (its master where there is one),
    all in float32, each operation rounded once and none contracted::

        g = g * (1 / grad_scale), or its negative to maximize
        w = w * (1 - lr * weight_decay)
        m = m + (g - m) * (1 - beta1)       # from g's side where 1 - beta1 >= 0.5
        v = v * beta2 + (1 - beta2) * g * g
        w = w - lr / (1 - beta1**step) * m / (sqrt(v) / sqrt(1 - beta2**step) + eps)

    What has no element in it is computed in float64 and rounded to float32 once. CPU and CUDA give
    the same bytes.

    Args:
        grads: float32, bfloat16 or float16.
        exp_avgs, exp_avg_sqs: float32, or both bfloat16 (rounded to nearest).
        params: all float32, bfloat16 or float16, which are rounded to nearest; or all FP8 codes.
        masters: float32, or empty. With them the step starts from the masters.
        steps: the number of this step counted from 1, float32 of one element each.
        scales: of codes, read (without masters) and written: float32 of one element each, or one
            element a block (float32 or float8_e8m0fnu). Empty for plain parameters.
        new_scales: where each parameter has one scale: those to write with, float32 of one element
            each. Empty with such parameters, nothing is written but ``amaxes``.
        amaxes: float32 of one element each, or empty. They become the maxima of the updated values;
            with ``new_scales`` they are raised to them where those are finite, and where one is not
            the parameter's scale becomes NaN.
        offsets, streams: of each parameter the index of its first element in the whole one, and
            that one's number: stochastic rounding depends on them, on ``seed`` and on the step.
        lr_tensor: in place of ``lr``, float32 of one element.
        grad_scale: what gradients were multiplied with, float32 of one element.
        found_inf: nothing is written where it is not zero; float32 of one element.
        seed: round codes stochastically with this seed; None is to nearest.
        block: the blocks that have scales of their own, (rows, columns), -1 for the whole extent:
            found, and written in the same pass. Empty where there are none.
        rounding, power_2_scale, amax_epsilon: how such scales are made, as in ``quantize_blocks``.
        batched: parameters of three or more dimensions are batches of matrices along the first
            one, with scales and maxima for each matrix.
    """


@in_python(_core.random_uniform, writes=["x"])
def random_uniform_(
    x: Tensor,
    seed: int,
    offset: int = 0,
    low: float = 0.0,
    high: float = 1.0,
    stream: int = 0,
    step: Tensor | None = None,
) -> None:
    """Fill ``x`` with numbers from ``low`` to ``high`` that depend on seed and position alone.

    Element i, counted in the order of the indices, gets the number of counter ``offset`` + i: a
    tensor filled at once, and its parts each filled with an offset of its own, are the same, on the
    CPU and on CUDA. The number is low + u * (high - low) in float32, u a multiple of 2**-24 from 0
    to below 1 (Philox4x32-10), rounded to the dtype of ``x``: ``high`` is met by rounding alone.

    Args:
        x: float32, bfloat16 or float16; strides are free where they make a strided matrix.
        seed: 64 bits.
        offset: the counter of the first element.
        low, high: finite, ``low`` at most ``high``.
        stream: other numbers for each, 32 bits: the place of a weight among those of ``adamw_``.
        step: other numbers for each, float32 of one element without a fraction. With all of these
            a number of [0, 1) is the one that ``adamw_`` rounds an element with.
    """
