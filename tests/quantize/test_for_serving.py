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


def vllm_scales(x):
    """Return max(amax / 448, 1 / (448 * 512)) of each row."""
    amax = x.float().abs().amax(-1, keepdim=True)
    return (amax / 448.0).clamp(min=torch.tensor(VLLM_MIN_SCALE).item())


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
