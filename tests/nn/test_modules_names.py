"""State dicts of Llama's and TransformerEngine's layers load into a TransformerLayer."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch

import fp8rs
from distributed import ranks
from fp8rs.nn import TransformerLayer, load_transformer_layer, rotary_pos_emb
from fp8rs.nn.transformer import TRANSFORMER_ENGINE

PAGE = Path(__file__).parents[2] / "docs" / "modules.md"
PREFIX = "model.layers.1."


@cache
def llama():
    """Build transformers' Llama with two layers, groups and a nondefault rotary base."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-4,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).eval()
    for name, p in model.named_parameters():
        if "norm" in name:  # ones would hide that they are not loaded
            p.data.add_(torch.randn_like(p), alpha=0.2)
        else:
            p.data.mul_(5)  # make the residual branch as large as the input
    return model


def of_llama(config, **options):
    """Build a layer that computes what a Llama layer does."""
    return TransformerLayer(
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        num_gqa_groups=config.num_key_value_heads,
        layernorm_epsilon=config.rms_norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias=False,
        activation="swiglu",
        normalization="RMSNorm",
        **options,
    )


def test_llama_layer_equals_transformers():
    model = llama()
    layer = of_llama(model.config)
    load_transformer_layer(layer, model.state_dict(), names="llama", prefix=PREFIX)
    x = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(24).expand(2, -1)
    theirs = model.model.rotary_emb(x, position_ids=positions)
    with torch.no_grad():
        # transformers' layer has no causal mask. Its model creates one.
        mask = torch.full((24, 24), -torch.inf).triu(1)[None, None]
        expected = model.model.layers[1](x, attention_mask=mask, position_embeddings=theirs)
        for rotation in (theirs, rotary_pos_emb(24, 16)):
            got = layer(x, rotary_pos_emb=rotation)
            assert (got - expected).abs().max() < 1e-5
    assert (expected - x).abs().max() > 1


def kinds(normalization, bias):
    return (("weight", "bias") if normalization == "LayerNorm" else ("weight",)), (
        ("weight", "bias") if bias else ("weight",)
    )


def transformer_engine(width, ffn, kv, *, gated, decoder, normalization, bias):
    """Return a random state dict with the names and shapes of TransformerEngine.

    After the sources of its ``TransformerLayer`` and of what that is made of.
    """
    generator = torch.Generator().manual_seed(2)
    norms, linears = kinds(normalization, bias)
    state = {}

    def add(name, rows, columns=None):
        for kind in norms if columns is None else linears:
            shape = (rows,) if columns is None or kind == "bias" else (rows, columns)
            state[f"{name}{kind}"] = torch.randn(shape, generator=generator)

    self_attention = "self_attention.layernorm_qkv."
    add(self_attention + "layer_norm_", width)
    for name, rows in (("query_", width), ("key_", kv), ("value_", kv)):
        add(self_attention + name, rows, width)
    add("self_attention.proj.", width, width)
    if decoder:
        add("inter_attention.layernorm_query.layer_norm_", width)
        add("inter_attention.layernorm_query.query_", width, width)
        add("inter_attention.key_value.key_", kv, width)
        add("inter_attention.key_value.value_", kv, width)
        add("inter_attention.proj.", width, width)
    add("layernorm_mlp.layer_norm_", width)
    add("layernorm_mlp.fc1_", (2 if gated else 1) * ffn, width)
    add("layernorm_mlp.fc2_", width, ffn)
    state["layernorm_mlp._extra_state"] = torch.empty(0, dtype=torch.uint8)
    return state


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("layer_type", ["encoder", "decoder"])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_state_dict_of_transformer_engine(activation, layer_type, normalization, bias):
    layer = TransformerLayer(
        64,
        96,
        4,
        num_gqa_groups=2,
        activation=activation,
        layer_type=layer_type,
        normalization=normalization,
        bias=bias,
    )
    theirs = transformer_engine(
        64,
        96,
        32,
        gated=activation == "swiglu",
        decoder=layer_type == "decoder",
        normalization=normalization,
        bias=bias,
    )
    load_transformer_layer(layer, theirs, names="transformer_engine")
    del theirs["layernorm_mlp._extra_state"]
    state_dict = layer.state_dict()
    for name, value in theirs.items():
        head, kind = re.fullmatch(r"(.*[._])(weight|bias)", name).groups()
        ours = [n.format(kind) for n in TRANSFORMER_ENGINE[head + "{}"]]
        parts = [state_dict.pop(n) for n in ours if n in state_dict]
        assert torch.equal(torch.cat(parts), value), name
    assert not state_dict


def test_the_gate_comes_first():
    """The activation applies to fc1's first half, as in TransformerEngine's Llama example."""
    layer = of_llama(llama().config)
    options = {"gated": True, "decoder": False, "normalization": "RMSNorm", "bias": False}
    theirs = transformer_engine(64, 96, 32, **options)
    load_transformer_layer(layer, theirs, names="transformer_engine")
    assert torch.equal(layer.mlp.gate_proj.weight, theirs["layernorm_mlp.fc1_weight"][:96])
    assert torch.equal(layer.mlp.up_proj.weight, theirs["layernorm_mlp.fc1_weight"][96:])


@pytest.mark.parametrize("fp8_weights", [False, True])
def test_a_converted_layer_is_loaded(fp8_weights):
    model = llama()
    x = torch.randn(2, 24, 64)
    states = model.state_dict()
    layers = [of_llama(model.config) for _ in range(2)]
    load_transformer_layer(layers[0], states, names="llama", prefix=PREFIX)
    for layer in layers:
        fp8rs.convert_to_float8_training(layer, recipe="rowwise", fp8_weights=fp8_weights)
    load_transformer_layer(layers[1], states, names="llama", prefix=PREFIX)
    assert torch.equal(layers[0](x), layers[1](x))


@ranks(2)
@pytest.mark.parametrize("fp8_weights", [False, True])
def test_sharded_layer_loads_whole_tensors(rig, fp8_weights):
    from torch.distributed.fsdp import fully_shard

    model = llama()
    reference = of_llama(model.config)
    load_transformer_layer(reference, model.state_dict(), names="llama", prefix=PREFIX)
    layer = of_llama(model.config)
    for module in (reference, layer):
        module.to(rig.device)
        fp8rs.convert_to_float8_training(module, recipe="current", fp8_weights=fp8_weights)
    fully_shard(layer, mesh=rig.mesh())
    load_transformer_layer(layer, model.state_dict(), names="llama", prefix=PREFIX)
    x = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(rig.rank)).to(rig.device)
    assert torch.equal(layer(x), reference(x))


def test_mismatched_names_are_listed():
    layer = of_llama(llama().config)
    states = llama().state_dict()
    with pytest.raises(ValueError, match="names must be 'llama' or 'transformer_engine'"):
        load_transformer_layer(layer, states, names="megatron")
    with pytest.raises(ValueError, match=r"no name that begins with 'layers\.7\.'"):
        load_transformer_layer(layer, states, names="llama", prefix="layers.7.")
    options = {"gated": True, "decoder": False, "normalization": "RMSNorm", "bias": False}
    fused = transformer_engine(64, 96, 32, **options)
    parts = [fused.pop(f"self_attention.layernorm_qkv.{n}_weight") for n in ("query", "key")]
    fused["self_attention.layernorm_qkv.weight"] = torch.cat(parts)
    with pytest.raises(RuntimeError, match=r"(?s)q_proj.*Unexpected.*layernorm_qkv\.weight"):
        load_transformer_layer(layer, fused, names="transformer_engine")


def test_documented_name_table_matches():
    rows = re.findall(r"^\| `([\w.]+\.\*)`[^|]*\| `([^|]+)` \|", PAGE.read_text(), re.M)
    assert dict(rows) == {
        ours.replace("{}", "*"): theirs.replace("{}", "*")
        for theirs, names in TRANSFORMER_ENGINE.items()
        for ours in names
    }
