"""Operators on existing codes: transpose and dequantize."""

import pytest
import torch

from cases import SHAPES, all_codes, data, each_dtype, each_format, scalar
from oracle import tensorwise
from oracle.compare import codes, same
from oracle.elements import FORMATS
from oracle.tensorwise import matrix

ops = torch.ops.fp8rs


@each_format
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_transpose_gives_the_transposed_matrix(device, fp8_dtype, shape):
    t = all_codes(fp8_dtype, device, *shape)
    out = ops.transpose(t)
    assert out.dtype == fp8_dtype
    assert out.is_contiguous()
    assert same(codes(out), matrix(codes(t)).t())


@each_format
def test_transpose_of_strided_codes(device, fp8_dtype):
    t = all_codes(fp8_dtype, device, 40, 70)
    for view in (t.t(), t[::3], t[:, 5:37], t[:, ::2], t[1:2].expand(9, 70)):
        assert same(codes(ops.transpose(view)), codes(view).t())


@each_format
@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dequantize_per_tensor(device, fp8_dtype, dtype, shape):
    t = all_codes(fp8_dtype, device, *shape)
    for value in (0.37, 1e-30, 1e33, float("nan")):
        scale = scalar(value, device)
        got = ops.dequantize(t, scale, [-1, -1], dtype)
        expected = tensorwise.dequantize(t, scale, dtype)
        assert got.is_contiguous()
        assert (got.dtype, got.shape) == (dtype, t.shape)
        torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@each_format
@each_dtype
@pytest.mark.parametrize("block", [(1, -1), (1, 128), (128, 128), (1, 32), (32, 32), (-1, 1)])
def test_dequantize_blocks(device, fp8_dtype, dtype, block):
    rows = 150
    cols = 300
    t = all_codes(fp8_dtype, device, rows, cols)
    height, width = (n if b == -1 else b for n, b in zip((rows, cols), block, strict=True))
    grid = (-(-rows // height), -(-cols // width))
    scale = data("cpu", *grid).abs() + 0.01
    expanded_scale = scale.repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :cols]
    got = ops.dequantize(t, scale.to(device), list(block), dtype)
    expected = tensorwise.dequantize(t, expanded_scale, dtype)
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@each_format
@each_dtype
def test_dequantize_e8m0_scales(device, fp8_dtype, dtype):
    t = all_codes(fp8_dtype, device, 64, 96)
    scale = torch.tensor([[0, 100, 127], [128, 254, 255]], dtype=torch.uint8)
    value = torch.exp2(scale.float() - 127).masked_fill(scale == 255, torch.nan)
    expanded_scale = value.repeat_interleave(32, 0).repeat_interleave(32, 1)
    got = ops.dequantize(t, scale.view(torch.float8_e8m0fnu).to(device), [32, 32], dtype)
    expected = tensorwise.dequantize(t, expanded_scale, dtype)
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_a_round_trip_of_codes_is_exact(device):
    for fp8_dtype in FORMATS:
        t = all_codes(fp8_dtype, device, 256)
        scale = scalar(0.0625, device)
        wide = ops.dequantize(t, scale, [-1, -1], torch.float32)
        back, _ = ops.quantize(wide, scale, fp8_dtype)
        finite = wide.isfinite().cpu()
        assert torch.equal(codes(back)[finite], codes(t)[finite])
