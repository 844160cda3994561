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

Trained = tuple[bench.Llama, list[torch.Tensor]]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def trained(request: pytest.FixtureRequest) -> Trained:
    settings = Settings.choose(request.param, ranks=1, steps=40)
    model, corpus = bench.trained_model(settings)
    return model, bench.held_out_batches(settings, corpus)


def limits(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Return the smallest and largest ratio of fp8rs's gradient errors to its simulation's.

    On the CPU both add in the same order, so their rounding errors and therefore the ratio are
    equal. On other devices sums differ in their last bits, which rounds some elements of the next
    layer differently. A few directions of the gradient hold most of the error and are chaotic, so
    the ratio of errors over all weights is chance: noise of 3e-4 of a row's largest sum, added to
    the simulation of ``current`` on the CPU's model, moved it by a factor of up to 1.10 in fp32 and
    1.27 in bf16 on one batch. The median over weights and 16 batches stayed within 0.7% of 1 in
    fp32 and 1.8% in bf16 (all pairs of six draws, standard deviations of 0.3% and 0.9%). Over 5
    batches, bf16 reached 4.1%.

    A larger ratio is a defect. Sums with the 14 bits of Hopper, simulated in wgrad of the model for
    GPUs, changed the errors of 21 weights by less than 2%, with a median of 0.2%, if they are added
    in fp32 after each 128 products. Otherwise they changed by -23% to 76%, with a median of 16%.

    A smaller ratio means that an operand is not rounded. On the CPU's model, with ``current``, the
    inverse ratio is 0.82 in fp32 and 0.75 in bf16 without rounding of weights (tested below), and
    0.75 and 0.58 of inputs. Of gradients it is 0.88 in fp32, but 0.97 in bf16, which this limit
    does not detect. test_gradients compares the bytes.
    """
    if device.type == "cpu":
        return 0.98, 1.02
    return 0.9, 1.02 if dtype == torch.float32 else 1.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", list(bench.CHOSEN))
def test_the_gradient_error_equals_the_simulations(
    trained: Trained, recipe: str, dtype: torch.dtype
) -> None:
    error = bench.gradient_error(*trained, recipe, dtype)
    least, most = limits(trained[1][0].device, dtype)
    assert least <= error.ratio <= most
    assert 0.02 < error.fp8rs < 0.2
    assert error.loss_off_fp8rs == pytest.approx(error.loss_off_simulated, abs=1e-3)


def test_a_coarser_format_is_detected(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes with one bit less move the error far beyond the tolerance."""
    rounded = bench.linear.rounded

    def coarser(x: torch.Tensor, dtype: torch.dtype, *block: Any, **options: Any) -> Any:
        return rounded(x, torch.float8_e5m2, *block, **options)

    monkeypatch.setattr(bench.linear, "rounded", coarser)
    error = bench.gradient_error(*trained, "current")
    assert abs(error.ratio - 1) > 0.2


@pytest.mark.parametrize("trained", ["cpu"], indirect=True)
def test_unrounded_weights_are_detected(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rounding of the weights, the error is below the lower limit."""
    monkeypatch.setattr(bench.linear, "_weight", lambda weight, *_: weight.float())
    error = bench.gradient_error(*trained, "current", torch.bfloat16)
    least, _ = limits(trained[1][0].device, torch.bfloat16)
    assert 1 / error.ratio < least


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_wgrad_on_the_cpu_has_the_error_of_quantization(mean: float) -> None:
    error = bench.wgrad_error(512, mean, "cpu", features=64)
    assert error.device == error.quantized
    # With means, rounding errors average out over the tokens, but the gradient does not.
    assert 0.02 < error.quantized < 0.05 if mean == 0 else 0.001 < error.quantized < 0.02
