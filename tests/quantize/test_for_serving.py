"""Recipes that give an inference server's codes, against the server's formulas in plain torch."""

import dataclasses

import pytest
import torch

import fp8rs
from fp8rs import Float8RowwiseScaling
from fp8rs.quantize.recipes import quant_spec
from oracle.elements import E4M3

#: The smallest scale of an activation in vLLM (csrc/quantization/w8a8/fp8/nvidia/quant_utils.cuh).
VLLM_MIN_SCALE = 1.0 / (448.0 * 512.0)


def activations(device, dtype=torch.bfloat16):
    """Return rows of magnitudes from 2^-30 to 2^9, some below the bound, and a row of zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(160, 192, generator=generator)
    x *= torch.exp2(torch.arange(160) % 40 - 30.0)[:, None]
    x[7] = 0
    return x.to(device, dtype)


def divided(values, divisor):
    """Return the rounded quotients. On CUDA, torch multiplies by the reciprocal of a number."""
    return values / values.new_tensor(divisor)


def vllm_scales(x):
    """Return max(amax / 448, 1 / (448 * 512)) of each row."""
    amax = x.float().abs().amax(-1, keepdim=True)
    return divided(amax, 448.0).clamp(min=torch.tensor(VLLM_MIN_SCALE).item())


def vllm_codes(x, scales):
    """Return clamp(x / scale) as E4M3."""
    return (x.float() / scales).clamp(-448.0, 448.0).to(E4M3)


def as_bits(tensor):
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_input_scales_have_the_bound_of_vllm(device, dtype):
    x = activations(device, dtype)
    recipe = Float8RowwiseScaling(input_amax_epsilon=1 / 512)
    plane = fp8rs.Quantizer(recipe, "input", columnwise=False)(x).rowwise
    assert torch.equal(plane.scale, vllm_scales(x))
    codes = (x.float() * (1.0 / plane.scale)).clamp(-448, 448).to(E4M3)
    assert torch.equal(as_bits(plane.data), as_bits(codes))


@pytest.mark.parametrize("role", ["weight", "grad"])
def test_the_bound_of_inputs_does_not_apply_to_weights_and_gradients(device, role):
    x = activations(device)
    bounded = fp8rs.Quantizer(Float8RowwiseScaling(input_amax_epsilon=1 / 512), role)(x)
    plain = fp8rs.Quantizer("rowwise", role)(x)
    for plane, expected in (
        (bounded.rowwise, plain.rowwise),
        (bounded.columnwise, plain.columnwise),
    ):
        assert torch.equal(plane.scale, expected.scale)
        assert torch.equal(as_bits(plane.data), as_bits(expected.data))


def test_the_larger_of_both_bounds_applies_to_inputs():
    recipe = Float8RowwiseScaling(amax_epsilon=0.5, input_amax_epsilon=0.25)
    assert quant_spec(recipe, "input").amax_epsilon == 0.5
    recipe = dataclasses.replace(recipe, input_amax_epsilon=1)
    assert quant_spec(recipe, "input").amax_epsilon == 1.0
    assert quant_spec(recipe, "weight").amax_epsilon == 0.5
    assert quant_spec(recipe, "grad").amax_epsilon == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_inputs_have_the_codes_of_fp8_dynamic(device, dtype):
    x = activations(device, dtype)
    planes = fp8rs.Quantizer(Float8RowwiseScaling.for_serving(), "input")(x)
    scales = vllm_scales(x)
    assert torch.equal(planes.rowwise.scale, scales)
    assert torch.equal(as_bits(planes.rowwise.data), as_bits(vllm_codes(x, scales)))
    # wgrad's codes are no part of an engine's forward.
    bounded = fp8rs.Quantizer(Float8RowwiseScaling(input_amax_epsilon=1 / 512), "input")(x)
    assert torch.equal(as_bits(planes.columnwise.data), as_bits(bounded.columnwise.data))
    assert torch.equal(planes.columnwise.scale, bounded.columnwise.scale)


def test_division_and_multiplication_differ_in_few_codes(device):
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    x = x.to(device, torch.bfloat16)
    recipe = Float8RowwiseScaling.for_serving()
    divided = fp8rs.Quantizer(recipe, "input")(x).rowwise
    recipe = dataclasses.replace(recipe, divide_input=False)
    multiplied = fp8rs.Quantizer(recipe, "input")(x).rowwise
    assert torch.equal(divided.scale, multiplied.scale)
    different = as_bits(divided.data) != as_bits(multiplied.data)
    # 0 of 262,144 would mean that both take the same way.
    assert 0 < different.sum().item() < 300


def test_only_inputs_are_divided():
    recipe = Float8RowwiseScaling.for_serving()
    assert quant_spec(recipe, "input").divide
    assert not quant_spec(recipe, "weight").divide
    assert not quant_spec(recipe, "grad").divide
    assert quant_spec(recipe, "input", format=fp8rs.quantize.formats.BLOCK_1X128).divide is False


def test_the_preset_takes_other_fields():
    recipe = Float8RowwiseScaling.for_serving(high_precision_gemms=("wgrad",), divide_input=False)
    assert recipe == Float8RowwiseScaling(
        input_amax_epsilon=1 / 512, high_precision_gemms=("wgrad",)
    )


def layer_results(layer, x, dy):
    x = x.detach().requires_grad_()
    y = layer(x)
    return y, *torch.autograd.grad(y, (x, layer.weight), dy)


def test_a_layer_multiplies_the_codes_of_fp8_dynamic(device):
    torch.manual_seed(0)
    # Fast accumulation on Hopper has 14 bits, and the reference accumulates in float32.
    recipe = Float8RowwiseScaling.for_serving(fast_accumulation=(False, False, False))
    layer = fp8rs.nn.Linear(192, 128, bias=False, dtype=torch.bfloat16, recipe=recipe).to(device)
    x = activations(device)
    dy = torch.randn(160, 128, generator=torch.Generator().manual_seed(1)).to(device, x.dtype)
    y, dx, _ = layer_results(layer, x, dy)

    scales = vllm_scales(x)
    values = vllm_codes(x, scales).float() * scales
    weight = layer.weight.detach().float()
    weight_scales = divided(weight.abs().amax(-1, keepdim=True), 448.0)
    weight_codes = (weight * (1.0 / weight_scales)).clamp(-448, 448).to(E4M3)
    expected = values @ (weight_codes.float() * weight_scales).T
    row_scale = expected.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    assert ((y.float() - expected).abs() / row_scale).max().item() < 2.0**-7

    # The layer's codes are those of the quantizer, to the bit.
    quantizer = fp8rs.Quantizer(Float8RowwiseScaling.for_serving(), "input")
    assert torch.equal(layer(quantizer(x)), y)
    recipe = Float8RowwiseScaling(fast_accumulation=(False, False, False))
    rowwise = fp8rs.nn.Linear(192, 128, bias=False, dtype=torch.bfloat16, recipe=recipe)
    rowwise = rowwise.to(device)
    rowwise.load_state_dict(layer.state_dict())
    y_rowwise, dx_rowwise, _ = layer_results(rowwise, x, dy)
    assert torch.equal(dx, dx_rowwise)
    assert not torch.equal(y, y_rowwise)


@pytest.mark.newest_torch
@pytest.mark.parametrize("save_input", [None, True, False])
def test_compiled_layers_have_the_bytes_of_eager_ones(device, save_input):
    torch.manual_seed(0)
    recipe = Float8RowwiseScaling.for_serving(save_input=save_input)
    layer = fp8rs.nn.Linear(192, 128, bias=False, dtype=torch.bfloat16, recipe=recipe).to(device)
    x = activations(device)
    dy = torch.randn(160, 128, generator=torch.Generator().manual_seed(1)).to(device, x.dtype)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = layer_results(layer, x, dy)
    x = x.detach().requires_grad_()
    y = compiled(x)
    results = y, *torch.autograd.grad(y, (x, layer.weight), dy)
    for result, value in zip(results, expected, strict=True):
        assert torch.equal(result, value)


def blocks_of_activations(device):
    """Return rows whose 1x128 blocks have magnitudes from 2^-40 to 2^9, and a row of zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 3, 128, generator=generator)
    x *= torch.exp2(torch.arange(300) % 50 - 40.0).view(100, 3, 1)
    x[7] = 0
    return x.to(device, torch.bfloat16)


def deep_gemm_scales(blocks, is_e8m0):
    """Return vLLM's scales of groups of 128 (csrc/quantization/w8a8/fp8/per_token_group_quant.cu).

    The amax is at least 1e-10. With E8M0, amax / 448 is at least 1e-10 and rounded up.
    """
    amax = blocks.float().abs().amax(-1).clamp(min=torch.tensor(1e-10).item())
    scales = divided(amax, 448.0)
    if not is_e8m0:
        return scales
    mantissa, exponent = torch.frexp(scales.clamp(min=torch.tensor(1e-10).item()))
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(torch.ones_like(scales), exponent)


def test_block_inputs_with_power_of_2_scales_have_the_codes_of_deep_gemm(device):
    """The pair of VLLM_USE_DEEP_GEMM_E8M0=1."""
    recipe = fp8rs.Float8BlockScaling(power_2_scale=True, amax_epsilon=448e-10)
    blocks = blocks_of_activations(device)
    plane = fp8rs.Quantizer(recipe, "input", columnwise=False)(blocks.flatten(1)).rowwise
    scales = deep_gemm_scales(blocks, is_e8m0=True)
    assert torch.equal(plane.scale, scales)
    codes = vllm_codes(blocks, scales.unsqueeze(-1)).flatten(1)
    assert torch.equal(as_bits(plane.data), as_bits(codes))


def test_block_inputs_with_fp32_scales_have_the_scales_and_nearly_all_codes_of_deep_gemm(device):
    """The pair of VLLM_USE_DEEP_GEMM_E8M0=0. vLLM divides by the scales."""
    recipe = fp8rs.Float8BlockScaling(amax_epsilon=1e-10)
    blocks = blocks_of_activations(device)
    plane = fp8rs.Quantizer(recipe, "input", columnwise=False)(blocks.flatten(1)).rowwise
    scales = deep_gemm_scales(blocks, is_e8m0=False)
    assert torch.equal(plane.scale, scales)
    codes = as_bits(vllm_codes(blocks, scales.unsqueeze(-1)).flatten(1))
    different = as_bits(plane.data) != codes
    # The other codes are neighbours: their values lie in the middle between two codes.
    assert different.float().mean().item() < 1e-3
    assert ((as_bits(plane.data).int() - codes.int()).abs() <= 1).all()


@pytest.mark.parametrize("power_2_scale", [False, True])
def test_block_weights_have_the_codes_of_deep_gemm(device, power_2_scale):
    """DeepGEMM's per_block_cast_to_fp8: the amax of a 128x128 block is at least 1e-4."""
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    weight *= torch.tensor([1e-3, 1.0]).repeat_interleave(128)[:, None]
    weight = weight.to(device, torch.bfloat16)
    recipe = fp8rs.Float8BlockScaling(power_2_scale=power_2_scale)
    plane = fp8rs.Quantizer(recipe, "weight", columnwise=False)(weight).rowwise

    blocks = weight.float().view(2, 128, 3, 128)
    amax = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-4)
    scales = divided(amax, 448.0)
    if power_2_scale:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    codes = (blocks * (1.0 / scales)).to(E4M3).view(256, 384)
    assert torch.equal(plane.scale, scales.view(2, 3))
    assert torch.equal(as_bits(plane.data), as_bits(codes))
