"""Operators of the optimizer, and random numbers that depend on an element's position."""

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
    """Run one step of AdamW for each parameter. Tensors are contiguous and of any shape.

    Let g be the gradient, m and v the moments, and w the parameter, or its master if there is one.
    All are float32. Each operation is rounded once and none is contracted::

        g = g * (1 / grad_scale), or its negative to maximize
        w = w * (1 - lr * weight_decay)
        m = m + (g - m) * (1 - beta1)       # computed from g if 1 - beta1 >= 0.5
        v = v * beta2 + (1 - beta2) * g * g
        w = w - lr / (1 - beta1**step) * m / (sqrt(v) / sqrt(1 - beta2**step) + eps)

    Terms that do not depend on an element are computed in float64 and rounded to float32 once. CPU
    and CUDA return the same bytes.

    Args:
        grads: gradients, float32, bfloat16 or float16.
        exp_avgs: first moments, float32 or bfloat16 (rounded to nearest).
        exp_avg_sqs: second moments, of the dtype of ``exp_avgs``.
        params: parameters. All are float32, bfloat16 or float16 (rounded to nearest), or all are
            FP8 codes.
        masters: float32, or empty. If given, the step reads and updates the masters.
        steps: the number of this step, starting at 1: float32, one element each.
        scales: scales of FP8 codes: float32 of one element each, or float32 or float8_e8m0fnu with
            one element per block. They are written, and without masters also read. Empty for plain
            parameters.
        new_scales: for codes with one scale, the scales to write with: float32, one element each.
            If empty, only ``amaxes`` is written for such parameters.
        amaxes: float32 of one element each, or empty. Without ``new_scales`` they are set to the
            absolute maxima of the updated values. With ``new_scales`` they are raised to the finite
            ones, and the scale of a parameter whose maximum is not finite becomes NaN.
        offsets: the index of each parameter's first element in the whole parameter. Stochastic
            rounding depends on it, on ``streams``, on ``seed`` and on the step.
        streams: the index of each whole parameter.
        lr_tensor: replaces ``lr``. float32, one element.
        grad_scale: the factor by which gradients were multiplied. float32, one element.
        found_inf: if nonzero, nothing is written. float32, one element.
        lr: the learning rate.
        beta1: the decay rate of the first moment.
        beta2: the decay rate of the second moment.
        eps: the epsilon that is added to the denominator.
        weight_decay: the coefficient of decoupled weight decay.
        maximize: whether to maximize the objective.
        seed: the seed for stochastic rounding of codes. None rounds to nearest.
        block: (rows, columns) of the blocks that have scales, -1 for the whole extent. These scales
            are computed and written in the same pass. Empty for one scale per parameter.
        rounding: see ``quantize_blocks``.
        power_2_scale: see ``quantize_blocks``.
        amax_epsilon: see ``quantize_blocks``.
        batched: read parameters of three or more dimensions as batches of matrices along the first
            dimension, with scales and maxima for each matrix.
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
    """Fill ``x`` with uniform numbers that depend on seed and position only.

    Element i in row-major order uses counter ``offset`` + i. Filling a tensor at once or in
    parts, with their offsets, gives the same numbers, on the CPU and on CUDA. The number is
    low + u * (high - low) in float32, rounded to the dtype of ``x``. u is a multiple of 2**-24 in
    [0, 1) from Philox4x32-10. ``high`` can occur only by rounding.

    Args:
        x: float32, bfloat16 or float16. It may be a strided matrix.
        seed: 64 bits.
        offset: the counter of the first element.
        low: the least number, finite.
        high: the largest number, finite and not less than ``low``.
        stream: 32 bits that select other numbers. In ``adamw_``, the index of a weight.
        step: float32 of one element without a fraction, which selects other numbers. With ``seed``,
            ``offset``, ``stream`` and ``step`` of ``adamw_``, the numbers in [0, 1) are those that
            ``adamw_`` rounds with.
    """
