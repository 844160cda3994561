"""On the demo's trained model, FP8 gradients are as far off as the formats alone make them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fp8rs.demo.train import Settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benches"))
import gradient_error as bench

Trained = tuple[bench.Llama, torch.Tensor]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def trained(request: pytest.FixtureRequest) -> Trained:
    settings = Settings.choose(request.param, ranks=1, steps=40)
    model, corpus = bench.trained_model(settings)
    batch = corpus.held_out_batch(0, settings.rows, settings.length)
    return model, batch.to(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "block", "mxfp8"])
def test_gradient_error_is_the_simulations(
    trained: Trained, recipe: str, dtype: torch.dtype
) -> None:
    found = bench.gradient_error(*trained, recipe, dtype)
    assert found.fp8rs == pytest.approx(found.simulated, rel=0.02)
    assert 0.02 < found.fp8rs < 0.2
    assert found.loss_off_fp8rs == pytest.approx(found.loss_off_simulated, abs=1e-3)


def test_a_wrong_scale_would_show(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is sharp: codes of one bit less move the error far beyond its tolerance."""
    rounded = bench.simulation.rounded

    def coarser(x: torch.Tensor, *arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scale = rounded(x, torch.float8_e5m2, *arguments[1:])
        return codes, scale

    monkeypatch.setattr(bench.simulation, "rounded", coarser)
    found = bench.gradient_error(*trained, "current")
    assert abs(found.ratio - 1) > 0.2
