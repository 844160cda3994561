"""PEFT's LoRA and DoRA over converted layers, as in ``examples/peft_lora.py``."""

from __future__ import annotations

import json

import pytest
from harness import assert_gathers_are_fp8, need, reference_run, run_example

need("peft", "0.21")
need("accelerate", "1.15")
need("transformers", "5.0")

EXAMPLE = "peft_lora"
STEPS = 5
KINDS = pytest.mark.parametrize("kind", [(), ("--dora",)], ids=["LoRA", "DoRA"])


@KINDS
@pytest.mark.parametrize("order", ["before", "after"])
def test_adapters_train_over_frozen_fp8_weights(kind, order):
    steps = ("--steps", str(STEPS))
    reference = reference_run(EXAMPLE, "--recipe", "bf16", *steps, *kind)
    run = run_example(EXAMPLE, "--convert", order, *steps, *kind)
    expected = reference.returned["losses"]
    assert expected[-1] < 0.95 * expected[0]
    # The tolerance is smaller than in tests/clients/test_accelerate.py, because the base is frozen.
    assert run.returned["losses"] == pytest.approx(expected, rel=0.01)
    assert not run.still
    assert run.moved == reference.moved
    assert all("lora_" in name for name in run.moved)
    assert not run.frozen_moved
    assert len(run.converted) == 2 * 7
    assert all(name.endswith(".base_layer") for name in run.converted)
    assert_gathers_are_fp8(run, reference, passes=2 * STEPS)


@KINDS
def test_adapters_have_peft_names_in_files(kind, tmp_path):
    from safetensors import safe_open

    found = []
    for recipe in ("bf16", "current"):
        folder = tmp_path / recipe
        run_example(EXAMPLE, "--recipe", recipe, "--steps", "2", "--save", str(folder), *kind)
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
        found.append({n: (t.shape, t.dtype) for n, t in tensors.items()})
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["use_dora"] == bool(kind)
        assert any(t.abs().max() > 0 for n, t in tensors.items() if "lora_B" in n)
    assert found[0] == found[1]


def merged(kind, order):
    """Two layers with merged adapters, converted before PEFT, after it, or after the merge."""
    import torch
    from peft import LoraConfig, get_peft_model
    from torch import nn

    import fp8rs

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    start = model[0].weight.detach().clone()
    options = {"use_dora": bool(kind), "init_lora_weights": False}
    if order == "before":
        fp8rs.convert_to_float8_training(model)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["0", "2"], **options))
    if order == "after":
        fp8rs.convert_to_float8_training(model, filter_fqns=["lora_"])
    model = model.merge_and_unload()
    if order == "last":
        fp8rs.convert_to_float8_training(model)
    assert all(isinstance(model[i], fp8rs.nn.Linear) for i in (0, 2))
    assert not torch.equal(model[0].weight, start)
    with torch.no_grad():
        return model(torch.randn(16, 32, generator=torch.Generator().manual_seed(1)))


@KINDS
@pytest.mark.parametrize("order", ["before", "after"])
def test_merged_adapters_are_in_the_converted_weights(kind, order):
    """`merge_and_unload` returns converted layers that equal layers converted after the merge."""
    assert merged(kind, order).equal(merged(kind, "last"))
