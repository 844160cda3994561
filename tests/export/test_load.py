"""`fp8rs.export.load` gives a model the values that the codes and scales in files represent."""

from __future__ import annotations

import copy
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp8rs
from distributed import ranks
from distributed.folders import shared_folder
from distributed.models import (
    RECIPES,
    Stack,
    assert_same_bytes,
    batch,
    linears,
    make,
    on_all_ranks,
    same_bytes,
    shard,
    train,
    whole_planes,
)
from export.own_formats import OWN, with_own_format
from fp8rs.export import load, save_pretrained, tensors
from fp8rs.export.formats import FORMATS
from fp8rs.export.stored import StoredTensors
from fp8rs.optim import AdamW, MasterWeights
from internals import storage_of
from language_models import llama

pytestmark = pytest.mark.newest_torch

E4M3 = torch.float8_e4m3fn

#: Sizes of several blocks in each format. MXFP8 needs multiples of 32.
SIZES = (320, 160)

every_recipe = pytest.mark.parametrize("recipe", list(RECIPES))
both_weights = pytest.mark.parametrize("fp8_weights", [False, True], ids=["masters", "fp8"])


def exported(model, format):
    return {n: t.cpu().clone() for n, t in tensors(model, format, dtype=torch.float32)}


def write(directory, stored_tensors, config=None, files=1):
    """Write safetensors files in Hugging Face's layout."""
    names = list(stored_tensors)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(stored_tensors, directory / "model.safetensors")
        return
    index = {}
    for i in range(files):
        part = {n: stored_tensors[n] for n in names[i::files]}
        file = f"model-{i + 1:05}-of-{files:05}.safetensors"
        save_file(part, directory / file)
        index.update(dict.fromkeys(part, file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def dequantized(codes, scale, block):
    """Return codes times the scales of their blocks, computed in plain torch."""
    rows, cols = codes.shape
    if scale.dtype == torch.uint8:
        scale = torch.exp2(scale.double() - 127)
    scale = scale.float().reshape(scale.shape if scale.dim() == 2 else (-1, 1))
    down, across = (n if b < 0 else b for b, n in zip(block, (rows, cols), strict=True))
    scale_of_elements = scale.repeat_interleave(down, 0)[:rows].repeat_interleave(across, 1)[
        :, :cols
    ]
    return codes.float() * scale_of_elements


BLOCKS = {"fp8-block": (128, 128), "fp8-row": (1, -1), "fp8-tensor": (-1, -1), "mxfp8": (1, 32)}


def values_of(exported_tensors, format):
    """Return the values of a model's tensors in an export format, by their unconverted names."""
    values = {}
    for name, tensor in exported_tensors.items():
        if name.endswith(("_scale", "_scale_inv")):
            continue
        scale = [
            t for n, t in exported_tensors.items() if n in (f"{name}_scale", f"{name}_scale_inv")
        ]
        values[name] = dequantized(tensor, scale[0], BLOCKS[format]) if scale else tensor
    return values


def full(value):
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().cpu()


def filled_with_nan(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    return model


def state(model):
    """Return copies of all values, and of the codes and scales of FP8 weights."""
    values = {}
    for name, value in model.state_dict().items():
        if isinstance(value, fp8rs.QuantizedTensor):
            for i, tensor in enumerate(storage_of(value).tensors()):
                values[f"{name}.{i}"] = tensor.clone()
        else:
            values[name] = value.clone()
    return values


# --- files of save_pretrained --------------------------------------------------------------------


@with_own_format
def test_fp8_weights_get_the_exported_codes_and_scales(recipe, tmp_path):
    options = {"recipe": RECIPES[recipe], "fp8_weights": True}
    model = make(SIZES, **options)
    save_pretrained(model, tmp_path, OWN[recipe], dtype=torch.float32, max_shard_bytes=20_000)
    other = make(SIZES, seed=1, **options)
    loaded = load(other, tmp_path)
    weights = [f"{name}.weight" for name in linears(model)]
    assert (loaded.exact, loaded.quantized) == (weights, [])
    assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])
    assert_same_bytes(exported(other, OWN[recipe]), exported(model, OWN[recipe]))
    for name, layer in linears(other).items():
        wanted = storage_of(linears(model)[name].weight).rowwise
        actual = storage_of(layer.weight).rowwise
        assert same_bytes(actual.data, wanted.data) and same_bytes(actual.scale, wanted.scale)


def test_the_second_plane_of_1x32_blocks_is_quantized_from_the_values_of_the_file(tmp_path):
    options = {"recipe": RECIPES["mxfp8 of 1x32"], "fp8_weights": True}
    model = make(SIZES, **options)
    save_pretrained(model, tmp_path, "mxfp8")
    values = values_of(exported(model, "mxfp8"), "mxfp8")
    other = make(SIZES, seed=1, **options)
    load(other, tmp_path)
    for name, layer in linears(other).items():
        codes, scale = whole_planes(values[f"{name}.weight"], "mxfp8 of 1x32")[2:]
        plane = storage_of(layer.weight).columnwise
        assert same_bytes(plane.data, codes) and same_bytes(plane.scale, scale)


@every_recipe
@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_master_weights_get_the_values_rounded_once_to_their_dtype(recipe, format, dtype, tmp_path):
    model = make(SIZES, recipe=RECIPES[recipe])
    save_pretrained(model, tmp_path, format, dtype=torch.float32)
    values = values_of(exported(model, format), format)
    for wanted_recipe in (RECIPES[recipe], None):
        other = filled_with_nan(make(SIZES, recipe=wanted_recipe, dtype=dtype))
        loaded = load(other, tmp_path)
        assert loaded.exact == loaded.quantized == []
        assert_same_bytes(
            dict(other.named_parameters()), {n: v.to(dtype) for n, v in values.items()}
        )


@with_own_format
@pytest.mark.parametrize("format", list(FORMATS))
def test_fp8_weights_of_another_format_are_quantized_once_from_the_values(recipe, format, tmp_path):
    if OWN[recipe] == format:
        pytest.skip("the same format: codes are taken over")
    model = make(SIZES, recipe="current")
    save_pretrained(model, tmp_path, format, dtype=torch.float32)
    values = values_of(exported(model, format), format)
    other = make(SIZES, seed=1, recipe=RECIPES[recipe], fp8_weights=True)
    loaded = load(other, tmp_path)
    assert loaded.exact == []
    assert loaded.quantized == [f"{name}.weight" for name in linears(other)]
    for name, layer in linears(other).items():
        codes, scale, *_ = whole_planes(values[f"{name}.weight"], recipe)
        row = storage_of(layer.weight).rowwise
        assert same_bytes(row.data, codes) and same_bytes(row.scale, scale), name
        assert same_bytes(layer.bias.detach(), values[f"{name}.bias"])


@both_weights
def test_delayed_scaling_restarts_from_loaded_weights(fp8_weights, tmp_path):
    """With the scales of the previous small weights, the loaded large ones would saturate."""
    model = make(SIZES, recipe="delayed", fp8_weights=fp8_weights)
    with torch.no_grad():
        for layer in linears(model).values():
            layer.weight.mul_(64)
    save_pretrained(model, tmp_path, "fp8-tensor", dtype=torch.float32)
    wanted = values_of(exported(model, "fp8-tensor"), "fp8-tensor")
    other = make(SIZES, seed=1, recipe="delayed", fp8_weights=fp8_weights)
    x = torch.randn(16, 32)
    train(other, torch.optim.SGD(other.parameters(), 0.0), [x] * 3)
    load(other, tmp_path)
    for name, tensor in values_of(exported(other, "fp8-tensor"), "fp8-tensor").items():
        assert torch.allclose(tensor, wanted[name], rtol=0.07, atol=wanted[name].abs().max() / 2**9)
    plain = make(SIZES, recipe=None)
    plain.load_state_dict(wanted)
    with torch.no_grad():
        assert (other(x) - plain(x)).norm() < 0.1 * plain(x).norm()


def test_a_model_in_high_precision_is_loaded_into_fp8_weights(tmp_path):
    plain = make(SIZES, recipe=None)
    write(tmp_path, plain.state_dict())
    model = make(SIZES, seed=1, recipe="block", fp8_weights=True)
    loaded = load(model, tmp_path)
    assert loaded.quantized == [f"{name}.weight" for name in linears(model)]
    for name, layer in linears(plain).items():
        codes, scale, *_ = whole_planes(layer.weight.detach(), "block")
        row = storage_of(linears(model)[name].weight).rowwise
        assert same_bytes(row.data, codes) and same_bytes(row.scale, scale)


def test_compiled_and_checkpointed_blocks_are_loaded_by_their_names(tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = make(SIZES)
    save_pretrained(model, tmp_path, "bf16", dtype=torch.float32)
    wanted = exported(model, "bf16")
    other = filled_with_nan(make(SIZES))
    other.blocks[0] = checkpoint_wrapper(other.blocks[0])
    other.blocks[1] = torch.compile(other.blocks[1])
    load(other, tmp_path)
    assert_same_bytes(exported(other, "bf16"), wanted)


def test_a_transformers_model_continues_training_from_its_fp8_files(tmp_path):
    transformers = pytest.importorskip("transformers", "5.0")
    model = fp8rs.convert_to_float8_training(llama("cpu"), recipe="block", filter_fqns=["lm_head"])
    save_pretrained(model, tmp_path, "fp8-block", dtype=torch.float32)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    other = transformers.AutoModelForCausalLM.from_config(config)
    fp8rs.convert_to_float8_training(
        other, recipe="block", filter_fqns=["lm_head"], fp8_weights=True
    )
    assert load(other, tmp_path).quantized == []
    tokens = torch.arange(16).view(1, 16)
    with torch.no_grad():
        assert same_bytes(other(input_ids=tokens).logits, model(input_ids=tokens).logits)
    optimizer = AdamW(other.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        losses.append(other(input_ids=tokens, labels=tokens).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]


# --- files of other tools ------------------------------------------------------------------------


class Net(nn.Module):
    """A model with sizes that blocks do not divide, buffers, an embedding, an unconverted layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 200)
        self.up = nn.Linear(200, 300)
        self.norm = nn.BatchNorm1d(300)
        self.down = nn.Linear(300, 200, bias=False)
        self.head = nn.Linear(200, 12)


def net(recipe, **options):
    torch.manual_seed(1)
    model = Net()
    if recipe is not None:
        fp8rs.convert_to_float8_training(model, recipe=recipe, filter_fqns=["head"], **options)
    return model


def scale_shape(block, rows, cols):
    down, across = (n if b < 0 else b for b, n in zip(block, (rows, cols), strict=True))
    return -(-rows // down), -(-cols // across)


def made_by_hand(suffix, block, scale_dtype=torch.float32, shaped=None):
    """Return the files of a `Net` with FP8 codes in up and down, and their values."""
    torch.manual_seed(2)
    stored_tensors = {}
    values = {}
    for name, value in Net().state_dict().items():
        if name not in ("up.weight", "down.weight"):
            stored_tensors[name] = values[name] = value.clone()
            continue
        codes = torch.randn(value.shape).mul(50).to(E4M3)
        scale = (torch.rand(scale_shape(block, *value.shape)) + 0.5) / 1000
        if scale_dtype == torch.uint8:
            scale = torch.randint(110, 130, scale.shape, dtype=torch.uint8)
        elif scale_dtype == torch.float8_e8m0fnu:
            scale = torch.randint(110, 130, scale.shape, dtype=torch.uint8)
            values[name] = dequantized(codes, scale, block)
            scale = scale.view(scale_dtype)
        scale = scale if scale.element_size() == 1 else scale.to(scale_dtype)
        values.setdefault(name, None)
        if values[name] is None:
            values[name] = dequantized(codes, scale, block)
        stored_tensors[name] = codes
        stored_tensors[name + suffix] = scale if shaped is None else scale.reshape(shaped(scale))
    return stored_tensors, values


DEEPSEEK = {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
}


def compressed(strategy, format="float-quantized", **weights):
    """Return a config.json as llm-compressor writes it."""
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {"targets": ["Linear"], "weights": {**number, "strategy": strategy, **weights}}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": format,
            "config_groups": {"group_0": group},
            "ignore": ["head"],
            "kv_cache_scheme": None,
        }
    }


#: How to write files with their config, and a recipe that has their format.
FILES = {
    "DeepSeek": (("_scale_inv", (128, 128)), DEEPSEEK, "block"),
    "DeepSeek, E8M0": (("_scale_inv", (128, 128), torch.float8_e8m0fnu), DEEPSEEK, "block"),
    "DeepSeek, 64x64": (
        ("_scale_inv", (64, 64)),
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
        None,
    ),
    "tensor": (
        ("_scale", (-1, -1), torch.float32, lambda s: (1,)),
        compressed("tensor"),
        "current",
    ),
    "tensor, bf16 scale without dimensions": (
        ("_scale", (-1, -1), torch.bfloat16, lambda s: ()),
        compressed("tensor", "naive-quantized"),
        "current",
    ),
    "channel": (("_scale", (1, -1), torch.bfloat16), compressed("channel"), "rowwise"),
    "channel, vector": (
        ("_scale", (1, -1), torch.float32, lambda s: s.shape[:1]),
        compressed("channel"),
        "rowwise",
    ),
    "block": (
        ("_scale", (128, 128)),
        compressed("block", block_structure=[128, 128]),
        "block",
    ),
    "group": (("_scale", (1, 100)), compressed("group", group_size=100), None),
    "no config": (("_scale", (128, 128)), None, "block"),
}


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("kind", list(FILES))
def test_files_of_other_tools_load_as_the_values_that_they_represent(kind, files, tmp_path):
    scale_format, config, matching_recipe = FILES[kind]
    stored_tensors, values = made_by_hand(*scale_format)
    stored_tensors["up.input_scale"] = torch.ones(1)
    write(tmp_path, stored_tensors, config, files)
    for recipe in (None, "current"):
        model = net(recipe)
        load(model, tmp_path)
        assert_same_bytes(model.state_dict(), values)
    for recipe in {"current", matching_recipe or "rowwise"}:
        model = net(recipe, fp8_weights=True)
        loaded = load(model, tmp_path)
        weights = ["up.weight", "down.weight"]
        assert (loaded.exact, loaded.quantized) == (
            (weights, []) if recipe == matching_recipe else ([], weights)
        )
        for name in weights:
            row = storage_of(model.get_parameter(name)).rowwise
            codes, scale, *_ = whole_planes(values[name], recipe)
            if recipe == matching_recipe:
                suffix = scale_format[0]
                codes = stored_tensors[name]
                scale = stored_tensors[name + suffix].float().reshape(row.scale.shape)
            assert same_bytes(row.data, codes) and same_bytes(row.scale, scale), name
        assert torch.equal(model.norm.running_mean, values["norm.running_mean"])
        assert torch.equal(model.head.weight, values["head.weight"])


def test_mxfp8_files_with_rowwise_scales_are_quantized_into_square_blocks(tmp_path):
    model = make((64,), recipe="mxfp8", fp8_weights=True)
    save_pretrained(model, tmp_path, "mxfp8", dtype=torch.float32)
    exported_tensors = exported(model, "mxfp8")
    exported_tensors["blocks.0.up.weight_scale"][5] += 1
    config = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path, exported_tensors, config)
    values = values_of(exported_tensors, "mxfp8")["blocks.0.up.weight"]
    loaded = load(model, tmp_path)
    assert loaded.quantized == ["blocks.0.up.weight"]
    assert loaded.exact == ["blocks.0.down.weight", "head.weight"]
    codes, scale, *_ = whole_planes(values, "mxfp8")
    row = storage_of(model.blocks[0].up.weight).rowwise
    assert same_bytes(row.data, codes) and same_bytes(row.scale, scale)


@pytest.mark.parametrize("powers", [False, True])
def test_a_recipe_with_powers_of_two_quantizes_other_scales_again(powers, tmp_path):
    stored_tensors, _ = made_by_hand("_scale_inv", (128, 128))
    for name in ("up.weight_scale_inv", "down.weight_scale_inv"):
        stored_tensors[name] = (
            torch.exp2(stored_tensors[name].log2().round()) if powers else stored_tensors[name]
        )
    write(tmp_path, stored_tensors, DEEPSEEK)
    model = net(fp8rs.Float8BlockScaling(power_2_scale=True), fp8_weights=True)
    loaded = load(model, tmp_path)
    weights = ["up.weight", "down.weight"]
    assert (loaded.exact if powers else loaded.quantized) == weights
    for name in weights:
        scale = storage_of(model.get_parameter(name)).rowwise.scale
        assert (torch.frexp(scale)[0] == 0.5).all()


# --- ties, missing and unexpected names ----------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.mid = nn.Linear(32, 32, bias=False)
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embed.weight


def tied():
    model = Tied()
    with pytest.warns(UserWarning, match="head is not converted"):
        return fp8rs.convert_to_float8_training(model, recipe="current", fp8_weights=True)


@pytest.mark.parametrize("names", [["embed"], ["head"], ["embed", "head"]])
def test_a_tied_weight_is_loaded_from_any_of_its_names(names, tmp_path):
    wanted = torch.randn(40, 32)
    stored_tensors = {f"{name}.weight": wanted.clone() for name in names}
    write(tmp_path, {**stored_tensors, "mid.weight": torch.randn(32, 32)})
    model = tied()
    load(model, tmp_path)
    assert torch.equal(model.embed.weight, wanted)
    assert model.head.weight is model.embed.weight


def test_a_tied_weight_with_two_values_is_refused(tmp_path):
    stored_tensors = {f"{name}.weight": torch.randn(40, 32) for name in ("embed", "head")}
    write(tmp_path, {**stored_tensors, "mid.weight": torch.randn(32, 32)})
    with pytest.raises(ValueError, match=r"embed\.weight and head\.weight: tied in the model"):
        load(tied(), tmp_path)


def test_names_that_do_not_match_are_refused_or_returned(tmp_path):
    stored_tensors, values = made_by_hand("_scale_inv", (128, 128))
    del stored_tensors["head.bias"]
    stored_tensors["other.weight"] = torch.zeros(3)
    write(tmp_path, stored_tensors, DEEPSEEK)
    model = net("current")
    before = state(model)
    with pytest.raises(
        ValueError, match=r"(?s)strict=False.*missing.*head\.bias.*unexpected.*other"
    ):
        load(model, tmp_path)
    assert_same_bytes(state(model), before)
    loaded = load(model, tmp_path, strict=False)
    assert loaded.missing_keys == ["head.bias"]
    assert loaded.unexpected_keys == ["other.weight"]
    assert_same_bytes(state(model), {**values, "head.bias": before["head.bias"]})


# --- files that cannot be loaded -----------------------------------------------------------------


def without_scale(stored_tensors):
    del stored_tensors["up.weight_scale_inv"]


def of_another_shape(stored_tensors):
    stored_tensors["up.bias"] = torch.zeros(301)


def with_scales_of_no_block(stored_tensors):
    stored_tensors["up.weight_scale_inv"] = torch.ones(5, 7)


def of_integers(stored_tensors):
    stored_tensors["up.weight"] = torch.zeros(300, 200, dtype=torch.int8)


def method(name, **more):
    return {"quantization_config": {"quant_method": name, **more}}


REFUSED = {
    "NVFP4": (
        None,
        compressed("tensor_group", "nvfp4-pack-quantized", num_bits=4),
        r"format 'nvfp4-pack-quantized' \(4-bit float weights\)\. .*'float-quantized'",
    ),
    "int8": (
        None,
        compressed("channel", "int-quantized", type="int"),
        r"format 'int-quantized' \(8-bit int weights\)",
    ),
    "int8 in a format for FP8 too": (
        None,
        compressed("channel", "naive-quantized", type="int"),
        r"'naive-quantized' \(8-bit int weights\)",
    ),
    "gptq": (None, method("gptq", bits=4), r"quant_method 'gptq'\. .* quant_method 'fp8'"),
    "modelopt": (None, method("modelopt", quant_algo="NVFP4"), r"quant_method 'modelopt'"),
    "sparse": (
        None,
        method("compressed-tensors", sparsity_config={"format": "sparse-24-bitmask"}),
        "sparsity format 'sparse-24-bitmask'",
    ),
    "no scales": (
        without_scale,
        DEEPSEEK,
        r"up\.weight: FP8 codes without scales: expected up\.weight_scale_inv or up\.weight_scale",
    ),
    "a shape": (of_another_shape, DEEPSEEK, r"up\.bias: shape \(301,\) in the files, \(300,\) in"),
    "scales of no block": (
        with_scales_of_no_block,
        DEEPSEEK,
        r"up\.weight: scales of shape \(5, 7\) for a weight of shape \(300, 200\)",
    ),
    "integers": (of_integers, None, r"up\.weight: type I8 in the files, float32 in the model"),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("fault", list(REFUSED))
@both_weights
def test_errors_name_what_cannot_be_loaded_before_anything_is_written(
    fault, strict, fp8_weights, tmp_path
):
    change, config, message = REFUSED[fault]
    stored_tensors, _ = made_by_hand("_scale_inv", (128, 128))
    if change is not None:
        change(stored_tensors)
    write(tmp_path, stored_tensors, config)
    model = net("block", fp8_weights=fp8_weights)
    before = state(model)
    with pytest.raises(ValueError, match=message):
        load(model, tmp_path, strict=strict)
    assert_same_bytes(state(model), before)


def test_errors_name_missing_and_damaged_files(tmp_path):
    model = net("current")
    before = state(model)
    with pytest.raises(FileNotFoundError, match=r"'org/model', which is not a directory on this"):
        load(model, "org/model")
    with pytest.raises(FileNotFoundError, match=r"has neither model\.safetensors nor model\.safet"):
        load(model, tmp_path)
    stored_tensors, _ = made_by_hand("_scale_inv", (128, 128))
    write(tmp_path, stored_tensors, DEEPSEEK, files=3)
    second = tmp_path / "model-00002-of-00003.safetensors"
    file_bytes = second.read_bytes()
    second.write_bytes(file_bytes[:-10])
    with pytest.raises(
        OSError, match=r"model-00002-of-00003\.safetensors is damaged or incomplete"
    ):
        load(model, tmp_path)
    second.unlink()
    with pytest.raises(FileNotFoundError, match=r"missing files: model-00002-of-00003"):
        load(model, tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load(model, tmp_path)
    assert_same_bytes(state(model), before)


def test_without_safetensors_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        load(net("current"), tmp_path)


def test_a_model_on_the_meta_device_is_refused_by_the_name_of_a_tensor(tmp_path):
    write(tmp_path, make((64,), recipe=None).state_dict())
    with pytest.raises(
        ValueError, match=r"blocks\.0\.norm\.weight is on the meta device.*to_empty"
    ):
        load(make((64,), device="meta"), tmp_path)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not dict"):
        load({}, tmp_path)


# --- sharded -------------------------------------------------------------------------------------

#: Hidden sizes with even, uneven and empty shards.
SHARDED = {"even": (64, 256), "uneven": (160, 96), "empty": (32, 32)}


def meta(sizes, recipe, rig, fp8_weights):
    """Return a model that is converted and sharded on the meta device."""
    with torch.device("meta"):
        model = Stack(sizes)
    fp8rs.convert_to_float8_training(model, recipe=recipe, fp8_weights=fp8_weights)
    shard(model, rig)
    return model.to_empty(device=rig.device)


@ranks(1, 2)
@with_own_format
@both_weights
@pytest.mark.parametrize("sizes", list(SHARDED))
def test_a_sharded_model_loads_the_values_of_an_unsharded_one(rig, recipe, fp8_weights, sizes):
    options = {"recipe": RECIPES[recipe], "fp8_weights": fp8_weights, "device": rig.device}
    folder = shared_folder(rig)
    # Blocks of 128 have other scales than blocks of 32, rows and tensors, so weights are quantized.
    for format in {OWN[recipe], "fp8-block"}:
        save_pretrained(make(SHARDED[sizes], **options), folder, format, dtype=torch.float32)
        dist.barrier()
        reference = make(SHARDED[sizes], seed=1, **options)
        wanted = load(reference, folder)
        after = shard(make(SHARDED[sizes], seed=2, **options), rig)
        for model in (after, meta(SHARDED[sizes], RECIPES[recipe], rig, fp8_weights)):
            assert load(model, folder) == wanted
            assert_same_bytes(exported(model, OWN[recipe]), exported(reference, OWN[recipe]))
            for layer in linears(model).values() if fp8_weights and "mxfp8" not in recipe else ():
                scale = storage_of(layer.weight).rowwise.scale
                assert scale.dim() or on_all_ranks(scale.view(1))
        x = batch(rig)
        assert same_bytes(after(x), model(x))
        dist.barrier()


@ranks(2)
@both_weights
def test_a_rank_reads_only_its_own_part_and_each_tensor_once(rig, fp8_weights):
    folder = shared_folder(rig)
    options = {"recipe": "block", "fp8_weights": fp8_weights, "device": rig.device}
    save_pretrained(make((256,), **options), folder, "fp8-block", dtype=torch.float32)
    dist.barrier()
    model = shard(make((256,), **options), rig)
    shard_numel = sum(p.to_local().numel() for p in model.parameters())
    names = []
    read = []
    original = StoredTensors.read

    def counted(self, name, part):
        values = original(self, name, part)
        names.append(name)
        if "scale" not in name:
            read.append(values.numel())
        return values

    StoredTensors.read = counted
    try:
        load(model, folder)
    finally:
        StoredTensors.read = original
    assert sum(read) == shard_numel
    assert len(names) == len(set(names))


@ranks(2)
@pytest.mark.parametrize("recipe", ["current", "delayed", "block", "mxfp8"])
@pytest.mark.parametrize("optimizer", ["AdamW", "MasterWeights", "torch"])
def test_a_load_between_steps_is_not_undone_by_the_next_step(rig, recipe, optimizer):
    """The optimizer reads its master weights again from the loaded weights."""
    folder = shared_folder(rig)
    fp8_weights = optimizer != "torch"
    options = {"recipe": RECIPES[recipe], "fp8_weights": fp8_weights, "device": rig.device}
    save_pretrained(make((64,), **options), folder, OWN[recipe], dtype=torch.float32)
    dist.barrier()
    model = shard(make((64,), seed=1, **options), rig)
    stepped = {
        "AdamW": lambda p: AdamW(p, lr=1e-2, weight_decay=0.0),
        "MasterWeights": lambda p: MasterWeights(p, torch.optim.SGD, lr=1e-2),
        "torch": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0),
    }[optimizer](model.parameters())
    train(model, stepped, [batch(rig), batch(rig, 1)])
    load(model, folder)
    wanted = {n: full(p.detach()) for n, p in model.named_parameters()}
    for group in stepped.param_groups:
        group["lr"] = 0.0
    train(model, stepped, [batch(rig, 2)])
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        # A master that rounds to the loaded code is kept, so the scale may differ by a rounding.
        error = (full(value) - wanted[name]).abs()
        most = wanted[name].abs()
        rounding = most / 8 + most.max() / 2**9 if fp8_weights and most.dim() == 2 else 0
        assert (error <= rounding).all(), name


@ranks(2)
def test_a_load_into_unsharded_units_writes_the_shards(rig):
    folder = shared_folder(rig)
    save_pretrained(make((64,), device=rig.device), folder, "bf16", dtype=torch.float32)
    dist.barrier()
    model = shard(make((64,), seed=1, device=rig.device), rig, reshard_after_forward=False)
    model(batch(rig))
    load(model, folder)
    assert_same_bytes(exported(model, "bf16"), exported(make((64,), device=rig.device), "bf16"))


@ranks(2, 4)
@pytest.mark.parametrize("recipe", ["current", "rowwise", "block", "mxfp8"])
@both_weights
def test_tensor_parallel_weights_get_the_values_of_the_files(rig, recipe, fp8_weights):
    folder = shared_folder(rig)
    options = {"recipe": RECIPES[recipe], "device": rig.device}
    save_pretrained(make((128,), **options), folder, OWN[recipe], dtype=torch.float32)
    wanted = values_of(exported(make((128,), **options), OWN[recipe]), OWN[recipe])
    dist.barrier()
    model = make((128,), seed=1, fp8_weights=fp8_weights, **options)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    mesh = rig.mesh(rig.world_size // 2, 2, names=("data", "tensor"))
    parallelize_module(model.blocks[0], mesh["tensor"], plan)
    if rig.world_size == 4:
        shard(model, mesh=mesh["data"])
    load(model, folder)
    for name, value in model.named_parameters():
        value = full(value)
        values = wanted[name]
        value = value.dequantize() if isinstance(value, fp8rs.QuantizedTensor) else value
        # Parts of rows and blocks are quantized again.
        if fp8_weights and value.dim() == 2:
            assert ((value - values).abs() <= values.abs() / 16 + values.abs().max() / 2**10).all()
        else:
            assert torch.equal(value, values), name


@ranks(2)
def test_ranks_with_different_parts_of_a_model_load_their_own(rig):
    """With pipeline stages, names are compared across all ranks."""
    folder = shared_folder(rig)
    reference = make((64, 96), device=rig.device)
    save_pretrained(reference, folder, "fp8-tensor", dtype=torch.float32)
    wanted = values_of(exported(reference, "fp8-tensor"), "fp8-tensor")
    dist.barrier()
    stage = make((64, 96), seed=1, device=rig.device)
    delattr(stage.blocks, str(1 - rig.rank))
    if rig.rank == 0:
        del stage.head
    loaded = load(stage, folder)
    assert loaded.missing_keys == loaded.unexpected_keys == []
    for name, value in stage.named_parameters():
        assert same_bytes(value.detach().cpu(), wanted[name])


@ranks(2)
def test_files_that_differ_between_ranks_are_compared_on_all(rig):
    folder = shared_folder(rig)
    for rank in range(2):  # only the first rank writes
        model = make((64, 96)[: 1 + rank], device=rig.device)
        save_pretrained(model, f"{folder}/{rank}", "bf16")
    dist.barrier()
    with pytest.raises(ValueError, match=r"unexpected in the files:\s+blocks\.1\."):
        load(make((64,), device=rig.device), f"{folder}/{rig.rank}")


@ranks(2)
def test_an_error_of_one_rank_is_raised_on_all_before_anything_is_written(rig):
    folder = shared_folder(rig)
    save_pretrained(make((64,), device=rig.device), folder, "bf16")
    dist.barrier()
    model = shard(make((64,), seed=1, device=rig.device), rig)
    before = copy.deepcopy({n: p.to_local() for n, p in model.state_dict().items()})
    message = "'/nowhere'" if rig.rank == 1 else r"rank 1: directory is '/nowhere'"
    with pytest.raises(FileNotFoundError, match=message):
        load(model, folder if rig.rank == 0 else "/nowhere")
    for name, value in model.state_dict().items():
        assert same_bytes(value.to_local(), before[name])


@ranks(2, cuda=False)
def test_an_undecodable_config_of_one_rank_is_raised_on_all(rig):
    folder = Path(shared_folder(rig))
    save_pretrained(make((64,)), folder / "saved", "bf16")
    dist.barrier()
    rank_folder = folder / str(rig.rank)
    shutil.copytree(folder / "saved", rank_folder)
    if rig.rank == 1:
        (rank_folder / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="rank 1: .*codec" if rig.rank == 0 else "codec"):
        load(make((64,)), rank_folder)


@ranks(2)
def test_a_tied_weight_of_a_sharded_model_is_loaded_once(rig):
    folder = shared_folder(rig)
    wanted = torch.arange(40.0 * 32).reshape(40, 32)
    if rig.rank == 0:
        save_file(
            {"embed.weight": wanted, "mid.weight": torch.ones(32, 32)},
            f"{folder}/model.safetensors",
        )
    dist.barrier()
    model = tied().to(rig.device)
    fully_shard(model, mesh=rig.mesh())
    load(model, folder)
    assert torch.equal(full(model.embed.weight), wanted)
    assert torch.equal(full(model.head.weight), wanted)
