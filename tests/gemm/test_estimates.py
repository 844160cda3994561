"""Estimated times, the measurements that they are fitted to, and the choices that follow."""

import json
from pathlib import Path

import pytest
import torch

from fp8rs.gemm import estimates
from fp8rs.gemm.estimates import (
    FP8,
    HIGH_PRECISION,
    HIGH_PRECISION_WGRAD,
    GroupedWeight,
    choose,
    grouped_us,
    prefers_gated_mlp,
)

LINEAR = json.loads((Path(__file__).parents[2] / "docs/figures/linear_shapes.json").read_text())


def of_grouped(fp8, gemm):
    """Measured microseconds, operations and elements of a grouped GEMM."""
    for experts, n, k, rows, *us in estimates.MEASURED:
        elements = experts * n * k if gemm == "wgrad" else rows * n
        yield us[fp8][gemm == "wgrad"], 2 * rows * n * k, elements


def of_linear(name):
    """Measured microseconds, operations and elements of forward and backward of a linear layer."""
    for row in LINEAR["rows"]:
        tokens, k, n = row["shape"]
        yield 1e3 * row["ms"][name]["both"], 2 * tokens * n * k, tokens * (n + k) + n * k


GROUPED = [
    (getattr(costs, gemm), list(of_grouped(fp8, gemm)))
    for fp8, costs in estimates.GROUPED_GEMMS.items()
    for gemm in ("rows", "wgrad")
]
COSTS = GROUPED + [(cost, list(of_linear(name))) for name, cost in estimates.LINEAR.items()]


@pytest.mark.parametrize("cost, measured", COSTS)
def test_costs_are_least_squares_fits_of_relative_errors(cost, measured):
    rows = [[1 / us, flops / (1e6 * us), elements / (1e3 * us)] for us, flops, elements in measured]
    terms = torch.tensor(rows, dtype=torch.float64)
    one = torch.ones(len(rows), 1, dtype=torch.float64)
    overhead, flop, element = torch.linalg.lstsq(terms, one).solution.flatten().tolist()
    assert cost == pytest.approx((overhead, 1 / flop, 1 / element), rel=0.01)


@pytest.mark.parametrize("cost, measured", GROUPED)
def test_grouped_gemms_are_estimated_within_11_percent(cost, measured):
    for us, flops, elements in measured:
        assert cost.us(flops, elements) == pytest.approx(us, rel=0.11)


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
    """With 128 rows per expert, FP8's wgrad is measured slower than bf16's."""
    assert choices(128, QWEN3)[0] == [HIGH_PRECISION_WGRAD] * 2


def test_a_small_weight_gains_from_fp8_only_with_fused_quantization():
    """Qwen3's down projection with many rows."""
    assert choices(8192, QWEN3) == ([FP8, HIGH_PRECISION], True)


def test_weights_that_are_not_gathered_gain_less():
    """They are quantized in each call, and do not have to be dequantized without FP8."""
    for rows in (128, 1024):
        assert choices(rows, QWEN3, gathered=False) == ([HIGH_PRECISION] * 2, False)
    assert choices(2048, MIXTRAL, gathered=False) == ([FP8, FP8], True)


def test_row_scales_cost_a_pass_over_gradients():
    assert choices(1024, QWEN3, row_scales=True)[0] == [HIGH_PRECISION] * 2
    assert choices(2048, MIXTRAL, row_scales=True)[0] == [FP8, FP8]


@pytest.mark.parametrize("n, k", [(1536, 2048), (4096, 14336)])
def test_the_choice_does_not_depend_on_the_layout(n, k):
    for rows in (128, 1024, 8192):
        weight = GroupedWeight(8, n, k)
        assert choose(8 * rows, weight) == choose(8 * rows, weight._replace(n=k, k=n))


@pytest.mark.parametrize("rows", [16, 128, 1024, 65536])
@pytest.mark.parametrize("n, k", [(64, 96), (1536, 2048), (28672, 4096)])
def test_no_other_choice_is_faster(rows, n, k):
    given = 8 * rows, GroupedWeight(8, n, k)
    least = min(grouped_us(c, *given) for c in (HIGH_PRECISION, HIGH_PRECISION_WGRAD, FP8))
    assert grouped_us(choose(*given), *given) == least
