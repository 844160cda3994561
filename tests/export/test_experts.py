"""Experts are exported with the names that servers read, and loaded from them."""

from __future__ import annotations

import json

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import fp8rs
from cases import TWO_PLANES
from distributed import ranks
from distributed.batched import BATCHES, build
from distributed.batched import shard as shard_batched
from distributed.folders import shared_folder
from distributed.models import RECIPES, assert_same_bytes, same_bytes, whole_planes
from export.own_formats import OWN, with_own_format
from fp8rs.export import load, save_pretrained, tensors
from fp8rs.export.formats import FORMATS, serving_format
from internals import storage_of
from language_models import mixture

pytest.importorskip("transformers", "5.0")
pytest.importorskip("compressed_tensors", "0.15")

from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

pytestmark = pytest.mark.newest_torch

#: The names of an expert's gate, up and down projections in the files of each model.
LAYER = "model.layers.1."
NAMES = {
    "mixtral": "block_sparse_moe.experts.{}.w1 block_sparse_moe.experts.{}.w3 "
    "block_sparse_moe.experts.{}.w2",
    "qwen3_moe": "mlp.experts.{}.gate_proj mlp.experts.{}.up_proj mlp.experts.{}.down_proj",
    "deepseek_v3": "mlp.experts.{}.gate_proj mlp.experts.{}.up_proj mlp.experts.{}.down_proj",
}
every_kind = pytest.mark.parametrize("kind", list(NAMES))

every_format = pytest.mark.parametrize("format", list(FORMATS))
both_weights = pytest.mark.parametrize("fp8_weights", [False, True], ids=["masters", "fp8"])


def converted(kind, recipe="current", *, width=64, seed=0, fp8_weights=False, **sizes):
    """Return a converted mixture of experts."""
    names = {"mixtral": "intermediate_size", "gpt_oss": "intermediate_size"}
    options = {names.get(kind, "moe_intermediate_size"): width, **sizes}
    model = mixture(kind, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
                # The scales of experts and of gate and up differ.
                parameter.mul_(torch.arange(1, len(parameter) + 1).view(-1, 1, 1))
                if "gate_up" in name:
                    parameter[:, : parameter.shape[1] // 2].mul_(3)
    recipe = RECIPES.get(recipe, recipe)
    return fp8rs.convert_to_float8_training(
        model,
        recipe=recipe,
        filter_fqns=["lm_head"],
        experts="gather",
        fp8_weights=fp8_weights,
    )


def exported(model, format, **options):
    return {n: t.cpu().clone() for n, t in tensors(model, format, **options)}


def values_of(exported_tensors, name, format):
    """Return code times scale of a matrix or a batch, by the format's conventions."""
    codes = exported_tensors[name].float()
    if format == "bf16":
        return codes
    scale = exported_tensors[name + serving_format(format).scale_name.removeprefix("weight")]
    if format == "mxfp8":
        scale = torch.exp2(scale.float() - 127).repeat_interleave(32, -1)
    if format == "fp8-block":
        rows, cols = codes.shape[-2:]
        scale = scale.repeat_interleave(128, -2)[..., :rows, :]
        scale = scale.repeat_interleave(128, -1)[..., :cols]
    return codes * scale


def matrices(model, kind):
    """Return the values of the second layer's experts by the names of the files."""
    experts = model.get_submodule(LAYER + "mlp.experts")
    values = {}
    for e in range(experts.down_proj.shape[0]):
        gate, up = experts.gate_up_proj[e].detach().chunk(2)
        for name, value in zip(
            NAMES[kind].split(), (gate, up, experts.down_proj[e].detach()), strict=True
        ):
            values[f"{LAYER}{name.format(e)}.weight"] = value
    return values


# --- names and values ----------------------------------------------------------------------------


@every_kind
@every_format
def test_each_expert_has_the_names_that_servers_read(kind, format):
    model = converted(kind, width=128)
    exported_tensors = exported(model, format)
    expected = matrices(converted(kind, width=128), kind)
    assert not [
        name
        for name in exported_tensors
        if name.endswith(("gate_up_proj", "mlp.experts.down_proj"))
    ]
    assert {name for name in exported_tensors if f"{LAYER}" in name and ".experts." in name} == {
        name + suffix
        for name in expected
        for suffix in {"", serving_format(format).scale_name.removeprefix("weight")}
    }
    for name, value in expected.items():
        assert exported_tensors[name].shape == value.shape
        error = (values_of(exported_tensors, name, format) - value).abs()
        assert (error <= value.abs() / 16 + value.abs().max() * 2**-9).all()
    # The other parameters have the names of transformers' files, too.
    router = "block_sparse_moe.gate.weight" if kind == "mixtral" else "mlp.gate.weight"
    assert LAYER + router in exported_tensors


@with_own_format
@both_weights
def test_codes_of_experts_are_stored_unchanged(recipe, fp8_weights):
    model = converted("qwen3_moe", recipe, width=128, fp8_weights=fp8_weights)
    exported_tensors = exported(model, OWN[recipe])
    experts = converted("qwen3_moe", recipe, width=128).model.layers[1].mlp.experts
    suffix = serving_format(OWN[recipe]).scale_name
    for e in range(8):
        codes, scale, *_ = whole_planes(experts.gate_up_proj[e].detach(), recipe)
        if recipe.startswith("mxfp8"):
            scale = scale.view(torch.uint8)
            scale = scale if recipe == "mxfp8 of 1x32" else scale.repeat_interleave(32, 0)
        for at, name in enumerate(("gate_proj", "up_proj")):
            prefix = f"{LAYER}mlp.experts.{e}.{name}."
            assert same_bytes(exported_tensors[prefix + "weight"], codes.chunk(2)[at])
            part_scale = scale.view(1) if not scale.dim() else scale.chunk(2)[at]
            assert same_bytes(exported_tensors[prefix + suffix], part_scale)


def test_gate_and_up_are_quantized_separately_if_a_block_contains_rows_of_both():
    model = converted("qwen3_moe", "block", width=96)
    exported_tensors = exported(model, "fp8-block")
    experts = model.model.layers[1].mlp.experts
    up = experts.gate_up_proj[2].detach()[96:]
    codes, scale, *_ = whole_planes(up, "block")
    assert same_bytes(exported_tensors[f"{LAYER}mlp.experts.2.up_proj.weight"], codes)
    assert same_bytes(exported_tensors[f"{LAYER}mlp.experts.2.up_proj.weight_scale_inv"], scale)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@every_kind
@pytest.mark.parametrize("format", ["bf16", "fp8-block", "fp8-row", "fp8-tensor"])
def test_transformers_reads_the_exported_experts(kind, format, tmp_path):
    sizes = {"hidden_size": 128, "num_key_value_heads": 4, "head_dim": 32}
    if kind == "deepseek_v3":
        # All sizes are multiples of 128, as transformers requires for blocks.
        sizes |= {"q_lora_rank": 128, "kv_lora_rank": 96, "qk_rope_head_dim": 32}
        sizes |= {"qk_nope_head_dim": 32, "v_head_dim": 32, "intermediate_size": 128}
    model = converted(kind, width=128, **sizes).to(torch.bfloat16)
    save_pretrained(model, tmp_path, format)
    exported_tensors = exported(model, format)
    configs = {"bf16": None, "fp8-block": FineGrainedFP8Config(dequantize=True)}
    config = configs.get(format, CompressedTensorsConfig(dequantize=True))
    extra = {} if config is None else {"quantization_config": config}
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, **extra)
    for name, value in matrices(read, kind).items():
        assert torch.equal(value, values_of(exported_tensors, name, format).bfloat16()), name
    router = read.get_parameter(LAYER + "mlp.gate.weight")
    assert torch.equal(router, model.get_parameter(LAYER + "mlp.gate.weight").detach())


def test_the_config_lists_routers_and_experts_in_high_precision(tmp_path):
    model = mixture("mixtral", hidden_size=128, intermediate_size=128)
    fp8rs.convert_to_float8_training(model, experts="off", filter_fqns=["lm_head"])
    lists = {}
    for format, key in (("fp8-block", "modules_to_not_convert"), ("fp8-row", "ignore")):
        save_pretrained(model, tmp_path, format)
        config = json.loads((tmp_path / "config.json").read_text())
        lists[format] = set(config["quantization_config"][key])
    routers_and_norms = {
        f"model.layers.{i}.{moe}.{name}"
        for i in range(2)
        for moe in ("mlp", "block_sparse_moe")
        for name in ("gate", "experts")
    }
    assert lists["fp8-block"] == routers_and_norms | {"lm_head"}
    # vLLM compares the names of the first expert's layers with the list.
    patterns = {name for name in lists["fp8-row"] if name.startswith("re:")}
    assert lists["fp8-row"] - patterns == lists["fp8-block"]
    assert r"re:model\.layers\.1\.block_sparse_moe\.experts[.].*" in patterns


@pytest.mark.parametrize("format", ["fp8-tensor", "fp8-row"])
def test_transposed_experts_are_exported_in_high_precision_only(format):
    model = converted("gpt_oss")
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj has transposed matrices"):
        tensors(model, format)
    assert LAYER + "mlp.experts.gate_up_proj" in exported(model, "bf16")


def test_one_ranks_experts_are_not_exported(tmp_path):
    model = converted("qwen3_moe")
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    with pytest.raises(ValueError, match="has the experts of one rank only"):
        tensors(model, "fp8-tensor")


# --- load ----------------------------------------------------------------------------------------


@every_kind
@with_own_format
def test_fp8_weights_of_experts_get_the_exported_codes_and_scales(kind, recipe, tmp_path):
    options = {"width": 128, "fp8_weights": True}
    model = converted(kind, recipe, **options)
    save_pretrained(model, tmp_path, OWN[recipe], dtype=torch.float32, max_shard_bytes=200_000)
    other = converted(kind, recipe, seed=1, **options)
    loaded = load(other, tmp_path)
    assert loaded.quantized == loaded.missing_keys == loaded.unexpected_keys == []
    assert f"{LAYER}mlp.experts.gate_up_proj" in loaded.exact
    for name in ("gate_up_proj", "down_proj"):
        planes = [
            storage_of(m.get_parameter(f"{LAYER}mlp.experts.{name}")).rowwise
            for m in (other, model)
        ]
        assert same_bytes(planes[0].data, planes[1].data)
        assert same_bytes(planes[0].scale, planes[1].scale)


@every_kind
@every_format
def test_masters_of_experts_get_the_values_of_the_files(kind, format, tmp_path):
    model = converted(kind, width=128)
    save_pretrained(model, tmp_path, format, dtype=torch.float32)
    exported_tensors = exported(model, format, dtype=torch.float32)
    for recipe in ("current", "block"):
        other = converted(kind, recipe, width=128, seed=1)
        loaded = load(other, tmp_path)
        assert loaded.exact == loaded.quantized == []
        for name, value in matrices(other, kind).items():
            assert torch.equal(value, values_of(exported_tensors, name, format)), name


def test_experts_are_quantized_again_if_gate_and_up_have_different_scales(tmp_path):
    """Servers' tools quantize gate and up separately."""
    model = converted("qwen3_moe", "rowwise")
    save_pretrained(model, tmp_path, "fp8-tensor", dtype=torch.float32)
    exported_tensors = exported(model, "fp8-tensor", dtype=torch.float32)
    for recipe in ("rowwise", "current"):
        other = converted("qwen3_moe", recipe, seed=1, fp8_weights=True)
        assert f"{LAYER}mlp.experts.gate_up_proj" in load(other, tmp_path).quantized
        weight = other.model.layers[1].mlp.experts.gate_up_proj
        values = torch.cat(
            [
                values_of(
                    exported_tensors, f"{LAYER}mlp.experts.1.{name}_proj.weight", "fp8-tensor"
                )
                for name in ("gate", "up")
            ]
        )
        codes, scale, *_ = whole_planes(values, recipe)
        plane = storage_of(weight).rowwise
        assert same_bytes(plane.data[1], codes) and torch.equal(plane.scale[1], scale)


def test_stacked_experts_of_files_are_loaded(tmp_path):
    from safetensors.torch import save_file

    model = converted("qwen3_moe")
    state = {n: t.detach().clone() for n, t in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    other = converted("qwen3_moe", seed=1)
    load(other, tmp_path)
    assert_same_bytes(dict(other.named_parameters()), dict(model.named_parameters()))


@pytest.mark.parametrize("change", ["absent", "shape", "scale"])
def test_files_without_one_expert_are_refused(change, tmp_path):
    from safetensors.torch import save_file

    model = converted("qwen3_moe")
    exported_tensors = exported(model, "fp8-row")
    name = f"{LAYER}mlp.experts.3.up_proj.weight"
    expected = {
        "absent": r"missing in the files:\n  model.layers.1.mlp.experts.gate_up_proj",
        "shape": r"experts.3.up_proj.weight: shape \(8, 64\) in the files, \(64, 64\) in the model",
        "scale": r"FP8 codes without scales: expected .*experts.3.up_proj.weight_scale",
    }[change]
    if change == "absent":
        del exported_tensors[name]
    elif change == "shape":
        exported_tensors[name] = exported_tensors[name][:8].contiguous()
    else:
        del exported_tensors[name + "_scale"]
    save_file(exported_tensors, tmp_path / "model.safetensors")
    before = {n: t.detach().clone() for n, t in model.named_parameters()}
    with pytest.raises(ValueError, match=expected):
        load(model, tmp_path)
    assert_same_bytes(dict(model.named_parameters()), before)


# --- modules without a mapping -------------------------------------------------------------------


def stacked(batch, recipe, **options):
    """Return a model with batched weights whose sizes are multiples of 32, as MXFP8 requires."""
    model = build(options.pop("device", "cpu"), recipe, batch.experts, hidden=64, **options)
    model.dim = 0 if recipe in TWO_PLANES else batch.dim
    return model


@with_own_format
@both_weights
def test_stacked_weights_keep_their_names_and_codes(recipe, fp8_weights, tmp_path):
    batch = BATCHES["3 experts"]
    model = stacked(batch, recipe, fp8_weights=fp8_weights)
    format = OWN[recipe]
    exported_tensors = exported(model, format)
    plain = stacked(batch, recipe).experts
    suffix = serving_format(format).scale_name.removeprefix("weight")
    for name in ("gate_up", "down"):
        for e, matrix in enumerate(plain.get_parameter(name).detach()):
            codes, scale, *_ = whole_planes(matrix, recipe)
            assert same_bytes(exported_tensors[f"experts.{name}"][e], codes)
            stored_scale = exported_tensors[f"experts.{name}{suffix}"][e]
            if recipe == "mxfp8":
                stored_scale = stored_scale[::32]
            scale = scale.view(torch.uint8) if recipe.startswith("mxfp8") else scale
            assert same_bytes(stored_scale.reshape(scale.shape), scale)
    save_pretrained(model, tmp_path, format)
    other = stacked(batch, recipe, fp8_weights=fp8_weights, seed=1)
    loaded = load(other, tmp_path)
    assert loaded.quantized == [] and loaded.unexpected_keys == []
    if fp8_weights:
        assert {"experts.gate_up", "experts.down"} <= set(loaded.exact)
    for name in ("gate_up", "down"):
        weight = other.experts.get_parameter(name)
        values = values_of(exported_tensors, f"experts.{name}", format)
        assert torch.equal(weight.dequantize() if fp8_weights else weight.detach(), values)


@with_own_format
@both_weights
def test_weights_of_four_dimensions_are_batches_of_matrices(recipe, fp8_weights, tmp_path):
    batch = BATCHES["3 experts"]
    options = {"recipe": recipe, "fp8_weights": fp8_weights}
    exported_tensors = exported(stacked(batch, **options), OWN[recipe])
    model = stacked(batch, **options, gated=True)
    gated = exported(model, OWN[recipe])
    assert gated["experts.gate_up"].shape == (3, 2, 32, 96)
    gated["experts.gate_up"] = gated["experts.gate_up"].flatten(1, 2)
    assert_same_bytes(gated, exported_tensors)
    save_pretrained(model, tmp_path, OWN[recipe])
    other = stacked(batch, **options, gated=True, seed=1)
    load(other, tmp_path)
    weight = other.experts.gate_up
    values = weight.dequantize() if fp8_weights else weight.detach()
    # MXFP8 in blocks of 32x32 is quantized from the values.
    if not fp8_weights or recipe != "mxfp8":
        expected = values_of(exported_tensors, "experts.gate_up", OWN[recipe])
        assert torch.equal(values.flatten(1, 2), expected)


# --- sharded -------------------------------------------------------------------------------------


@ranks(2)
@with_own_format
@both_weights
@pytest.mark.parametrize("hidden", list(BATCHES))
def test_sharded_stacks_give_and_load_the_bytes_of_unsharded_ones(rig, recipe, fp8_weights, hidden):
    options = {"device": rig.device, "fp8_weights": fp8_weights}
    batch = BATCHES[hidden]
    format = OWN[recipe]
    wanted = exported(stacked(batch, recipe, **options), format)
    model = stacked(batch, recipe, **options)
    shard_batched(model, rig, model.dim)
    assert_same_bytes(exported(model, format), wanted)
    folder = shared_folder(rig)
    save_pretrained(model, folder, format)
    other = stacked(batch, recipe, **options, seed=1)
    shard_batched(other, rig, other.dim)
    assert load(other, folder).quantized == []
    if fp8_weights:
        assert_same_bytes(exported(other, format), wanted)
    for name in ("gate_up", "down") if not fp8_weights else ():
        value = other.experts.get_parameter(name).full_tensor()
        assert torch.equal(value.cpu(), values_of(wanted, f"experts.{name}", format))


@ranks(2)
@pytest.mark.parametrize("kind, recipe", [("mixtral", "block"), ("qwen3_moe", "current")])
@both_weights
def test_a_sharded_model_of_transformers_keeps_the_names_of_its_files(
    rig, kind, recipe, fp8_weights
):
    def make(seed):
        return converted(kind, recipe, width=128, seed=seed, fp8_weights=fp8_weights).to(rig.device)

    wanted = exported(make(0), OWN[recipe])
    models = [make(0), make(1)]
    for model in models:
        for layer in model.model.layers:
            fully_shard(layer, mesh=rig.mesh())
        fully_shard(model, mesh=rig.mesh())
    assert_same_bytes(exported(models[0], OWN[recipe]), wanted)
    folder = shared_folder(rig)
    save_pretrained(models[0], folder, OWN[recipe], dtype=torch.float32)
    load(models[1], folder)
    # With these recipes, the values of the files are quantized to the same codes again.
    assert_same_bytes(exported(models[1], OWN[recipe]), wanted)
