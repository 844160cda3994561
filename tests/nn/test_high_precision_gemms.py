"""Recipes that run GEMMs in high precision: each GEMM equals that of FP8 or that of nn.Linear."""

import dataclasses
import itertools

import pytest
import torch
import torch._dynamo as dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fp8rs
from calls import Calls
from cases import RECIPES, skip_without_block_gemms
from fp8rs.quantize.recipes import GEMMS, quant_spec, resolve_recipe
from fp8rs.tensor.quantizer import Quantizer
from saved_tensors import saved_tensors

NAME = "rowwise_with_gw_hp"
#: All subsets but that of all GEMMs, which a recipe refuses.
SUBSETS = [names for n in range(len(GEMMS)) for names in itertools.combinations(GEMMS, n)]
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
both_weights = pytest.mark.parametrize("fp8_weights", [False, True], ids=["masters", "fp8"])
both_biases = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])


@pytest.fixture(autouse=True)
def _supported(request, device):
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and "block" in str(callspec.params.get("recipe")):
        skip_without_block_gemms(device)


def build(device, recipe=None, dtype=torch.float32, bias=True, **convert):
    torch.manual_seed(0)
    layer = nn.Linear(64, 96, bias=bias).to(device, dtype)
    if recipe is not None:
        fp8rs.convert_to_float8_training(layer, recipe=recipe, **convert)
    return layer


def inputs(device, dtype=torch.float32, lead=(3, 20)):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*lead, 64, generator=generator)
    dy = torch.randn(*lead, 96, generator=generator)
    return x.to(device, dtype), dy.to(device, dtype)


def run(layer, x, dy):
    """Return the result of each GEMM, by name, and the gradient of the bias."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(dy.to(y.dtype))
    results = {"forward": y.detach(), "dgrad": x.grad, "wgrad": layer.weight.grad}
    if layer.bias is not None:
        results["bias"] = layer.bias.grad
    return {name: result.clone() for name, result in results.items()}


@each_dtype
@both_weights
@both_biases
@pytest.mark.parametrize("lead", [(3, 20), (37,), (), (0,)], ids=str)
def test_only_wgrad_differs_from_rowwise_and_equals_torch(device, dtype, fp8_weights, bias, lead):
    plain = build(device, None, dtype, bias)
    rowwise = build(device, "rowwise", dtype, bias, fp8_weights=fp8_weights)
    layer = build(device, NAME, dtype, bias, fp8_weights=fp8_weights)
    x, dy = inputs(device, dtype, lead)
    results, exact, quantized = (run(module, x, dy) for module in (layer, plain, rowwise))

    assert torch.equal(results["forward"], quantized["forward"])
    assert torch.equal(results["dgrad"], quantized["dgrad"])
    assert torch.equal(results["wgrad"], exact["wgrad"])
    assert torch.equal(results["wgrad"], dy.reshape(-1, 96).t() @ x.reshape(-1, 64))
    if bias:
        assert torch.equal(results["bias"], exact["bias"])
    if x.numel():
        assert not torch.equal(quantized["wgrad"], exact["wgrad"])


@pytest.mark.parametrize("recipe", list(RECIPES))
@each_dtype
def test_each_gemm_of_each_recipe_has_the_precision_that_the_recipe_names(device, recipe, dtype):
    all_fp8 = dataclasses.replace(resolve_recipe(RECIPES[recipe]), high_precision_gemms=())
    x, dy = inputs(device, dtype)
    exact = run(build(device, None, dtype), x, dy)
    quantized = run(build(device, all_fp8, dtype), x, dy)
    for gemms in SUBSETS:
        chosen = dataclasses.replace(all_fp8, high_precision_gemms=gemms)
        results = run(build(device, chosen, dtype), x, dy)
        for name in GEMMS:
            expected = exact if name in gemms else quantized
            assert torch.equal(results[name], expected[name]), (gemms, name)
        assert torch.equal(results["bias"], exact["bias"])


@each_dtype
@pytest.mark.parametrize("save_input", [None, True])
def test_the_saved_tensor_is_the_input(device, dtype, save_input):
    recipe = dataclasses.replace(resolve_recipe(NAME), save_input=save_input)
    layer = build(device, recipe, dtype)
    x = inputs(device, dtype)[0].requires_grad_()
    with saved_tensors() as saved:
        layer(x)
    assert sum(tensor.data_ptr() == x.data_ptr() for tensor in saved) == 1
    assert all(tensor.dtype.itemsize > 1 for tensor in saved)

    layer.weight.requires_grad_(False)
    with saved_tensors() as saved:
        layer(x)
    assert all(tensor.data_ptr() != x.data_ptr() for tensor in saved)


def test_nothing_is_quantized_for_wgrad(device):
    x, dy = inputs(device)
    x.requires_grad_()
    layer = build(device, NAME)
    with Calls() as calls:
        layer(x).backward(dy)
    # The input and the weight in the forward, and the weight and the gradient in the backward.
    assert calls.quantizations == 4
    if device.type == "cpu":  # FP8 GEMMs are emulated
        assert calls.counts["dequantize"] == 4, "two operands of two GEMMs"


def test_autocast_sets_the_dtype_of_wgrad(device):
    layer = build(device, NAME)
    plain = build(device)
    x, dy = inputs(device)
    with torch.autocast(device.type, torch.bfloat16):
        results = run(layer, x, dy)
        exact = run(plain, x, dy)
    assert results["forward"].dtype == torch.bfloat16
    assert results["wgrad"].dtype == torch.float32
    assert torch.equal(results["wgrad"], exact["wgrad"])
    assert torch.equal(results["wgrad"], results["wgrad"].bfloat16().float())


def test_wgrad_of_a_quantized_input_multiplies_the_values_of_its_codes(device):
    layer = build(device, NAME)
    x, dy = inputs(device)
    quantized = Quantizer(quant_spec(resolve_recipe(NAME), "input"), columnwise=False)(x)
    y = layer(quantized)
    (dw,) = torch.autograd.grad(y, layer.weight, dy)
    assert torch.equal(y, layer(x))
    values = quantized.dequantize(torch.float32)
    assert torch.equal(dw, dy.reshape(-1, 96).t() @ values.reshape(-1, 64))


@both_weights
@pytest.mark.parametrize("recipe", [NAME, "delayed"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_equal_eager_ones_in_one_graph(device, recipe, fp8_weights):
    recipe = dataclasses.replace(resolve_recipe(recipe), high_precision_gemms=("wgrad",))
    eager = build(device, recipe, fp8_weights=fp8_weights)
    compiled = build(device, recipe, fp8_weights=fp8_weights)
    dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled.compile(backend=backend, fullgraph=True)
    x, dy = inputs(device)
    expected = run(eager, x, dy)
    results = run(compiled, x, dy)
    assert all(torch.equal(results[name], expected[name]) for name in expected)
    assert backend.frame_count == 1
    dynamo.reset()


@pytest.mark.parametrize(
    "gemms", [("wgrad",), ("dgrad",), ("forward",), ("dgrad", "wgrad")], ids=str
)
def test_histories_record_the_gradient_if_a_gemm_reads_its_codes(gemms, device):
    layer = build(device, fp8rs.DelayedScaling(high_precision_gemms=gemms))
    run(layer, *inputs(device))
    weight, input, grad = layer.fp8_amax[:3, 0].tolist()
    assert weight > 0
    assert input > 0
    assert (grad > 0) == (gemms != ("dgrad", "wgrad"))


def test_high_precision_adds_to_the_gemms_of_the_recipe(device):
    model = nn.Sequential(build(device))
    exact = run(model[0], *inputs(device))
    fp8rs.convert_to_float8_training(model, recipe=NAME)
    quantized = run(model[0], *inputs(device))
    for gemms in SUBSETS:
        fp8rs.high_precision(model, "0", gemms=gemms)
        results = run(model[0], *inputs(device))
        for name in GEMMS:
            expected = exact if name in (*gemms, "wgrad") else quantized
            assert torch.equal(results[name], expected[name]), (gemms, name)


def test_the_monitor_reads_each_operand_that_is_quantized(device):
    model = nn.Sequential(build(device))
    fp8rs.convert_to_float8_training(model, recipe=NAME)
    monitor = fp8rs.monitor(model, every=1)
    run(model[0], *inputs(device))
    statistics = monitor.step()
    for operand in ("input", "weight", "grad"):
        assert 25 < statistics[f"fp8/0/{operand}/sqnr_db"] < 45


def test_a_double_backward_is_refused(device):
    layer = build(device, NAME)
    x = inputs(device)[0].requires_grad_()
    with pytest.raises(RuntimeError, match="FP8 linear layers do not support double backward"):
        torch.autograd.grad(layer(x).sum(), layer.weight, create_graph=True)


def test_an_fp8_weight_written_since_the_forward_is_an_error(device):
    layer = build(
        device, fp8rs.Float8RowwiseScaling(high_precision_gemms="dgrad"), fp8_weights=True
    )
    y = layer(inputs(device)[0].requires_grad_())
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: the FP8 weight"):
        y.sum().backward()
