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
    LEAST_SPEEDUP,
    GroupedWeight,
    choose,
    grouped_us,
    prefers_gated_mlp,
)

FIGURES = Path(__file__).parents[2] / "docs/figures"
LINEAR = json.loads((FIGURES / "linear_shapes.json").read_text())
GROUPED = json.loads((FIGURES / "grouped_shapes.json").read_text())

#: The rows of each measured weight: of each GEMM, and of the quantization of each operand.
CASES = {}
for row in GROUPED["gemms"] + GROUPED["quantize"]:
    case = row["model"], row["rows"], row["routing"], row["weight"]
    CASES.setdefault(case, {})[row.get("gemm") or row["operand"]] = row


def transposition(rows):
    """The measured time of the transposition of a weight's codes."""
    return rows["dgrad"]["quantize"] - rows["dy"]["rowwise"]


def measurements():
    """Each cost, and its measured parts, operations, elements and microseconds."""
    for name, cost in estimates.LINEAR.items():
        found = []
        for row in LINEAR["rows"]:
            tokens, k, n = row["shape"]
            elements = tokens * (n + k) + n * k
            found.append((1, 2 * tokens * n * k, elements, 1e3 * row["ms"][name]["both"]))
        yield pytest.param(cost, found, id=f"linear-{name}")
    balanced = [rows for case, rows in CASES.items() if "balanced" in case]
    weights = [
        (r["experts"], 2 * r["rows"] * r["n"] * r["k"], r["experts"] * r["n"] * r["k"])
        for r in (rows["wgrad"] for rows in balanced)
    ]
    for fp8, costs in estimates.GROUPED_GEMMS.items():
        for cost, gemms in (costs.rows, ("forward", "dgrad")), (costs.wgrad, ("wgrad",)):
            found = [
                (*weight, rows[gemm]["fp8" if fp8 else "bf16"])
                for weight, rows in zip(weights, balanced, strict=True)
                for gemm in gemms
            ]
            yield pytest.param(cost, found, id=f"grouped-{gemms[0]}-{fp8}")
    found = [(*w, transposition(r)) for w, r in zip(weights, balanced, strict=True)]
    yield pytest.param(estimates.TRANSPOSE, found, id="transpose")
    for columnwise, cost in estimates.QUANTIZE.items():
        found = [
            (1, 0, r["rows"] * r["cols"], r["both" if columnwise else "rowwise"])
            for r in GROUPED["quantize"]
        ]
        yield pytest.param(cost, found, id=f"quantize-{columnwise}")


@pytest.mark.parametrize("cost, measured", list(measurements()))
def test_costs_are_least_squares_fits(cost, measured):
    """The relative errors are minimal. Infinite rates are not fitted."""
    used = [1.0, 1e-6 * (cost.tflops < inf), 1e-3 * (cost.gelements < inf)]
    terms = torch.tensor(
        [[a * unit / us for a, unit in zip(given, used, strict=True)] for *given, us in measured],
        dtype=torch.float64,
    )
    terms = terms[:, [unit > 0 for unit in used]]
    one = torch.ones(len(terms), 1, dtype=torch.float64)
    fitted = torch.linalg.lstsq(terms, one).solution
    least = (terms @ fitted - one).square().sum().item()
    found = sum((cost.us(*given) / us - 1) ** 2 for *given, us in measured)
    overhead, *times = fitted.flatten().tolist()
    rates = [f"{1 / time:.0f}" if time else "inf" for time in times]
    assert found == pytest.approx(least, rel=0.01), f"overhead {overhead:.3f}, rates {rates}"


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
    """The rows and the weight of a case, and the measured microseconds of each choice."""
    rows = CASES[case]
    row = rows["forward"]
    weight = GroupedWeight(row["experts"], row["n"], row["k"])
    measured = {}
    for choice in CHOICES:
        kinds = [("fp8" if fp8 else "bf16") for fp8 in (choice.rows, choice.rows, choice.wgrad)]
        gemms = zip(("forward", "dgrad", "wgrad"), kinds, strict=True)
        us = sum(rows[gemm][kind] for gemm, kind in gemms)
        if choice.rows:
            direction = "both" if choice.wgrad else "rowwise"
            us += transposition(rows) + rows["x"][direction] + rows["dy"][direction]
        else:
            us += 2 * estimates.DEQUANTIZE.us(1, 0, weight.experts * weight.n * weight.k)
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
    # A gain that is estimated below the least one is forgone.
    assert chosen <= 1.2 * min(measured.values())


#: Experts, hidden size and width of the experts.
MIXTRAL, QWEN3, DEEPSEEK = (8, 4096, 14336), (128, 2048, 768), (256, 7168, 2048)


def choices(rows_per_expert, model, **options):
    """The choices of two weights, and whether their GEMMs are fused."""
    experts, hidden, width = model
    gate_up, down = (
        GroupedWeight(experts, n, k, **options) for n, k in ((2 * width, hidden), (hidden, width))
    )
    rows = rows_per_expert * experts
    return [choose(rows, gate_up), choose(rows, down)], prefers_gated_mlp(rows, down)


@pytest.mark.parametrize("model", [MIXTRAL, DEEPSEEK])
@pytest.mark.parametrize("rows", [512, 2048, 65536])
def test_large_experts_run_in_fp8(model, rows):
    assert choices(rows, model) == ([FP8, FP8], True)


def test_wgrad_of_few_rows_stays_in_high_precision():
    assert choices(128, MIXTRAL)[0] == [HIGH_PRECISION_WGRAD] * 2


def test_small_experts_run_in_fp8_if_fused_and_with_many_rows():
    """Two H100s took longer with FP8 GEMMs and 512 rows per expert."""
    for rows in (128, 512, 2048, 65536):
        assert choices(rows, QWEN3) == ([HIGH_PRECISION] * 2, rows >= 2048)


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
        weight, turned = GroupedWeight(8, n, k), GroupedWeight(8, k, n)
        assert choose(8 * rows, weight) == choose(8 * rows, turned)


@pytest.mark.parametrize("rows", [16, 128, 1024, 65536])
@pytest.mark.parametrize("n, k", [(64, 96), (1536, 2048), (28672, 4096)])
def test_no_other_choice_is_much_faster(rows, n, k):
    given = 8 * rows, GroupedWeight(8, n, k)
    chosen, plain = choose(*given), grouped_us(HIGH_PRECISION, *given)
    least = min(grouped_us(c, *given) for c in CHOICES)
    assert grouped_us(chosen, *given) == (least if least * LEAST_SPEEDUP < plain else plain)
