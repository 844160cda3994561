"""Packed E8M0 scales and rebased planes."""

import pytest
import torch

import fp8rs  # noqa: F401  (registers the operators)
from ops.block_formats import E4M3, E8M0, F32, bits, data, every_type
from oracle import blocks as reference

ops = torch.ops.fp8rs

#: No release of torch changes these bytes.
pytestmark = pytest.mark.newest_torch

every_block = pytest.mark.parametrize("block", [(1, 32), (32, 32)])

#: At least 3x3 tiles of 128x4 in both directions, with partial tiles at the edges and without.
SHAPES = [(300, 290), (384, 384), (257, 400)]


@every_block
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_scales_follow_the_definition_of_the_layout(device, block, shape):
    x = data(device, *shape, dtype=torch.bfloat16)
    compact = ops.quantize_blocks(x, E4M3, block, E8M0, True, True)
    packed = ops.quantize_blocks(x, E4M3, block, E8M0, True, True, packed=True)
    for i, rows in ((0, shape[0]), (2, shape[1])):
        assert torch.equal(bits(packed[i]), bits(compact[i]))
        scale = bits(compact[i + 1]).cpu()
        lines = scale.repeat_interleave(block[0], 0)[:rows]
        expected = reference.swizzle(lines)
        assert torch.equal(bits(packed[i + 1]).cpu(), expected)
        assert torch.equal(bits(ops.pack_scales(compact[i + 1], rows, block[0])).cpu(), expected)


@every_block
@pytest.mark.parametrize("rowwise, columnwise", [(True, False), (False, True)])
def test_packed_scales_of_one_direction(device, block, rowwise, columnwise):
    x = data(device, 200, 333)
    two_directions = ops.quantize_blocks(x, E4M3, block, E8M0, True, True, packed=True)
    one_direction = ops.quantize_blocks(x, E4M3, block, E8M0, rowwise, columnwise, packed=True)
    for got, expected in zip(one_direction, two_directions, strict=True):
        if got.numel():
            assert torch.equal(bits(got), bits(expected))


def test_padding_of_packed_scales_is_zero(device):
    _codes, packed, _, _ = ops.quantize_blocks(
        torch.ones(5, 40, device=device), E4M3, [1, 32], E8M0, packed=True
    )
    assert packed.shape == (512,)
    expected = torch.zeros(32, 16, dtype=torch.uint8)
    expected[:5, :2] = 119
    assert torch.equal(bits(packed).cpu(), expected.view(-1))


def rebased(codes, scale, block, dtype):
    """Return codes and a scale per row of finite planes, computed from the definition in fp64."""
    exponent = bits(scale).int() - 127
    rows, cols = codes.shape
    full = reference.expand(exponent, block, (rows, cols))
    line = exponent.amax(1, keepdim=True).repeat_interleave(block[0], 0)[:rows].clamp(min=-126)
    value = codes.double() * torch.pow(2.0, (full - line).double())
    out = value.float().to(dtype)
    scale = torch.pow(2.0, line.double()).float()
    scale[(codes.float() == 0).all(1)] = 1.0
    return out, scale


@every_block
@every_type
@pytest.mark.parametrize("shape", [(64, 128), (300, 290), (33, 1000), (1, 1), (130, 16)])
def test_rebase_equals_its_definition(device, block, fp8_dtype, shape):
    x = data(device, *shape) * torch.randn(shape[0], 1, device=device).mul(5).exp()
    x[shape[0] // 2] = 0
    codes, scale, codes_t, scale_t = ops.quantize_blocks(x, fp8_dtype, block, E8M0, True, True)
    got = [t.cpu() for t in ops.rebase(codes, scale, block, 0)]
    along_columns = [t.cpu() for t in ops.rebase(codes, scale, block, 1)]
    along_rows_of_transposed = [t.cpu() for t in ops.rebase(codes_t, scale_t, block, 0)]
    codes = codes.cpu()
    scale = scale.cpu()
    for a, b in zip(got, rebased(codes, scale, block, fp8_dtype), strict=True):
        assert torch.equal(bits(a), bits(b))
    got = along_columns
    assert (got[0].shape, got[1].shape) == (shape[::-1], (shape[1], 1))
    # Along columns, apply the definition to the transposed plane, whose blocks are (32, 1) or (32,
    # 32).
    full = reference.expand(bits(scale).int() - 127, block, shape).t()
    line = full.amax(1, keepdim=True).clamp(min=-126)
    value = codes.double().t() * torch.pow(2.0, (full - line).double())
    assert torch.equal(bits(got[0]), bits(value.float().to(fp8_dtype)))
    expected = torch.pow(2.0, line.double()).float()
    expected[(codes.float() == 0).all(0)] = 1.0
    assert torch.equal(got[1], expected)
    if block == (32, 32):
        rebased_rows = along_rows_of_transposed
        assert torch.equal(bits(rebased_rows[0]), bits(got[0]))
        assert torch.equal(rebased_rows[1], got[1])


def test_rebase_of_special_rows(device):
    """The expected bytes come from the definition."""
    codes = torch.zeros(5, 64, dtype=torch.uint8)
    scale = torch.full((5, 2), 127, dtype=torch.uint8)
    # Negative zeros: the scale is 1 and signs are kept.
    codes[0] = 0x80
    scale[0] = 140
    # A NaN code among numbers remains one.
    codes[1, 0] = 0x7F
    codes[1, 1] = 0x38
    # A NaN block has only NaN codes and does not affect the scale.
    codes[2, :32] = 0x38
    scale[2, 1] = 255
    # 2^-127 relative to 2^-126: 1 becomes 0.5.
    codes[3, :32] = 0x38
    scale[3] = 0
    # Scales that differ by 2^20: the smaller value is lost.
    codes[4, :32] = 0x7E
    scale[4, 1] = 147
    codes[4, 32] = 0x7E
    expected = codes.clone()
    expected[2, 32:] = 0x7F
    expected[3, :32] = 0x30
    expected[4, :32] = 0x00
    for axis in (0, 1):
        if axis == 0:
            got, line = ops.rebase(
                codes.to(device).view(E4M3), scale.to(device).view(E8M0), [1, 32], 0
            )
        else:
            # The transposed plane has blocks of (32, 1), so repeat its columns to 32x32 blocks.
            wide = codes.t().repeat_interleave(32, 1).contiguous().to(device).view(E4M3)
            got, line = ops.rebase(wide, scale.t().contiguous().to(device).view(E8M0), [32, 32], 1)
            got = got[::32]
            line = line[::32]
        assert torch.equal(bits(got).cpu(), expected)
        assert line.flatten().tolist() == [1.0, 1.0, 1.0, 2.0**-126, 2.0**20]


def test_a_rebased_plane_dequantizes_as_the_block_plane_unless_bits_are_lost(device):
    x = torch.randn(256, 512, device=device).clamp(-4, 4)
    codes, scale, _, _ = ops.quantize_blocks(x, E4M3, [32, 32], E8M0)
    out, line = ops.rebase(codes, scale, [32, 32], 0)
    a = ops.dequantize(codes, scale, [32, 32], F32)
    b = ops.dequantize(out, line, [1, -1], F32)
    assert (a != b).float().mean() < 0.02
    assert (a - b).abs().max() <= line.max() * 2**-10
