"""Estimates of the time of linear layers in FP8 and in bf16, fitted to measurements.

An operation takes a constant time, a time per floating-point operation, and a time per element that
it writes. `GROUPED_GEMMS` are least-squares fits of the relative errors of `MEASURED`, and `LINEAR`
of ``docs/figures/linear_shapes.json``. To replace a measurement, edit these and run
``tests/gemm/test_estimates.py``, which prints the fit.
"""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """The time of an operation.

    Attributes:
        overhead: microseconds of a call.
        tflops: rate of floating-point operations, in 1e12 per second.
        gelements: rate of elements, in 1e9 per second.
    """

    overhead: float
    tflops: float
    gelements: float

    def us(self, flops: float, elements: float) -> float:
        """Return the microseconds of an operation."""
        return self.overhead + flops / (1e6 * self.tflops) + elements / (1e3 * self.gelements)


# --- linear layers -------------------------------------------------------------------------------

#: Forward, dgrad and wgrad of a compiled linear layer with their quantization, by recipe. Elements
#: are in the input, the weight and the output. One H100, torch 2.11.
LINEAR = {
    "bf16": Cost(10.3, 298, 783),
    "current": Cost(39.9, 527, 275),
    "rowwise": Cost(45.8, 522, 266),
    "mxfp8": Cost(54.0, 530, 241),
    "block": Cost(35.4, 431, 321),
}


def linear_us(name: str, tokens: int, n: int, k: int) -> float:
    """Return the microseconds of forward and backward of a linear layer.

    Args:
        name: a key of `LINEAR`.
        tokens: rows of the input.
        n: out_features.
        k: in_features.
    """
    return LINEAR[name].us(2 * tokens * n * k, tokens * (n + k) + n * k)


# --- grouped GEMMs of experts --------------------------------------------------------------------

#: Measured grouped GEMMs: experts, out_features, in_features, rows, and the microseconds of forward
#: and wgrad in bf16, then in FP8 with fast accumulation. Rows are distributed evenly. One H200,
#: torch 2.11.
MEASURED = (
    (8, 28672, 4096, 16384, (5800, 6773), (3214, 3844)),  # Mixtral 8x7B, gate and up
    (8, 4096, 14336, 16384, (2903, 2955), (1627, 1740)),  # Mixtral 8x7B, down
    (32, 4096, 7168, 65536, (5826, 6007), (3300, 3523)),  # DeepSeek-V3, gate and up
    (128, 1536, 2048, 131072, (1346, 1418), (760, 954)),  # Qwen3-30B-A3B, gate and up
    (128, 2048, 768, 131072, (757, 729), (599, 595)),  # Qwen3-30B-A3B, down
    (128, 1536, 2048, 16384, (267, 418), (155, 443)),  # Qwen3-30B-A3B with few rows, gate and up
    (128, 2048, 768, 16384, (153, 210), (113, 287)),  # Qwen3-30B-A3B with few rows, down
)


class GroupedCosts(NamedTuple):
    """The costs of the grouped GEMMs of one kind of operands. Elements are in the result.

    Attributes:
        rows: the GEMM of rows and a weight, for forward and dgrad.
        wgrad: the GEMM of a weight's gradient.
    """

    rows: Cost
    wgrad: Cost


#: By whether operands are FP8. Without FP8, they are bf16.
GROUPED_GEMMS = {
    False: GroupedCosts(Cost(79.7, 671, 5395), Cost(0.438, 697, 1492)),
    True: GroupedCosts(Cost(52.2, 1313, 1360), Cost(144, 1323, 1862)),
}

#: Rates of kernels on one H100, in 1e9 elements per second. `_QUANTIZE` is by whether columnwise
#: codes are written too. `_QUANTIZE_TOKENS` writes both and copies tokens to their rows. The copy
#: in bf16 is subtracted.
_QUANTIZE = {False: 480, True: 350}
_QUANTIZE_TOKENS = 670
_TRANSPOSE = 1000
_DEQUANTIZE = 1000

#: Rows per expert that are assumed if a compiler does not know the number of rows.
TYPICAL_ROWS = 1024


class GroupedChoice(NamedTuple):
    """Which GEMMs of a weight of experts run on FP8 operands.

    Attributes:
        rows: whether forward and dgrad do.
        wgrad: whether wgrad does, which requires ``rows``.
    """

    rows: bool
    wgrad: bool

    def __str__(self) -> str:
        if self.wgrad:
            return "FP8"
        return "FP8, high-precision wgrad" if self.rows else "high precision"


HIGH_PRECISION = GroupedChoice(False, False)
HIGH_PRECISION_WGRAD = GroupedChoice(True, False)
FP8 = GroupedChoice(True, True)


def grouped_us(choice: GroupedChoice, rows: int, experts: int, n: int, k: int) -> float:
    """Return the microseconds of forward and backward with a weight of experts.

    The weight is given as FP8 codes, as FSDP2 gathers it. GEMMs in high precision dequantize it in
    the forward and in the backward, and FP8 GEMMs transpose its codes in the backward.

    Args:
        choice: the GEMMs.
        rows: rows of the input.
        experts: the number of experts.
        n: out_features.
        k: in_features.
    """
    us = _gemms_us(choice, rows, experts, n, k)
    if not choice.rows:
        return us + 2 * experts * n * k / (1e3 * _DEQUANTIZE)
    return us + rows * (n + k) / (1e3 * _QUANTIZE[choice.wgrad])


def choose(rows: int, experts: int, n: int, k: int) -> GroupedChoice:
    """Return the fastest GEMMs of a weight of experts.

    Args:
        rows: rows of the input.
        experts: the number of experts.
        n: out_features, or in_features.
        k: the other one.
    """
    best, least = HIGH_PRECISION, grouped_us(HIGH_PRECISION, rows, experts, n, k)
    for choice in (HIGH_PRECISION_WGRAD, FP8):
        us = grouped_us(choice, rows, experts, n, k)
        if us < least:
            best, least = choice, us
    return best


def prefers_gated_mlp(rows: int, experts: int, hidden: int, width: int) -> bool:
    """Whether `fp8rs.nn.grouped.gated_mlp` is faster than the choices of its two weights.

    It quantizes tokens as it copies them, and activations as it computes them, which takes no
    longer than computing them in bf16. Only the gradient of the output is quantized on its own.

    Args:
        rows: rows of the input.
        experts: the number of experts.
        hidden: in_features of the first weight and out_features of the second.
        width: in_features of the second weight, half of the first one's out_features.
    """
    sizes = (2 * width, hidden), (hidden, width)
    fused = sum(_gemms_us(FP8, rows, experts, n, k) for n, k in sizes)
    fused += rows * hidden * (1 / _QUANTIZE_TOKENS + 1 / _QUANTIZE[True]) / 1e3
    chosen = (choose(rows, experts, n, k) for n, k in sizes)
    separate = (
        grouped_us(choice, rows, experts, n, k)
        for choice, (n, k) in zip(chosen, sizes, strict=True)
    )
    return fused < sum(separate)


def _gemms_us(choice: GroupedChoice, rows: int, experts: int, n: int, k: int) -> float:
    """Return the microseconds of three GEMMs and of the transposition of FP8 codes."""
    flops, weights = 2 * rows * n * k, experts * n * k
    gemm = GROUPED_GEMMS[choice.rows].rows
    us = gemm.us(flops, rows * n) + gemm.us(flops, rows * k)
    us += GROUPED_GEMMS[choice.wgrad].wgrad.us(flops, weights)
    return us + (weights / (1e3 * _TRANSPOSE) if choice.rows else 0)
