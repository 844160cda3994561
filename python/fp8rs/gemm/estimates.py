"""Estimates of the time of linear layers in FP8 and in bf16, fitted to measurements.

The estimate for an operation is the sum of a constant time, a time per floating-point operation and
a time per element. The costs are least-squares fits of relative errors, on one H100 with torch
2.11. Measured times are in ``docs/figures/linear_shapes.json`` and
``docs/figures/grouped_shapes.json``, which the benchmarks of these names write.
``tests/gemm/test_estimates.py`` checks the fits, and prints new ones if the files change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, inf
from typing import NamedTuple


class Cost(NamedTuple):
    """The time of an operation.

    Attributes:
        overhead: microseconds of each part, which is a call or a matrix.
        tflops: rate of floating-point operations, in 1e12 per second.
        gelements: rate of elements, in 1e9 per second.
    """

    overhead: float
    tflops: float
    gelements: float

    def us(self, parts: int, flops: float, elements: float) -> float:
        """Return the microseconds of an operation."""
        rates = flops / (1e6 * self.tflops) + elements / (1e3 * self.gelements)
        return parts * self.overhead + rates


# --- linear layers -------------------------------------------------------------------------------

#: Forward, dgrad and wgrad of a compiled linear layer with their quantization, by recipe. Elements
#: are in the input, the weight and the output.
LINEAR = {
    "bf16": Cost(10.3, 298, 783),
    "current": Cost(39.9, 527, 275),
    "rowwise": Cost(45.8, 522, 266),
    "mxfp8": Cost(54.0, 530, 241),
    "block": Cost(35.4, 431, 321),
}


def linear_us(name: str, tokens: int, n: int, k: int, high_precision_gemms: int = 0) -> float:
    """Return the microseconds of forward and backward of a linear layer.

    A GEMM in high precision is counted as a third of the layer in bf16. Layers with such GEMMs were
    not measured.

    Args:
        name: a key of `LINEAR`, or "delayed", which is estimated as "current" and is faster.
        tokens: rows of the input.
        n: out_features.
        k: in_features.
        high_precision_gemms: the number of GEMMs that run in high precision, of three.
    """
    size = (1, 2 * tokens * n * k, tokens * (n + k) + n * k)
    us = LINEAR["current" if name == "delayed" else name].us(*size)
    return us + high_precision_gemms / 3 * (LINEAR["bf16"].us(*size) - us)


#: Microseconds that the host takes for a linear layer of a transformer, with everything around it,
#: in a training step with FP8. Where bf16 GEMMs take less, the device waits for the host, so that
#: FP8 GEMMs gain nothing, and their launches take time. Blocks with widths of 512 to 8,192 broke
#: even at 600 to 1,100 us on one H200, eager and compiled (`benches/pays_off.py`).
HOST_US = 900

#: The devices whose GEMMs were measured.
MEASURED_DEVICES = ("cuda",)


def is_measured(device_type: str) -> bool:
    """Return whether a type of devices has measured GEMMs, so that estimates apply to it."""
    return device_type in MEASURED_DEVICES


def min_tokens(
    name: str, weights: Sequence[tuple[int, int]], high_precision_gemms: int = 0
) -> float:
    """Return the least number of tokens from which a model is faster in FP8 than in bf16.

    Below it, the host is estimated to be slower than the device, or FP8 GEMMs with their
    quantization slower than bf16 GEMMs.

    Args:
        name: a name as for `linear_us`.
        weights: (out_features, in_features) of each linear layer.
        high_precision_gemms: the number of GEMMs that run in high precision, of three.

    Returns:
        A whole number, or inf if FP8 is slower with any number of tokens. 0 without weights.
    """
    if not weights:
        return 0

    # Estimates are linear in the number of tokens.
    bf16_us, bf16_us_per_token = _us_and_slope("bf16", weights)
    fp8_us, fp8_us_per_token = _us_and_slope(name, weights, high_precision_gemms)
    if fp8_us_per_token >= bf16_us_per_token:
        return inf

    to_occupy_the_device = (HOST_US * len(weights) - bf16_us) / bf16_us_per_token
    to_pay_for_quantization = (fp8_us - bf16_us) / (bf16_us_per_token - fp8_us_per_token)
    return ceil(max(to_occupy_the_device, to_pay_for_quantization, 0))


def _us_and_slope(
    name: str, weights: Iterable[tuple[int, int]], high_precision_gemms: int = 0
) -> tuple[float, float]:
    """Return the microseconds of layers without tokens, and of each token."""
    us = 0.0
    us_of_one_token = 0.0
    for n, k in weights:
        us += linear_us(name, 0, n, k, high_precision_gemms)
        us_of_one_token += linear_us(name, 1, n, k, high_precision_gemms)
    return us, us_of_one_token - us


# --- grouped GEMMs of experts --------------------------------------------------------------------


class GroupedCosts(NamedTuple):
    """The costs of grouped GEMMs. Parts are experts, and elements are in the weight.

    Attributes:
        rows: the GEMM of rows and a weight, for forward and dgrad.
        wgrad: the GEMM of a weight's gradient.
    """

    rows: Cost
    wgrad: Cost


#: The costs of bf16 (False) and FP8 (True), with rows distributed evenly.
GROUPED_GEMMS = {
    False: GroupedCosts(Cost(0.788, 769, 9833), Cost(0.353, 741, 2078)),
    True: GroupedCosts(Cost(0.671, 1203, inf), Cost(1.028, 1283, 1862)),
}

#: The quantization of rows, by whether columnwise codes are written too.
QUANTIZE = {False: Cost(13.5, inf, 606), True: Cost(38.7, inf, 477)}

#: The extra time to quantize tokens in both directions while they are copied to rows, compared with
#: copying them in bf16. It was 171, 76 and 412 us for 131,072 rows of 2,048 values, 16,384 of 4,096
#: and 65,536 of 7,168.
QUANTIZE_TOKENS = Cost(0, inf, 1250)

#: The transposition of a weight's codes.
TRANSPOSE = Cost(0, inf, 1341)

#: The dequantization of a weight. 24 of them took 7.46 ms in steps of a model like Qwen3.
DEQUANTIZE = Cost(0, inf, 972)

#: Costs that follow from the bytes that are read and written, at 3 TB/s. A weight that is not
#: gathered is quantized in the forward and in the backward, with launches for each expert.
#: `ROW_SCALES` multiplies the row scales of a weight into a gradient.
QUANTIZE_WEIGHT = Cost(9, inf, 340)
ROW_SCALES = Cost(0, inf, 150)

#: FP8 is chosen if it is estimated to be at least this many times as fast, and to save at least
#: these microseconds per weight. FP8 GEMMs launch more kernels, which takes time where the host
#: limits a step. A gated MLP with fused quantization launches fewer. Steps of a model like Qwen3
#: (6 layers, two H100s) took 116, 154 and 236 ms with it and 123, 161 and 251 ms without FP8 GEMMs,
#: with 256, 512 and 1,024 rows per expert. The estimated savings are 501, 637 and 909 us per
#: weight. With 128 rows and 433 us, steps were 3% longer with it: the mean of four comparisons with
#: the variants in turn, on one H200 as rank 0 of two (2026-11-30, torch 2.11). Steps with smaller
#: savings or unfused quantization were not measured.
MIN_SPEEDUP = 1.1
MIN_SAVING = 750
MIN_FUSED_SAVING = 450

#: With more rows per expert, wgrad is not in FP8, or its sums are divided into parts if FP8 is
#: requested. Hopper accumulates with about 14 bits, so sums of terms with a nonzero mean lose
#: accuracy as the number of terms grows.
MAX_WGRAD_ROWS = 8192

#: The rule of `choose`, for reports.
CHOICE = (
    f"FP8 is chosen where it is estimated to be {MIN_SPEEDUP - 1:.0%} faster and to save "
    f"{MIN_SAVING / 1000} ms per weight ({MIN_FUSED_SAVING / 1000} ms if gate, up and down are "
    f"fused), for wgrad up to {MAX_WGRAD_ROWS:,} rows per expert."
)

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
        fp8_wgrad: whether the recipe allows wgrad on FP8 operands.
    """

    experts: int
    n: int
    k: int
    gathered: bool = True
    row_scales: bool = False
    fp8_wgrad: bool = True


def choose(rows: int, weight: GroupedWeight) -> GroupedChoice:
    """Return the fastest GEMMs of a weight.

    FP8 is chosen only if it reaches `MIN_SPEEDUP` and `MIN_SAVING`. In wgrad, it is chosen only
    if the recipe allows it, for at most `MAX_WGRAD_ROWS` rows per expert.

    Args:
        rows: rows of the input, of all experts.
        weight: the weight.
    """
    best = HIGH_PRECISION
    best_us = _max_us(grouped_us(HIGH_PRECISION, rows, weight), MIN_SAVING)
    allows_fp8_wgrad = weight.fp8_wgrad and rows <= MAX_WGRAD_ROWS * weight.experts
    for choice in (HIGH_PRECISION_WGRAD, FP8):
        if choice.wgrad and not allows_fp8_wgrad:
            continue
        us = grouped_us(choice, rows, weight)
        if us < best_us:
            best = choice
            best_us = us
    return best


def gated_mlp_is_faster(rows: int, down: GroupedWeight) -> bool:
    """Return whether `gated_mlp` is faster than the choices of its two weights.

    It is a function of `fp8rs.nn.grouped_function`.

    Like `choose`, this requires `MIN_SPEEDUP` and a saving, here `MIN_FUSED_SAVING` per weight,
    and at most `MAX_WGRAD_ROWS` rows per expert.

    Args:
        rows: rows of the input, of all experts.
        down: the second weight, (experts, hidden, width).
    """
    fused_us = gated_mlp_us(rows, down)
    weights = (_gate_up(down), down)
    high_precision_us = sum(grouped_us(HIGH_PRECISION, rows, weight) for weight in weights)
    separate_us = sum(grouped_us(choose(rows, weight), rows, weight) for weight in weights)
    return (
        fused_us < separate_us
        and fused_us < _max_us(high_precision_us, 2 * MIN_FUSED_SAVING)
        and rows <= MAX_WGRAD_ROWS * down.experts
    )


def gated_mlp_us(rows: int, down: GroupedWeight) -> float:
    """Return the microseconds of forward and backward of `fp8rs.nn.grouped_function.gated_mlp`.

    It quantizes tokens as it copies them, and activations as it computes them, which takes no
    longer than computing them in bf16. Only the gradient of the output is quantized on its own. The
    copy of tokens and the activation itself are not included.

    Args:
        rows: rows of the input, of all experts.
        down: the second weight, (experts, hidden, width).
    """
    elements = rows * down.n
    us = QUANTIZE_TOKENS.us(1, 0, elements) + QUANTIZE[True].us(1, 0, elements)
    return us + _gemms_us(FP8, rows, _gate_up(down)) + _gemms_us(FP8, rows, down)


def _gate_up(down: GroupedWeight) -> GroupedWeight:
    return down._replace(n=2 * down.k, k=down.n)


def _max_us(high_precision_us: float, saving: float) -> float:
    """Return the most microseconds that FP8 may take to be chosen."""
    return min(high_precision_us / MIN_SPEEDUP, high_precision_us - saving)


def grouped_us(choice: GroupedChoice, rows: int, weight: GroupedWeight) -> float:
    """Return the microseconds of forward and backward, with the quantization of the operands.

    Args:
        choice: the GEMMs.
        rows: rows of the input, of all experts.
        weight: the weight.
    """
    us = _gemms_us(choice, rows, weight)
    if choice.rows:
        us += QUANTIZE[choice.wgrad].us(2, 0, rows * (weight.n + weight.k))
        if weight.row_scales:
            us += ROW_SCALES.us(1, 0, rows * weight.n)
    return us


def _gemms_us(choice: GroupedChoice, rows: int, weight: GroupedWeight) -> float:
    """Return the microseconds of three GEMMs and of the preparation of the weight."""
    elements = weight.experts * weight.n * weight.k
    flops = 2 * rows * weight.n * weight.k
    us = 2 * GROUPED_GEMMS[choice.rows].rows.us(weight.experts, flops, elements)
    us += GROUPED_GEMMS[choice.wgrad].wgrad.us(weight.experts, flops, elements)
    if choice.rows:
        preparation = TRANSPOSE if weight.gathered else QUANTIZE_WEIGHT
        us += preparation.us(weight.experts, 0, elements)
    elif weight.gathered:
        us += 2 * DEQUANTIZE.us(1, 0, elements)
    return us
