"""Estimated times, the measurements that they are fitted to, and the choices that follow."""

import json
from math import inf
from pathlib import Path

import pytest
import torch

from fp8rs.gemm import estimates
from fp8rs.gemm.estimates import (
    FP8,
    HIGH_PRECISION,
    HIGH_PRECISION_WGRAD,
    MAX_WGRAD_ROWS,
    MIN_SAVING,
    MIN_SPEEDUP,
    GroupedWeight,
    choose,
    gated_mlp_is_faster,
    gated_mlp_us,
    grouped_us,
)

FIGURES = Path(__file__).parents[2] / "docs/figures"
LINEAR = json.loads((FIGURES / "linear_shapes.json").read_text())
GROUPED = json.loads((FIGURES / "grouped_shapes.json").read_text())

#: The measured GEMMs of each weight.
CASES = {}
for row in GROUPED["gemms"]:
    case = row["model"], row["rows"], row["routing"], row["weight"]
    CASES.setdefault(case, {})[row["gemm"]] = row

#: The measured kernels. The name in the file is for rows of in_features of gate_up.
KERNELS = {}
for row in GROUPED["kernels"]:
    KERNELS.setdefault(row["name"], []).append(row)


def measurements():
    """Each cost, and its measured parts, operations, elements and microseconds."""
    for name, cost in estimates.LINEAR.items():
        points = []
        for row in LINEAR["rows"]:
            tokens, k, n = row["shape"]
            elements = tokens * (n + k) + n * k
            points.append((1, 2 * tokens * n * k, elements, 1e3 * row["ms"][name]["both"]))
        yield pytest.param(cost, points, id=f"linear-{name}")
    balanced = [rows for case, rows in CASES.items() if "balanced" in case]
    weights = [
        (r["experts"], 2 * r["rows"] * r["n"] * r["k"], r["experts"] * r["n"] * r["k"])
        for r in (rows["wgrad"] for rows in balanced)
    ]
    for fp8, costs in estimates.GROUPED_GEMMS.items():
        for cost, gemms in (costs.rows, ("forward", "dgrad")), (costs.wgrad, ("wgrad",)):
            points = [
                (*weight, rows[gemm]["fp8" if fp8 else "bf16"])
                for weight, rows in zip(weights, balanced, strict=True)
                for gemm in gemms
            ]
            yield pytest.param(cost, points, id=f"grouped-{gemms[0]}-{fp8}")
    for name, cost in (
        ("rows", estimates.QUANTIZE[False]),
        ("rows and columns", estimates.QUANTIZE[True]),
    ):
        points = [(1, 0, r["rows"] * r["cols"], r["time"]) for r in KERNELS[name]]
        yield pytest.param(cost, points, id=name)
    sizes = {
        r["model"]: r["experts"] * r["n"] * r["k"]
        for r in GROUPED["gemms"]
        if r["weight"] == "gate_up"
    }
    kernels = KERNELS["transposition of gate_up codes"]
    points = [(1, 0, sizes[r["model"]], r["time"]) for r in kernels]
    yield pytest.param(estimates.TRANSPOSE, points, id="transposition")


@pytest.mark.parametrize("cost, measured", list(measurements()))
def test_costs_are_least_squares_fits(cost, measured):
    """The relative errors are minimal. Infinite rates and overheads of 0 are not fitted."""
    used = [cost.overhead > 0, 1e-6 * (cost.tflops < inf), 1e-3 * (cost.gelements < inf)]
    terms = torch.tensor(
        [[a * unit / us for a, unit in zip(units, used, strict=True)] for *units, us in measured],
        dtype=torch.float64,
    )
    terms = terms[:, [unit > 0 for unit in used]]
    ones = torch.ones(len(terms), 1, dtype=torch.float64)
    fitted = torch.linalg.lstsq(terms, ones).solution
    least = (terms @ fitted - ones).square().sum().item()
    squares = sum((cost.us(*units) / us - 1) ** 2 for *units, us in measured)
    assert squares == pytest.approx(least, rel=0.01), f"{fitted}, or inverse: {1 / fitted}"


@pytest.mark.parametrize("name", ["current", "rowwise", "mxfp8", "block"])
def test_speedups_of_linear_layers_are_on_the_measured_side(name):
    """Layers that are measured 5% faster or slower than bf16 are estimated so."""
    for row in LINEAR["rows"]:
        tokens, k, n = row["shape"]
        measured = row["ms"]["bf16"]["both"] / row["ms"][name]["both"]
        sizes = tokens, n, k
        estimated = estimates.linear_us("bf16", *sizes) / estimates.linear_us(name, *sizes)
        assert estimated == pytest.approx(measured, rel=0.2)
        if abs(measured - 1) > 0.05:
            assert (estimated > 1) == (measured > 1), row["shape"]


CHOICES = (HIGH_PRECISION, HIGH_PRECISION_WGRAD, FP8)


def grouped(case):
    """The rows and the weight of a case, and the times of each choice with measured GEMMs."""
    rows = CASES[case]
    row = rows["forward"]
    weight = GroupedWeight(row["experts"], row["n"], row["k"])
    measured = {}
    for choice in CHOICES:
        kinds = [("fp8" if fp8 else "bf16") for fp8 in (choice.rows, choice.rows, choice.wgrad)]
        gemms = zip(("forward", "dgrad", "wgrad"), kinds, strict=True)
        us = sum(rows[gemm][kind] for gemm, kind in gemms)
        elements = weight.experts * weight.n * weight.k
        if choice.rows:
            us += estimates.TRANSPOSE.us(1, 0, elements)
            quantized = row["rows"] * (weight.n + weight.k)
            us += estimates.QUANTIZE[choice.wgrad].us(2, 0, quantized)
        else:
            us += 2 * estimates.DEQUANTIZE.us(1, 0, elements)
        measured[choice] = us
    return row["rows"], weight, measured


@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward_are_estimated_within_12_percent(case):
    """This holds for even rows. Skewed rows take up to a quarter longer."""
    rows, weight, measured = grouped(case)
    for choice, us in measured.items():
        ratio = grouped_us(choice, rows, weight) / us
        assert 0.88 < ratio < 1.12 if "balanced" in case else 0.8 < ratio < 1.12


@pytest.mark.parametrize("case", CASES)
def test_the_choice_is_measured_as_fast_as_high_precision(case):
    rows, weight, measured = grouped(case)
    chosen = measured[choose(rows, weight)]
    assert chosen <= measured[HIGH_PRECISION]
    # Small gains are forgone, and wgrad of many rows is not in FP8.
    has_parts = rows > MAX_WGRAD_ROWS * weight.experts
    least = min(us for choice, us in measured.items() if not (choice.wgrad and has_parts))
    assert chosen <= max(1.15 * least, least + 1.2 * MIN_SAVING)


@pytest.mark.parametrize("row", [row for row in GROUPED["mlp"] if row["kind"] == "mlp"])
def test_a_gated_mlp_saves_at_least_the_estimated_time(row):
    """Compared with bf16 GEMMs on dequantized weights. The sum into tokens is not part of it."""
    experts, hidden, width = EXPERTS[row["model"]]
    down = GroupedWeight(experts, hidden, width)
    weights = down, GroupedWeight(experts, 2 * width, hidden)
    elements = sum(w.experts * w.n * w.k for w in weights)
    dequantized = 2 * estimates.DEQUANTIZE.us(1, 0, elements)
    measured = row["bf16"] + dequantized - (row["fp8"] - row["permuting"])
    plain = sum(grouped_us(HIGH_PRECISION, row["rows"], w) for w in weights)
    assert measured > 0.95 * (plain - gated_mlp_us(row["rows"], down))


#: Experts, hidden size and width of the experts.
MIXTRAL, QWEN3, DEEPSEEK = (8, 4096, 14336), (128, 2048, 768), (256, 7168, 2048)
EXPERTS = {"mixtral": MIXTRAL, "qwen3": QWEN3, "deepseek-v3": (32, *DEEPSEEK[1:])}


def choices(rows_per_expert, model, **options):
    """The choices of two weights, and whether their GEMMs are fused."""
    experts, hidden, width = model
    gate_up, down = (
        GroupedWeight(experts, n, k, **options) for n, k in ((2 * width, hidden), (hidden, width))
    )
    rows = rows_per_expert * experts
    return [choose(rows, gate_up), choose(rows, down)], gated_mlp_is_faster(rows, down)


@pytest.mark.parametrize("model", [MIXTRAL, DEEPSEEK])
@pytest.mark.parametrize("rows", [512, 2048, MAX_WGRAD_ROWS])
def test_large_experts_run_in_fp8(model, rows):
    assert choices(rows, model) == ([FP8, FP8], True)


@pytest.mark.parametrize("rows", [128, MAX_WGRAD_ROWS + 1])
def test_wgrad_of_few_or_many_rows_stays_in_high_precision(rows):
    """FP8 gains little for few rows, and Hopper's sums lose accuracy with many."""
    gate_up = FP8 if rows == 128 else HIGH_PRECISION_WGRAD
    assert choices(rows, MIXTRAL) == ([gate_up, HIGH_PRECISION_WGRAD], rows == 128)


def test_small_experts_run_in_fp8_if_fused():
    """With 256 rows per expert or more, steps took no longer with FP8 GEMMs."""
    for rows in (64, 128, 256, 512, 1024):
        assert choices(rows, QWEN3) == ([HIGH_PRECISION] * 2, rows >= 256)
    assert choices(8192, QWEN3)[1]


def test_weights_that_are_not_gathered_gain_less():
    """FP8 GEMMs quantize them in each call, and others read them as they are."""
    for rows in (128, 1024):
        assert choices(rows, MIXTRAL, gathered=False) == ([HIGH_PRECISION] * 2, False)
    assert choices(8192, MIXTRAL, gathered=False) == ([FP8, FP8], True)


def test_row_scales_cost_a_pass_over_gradients():
    down = GroupedWeight(32, 2880, 2880)
    assert choose(32 * 2048, down) == FP8
    assert choose(32 * 2048, GroupedWeight(32, 2880, 2880, row_scales=True)) == HIGH_PRECISION
    assert choices(2048, MIXTRAL, row_scales=True)[0] == [FP8, FP8]


@pytest.mark.parametrize("n, k", [(1536, 2048), (4096, 14336)])
def test_the_choice_does_not_depend_on_the_layout(n, k):
    for rows in (128, 1024, 8192):
        weight = GroupedWeight(8, n, k)
        transposed = GroupedWeight(8, k, n)
        assert choose(8 * rows, weight) == choose(8 * rows, transposed)


@pytest.mark.parametrize("rows", [16, 128, 1024, MAX_WGRAD_ROWS])
@pytest.mark.parametrize("n, k", [(64, 96), (1536, 2048), (28672, 4096)])
def test_no_other_choice_is_much_faster(rows, n, k):
    sizes = 8 * rows, GroupedWeight(8, n, k)
    chosen = choose(*sizes)
    plain = grouped_us(HIGH_PRECISION, *sizes)
    least = min(grouped_us(c, *sizes) for c in CHOICES)
    if chosen == HIGH_PRECISION:
        assert least > min(plain / MIN_SPEEDUP, plain - MIN_SAVING)
    else:
        assert grouped_us(chosen, *sizes) == least
