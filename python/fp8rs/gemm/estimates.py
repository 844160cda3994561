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

#: Rates that follow from the bytes that are read and written, at 3 TB/s. A weight is quantized in
#: the forward and in the backward. `_ROW_SCALES` multiplies a weight's row scales into a gradient.
_DEQUANTIZE = 1000
_QUANTIZE_WEIGHT = 340
_ROW_SCALES = 150

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


class GroupedWeight(NamedTuple):
    """A weight of experts.

    Attributes:
        experts: the number of matrices.
        n: rows of a matrix as it is stored.
        k: columns of a matrix as it is stored.
        gathered: whether the weight is given as FP8 codes, as FSDP2 gathers it. FP8 GEMMs transpose
            such codes in the backward, and others dequantize them in the forward and the backward.
            Otherwise FP8 GEMMs quantize the weight in both.
        row_scales: whether it has a scale per row and not one per expert.
    """

    experts: int
    n: int
    k: int
    gathered: bool = True
    row_scales: bool = False


def choose(rows: int, weight: GroupedWeight) -> GroupedChoice:
    """Return the fastest GEMMs of a weight.

    Args:
        rows: rows of the input, of all experts.
        weight: the weight.
    """
    best, least = HIGH_PRECISION, grouped_us(HIGH_PRECISION, rows, weight)
    for choice in (HIGH_PRECISION_WGRAD, FP8):
        us = grouped_us(choice, rows, weight)
        if us < least:
            best, least = choice, us
    return best


def prefers_gated_mlp(rows: int, down: GroupedWeight) -> bool:
    """Whether `fp8rs.nn.grouped.gated_mlp` is faster than the choices of its two weights.

    It quantizes tokens as it copies them, and activations as it computes them, which takes no
    longer than computing them in bf16. Only the gradient of the output is quantized on its own.

    Args:
        rows: rows of the input, of all experts.
        down: the second weight, (experts, hidden, width).
    """
    gate_up = down._replace(n=2 * down.k, k=down.n)
    fused = _gemms_us(FP8, rows, gate_up) + _gemms_us(FP8, rows, down)
    fused += rows * down.n * (1 / _QUANTIZE_TOKENS + 1 / _QUANTIZE[True]) / 1e3
    separate = 0.0
    for weight in (gate_up, down):
        separate += grouped_us(choose(rows, weight), rows, weight)
    return fused < separate


def grouped_us(choice: GroupedChoice, rows: int, weight: GroupedWeight) -> float:
    """Return the microseconds of forward and backward, with the quantization of the operands.

    Args:
        choice: the GEMMs.
        rows: rows of the input, of all experts.
        weight: the weight.
    """
    us = _gemms_us(choice, rows, weight)
    if choice.rows:
        us += rows * (weight.n + weight.k) / (1e3 * _QUANTIZE[choice.wgrad])
        if weight.row_scales:
            us += rows * weight.n / (1e3 * _ROW_SCALES)
    return us


def _gemms_us(choice: GroupedChoice, rows: int, weight: GroupedWeight) -> float:
    """Return the microseconds of three GEMMs and of the preparation of the weight."""
    n, k = weight.n, weight.k
    flops, elements = 2 * rows * n * k, weight.experts * n * k
    gemm = GROUPED_GEMMS[choice.rows].rows
    us = gemm.us(flops, rows * n) + gemm.us(flops, rows * k)
    us += GROUPED_GEMMS[choice.wgrad].wgrad.us(flops, elements)
    if choice.rows:
        us += elements / (1e3 * (_TRANSPOSE if weight.gathered else _QUANTIZE_WEIGHT))
    elif weight.gathered:
        us += 2 * elements / (1e3 * _DEQUANTIZE)
    return us
