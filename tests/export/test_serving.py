"""The config of an inference engine, and the layers that only one side quantizes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from fp8rs import convert_to_float8_training
from fp8rs.export import compare_layers, save_pretrained, serving_config
from language_models import llama, mixture

pytest.importorskip("transformers", "5.0")
pytestmark = pytest.mark.newest_torch

FP8_FORMATS = ["fp8-block", "fp8-row", "fp8-tensor", "mxfp8"]


def converted(kind="llama", recipe="rowwise", **options):
    sizes = {"intermediate_size": 64, "moe_intermediate_size": 64}
    model = llama("cpu", intermediate_size=64) if kind == "llama" else mixture(kind, **sizes)
    return convert_to_float8_training(model, recipe=recipe, **options)


@pytest.mark.parametrize("format", FP8_FORMATS)
def test_the_config_is_that_of_the_files(format):
    model = converted(recipe="current", filter_fqns=["lm_head"])
    config = serving_config(model, format)
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, folder, format)
        written = json.loads((Path(folder) / "config.json").read_text())
    assert written["quantization_config"] == json.loads(json.dumps(config))
    ignored = config["modules_to_not_convert"] if format == "fp8-block" else config["ignore"]
    assert ignored == ["lm_head"]


def test_a_format_in_high_precision_has_no_config():
    with pytest.raises(ValueError, match=r"format is 'bf16', which has no .*'fp8-block', 'fp8-row"):
        serving_config(converted(), "bf16")


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
@pytest.mark.parametrize("format", FP8_FORMATS)
@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("experts", ["auto", "off"])
def test_a_model_and_its_own_config_quantize_the_same_layers(kind, format, engine, experts):
    options = {} if kind == "llama" else {"experts": experts}
    model = converted(kind, "current", filter_fqns=["lm_head", "layers.1.self_attn.q"], **options)
    differences = compare_layers(model, serving_config(model, format), engine=engine)
    assert not differences, str(differences)
    assert str(differences) == "training and engine quantize the same layers"


def test_a_dot_that_is_no_dot_ignores_other_layers_than_meant():
    """A pattern for routers also matches gate_proj (reported for prime-rl, 2442)."""
    model = converted("qwen3_moe", filter_fqns=["lm_head"], experts="off")
    config = serving_config(model, "fp8-row")
    routers = [name for name in config["ignore"] if name.endswith("mlp.gate")]
    assert routers
    config["ignore"] = [name for name in config["ignore"] if name not in routers]
    config["ignore"].append("re:.*mlp.gate.")
    differences = compare_layers(model, config)
    assert differences.only_in_engine == tuple(routers)
    assert differences.unmatched == ("re:.*mlp.gate.",)

    dense = converted(filter_fqns=["lm_head"])
    differences = compare_layers(dense, config)
    assert differences.only_in_training == tuple(
        f"model.layers.{i}.mlp.gate_proj" for i in range(len(dense.model.layers))
    )
    assert not differences.only_in_engine


def test_layers_that_one_side_lacks_are_named():
    model = converted(filter_fqns=["lm_head", "layers.0.mlp.down"])
    config = serving_config(model)
    config["modules_to_not_convert"] = ["lm_head", "model.layers.1.mlp.up_proj", "model.layers.7"]
    differences = compare_layers(model, {"architectures": [], "quantization_config": config})
    assert differences
    assert differences.only_in_training == ("model.layers.1.mlp.up_proj",)
    assert differences.only_in_engine == ("model.layers.0.mlp.down_proj",)
    assert differences.unmatched == ("model.layers.7",)
    assert str(differences).splitlines() == [
        "quantized by the training only (1): model.layers.1.mlp.up_proj",
        "quantized by the engine only (1): model.layers.0.mlp.down_proj",
        "patterns that match no layer (1): model.layers.7",
    ]


def test_an_engine_without_a_config_quantizes_nothing():
    model = converted(filter_fqns=["lm_head"])
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    for config in ({}, {"architectures": ["LlamaForCausalLM"], "quantization_config": None}):
        differences = compare_layers(model, config)
        assert set(differences.only_in_training) == set(linears) - {"lm_head"}


def test_arguments_are_checked():
    model = converted()
    with pytest.raises(ValueError, match="quant_method of config is 'awq'"):
        compare_layers(model, {"quant_method": "awq"})
    with pytest.raises(ValueError, match="engine must be 'vllm' or 'transformers', not 'sglang'"):
        compare_layers(model, {}, engine="sglang")
    with pytest.raises(TypeError, match="config must be a mapping, not list"):
        compare_layers(model, [])
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        serving_config(model.state_dict())


PATTERNS = ["lm_head", "model.layers.1", "model.layers.0.mlp.gate", "up_proj", "model.*self_attn"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_names_match_as_in_transformers(pattern):
    from transformers.quantizers.quantizers_utils import should_convert_module

    model = converted(filter_fqns=["lm_head"])
    config = serving_config(model) | {"modules_to_not_convert": [pattern]}
    differences = compare_layers(model, config, engine="transformers")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            in_engine = name not in differences.only_in_training
            if name == "lm_head":
                in_engine = name in differences.only_in_engine
            assert in_engine == should_convert_module(name, [pattern]), name


@pytest.mark.parametrize("pattern", [*PATTERNS, *(f"re:.*{pattern}" for pattern in PATTERNS)])
def test_names_match_as_in_compressed_tensors(pattern):
    matching = pytest.importorskip("compressed_tensors.utils.match")
    model = converted(filter_fqns=["lm_head"])
    config = serving_config(model, "fp8-row") | {"ignore": [pattern]}
    differences = compare_layers(model, config)
    plain = llama("cpu")
    with torch.no_grad():
        quantized = {name for name, _ in matching.match_named_modules(plain, ["Linear"], [pattern])}
    for name, module in plain.named_modules():
        if isinstance(module, nn.Linear):
            in_engine = name not in differences.only_in_training
            if name == "lm_head":
                in_engine = name in differences.only_in_engine
            assert in_engine == (name in quantized), name
