"""Norms and gated activations of transformer modules in eager mode, which return FP8 planes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8rs
from calls import Calls
from cases import each_dtype
from fp8rs.nn import LayerNormLinear, LayerNormMLP, MultiheadAttention, TransformerLayer
from internals import composed_modules, counted_fusions
from oracle.compare import relative

WIDTH, HIDDEN, HEADS = 128, 192, 4
fused_recipes = pytest.mark.parametrize("recipe", ["current", "delayed"])
#: A Llama's layer and a decoder with biases. The tokens are no multiple of 16.
LAYERS = {
    "Llama's": {"normalization": "RMSNorm", "activation": "swiglu", "bias": False},
    "with biases": {"normalization": "LayerNorm", "activation": "geglu"},
}
each_layer = pytest.mark.parametrize("kind", list(LAYERS))
FUSIONS = [True, True, True]  # the attention's norm, the feed-forward network's, the activation


def make_layer(kind, device, recipe="current", dtype=torch.float32, **options):
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, **LAYERS[kind], **options}
    layer = TransformerLayer(WIDTH, HIDDEN, HEADS, **options).to(device, dtype)
    fp8rs.convert_to_float8_training(layer, recipe=recipe)
    return layer


def draw(device, dtype=torch.float32, shape=(2, 21, WIDTH), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def step(module, x):
    """Return the output and all gradients of one call."""
    x = x.clone().requires_grad_()
    y = module(x)
    y.float().square().mean().backward()
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return {"output": y.detach(), "input": x.grad, **gradients}


def train(module, device, dtype, steps=3):
    """Train so that delayed scaling has scales, and return the results of the next step."""
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    for seed in range(steps):
        module(draw(device, dtype, seed=seed)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return module


@fused_recipes
@each_layer
@each_dtype
def test_fused_layer_is_close_to_the_composition(device, recipe, kind, dtype):
    fused = make_layer(kind, device, recipe, dtype)
    with composed_modules():
        train(fused, device, dtype)
    composed = copy.deepcopy(fused)
    x = draw(device, dtype, seed=9)
    with counted_fusions() as decisions:
        got = step(fused, x)
    assert decisions == FUSIONS
    with composed_modules():
        expected = step(composed, x)
    assert list(got) == list(expected)
    # A value that is rounded to a neighbor may get another code, 2^-4 or 2^-3 away.
    bound = 2e-3 if dtype == torch.float32 else 0.06
    for name, value in expected.items():
        if name != "self_attn.k_proj.bias":  # the gradient is only rounding
            assert relative(got[name], value) < bound, name


@fused_recipes
def test_history_of_delayed_scaling_is_that_of_the_composition(device, recipe):
    """The amaxes that siblings record, of inputs and of gradients."""
    if recipe == "current":
        pytest.skip("no history")
    fused = make_layer("Llama's", device, recipe)
    with composed_modules():
        train(fused, device, torch.float32)
    composed = copy.deepcopy(fused)
    x = draw(device, seed=9)
    step(fused, x)
    with composed_modules():
        step(composed, x)
    for (name, got), expected in zip(fused.named_buffers(), composed.buffers(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=0, msg=name)
        assert got.count_nonzero() == expected.count_nonzero(), name


@each_layer
def test_evaluation_and_frozen_weights(device, kind):
    layer = make_layer(kind, device)
    x = draw(device)
    trained = step(layer, x)
    with torch.no_grad(), counted_fusions() as decisions:
        y = layer(x)
    assert decisions == FUSIONS
    assert torch.equal(y, trained["output"])
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    frozen = step(layer, x)
    assert list(frozen) == ["output", "input"]
    assert torch.equal(frozen["input"], trained["input"])
    with torch.inference_mode():
        assert torch.equal(layer(x), y)


def test_norm_and_activation_are_not_written(device):
    layer = make_layer("Llama's", device)
    with Calls() as calls:
        step(layer, draw(device))
    assert calls.counts["_quantize_norm"] == 2
    assert calls.counts["_quantize_glu"] == calls.counts["_quantize_glu_backward"] == 1


@each_dtype
@pytest.mark.parametrize("shape", [(0, WIDTH), (1, WIDTH), (3, 0, WIDTH), (WIDTH,), (17, WIDTH)])
def test_any_number_of_tokens(device, shape, dtype):
    torch.manual_seed(0)
    for module in (
        LayerNormLinear(WIDTH, 48, normalization="RMSNorm", recipe="current"),
        LayerNormMLP(WIDTH, HIDDEN, activation="swiglu", bias=False, recipe="current"),
    ):
        module.to(device, dtype)
        x = draw(device, dtype, shape)
        with counted_fusions() as decisions:
            got = step(module, x)
        assert all(decisions)
        with composed_modules():
            expected = step(module, x)
        for name, value in expected.items():
            assert got[name].shape == value.shape
            if value.numel() and x.numel():
                assert relative(got[name], value) < 0.06, name


def test_activation_checkpointing_recomputes_the_same_bytes(device):
    layer = make_layer("Llama's", device)
    x = draw(device)
    expected = step(layer, x)
    got = step_of_checkpoint(layer, x)
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def step_of_checkpoint(layer, x):
    x = x.clone().requires_grad_()
    y = checkpoint(layer, x, use_reentrant=False)
    y.float().square().mean().backward()
    gradients = {n: p.grad.clone() for n, p in layer.named_parameters()}
    layer.zero_grad()
    return {"output": y.detach(), "input": x.grad, **gradients}


# --- what stays a composition ---------------------------------------------------------------------


def hook_on(name):
    def change(layer):
        layer.get_submodule(name).register_forward_hook(lambda *_: None)

    return change


def replace(name, module):
    def change(layer):
        parent, _, child = name.rpartition(".")
        setattr(layer.get_submodule(parent), child, module)

    return change


def convert_with(**options):
    return lambda layer: fp8rs.convert_to_float8_training(layer, **options)


#: A change to a layer, and whether norms and activation are still fused.
CHANGES = {
    "hook on a norm": (hook_on("input_layernorm"), [True, True]),
    "hook on q": (hook_on("self_attn.q_proj"), [False, True, True]),
    "hook on down": (hook_on("mlp.down_proj"), [True, True, False]),
    "hook on the feed-forward network": (hook_on("mlp"), [True, True]),
    "another norm": (replace("post_attention_layernorm", nn.Identity()), [True, True]),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_layers_that_something_observes_are_composed(device, change):
    layer = make_layer("Llama's", device)
    apply, expected = CHANGES[change]
    apply(layer)
    with counted_fusions() as decisions:
        step(layer, draw(device))
    assert decisions == expected


@pytest.mark.parametrize(
    "recipe",
    [
        "rowwise",
        "mxfp8",
        fp8rs.Float8CurrentScaling(high_precision_gemms=("wgrad",)),
        fp8rs.Float8CurrentScaling(save_input=True),
    ],
    ids=["rowwise", "mxfp8", "wgrad in high precision", "saves inputs"],
)
def test_other_quantizations_are_composed(device, recipe):
    layer = make_layer("Llama's", device, recipe)
    x = draw(device)
    with counted_fusions() as decisions:
        got = step(layer, x)
    assert decisions == [False] * 3
    with composed_modules():
        expected = step(layer, x)
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_modules_without_fp8_and_autocast_are_composed(device):
    torch.manual_seed(0)
    plain = TransformerLayer(WIDTH, HIDDEN, HEADS, **LAYERS["Llama's"]).to(device)
    layer = make_layer("Llama's", device)
    with counted_fusions() as decisions:
        plain(draw(device))
        with torch.autocast(device.type, torch.bfloat16):
            layer(draw(device))
    assert decisions and not any(decisions)


def test_cross_attention_quantizes_its_two_inputs(device):
    torch.manual_seed(0)
    attention = MultiheadAttention(
        WIDTH,
        HEADS,
        attention_type="cross",
        attn_mask_type="no_mask",
        attention_dropout=0.0,
        input_layernorm=True,
        recipe="current",
    ).to(device)
    x = draw(device)
    source = draw(device, shape=(2, 13, WIDTH), seed=1)
    with counted_fusions() as decisions:
        y = attention(x, encoder_output=source)
    assert decisions == [True]
    with composed_modules():
        assert relative(y, attention(x, encoder_output=source)) < 2e-3


def test_double_backward_is_refused(device):
    layer = make_layer("Llama's", device)
    y = layer(draw(device).requires_grad_())
    with pytest.raises(RuntimeError, match="do not support double backward"):
        y.sum().backward(create_graph=True)
