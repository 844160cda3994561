"""On the demo's trained model, FP8 gradients have the error that the formats explain."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8rs.demo.train import Settings

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benches"))
import gradient_error as bench

#: Both sides run with one version of torch. test_gradients.py tests each release in the first tier.
pytestmark = [pytest.mark.newest_torch, pytest.mark.second_tier]

Trained = tuple[bench.Llama, torch.Tensor]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def trained(request: pytest.FixtureRequest) -> Trained:
    settings = Settings.choose(request.param, ranks=1, steps=40)
    model, corpus = bench.trained_model(settings)
    batch = corpus.held_out_batch(0, settings.rows, settings.length)
    return model, batch.to(request.param)


def limits(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Return the smallest and largest ratio of fp8rs's gradient error to its simulation's.

    On the CPU both add in the same order, so their rounding errors and therefore the ratio are
    equal. On other devices sums differ in their last bits, which rounds some elements of the next
    layer differently, and a few directions of the gradient hold most of the error. Noise of 1e-4 or
    3e-4 of a row's largest sum, added to the simulation of ``rowwise``, moved the ratio between
    0.983 and 1.000 in fp32 and between 0.990 and 1.031 in bf16 (three draws each).

    A larger ratio is a defect. A smaller one is chance, unless an operand is not rounded. On the
    CPU's model, a weight's share of the error is a quarter (tested below), and an input's is
    larger. A gradient's is 5% in fp32 and not visible in bf16. On the larger model of two H200
    runs, a weight's share was 5% and 14% in bf16. This limit need not detect those cases, because
    test_gradients compares the bytes.
    """
    if device.type == "cpu":
        return 0.98, 1.02
    return 0.9, 1.02 if dtype == torch.float32 else 1.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", list(bench.CHOSEN))
def test_the_gradient_error_equals_the_simulations(
    trained: Trained, recipe: str, dtype: torch.dtype
) -> None:
    found = bench.gradient_error(*trained, recipe, dtype)
    least, most = limits(trained[1].device, dtype)
    assert least <= found.ratio <= most
    assert 0.02 < found.fp8rs < 0.2
    assert found.loss_off_fp8rs == pytest.approx(found.loss_off_simulated, abs=1e-3)


def test_a_coarser_format_is_detected(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes with one bit less move the error far beyond the tolerance."""
    rounded = bench.linear.rounded

    def coarser(x: torch.Tensor, dtype: torch.dtype, *block: Any, **options: Any) -> Any:
        return rounded(x, torch.float8_e5m2, *block, **options)

    monkeypatch.setattr(bench.linear, "rounded", coarser)
    found = bench.gradient_error(*trained, "current")
    assert abs(found.ratio - 1) > 0.2


@pytest.mark.parametrize("trained", ["cpu"], indirect=True)
def test_unrounded_weights_are_detected(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rounding of the weights, the error is below the lower limit."""
    monkeypatch.setattr(bench.linear, "_weight", lambda weight, *_: weight.float())
    found = bench.gradient_error(*trained, "current", torch.bfloat16)
    least, _ = limits(trained[1].device, torch.bfloat16)
    assert found.simulated < least * found.fp8rs


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_wgrad_on_the_cpu_has_the_error_of_quantization(mean: float) -> None:
    found = bench.wgrad_error(512, mean, "cpu", features=64)
    assert found.device == found.quantized
    # With means, rounding errors average out over the tokens, but the gradient does not.
    assert 0.02 < found.quantized < 0.05 if mean == 0 else 0.001 < found.quantized < 0.02
