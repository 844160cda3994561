"""A Llama of transformers with fp8rs.nn.TransformerLayer: `examples/swap_transformer_layers.py`."""

from __future__ import annotations

import runpy

import pytest
from harness import ROOT, need

need("transformers", "5.0")


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(ROOT / "examples" / "swap_transformer_layers.py"))


@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize("dtype, rel", [("float32", 1e-5), ("bfloat16", 5e-3)])
def test_losses_are_those_of_transformers_layers(example, dtype, rel, recipe):
    losses = example["main"](["--dtype", dtype, "--recipe", recipe, "--steps", "6"])
    expected = losses["transformers"]
    assert losses["swapped"] == pytest.approx(expected, rel=rel)
    assert losses["fp8"] == pytest.approx(expected, rel=0.02)
    assert losses["fp8"] != losses["swapped"]
    assert losses["fp8"][-1] < 0.9 * losses["fp8"][0]
