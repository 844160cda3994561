"""Bounds on the error of the block formats: of elements, of products, and of small values."""

import pytest
import torch

import fp8rs  # noqa: F401  (registers the operators)

E4M3, E8M0, F32 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32

ops = torch.ops.fp8rs

#: No release of torch changes these bytes.
pytestmark = pytest.mark.newest_torch


def sqnr(x, approximate):
    noise = (x.double() - approximate.double()).square().sum()
    return (10 * torch.log10(x.double().square().sum() / noise)).item()


def gaussian(*shape, seed=0, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def dequantized(x, block, scale_dtype=E8M0, **options):
    codes, scale, _, _ = ops.quantize_blocks(x, E4M3, block, scale_dtype, **options)
    return ops.dequantize(codes, scale, block, F32)


@pytest.mark.parametrize("block", [(1, 32), (32, 32)])
@pytest.mark.parametrize("rounding, least", [("ceil", 31.4), ("floor", 30.5)])
def test_sqnr_of_mx_on_gaussian_data(device, block, rounding, least):
    x = gaussian(4096, 4096, device=device)
    assert sqnr(x, dequantized(x, block, rounding=rounding)) >= least


@pytest.mark.parametrize("block", [(1, -1), (1, 128), (128, 128)])
def test_sqnr_of_float32_scales_on_gaussian_data(device, block):
    x = gaussian(2048, 2048, device=device)
    assert sqnr(x, dequantized(x, block, F32)) >= 31.4
    assert sqnr(x, dequantized(x, block, F32, power_2_scale=True)) >= 31.4


@pytest.mark.parametrize("rounding, least", [("ceil", 28.4), ("floor", 27.5)])
def test_gemm_error_of_mx_operands_and_of_rebased_ones(device, rounding, least):
    """Compute y = x @ w.T with 1x32 activations and 32x32 weights.

    Products and sums are in float64.
    """
    x = gaussian(512, 4096, device=device)
    w = gaussian(512, 4096, seed=1, device=device)
    exact = x.double() @ w.double().t()
    mx = dequantized(x, (1, 32), rounding=rounding).double()
    codes, scale, _, _ = ops.quantize_blocks(w, E4M3, (32, 32), E8M0, rounding=rounding)
    true = sqnr(exact, mx @ ops.dequantize(codes, scale, (32, 32), F32).double().t())
    assert true >= least
    # On Hopper, the weight is rebased to one scale per row, and activations are quantized with one.
    out, line = ops.rebase(codes, scale, (32, 32), 0)
    w_rebased = ops.dequantize(out, line, (1, -1), F32).double()
    assert abs(sqnr(exact, mx @ w_rebased.t()) - true) <= 0.05
    if rounding == "ceil":
        row = dequantized(x, (1, -1), F32, power_2_scale=True).double()
        assert abs(sqnr(exact, row @ w_rebased.t()) - true) <= 0.05


@pytest.mark.parametrize("axis", [0, 1])
def test_outliers_do_not_increase_the_error_of_rebasing(device, axis):
    """With 0.1% outliers of a thousand times the size, rebasing costs at most 0.05 dB."""
    w = gaussian(512, 2048, device=device)
    spikes = torch.rand(w.shape, generator=torch.Generator().manual_seed(2)).to(device) < 0.001
    w[spikes] *= 1000
    codes, scale, _, _ = ops.quantize_blocks(w, E4M3, (32, 32), E8M0)
    plane = ops.dequantize(codes, scale, (32, 32), F32)
    out, line = ops.rebase(codes, scale, (32, 32), axis)
    rebased = ops.dequantize(out, line, (1, -1), F32)
    if axis == 1:
        rebased = rebased.t()
    x = gaussian(256, w.shape[1 - axis], seed=3, device=device).double()
    w_, plane, rebased = (m.double() if axis else m.double().t() for m in (w, plane, rebased))
    exact = x @ w_
    assert abs(sqnr(exact, x @ rebased) - sqnr(exact, x @ plane)) <= 0.05


def test_rows_of_different_magnitudes_underflow_less_with_smaller_blocks(device):
    """Rows have a lognormal(3) spread. A third of the values underflow with one scale per tensor, a
    sixth with blocks of 128 rows, and hardly any with one scale per row."""
    x = gaussian(1024, 1024, device=device) * gaussian(1024, 1, seed=1, device=device).mul(3).exp()

    def flushed(approximate):
        return ((approximate == 0) & (x != 0)).double().mean().item()

    codes, _, scale = ops.quantize_current(x, E4M3)
    assert flushed(ops.dequantize(codes, scale, [-1, -1], F32)) > 0.2
    assert flushed(dequantized(x, (128, 128), F32)) > 0.05
    assert flushed(dequantized(x, (1, 32))) < 1e-4
    assert flushed(dequantized(x, (1, -1), F32)) < 1e-4
