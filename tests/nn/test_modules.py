"""Transformer modules compute their formulas, in high precision and with every recipe."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8rs
from cases import RECIPES, each_kind_of_recipe, skip_without_block_gemms
from compiled_models import counting, graphs
from fp8rs.nn import (
    LayerNormLinear,
    LayerNormMLP,
    MultiheadAttention,
    TransformerLayer,
    rotary_pos_emb,
)
from fp8rs.nn.rotary import rotate
from fp8rs.optim import AdamW
from fp8rs.quantize.recipes import resolve_recipe
from internals import composed_modules, state_of
from oracle import modules as oracle
from oracle.compare import relative
from saving import reloaded

BATCH, LENGTH, WIDTH, HEADS, CHANNELS = 2, 136, 256, 4, 64
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
every_recipe = pytest.mark.parametrize("recipe", list(RECIPES))
each_norm = pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
both_weights = pytest.mark.parametrize("fp8_weights", [False, True], ids=["masters", "fp8"])


@dataclass(frozen=True)
class Case:
    """A module, its formula, and their arguments.

    Attributes:
        make: creates the module from ``normalization``, ``device`` and others.
        formula: computes the output in float64 from parameters and inputs.
        inputs: the number of inputs (batch, length, width). The second is the encoder's output.
        options: other arguments of the module's call.
        floors: the least SQNR in dB of the output, of any gradient, and of any gradient with E5M2
            gradients: the measured one less 0.3 to 0.4 dB. One GEMM has 28.5 dB, or 25.5 dB with an
            E5M2 operand. Chained GEMMs have less.
    """

    make: Any
    formula: Any
    floors: tuple[float, float, float]
    inputs: int = 1
    options: dict[str, Any] = field(default_factory=dict)


def normed(formula, inner, p, x, *args, **options):
    """Apply ``formula`` to a normalized input."""
    return formula(inner(p), oracle.norm(oracle.under(p, "norm"), x), *args, **options)


def named(name):
    return lambda p: oracle.under(p, name)


def itself(p):
    return p


ROTARY = {"rotary_pos_emb": rotary_pos_emb(LENGTH, CHANNELS)}
MASK = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.5
MASK |= torch.eye(LENGTH, dtype=torch.bool)


def mlp_case(activation, *floors):
    return Case(
        partial(LayerNormMLP, WIDTH, 384, activation=activation),
        partial(normed, oracle.mlp, named("mlp"), activation=activation),
        floors,
    )


def attention_case(*floors, causal, inputs=1, mask=None, rotary=False, **arguments):
    make = partial(
        MultiheadAttention,
        WIDTH,
        HEADS,
        attention_dropout=0.0,
        attn_mask_type="causal" if causal else "no_mask",
        attention_type="cross" if inputs == 2 else "self",
        input_layernorm=True,
        **arguments,
    )
    formula = partial(
        normed, oracle.attention, itself, channels=CHANNELS, causal=causal, rotary=rotary, mask=mask
    )
    options = {} if mask is None else {"attn_mask": mask}
    return Case(make, formula, floors, inputs, {**options, **(ROTARY if rotary else {})})


def layer_case(activation, *floors, inputs=1, rotary=True, **arguments):
    kind = "decoder" if inputs == 2 else "encoder"
    make = partial(
        TransformerLayer,
        WIDTH,
        384,
        HEADS,
        activation=activation,
        layer_type=kind,
        **NO_DROPOUT,
        **arguments,
    )
    formula = partial(
        oracle.layer, activation=activation, channels=CHANNELS, causal=True, rotary=rotary
    )
    return Case(make, formula, floors, inputs, ROTARY if rotary else {})


CASES = {
    "LayerNormLinear": Case(
        partial(LayerNormLinear, WIDTH, 384),
        partial(normed, oracle.linear, named("linear")),
        (28.4, 28.2, 24.2),
    ),
    "LayerNormMLP gelu": mlp_case("gelu", 25.3, 24.0, 20.4),
    # Rounding may change the sign of an input of relu, and its gradient becomes 0 or nonzero.
    "LayerNormMLP relu": mlp_case("relu", 25.4, 15.2, 14.4),
    "LayerNormMLP swiglu": mlp_case("swiglu", 23.8, 22.4, 20.2),
    "LayerNormMLP geglu": mlp_case("geglu", 23.7, 22.8, 20.1),
    "self-attention": attention_case(26.2, 22.0, 19.7, causal=True, rotary=True),
    "self-attention, groups": attention_case(
        25.6, 21.8, 19.5, causal=True, rotary=True, num_gqa_groups=2
    ),
    "self-attention, mask": attention_case(27.4, 22.2, 19.8, causal=False, mask=MASK),
    "self-attention, no bias": attention_case(
        25.2, 22.1, 19.7, causal=True, kv_channels=CHANNELS, bias=False
    ),
    "cross-attention": attention_case(27.1, 21.0, 19.3, causal=False, inputs=2, num_gqa_groups=1),
    "encoder": layer_case("gelu", 25.3, 21.9, 19.6, rotary=False),
    "Llama's": layer_case("swiglu", 24.0, 21.9, 19.6, num_gqa_groups=2, bias=False),
    "decoder": layer_case("geglu", 24.5, 21.4, 19.4, inputs=2),
}
every_case = pytest.mark.parametrize("case", list(CASES))


@pytest.fixture(autouse=True)
def _supported(request, device):
    if getattr(request.node, "callspec", None) is None:
        return
    if request.node.callspec.params.get("recipe") == "block":
        skip_without_block_gemms(device)


def moved(options, device):
    return torch.utils._pytree.tree_map(lambda t: t.to(device), options)


def results(case, module, device, dtype=torch.float32):
    """Return the output and the gradients, by name, of a module or an equivalent function."""
    generator = torch.Generator().manual_seed(1)

    def draw(length):
        values = torch.randn(BATCH, length, WIDTH, generator=generator)
        return values.to(device, dtype).requires_grad_()

    inputs = [draw(length) for length in (LENGTH, 72)[: case.inputs]]
    parameters = dict(module.named_parameters())
    if dtype == torch.float64:
        parameters = {n: p.detach().cpu().double().requires_grad_() for n, p in parameters.items()}
        y = case.formula(parameters, *inputs)
    else:
        named_inputs = {"encoder_output": inputs[1]} if case.inputs == 2 else {}
        y = module(inputs[0], **named_inputs, **moved(case.options, device))
    dy = torch.randn(y.shape, generator=generator).to(device, dtype)
    y.backward(dy)
    if isinstance(module, TransformerLayer):
        y = y - inputs[0]  # remove the residual
    leaves = {**parameters, **{f"input {i}": x for i, x in enumerate(inputs)}}
    return {"output": y.detach().cpu(), **{n: p.grad.cpu() for n, p in leaves.items()}}


def build(case, device, recipe=None, normalization="LayerNorm", **convert):
    torch.manual_seed(0)
    # Draw on the CPU, because a GPU draws other numbers and the floors depend on them.
    module = CASES[case].make(normalization=normalization)
    # Change the norms' weights, so that a missing norm is noticed.
    for name, p in module.named_parameters():
        if "norm" in name:
            p.data.add_(torch.randn_like(p), alpha=0.2)
    module.to(device)
    if recipe is not None:
        fp8rs.convert_to_float8_training(module, recipe=RECIPES[recipe], **convert)
    return module


def exact(case, module):
    return results(CASES[case], module, torch.device("cpu"), torch.float64)


def unseen(case, name):
    """Return whether a gradient is only rounding: softmax ignores a bias that all keys share."""
    rotated = "rotary_pos_emb" in CASES[case].options and not name.startswith("cross_attn")
    return name.endswith("k_proj.bias") and not rotated


@every_case
@each_norm
def test_high_precision(device, case, normalization):
    module = build(case, device, normalization=normalization)
    got = results(CASES[case], module, device)
    expected = exact(case, module)
    assert list(got) == list(expected)
    for name, value in expected.items():
        if unseen(case, name):
            assert got[name].norm() < 1e-3
        else:
            assert relative(got[name], value) < 2e-6, name


def sqnr(got, expected):
    return -20 * math.log10(relative(got, expected))


@every_recipe
@every_case
@each_norm
@both_weights
def test_fp8_error_is_near_the_format_limit(device, recipe, case, normalization, fp8_weights):
    module = build(case, device, normalization=normalization)
    expected = exact(case, module)
    fp8rs.convert_to_float8_training(module, recipe=RECIPES[recipe], fp8_weights=fp8_weights)
    got = results(CASES[case], module, device)
    actual = {n: sqnr(got[n], value) for n, value in expected.items() if not unseen(case, n)}
    output = actual.pop("output")
    least, *gradients = CASES[case].floors
    hybrid = resolve_recipe(RECIPES[recipe]).fp8_format == "hybrid"
    assert output > least
    assert min(actual.values()) > gradients[hybrid], actual


class InputCasts(TorchDispatchMode):
    """Records the widths of quantized tensors other than a layer's weights."""

    def __init__(self, layer):
        super().__init__()
        self.weights = {weight.data_ptr() for weight in layer.parameters()}
        self.widths = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("fp8rs::").lstrip("_")
        if name.startswith("quantize") and args[0].data_ptr() not in self.weights:
            self.widths.append(args[0].shape[-1])
        return func(*args, **(kwargs or {}))


def llama_layer(device="cpu", recipe=None, **options):
    arguments = {"num_gqa_groups": 2, "activation": "swiglu", "normalization": "RMSNorm"}
    options = {**NO_DROPOUT, **arguments, "bias": False, **options}
    return TransformerLayer(WIDTH, 384, HEADS, device=device, recipe=recipe, **options)


def hidden(device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, LENGTH, WIDTH, generator=generator).to(device)


@every_recipe
def test_siblings_quantize_their_input_once(device, recipe):
    """q, k and v share an input, and so do gate and up: seven layers, four casts."""
    layer = llama_layer(device)
    fp8rs.convert_to_float8_training(layer, recipe=RECIPES[recipe])
    with InputCasts(layer) as casts:
        layer(hidden(device))
    assert casts.widths == [WIDTH, WIDTH, WIDTH, 384]


@every_recipe
@both_weights
def test_meta_construction(device, recipe, fp8_weights):
    layer = llama_layer("meta")
    fp8rs.convert_to_float8_training(layer, recipe=RECIPES[recipe], fp8_weights=fp8_weights)
    layer.to_empty(device=device)
    materialized = llama_layer(device)
    for module in (layer, materialized):
        torch.manual_seed(0)
        for part in module.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
    fp8rs.convert_to_float8_training(materialized, recipe=RECIPES[recipe], fp8_weights=fp8_weights)
    assert torch.equal(layer(hidden(device)), materialized(hidden(device)))


def steps(layer, run, device, **options):
    optimizer = AdamW(layer.parameters(), 1e-2)
    tensors = []
    for n in range(3):
        y = run(hidden(device, n), **options)
        y.square().mean().backward()
        tensors.append([y.detach(), *(p.grad.clone() for p in layer.parameters())])
        optimizer.step()
        optimizer.zero_grad()
    return tensors


def assert_same_steps(a, b):
    for left, right in zip(a, b, strict=True):
        assert all(map(torch.equal, left, right))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@each_kind_of_recipe
@each_norm
@both_weights
def test_layer_compiles_whole_and_equals_the_eager_composition(
    device, recipe, normalization, fp8_weights
):
    torch.manual_seed(0)
    eager = llama_layer(device, normalization=normalization)
    fp8rs.convert_to_float8_training(eager, recipe=RECIPES[recipe], fp8_weights=fp8_weights)
    layer = copy.deepcopy(eager)
    options = moved(ROTARY, device)
    with counting() as backend:
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        got = steps(layer, compiled, device, **options)
        with composed_modules():
            assert_same_steps(steps(eager, eager, device, **options), got)
        assert backend.frame_count == graphs(recipe, 1)


@every_recipe
def test_dropout_only_in_training(device, recipe):
    layer = llama_layer(device, RECIPES[recipe], hidden_dropout=0.5, attention_dropout=0.5)
    x = hidden(device)
    with torch.no_grad():
        assert not torch.equal(layer(x), layer(x))
        layer.eval()
        assert torch.equal(layer(x), layer(x))


# --- modules with a recipe ------------------------------------------------------------------------


def states(module):
    return {state_of(m) for m in module.modules() if hasattr(m, "_fp8_state")}


@every_recipe
def test_module_with_recipe_equals_a_converted_module(device, recipe):
    torch.manual_seed(0)
    by_hand = llama_layer(device, RECIPES[recipe])
    torch.manual_seed(0)
    converted = fp8rs.convert_to_float8_training(llama_layer(device), recipe=RECIPES[recipe])
    assert len(states(by_hand)) == 1
    loaded = reloaded(by_hand, weights_only=False)
    expected = steps(converted, converted, device)
    assert_same_steps(steps(by_hand, by_hand, device), expected)
    assert_same_steps(steps(loaded, loaded, device), expected)


@pytest.mark.parametrize("recipe", ["current", "delayed"])
@both_weights
def test_conversion_includes_modules_with_recipe(device, recipe, fp8_weights):
    torch.manual_seed(0)
    model = nn.Sequential(llama_layer(device, recipe), nn.Linear(WIDTH, 16, device=device))
    torch.manual_seed(0)
    plain = nn.Sequential(llama_layer(device), nn.Linear(WIDTH, 16, device=device))
    for module in (model, plain):
        fp8rs.convert_to_float8_training(module, recipe=recipe, fp8_weights=fp8_weights)
    assert len(states(model)) == 1
    assert_same_steps(steps(model, model, device), steps(plain, plain, device))


def test_module_with_recipe_supports_fp8_weights(device):
    torch.manual_seed(0)
    with fp8rs.quantized_init("current"):
        layer = llama_layer(device, "current")
    torch.manual_seed(0)
    converted = llama_layer(device)
    fp8rs.convert_to_float8_training(converted, recipe="current", fp8_weights=True)
    assert isinstance(layer.mlp.up_proj.weight, fp8rs.QuantizedTensor)
    assert_same_steps(steps(layer, layer, device), steps(converted, converted, device))


def test_module_with_recipe_is_converted_whole_or_not_at_all(device):
    model = nn.Sequential(llama_layer(device, "delayed"), nn.Linear(WIDTH, 16, device=device))
    with pytest.raises(ValueError, match="built with recipe=, and another layer"):
        fp8rs.convert_to_float8_training(model, recipe="delayed", filter_fqns=["down_proj"])
    with pytest.raises(ValueError, match="built with recipe=, and another layer"):
        fp8rs.convert_to_float8_training(model[0].self_attn, recipe="delayed")
    fp8rs.convert_to_float8_training(model, recipe="delayed", filter_fqns=["0."])
    assert len(states(model)) == 2


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argument, value",
    [
        ("normalization", "BatchNorm"),
        ("activation", "reglu"),
        ("self_attn_mask_type", "padding"),
        ("layer_type", "both"),
        ("num_gqa_groups", 3),
        ("num_gqa_groups", 0),
    ],
)
def test_unsupported_argument_is_named(argument, value):
    with pytest.raises(ValueError, match=rf"^{argument} must .*{value}"):
        llama_layer(**{argument: value})


def test_halves_of_a_head_must_be_equal():
    with pytest.raises(ValueError, match="kv_channels must be even, but got 5"):
        rotary_pos_emb(4, 5)


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="num_attention_heads must be at least 1, but got 0"):
        MultiheadAttention(WIDTH, 0)
    with pytest.raises(ValueError, match="num_attention_heads must divide hidden_size"):
        MultiheadAttention(WIDTH, 3)


def test_arguments_of_another_attention_type_are_refused(device):
    x = hidden(device)
    mask = MASK.to(device)
    attention = partial(MultiheadAttention, WIDTH, HEADS, device=device)
    with pytest.raises(ValueError, match="self-attention takes no encoder_output"):
        attention()(x, encoder_output=x)
    with pytest.raises(ValueError, match="attn_mask requires"):
        attention()(x, attn_mask=mask)
    cross = attention(attention_type="cross", attn_mask_type="no_mask")
    with pytest.raises(ValueError, match="cross-attention needs an encoder_output"):
        cross(x)
    with pytest.raises(ValueError, match="takes no rotary_pos_emb"):
        cross(x, encoder_output=x, **moved(ROTARY, device))
    with pytest.raises(ValueError, match='are for layer_type="decoder"'):
        llama_layer(device)(x, encoder_output=x)
    with pytest.raises(ValueError, match="cross-attention needs an encoder_output"):
        llama_layer(device, layer_type="decoder")(x)


# --- rotary positions -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rotation_and_its_gradient_match_complex_numbers(device, dtype):
    x = torch.randn(2, LENGTH, 3, CHANNELS, device=device).to(dtype).requires_grad_()
    cos, sin = rotary_pos_emb(LENGTH, CHANNELS, device=device)
    y = rotate(x, (cos, sin))
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert y.dtype == dtype and y.stride() == x.stride()

    half = CHANNELS // 2
    turn = torch.complex(cos[:, :half].double(), sin[:, :half].double()).unsqueeze(1)
    for got, values, by in ((y, x, turn), (dx, dy, turn.conj())):
        first, second = values.detach().double().chunk(2, dim=-1)
        turned = torch.complex(first, second) * by
        expected = torch.cat((turned.real, turned.imag), dim=-1)
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=6 * torch.finfo(dtype).eps)


def test_rotation_by_different_angles_for_the_halves_has_gradients_of_any_order():
    rotation = torch.randn(2, 5, 8).unbind()
    x, dy = torch.randn(2, 3, 5, 2, 8, requires_grad=True).unbind()
    y = rotate(x, rotation)
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    torch.testing.assert_close((y * dy).sum(), (x * dx).sum())  # as a rotation is linear

    tangent = torch.randn_like(x)
    (gradient_of_dy,) = torch.autograd.grad(dx, dy, tangent)
    assert torch.equal(gradient_of_dy, rotate(tangent, rotation))


#: Shapes of queries, and of angles.
ROTATIONS = {
    "one rotation": ((2, LENGTH, 3, CHANNELS), (LENGTH, CHANNELS)),
    "batch of one": ((2, LENGTH, 3, CHANNELS), (1, LENGTH, CHANNELS)),
    "each row its own": ((2, LENGTH, 3, CHANNELS), (2, LENGTH, CHANNELS)),
    "no batch": ((LENGTH, 3, CHANNELS), (LENGTH, CHANNELS)),
}


@pytest.mark.parametrize("name", list(ROTATIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_operator_agrees_with_the_composition(device, name, dtype):
    """Also for results that are written in place, and for gradients that are one value expanded."""
    shape, shape_of_angles = ROTATIONS[name]
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    rotation = torch.randn(2, *shape_of_angles, device=device).unbind()

    def results():
        y = rotate(x, rotation).mul_(2)
        (dx,) = torch.autograd.grad(y.sum(), x)
        return y, dx

    got = results()
    with composed_modules():
        expected = results()
    for value, composed in zip(got, expected, strict=True):
        assert value.shape == composed.shape
        torch.testing.assert_close(value, composed, rtol=0, atol=16 * torch.finfo(dtype).eps)


def test_a_rotation_by_16_bit_angles_keeps_no_copies_of_them(device):
    """FSDP2 casts inputs, and so angles, to bf16. All layers share one pair."""
    x = torch.randn(2, LENGTH, 3, CHANNELS, device=device).bfloat16().requires_grad_()
    rotation = [angles.bfloat16() for angles in rotary_pos_emb(LENGTH, CHANNELS, device=device)]
    saved = []

    def pack(tensor):
        saved.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = rotate(x, rotation)
    assert saved == [angles.data_ptr() for angles in rotation]
    expected = rotate(x, [angles.float() for angles in rotation])
    assert torch.equal(y, expected)


@pytest.mark.parametrize("shape", [(1, LENGTH, 2 * CHANNELS), (2, LENGTH - 1, 2 * CHANNELS)])
def test_angles_of_another_shape_are_refused(device, shape):
    """The operator repeats angles for each row of a batch, so it would take other lengths too."""
    x = torch.randn(4, LENGTH, 2, CHANNELS, device=device)
    angles = torch.zeros(*shape, device=device)
    with pytest.raises(ValueError, match=rf"must be \(length, kv_channels\), which is \({LENGTH}"):
        rotate(x, (angles, angles))


def test_learned_angles_of_a_rotation_get_gradients(device):
    x = torch.randn(2, LENGTH, 3, CHANNELS, device=device)
    cos, sin = rotary_pos_emb(LENGTH, CHANNELS, device=device)
    expected = x.sum((0, 2))
    cos.requires_grad_()
    (gradient,) = torch.autograd.grad(rotate(x, (cos, sin)).sum(), cos)
    torch.testing.assert_close(gradient, expected)
