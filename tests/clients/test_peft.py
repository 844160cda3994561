"""PEFT's LoRA and DoRA over converted layers, as in ``examples/peft_lora.py``."""

from __future__ import annotations

import json
import runpy

import pytest
from harness import HERE, ROOT, assert_gathers_are_fp8, need, reference_run, run_example, run_file

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

    results = []
    for recipe in ("bf16", "current"):
        folder = tmp_path / recipe
        run_example(EXAMPLE, "--recipe", recipe, "--steps", "2", "--save", str(folder), *kind)
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
        results.append({n: (t.shape, t.dtype) for n, t in tensors.items()})
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["use_dora"] == bool(kind)
        assert any(t.abs().max() > 0 for n, t in tensors.items() if "lora_B" in n)
    assert results[0] == results[1]


def test_adapters_train_on_the_codes_of_an_fp8_checkpoint(tmp_path):
    """The base keeps the files' codes, and the adapters are saved and merged alone."""
    import torch
    from safetensors.torch import load_file

    runs = {}
    for base in ("fp8", "bf16"):
        folder = str(tmp_path / base)
        runs[base] = run_example(
            "lora_fp8_checkpoint", "--base", base, "--steps", "8", "--save", folder
        )
    run = runs["fp8"]
    losses = run.returned["losses"]
    assert losses[-1] < 0.95 * losses[0]
    assert losses == pytest.approx(runs["bf16"].returned["losses"], rel=0.01)
    assert run.moved == runs["bf16"].moved
    assert all("lora_" in name for name in run.moved)
    assert not run.frozen_moved

    # A layer gathers codes of its base, and its adapters in bf16. Embedding and head stay in bf16.
    layers_in_bf16 = runs["bf16"].gathered["bfloat16"] - run.gathered["bfloat16"]
    assert 0 < run.gathered["uint8"] < 0.7 * layers_in_bf16

    adapters = load_file(tmp_path / "fp8" / "adapter_model.safetensors")
    assert all("lora_" in name for name in adapters)
    layer = "model.layers.1.mlp.up_proj"
    merged_weight = load_file(tmp_path / "fp8" / "merged" / "model.safetensors")[f"{layer}.weight"]
    example = runpy.run_path(str(ROOT / "examples" / "lora_fp8_checkpoint.py"))
    example["small_checkpoint"](tmp_path / "base", width=128, layers=2)
    stored = load_file(tmp_path / "base" / "model.safetensors")
    scale = stored[f"{layer}.weight_scale_inv"]
    base_weight = stored[f"{layer}.weight"].float()
    base_weight *= scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    name = f"base_model.model.{layer}"
    down = adapters[f"{name}.lora_A.weight"].float()
    up = adapters[f"{name}.lora_B.weight"].float()
    assert up.abs().max() > 0
    expected = base_weight + up @ down  # the adapter's scaling is lora_alpha / r = 1
    torch.testing.assert_close(merged_weight.float(), expected, rtol=0.02, atol=2e-3)


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


RECIPES = pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "block", "mxfp8"])
WEIGHTS = pytest.mark.parametrize("weights", ["masters", "FP8 weights"])
ORDERS = pytest.mark.parametrize("order", ["before", "after"])
HEAD = "base_model.model.head.modules_to_save.default"


def assert_head_and_adapters_train(result, reference):
    losses, moved = result
    expected, expected_moved = reference
    assert losses[-1] < 0.8 * losses[0]
    assert losses == pytest.approx(expected, rel=0.03)
    assert moved == expected_moved
    assert {f"{HEAD}.weight", f"{HEAD}.bias"} <= set(moved)


@pytest.fixture(scope="module")
def modules_to_save_under_fsdp2():
    return run_file(HERE / "peft_modules_to_save.py").returned


@RECIPES
@WEIGHTS
@ORDERS
def test_modules_to_save_train_under_fsdp2(modules_to_save_under_fsdp2, recipe, weights, order):
    result = modules_to_save_under_fsdp2[f"{recipe}, {weights}, {order}"]
    assert_head_and_adapters_train(result, modules_to_save_under_fsdp2["reference"])


@RECIPES
@WEIGHTS
@ORDERS
def test_modules_to_save_are_converted_layers(recipe, weights, order, tmp_path):
    import torch
    from peft import PeftModel
    from peft_modules_to_save import Model, adapted, train

    import fp8rs

    model = adapted(recipe, weights == "FP8 weights", order)
    assert_head_and_adapters_train(train(model), train(adapted()))
    assert isinstance(model.get_submodule(HEAD), fp8rs.nn.Linear)
    # PEFT also keeps the untrained head.
    assert fp8rs.report(model).summary == "4 linear layers"
    fp8rs.monitor(model, every=1).close()

    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = model.eval()(x)
        if weights == "masters":
            model.save_pretrained(tmp_path)
            torch.manual_seed(0)
            loaded = PeftModel.from_pretrained(Model(), tmp_path)(x)
            assert (loaded - expected).norm() < 0.1 * expected.norm()
        merged = model.merge_and_unload()
        assert isinstance(merged.head, fp8rs.nn.Linear)
        # Delayed scales of an evaluation are older than the merged values.
        fp8rs.convert_to_high_precision(merged)
        assert (merged(x) - expected).norm() < 0.1 * expected.norm()
