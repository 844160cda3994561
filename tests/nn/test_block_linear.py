"""fp8rs.nn.Linear with scales per row or block, against a simulation in plain torch."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import fp8rs
from calls import Calls
from cases import BLOCK_RECIPES, skip_without_block_gemms
from fp8rs.gemm.table import scaled_mm
from fp8rs.model.state import ModelState
from oracle.blocks import quantize
from oracle.compare import relative
from oracle.elements import E4M3, E5M2
from oracle.linear import Blocks, blocks_of, linear, tensor_core_error, tensor_core_sums
from tensor_formats import quantizer_of

CHOSEN = {
    **BLOCK_RECIPES,
    "block of squares": fp8rs.Float8BlockScaling(wgrad_input_block=(128, 128)),
    "block of exact dgrad": fp8rs.Float8BlockScaling(high_precision_gemms=("dgrad",)),
}
NAMES = list(CHOSEN)
every_recipe = pytest.mark.parametrize("name", NAMES)

#: (leading dims, in_features, out_features): aligned, ragged, tiny, many blocks, 1-D, empty.
SHAPES = [
    ((128,), 256, 128),
    ((2, 37), 77, 130),
    ((5,), 3, 2),
    ((1,), 1, 1),
    ((33,), 200, 300),
    ((), 40, 16),
    ((0,), 32, 16),
]


@pytest.fixture(autouse=True)
def _supported(request, device):
    if "block" in str(request.node.callspec.params.get("name")):
        skip_without_block_gemms(device)


def data(device, *shape, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    spread = torch.randn(shape[-1:], generator=generator).exp() if shape else 1.0
    return (x * spread).to(device, dtype)


def layer(device, ins, outs, recipe, dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    module = fp8rs.nn.Linear(ins, outs, bias=bias, dtype=dtype, recipe=recipe)
    with torch.no_grad():
        module.weight.mul_(torch.randn(outs, 1).exp())
    return module.to(device)


def results(function, x, w, b, dy):
    x = x.detach().clone().requires_grad_()
    inputs = [x, w] + ([] if b is None else [b])
    y = function(x)
    return [y, *torch.autograd.grad(y, inputs, dy)]


def close(device, dtype, k):
    """Return tolerances for sums of ``k`` products, relative to the largest sum."""
    if dtype == torch.bfloat16:
        return 2.0**-7
    return 2.0**-18 + (tensor_core_error(k) if device.type == "cuda" else 0.0)


def compare(device, module, blocks, x, dy, grad_dtype=E4M3):
    w = module.weight
    b = module.bias
    got = results(module, x, w, b, dy)
    want = results(lambda x: linear(x, w, b, blocks, grad_dtype), x, w, b, dy)
    rows = x.shape[:-1].numel()
    contracted = [x.shape[-1], dy.shape[-1], rows, rows]  # in y, dx, dw and db
    for result, value, k in zip(got, want, contracted, strict=False):
        assert (result.shape, result.dtype) == (value.shape, value.dtype)
        assert result.is_contiguous()
        if value.numel():
            largest = value.float().abs().max().clamp(min=2.0**-100)
            off = (result.float() - value.float()).abs().max() / largest
            assert off.item() <= close(device, x.dtype, k)


@every_recipe
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_shape(device, name, shape, bias, dtype):
    lead, ins, outs = shape
    module = layer(device, ins, outs, CHOSEN[name], dtype, bias)
    x = data(device, *lead, ins, dtype=dtype)
    dy = data(device, *lead, outs, dtype=dtype, seed=2)
    compare(device, module, blocks_of(CHOSEN[name]), x, dy)


@pytest.mark.parametrize("k", [1, 3, 16, 33, 77, 128, 300])
@pytest.mark.parametrize("power_2_scale", [False, True])
def test_tolerance_covers_tensor_core_accumulation(k, power_2_scale):
    """The tolerance holds for emulated tensor cores and is not much larger than their error."""
    a = data("cpu", 128, k)
    b = data("cpu", 130, k, seed=2)
    (a, _), (b, _) = (quantize(m, E4M3, (1, -1), power_2_scale=power_2_scale) for m in (a, b))
    exact = a.double() @ b.double().t()
    off = (tensor_core_sums(a, b) - exact).abs().max() / exact.abs().max()
    assert off <= tensor_core_error(k)
    assert k < 32 or off > tensor_core_error(k) / 8


@every_recipe
def test_hybrid(device, name):
    recipe = replace(CHOSEN[name], fp8_format="hybrid")
    module = layer(device, 72, 48, recipe)
    x = data(device, 50, 72)
    dy = data(device, 50, 48, seed=2)
    compare(device, module, blocks_of(CHOSEN[name]), x, dy, E5M2)


@pytest.mark.parametrize("name", ["rowwise", "block", "block of squares"])
def test_power_of_2_scales(device, name):
    recipe = replace(CHOSEN[name], power_2_scale=True)
    module = layer(device, 72, 48, recipe)
    compare(device, module, blocks_of(recipe), data(device, 50, 72), data(device, 50, 48, seed=2))


@pytest.mark.parametrize("rounding", ["ceil", "floor"])
@pytest.mark.parametrize("block", [(1, 32), (32, 32)])
def test_mxfp8_options(device, rounding, block):
    recipe = fp8rs.MXFP8BlockScaling(weight_block=block, scale_rounding=rounding)
    module = layer(device, 72, 48, recipe)
    blocks = Blocks((1, 32), block, rounding)
    compare(device, module, blocks, data(device, 50, 72), data(device, 50, 48, seed=2))


@every_recipe
def test_gradients_approximate_high_precision(device, name):
    module = layer(device, 256, 128, CHOSEN[name])
    x = data(device, 512, 256)
    dy = data(device, 512, 128, seed=2)
    w = module.weight
    b = module.bias
    got = results(module, x, w, b, dy)
    want = results(lambda x: nn.functional.linear(x, w, b), x, w, b, dy)
    for result, value in zip(got, want, strict=True):
        assert relative(result, value) < 0.05


@every_recipe
def test_siblings_share_their_input(device, name):
    """The second layer uses the first one's planes. Gradients equal those without sharing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(64, 48)).to(device)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x):
            return self.layers[0](x), self.layers[1](x)

    two = fp8rs.convert_to_float8_training(Two(), recipe=CHOSEN[name])
    x = data(device, 40, 64).requires_grad_()
    with Calls() as calls:
        outputs = two(x)
    of_input = 2 if name == "block of squares" else 1
    assert calls.quantizations == 2 + of_input, "two weights and one input"

    # Gradients that do not depend on the outputs, whose last bits a BLAS does not promise.
    output_grads = [data(device, 40, 32, seed=1), data(device, 40, 48, seed=2)]
    torch.autograd.backward(outputs, output_grads)
    of_both = x.detach().clone().requires_grad_()
    for module, output_grad in zip(two.layers, output_grads, strict=True):
        alone = fp8rs.nn.Linear.from_linear(nn.Linear(64, module.out_features), recipe=CHOSEN[name])
        alone.weight = nn.Parameter(module.weight.detach().clone())
        alone.bias = nn.Parameter(module.bias.detach().clone())
        alone(of_both).backward(output_grad)
        assert torch.equal(alone.weight.grad, module.weight.grad)
        assert torch.equal(alone.bias.grad, module.bias.grad)
    assert torch.equal(of_both.grad, x.grad)


@pytest.mark.parametrize(
    ("rounding", "least"), [("ceil", 28.4), ("floor", 27.5)], ids=["ceil", "floor"]
)
@pytest.mark.parametrize("format", ["1x32", "32x32"])
def test_quality_of_mxfp8_products(device, rounding, least, format):
    """The SQNR against float64 on Gaussian data is at least the limit."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, generator=generator).to(device) for _ in range(2))
    left = quantizer_of("1x32", E4M3, columnwise=False, scale_rounding=rounding)
    right = quantizer_of(format, E4M3, columnwise=False, scale_rounding=rounding)
    out = scaled_mm(left(a).rowwise, right(b).rowwise, out_dtype=torch.float32).double()
    exact = a.double() @ b.double().t()
    quality = 20 * torch.log10(exact.norm() / (out - exact).norm())
    assert quality >= least


@every_recipe
def test_state_dicts_are_plain_and_modules_copy(device, name):
    module = layer(device, 32, 16, CHOSEN[name])
    assert {k: type(v) for k, v in module.state_dict().items()} == {
        "weight": torch.Tensor,
        "bias": torch.Tensor,
    }
    assert f"recipe={CHOSEN[name].name}" in repr(module)
    assert ("wgrad_input_block=(128, 128)" in repr(module)) == (name == "block of squares")
    twin = copy.deepcopy(module)
    x = data(device, 8, 32)
    assert torch.equal(twin(x), module(x))
    before = module(x)
    with torch.no_grad():
        twin.weight.mul_(2)
    assert torch.equal(module(x), before) and not torch.equal(twin(x), before)


def test_amax_group_requires_per_tensor_scales(device):
    with pytest.raises(ValueError, match="amax_reduction_group"):
        ModelState("mxfp8", amax_reduction_group=object())
