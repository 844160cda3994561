"""gemms="auto": FP8 GEMMs from some number of tokens on, high precision below."""

import copy
import logging

import pytest
import torch
from torch import nn

import fp8rs
from fp8rs.gemm import estimates
from fp8rs.model import gemm_choice
from gemms import counted_gemms
from saved_tensors import saved_tensors

TOKENS = 32


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """Let the CPU choose too, with FP8 faster from `TOKENS` tokens on."""
    monkeypatch.setattr(estimates, "MEASURED_DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(gemm_choice, "min_tokens", lambda *args: TOKENS)


def model(recipe="current", **options):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    return fp8rs.convert_to_float8_training(layers, recipe=recipe, **options)


def outputs(layers, x):
    """The output and all gradients."""
    x = x.detach().requires_grad_()
    y = layers(x)
    y.square().sum().backward()
    gradients = [p.grad.clone() for p in layers.parameters()]
    layers.zero_grad()
    return [y.detach(), x.grad, *gradients]


def plain(layers):
    return fp8rs.convert_to_high_precision(copy.deepcopy(layers))


@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "block", "mxfp8"])
@pytest.mark.parametrize("fp8_weights", [False, True])
def test_few_tokens_compute_in_high_precision_and_many_in_fp8(recipe, fp8_weights):
    options = {"recipe": recipe, "fp8_weights": fp8_weights}
    if fp8_weights:
        options["preserve_high_precision_init_val"] = False
    auto = model(**options)
    fp8 = model(gemms="fp8", **options)
    few = torch.randn(TOKENS - 1, 32)
    many_tokens = torch.randn(2, TOKENS // 2, 32)
    for _ in range(2):  # histories do not depend on calls in high precision
        for ours, theirs in zip(outputs(auto, few), outputs(plain(auto), few), strict=True):
            assert torch.equal(ours, theirs)
        for ours, theirs in zip(outputs(auto, many_tokens), outputs(fp8, many_tokens), strict=True):
            assert torch.equal(ours, theirs)


def test_a_quantized_input_is_multiplied_in_fp8():
    layer = model()[0]
    x = fp8rs.Quantizer("current")(torch.randn(4, 32))
    with counted_gemms() as count:
        layer(x)
    assert count.fp8 == 1


def test_fp8_weights_are_dequantized_again_in_the_backward():
    layers = model(fp8_weights=True)
    with saved_tensors() as saved:
        y = layers(torch.randn(4, 32, requires_grad=True))
    shapes = [tuple(tensor.shape) for tensor in saved]
    assert (48, 32) not in shapes and (32, 48) not in shapes
    y.sum().backward()


def test_a_graph_serves_each_side_of_the_number_of_tokens():
    layers = model()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layers, backend=backend, dynamic=True)
    layers(torch.randn(8, 32))
    for tokens in (8, 9, TOKENS - 1, TOKENS, TOKENS + 1, 3 * TOKENS, 10):
        x = torch.randn(tokens, 32)
        assert torch.equal(compiled(x), layers(x))
    assert len(graphs) == 2


def test_a_debugged_layer_makes_the_same_choice():
    layers = model()
    fp8rs.high_precision(layers, "0", gemms=("wgrad",))
    few = torch.randn(TOKENS - 1, 32)
    for ours, theirs in zip(outputs(layers, few), outputs(plain(layers), few), strict=True):
        assert torch.equal(ours, theirs)


def test_copies_and_pickles_keep_the_choice():
    layers = copy.deepcopy(model())
    few = torch.randn(TOKENS - 1, 32)
    assert torch.equal(layers(few), plain(layers)(few))


def test_other_devices_and_layers_of_their_own_have_fp8_gemms(monkeypatch):
    few = torch.randn(4, 32)
    with counted_gemms() as count:
        fp8rs.nn.Linear(32, 32)(few)
    assert count.fp8 == 1
    monkeypatch.setattr(estimates, "MEASURED_DEVICES", ("cuda",))
    with counted_gemms() as count:
        model()(few)
    assert count.fp8 == 2


@pytest.mark.parametrize("recipe", [fp8rs.Float8CurrentScaling(emulate=True)])
def test_emulated_gemms_have_fp8_operands(recipe):
    with counted_gemms() as count:
        model(recipe)(torch.randn(4, 32))
    assert count.fp8 == 2


def test_the_choice_is_logged_once(caplog):
    layers = model()
    caplog.set_level(logging.INFO, "fp8rs")
    for _ in range(2):
        layers(torch.randn(4, 32))
    messages = [record.message for record in caplog.records if "tokens on" in record.message]
    assert len(messages) == 1
    assert "faster from 32 tokens on, and the first forward has 4" in messages[0]
    assert "gemms='fp8'" in messages[0]


@pytest.mark.parametrize(
    "args, kwargs, tokens",
    [
        ((torch.zeros(2, 8, dtype=torch.long),), {}, 16),
        ((), {"mask": None, "input_ids": torch.zeros(2, 8, dtype=torch.long)}, 16),
        ((torch.zeros(2, 8, 4),), {}, 16),
        ((torch.zeros(8, 4),), {}, 8),
        ((torch.zeros(2, 3, 8, 8),), {}, None),
        (("text",), {}, None),
    ],
)
def test_tokens_of_an_input(args, kwargs, tokens):
    assert gemm_choice.tokens_of(args, kwargs) == tokens


def test_min_tokens_is_where_the_estimates_cross():
    weights = [(4096, 4096), (14336, 4096), (4096, 14336)]
    tokens = estimates.min_tokens("current", weights)

    def us(name, count):
        return sum(estimates.linear_us(name, count, n, k) for n, k in weights)

    def pays_off(count):
        occupied = us("bf16", count) >= estimates.HOST_US * len(weights)
        return occupied and us("current", count) <= us("bf16", count)

    assert pays_off(tokens)
    assert not pays_off(tokens - 1)
    assert estimates.min_tokens("delayed", weights) == tokens
    assert estimates.min_tokens("current", []) == 0
    assert estimates.min_tokens("current", [(256, 256)]) == float("inf")


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="gemms must be 'auto' or 'fp8', not 'bf16'"):
        model(gemms="bf16")
