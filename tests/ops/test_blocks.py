"""Block operators: bytes of the specification, shapes and directions, shards, bad calls."""

import pytest
import torch

from ops.block_formats import (
    E4M3,
    E5M2,
    E8M0,
    F32,
    bits,
    data,
    every_dtype,
    every_format,
    every_type,
    ops,
)
from oracle import blocks as reference

INF, NAN = float("inf"), float("nan")
F32_MAX, BF16_MAX = torch.finfo(F32).max, torch.finfo(torch.bfloat16).max


#: No release of torch changes these bytes.
pytestmark = pytest.mark.newest_torch


def block_of(head, filler):
    return torch.tensor([*head, *[filler] * (32 - len(head))], dtype=F32)


# Written from the specifications (OCP MX 1.0, OFP8 1.0, the byte contract), not from a run. Each
# entry has the first values, the value of the others, element type, rounding, scale byte, first
# codes, and the code of the others.
SPECIAL = {
    "zeros": ([0.0, -0.0], 0.0, E4M3, "ceil", 0, [0x00, 0x80], 0x00),
    "smallest subnormals vanish": ([2.0**-149, -(2.0**-149)], 0.0, E4M3, "ceil", 0, [0, 0x80], 0),
    # The smallest scale is 2^-127: 2^-127 is 1, 2^-126 is 2, 1.5 * 2^-136 is 1.5 steps of 2^-9.
    "subnormals": (
        [2.0**-127, -(2.0**-126), 1.5 * 2.0**-136],
        0.0,
        E4M3,
        "ceil",
        0,
        [0x38, 0xC0, 0x02],
        0x00,
    ),
    "nan": ([1.0, NAN], 2.0, E4M3, "ceil", 255, [0x7F, 0x7F], 0x7F),
    "nan floor e5m2": ([NAN], -0.0, E5M2, "floor", 255, [0x7F], 0x7F),
    "infinity": ([-INF], 0.0, E4M3, "ceil", 255, [0x7F], 0x7F),
    # (2 - 2^-23) * 2^127 needs 2^(127 - 8 + 1): 255.99 rounds to 256. FLOOR saturates.
    "largest finite": ([F32_MAX, -F32_MAX], 0.0, E4M3, "ceil", 247, [0x78, 0xF8], 0x00),
    "largest finite, floor": ([F32_MAX, -F32_MAX], 0.0, E4M3, "floor", 246, [0x7E, 0xFE], 0),
    # E5M2: 2^(127 - 15 + 1) = byte 240: 2^15 minus a bit rounds to 2^15, exponent field 30.
    "largest finite, e5m2": ([F32_MAX], 0.0, E5M2, "ceil", 240, [0x78], 0x00),
    # 1.9921875 * 2^127 / 2^120 = 255, between 240 and 256: 256.
    "largest bf16": ([BF16_MAX], 0.0, E4M3, "ceil", 247, [0x78], 0x00),
    "the largest that fits": ([448.0], -448.0, E4M3, "ceil", 127, [0x7E], 0xFE),
    # 450 / 2 = 225 rounds to 224 = 1.75 * 2^7.
    "one that does not": ([450.0], 0.0, E4M3, "ceil", 128, [0x76], 0x00),
    "one that does not, floor": ([450.0], 0.0, E4M3, "floor", 127, [0x7E], 0x00),
    # 1 <= 448 * 2^-8, not 2^-9: 256 = 2^8, field 15.
    "ones": ([], 1.0, E4M3, "ceil", 119, [], 0x78),
    "minus ones, floor": ([], -1.0, E4M3, "floor", 119, [], 0xF8),
    "ones, e5m2": ([], 1.0, E5M2, "ceil", 112, [], 0x78),
    # 448 * 2^20 needs a scale of 2^20. Values below half of 2^-9 at that scale become signed zeros.
    "one huge, 31 tiny": ([448.0 * 2**20], -1.0, E4M3, "ceil", 147, [0x7E], 0x80),
    # In units of 2^-9 after scaling: 1, 0.5 (tie to 0), 0.75, 1.5 (tie to 2).
    "at the bottom": (
        [448.0 * 2**20, 2.0**11, 2.0**10, 1.5 * 2**10, 1.5 * 2**11],
        0.0,
        E4M3,
        "ceil",
        147,
        [0x7E, 0x01, 0x00, 0x01, 0x02],
        0x00,
    ),
}


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("name", SPECIAL)
def test_mx_bytes_of_special_blocks(device, name, columnwise):
    head, filler, fp8_dtype, rounding, byte, first, others = SPECIAL[name]
    values = block_of(head, filler)
    expected = first + [others] * (32 - len(first))
    for dtype in (F32, torch.bfloat16, torch.float16):
        x = values.to(dtype)
        if not torch.equal(x.float()[~values.isnan()], values[~values.isnan()]):
            # These values are not representable in this dtype.
            continue
        x = x.view(32, 1) if columnwise else x.view(1, 32)
        out = ops.quantize_blocks(
            x.to(device), fp8_dtype, [1, 32], E8M0, not columnwise, columnwise, rounding=rounding
        )
        codes, scale = out[2:] if columnwise else out[:2]
        assert bits(scale).tolist() == [[byte]]
        assert bits(codes).tolist() == [expected]


def test_mx_bytes_of_the_largest_fp16_value(device):
    # 65504 = 1.9990234375 * 2^15 needs 2^(15 - 8 + 1): 255.875 rounds to 256.
    x = torch.zeros(1, 32, dtype=torch.float16, device=device)
    x[0, 0] = 65504
    codes, scale, _, _ = ops.quantize_blocks(x, E4M3, [1, 32], E8M0)
    assert (bits(scale).item(), bits(codes)[0, 0].item()) == (135, 0x78)


@every_format
def test_a_nan_stays_in_its_block(device, block, scale_dtype):
    x = torch.ones(300, 300, device=device)
    x[140, 150] = NAN
    codes, scale, codes_t, scale_t = ops.quantize_blocks(x, E4M3, block, scale_dtype, True, True)
    rows, cols = (1 if b == 1 else b for b in block)
    hit = torch.zeros(300, 300, dtype=torch.bool, device=device)
    r = slice(140, 141) if rows == 1 else slice(140 // rows * rows, (140 // rows + 1) * rows)
    c = slice(None) if cols == -1 else slice(150 // cols * cols, (150 // cols + 1) * cols)
    hit[r, c] = True
    assert torch.equal(bits(codes) == 0x7F, hit)
    out = ops.dequantize(codes, scale, block, F32)
    assert torch.equal(out.isnan(), hit)
    assert torch.equal(out[~hit], torch.ones_like(out[~hit]))
    hit_t = torch.zeros_like(hit)
    r = slice(150, 151) if rows == 1 else slice(150 // rows * rows, (150 // rows + 1) * rows)
    c = slice(None) if cols == -1 else slice(140 // cols * cols, (140 // cols + 1) * cols)
    hit_t[r, c] = True
    assert torch.equal(bits(codes_t) == 0x7F, hit_t)
    assert torch.equal(ops.dequantize(codes_t, scale_t, block, F32).isnan(), hit_t)


@every_format
@every_type
@every_dtype
@pytest.mark.parametrize("shape", [(64, 128), (129, 257), (1, 31), (300, 33), (5, 512), (260, 1)])
def test_bytes_equal_plain_torch(device, block, scale_dtype, fp8_dtype, dtype, shape):
    x = data(device, *shape, dtype=dtype)
    for rounding, power_2_scale in [("ceil", False), ("floor", True)]:
        codes, scale, codes_t, scale_t = ops.quantize_blocks(
            x,
            fp8_dtype,
            block,
            scale_dtype,
            True,
            True,
            rounding=rounding,
            power_2_scale=power_2_scale,
        )
        kind = {"rounding": rounding} if scale_dtype is E8M0 else {"power_2_scale": power_2_scale}
        # The reference runs on the CPU, because CUDA's division and powers of numbers are not
        # exact.
        codes, scale, codes_t, scale_t = (t.cpu() for t in (codes, scale, codes_t, scale_t))
        host = x.cpu()
        for x_, codes_, scale_ in [(host, codes, scale), (host.t(), codes_t, scale_t)]:
            expected, expected_scale = reference.quantize(x_, fp8_dtype, block, **kind)
            assert torch.equal(scale_.float(), expected_scale)
            assert torch.equal(bits(codes_), bits(expected))
            out = ops.dequantize(codes_, scale_, block, F32)
            full = reference.expand(expected_scale, block, tuple(x_.shape))
            assert torch.equal(out, codes_.float() * full)


@every_format
def test_one_direction_gives_the_bytes_of_both(device, block, scale_dtype):
    x = data(device, 3, 50, 200, dtype=torch.bfloat16)
    two_directions = ops.quantize_blocks(x, E4M3, block, scale_dtype, True, True)
    row = ops.quantize_blocks(x, E4M3, block, scale_dtype)
    col = ops.quantize_blocks(x, E4M3, block, scale_dtype, False, True)
    assert [t.numel() for t in row[2:]] == [0, 0] == [t.numel() for t in col[:2]]
    for a, b in zip((*row[:2], *col[2:]), two_directions, strict=True):
        assert torch.equal(bits(a), bits(b))
    assert two_directions[0].shape == x.shape
    assert two_directions[2].shape == (200, 150)


@every_format
def test_only_square_blocks_have_one_set_of_codes(device, block, scale_dtype):
    x = data(device, 200, 300)
    codes, scale, codes_t, scale_t = ops.quantize_blocks(x, E4M3, block, scale_dtype, True, True)
    square = block[0] == block[1]
    assert torch.equal(bits(codes_t), bits(codes).t()) == square
    if square:
        assert torch.equal(bits(scale_t), bits(scale.t().contiguous()))


@every_format
@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
def test_empty_tensors_have_scales_of_the_right_shape(device, block, scale_dtype, shape):
    x = torch.empty(shape, device=device)
    codes, scale, codes_t, scale_t = ops.quantize_blocks(x, E4M3, block, scale_dtype, True, True)
    assert (codes.shape, codes_t.shape) == (shape, shape[::-1])
    if block == (1, -1):
        # A line without elements has amax 0, so its scale is 1.
        assert scale.tolist() == [[1.0]] * shape[0]
        assert scale_t.tolist() == [[1.0]] * shape[1]
    else:
        assert scale.numel() == scale_t.numel() == 0


@every_format
@every_dtype
def test_strided_inputs_give_the_bytes_of_contiguous_ones(device, block, scale_dtype, dtype):
    base = data(device, 140, 330, dtype=dtype)
    for x in (base[:, ::2], base.t(), base[3:, 5:301], base[1:2].expand(40, -1), base.flip(0)):
        got = ops.quantize_blocks(x, E4M3, block, scale_dtype, True, True)
        expected = ops.quantize_blocks(x.contiguous(), E4M3, block, scale_dtype, True, True)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(bits(a), bits(b))


def test_1x128_scales_have_the_layout_of_scaled_mm(device):
    x = data(device, 256, 512)
    _, scale, _, scale_t = ops.quantize_blocks(x, E4M3, [1, 128], F32, True, True)
    assert (scale.shape, scale.stride()) == ((256, 4), (1, 256))
    assert (scale_t.shape, scale_t.stride()) == ((512, 2), (1, 512))


def test_amax_epsilon_bounds_the_scales(device):
    x = torch.full((2, 128), 1e-5, device=device)
    _, scale, _, _ = ops.quantize_blocks(x, E4M3, [1, 128], F32, amax_epsilon=0.5)
    assert scale.unique().tolist() == [torch.tensor(0.5).div(448).item()]


@pytest.mark.parametrize("power_2_scale", [False, True])
def test_column_scale_applies_to_the_rowwise_output_only(device, power_2_scale):
    x = data(device, 70, 90, dtype=torch.bfloat16)
    column_scale = data(device, 90, seed=1).abs()
    plain = ops.quantize_blocks(x, E4M3, [1, -1], F32, True, True, power_2_scale=power_2_scale)
    scaled = ops.quantize_blocks(
        x, E4M3, [1, -1], F32, True, True, power_2_scale=power_2_scale, column_scale=column_scale
    )
    product = ops.quantize_blocks(
        x.float() * column_scale, E4M3, [1, -1], F32, power_2_scale=power_2_scale
    )
    for got, expected in zip(scaled, (*product[:2], *plain[2:]), strict=True):
        assert torch.equal(bits(got), bits(expected))


@every_dtype
@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("power_2_scale", [False, True])
def test_division_equals_plain_torch(device, dtype, fp8_dtype, power_2_scale):
    base = data(device, 140, 330, dtype=dtype)
    column_scale = data(device, 330, seed=1).abs()
    largest = torch.finfo(fp8_dtype).max
    options = {"power_2_scale": power_2_scale, "amax_epsilon": 1 / 512}
    for x in (base, base[:, ::2], base.t(), base[3:, 5:301], base.flip(0)):
        for factors in (None, column_scale[: x.shape[1]]):
            plain = ops.quantize_blocks(
                x, fp8_dtype, [1, -1], F32, True, True, column_scale=factors, **options
            )
            divided = ops.quantize_blocks(
                x, fp8_dtype, [1, -1], F32, True, True, column_scale=factors, divide=True, **options
            )
            values = x.float() if factors is None else x.float() * factors
            codes = (values / divided[1]).clamp(-largest, largest).to(fp8_dtype)
            assert torch.equal(bits(divided[0]), bits(codes))
            for got, expected in zip(divided[1:], plain[1:], strict=True):
                assert torch.equal(bits(got), bits(expected))
            rowwise = ops.quantize_blocks(
                x, fp8_dtype, [1, -1], F32, column_scale=factors, divide=True, **options
            )
            assert torch.equal(bits(rowwise[0]), bits(codes))


@pytest.mark.parametrize(
    "block", [(1, 32), (32, 32), (128, 128), (1, -1), (-1, 1), (32, 1), (-1, -1)]
)
@pytest.mark.parametrize("row_offset", [0, 40])
@every_dtype
def test_block_amax_equals_plain_torch(device, block, row_offset, dtype):
    x = data(device, 150, 140, dtype=dtype)
    block_offset = 0 if block[0] == -1 else row_offset % block[0]
    expected = reference.block_amax(x, block, block_offset)
    assert torch.equal(ops.block_amax(x, block, row_offset), expected)
    x[77, 88] = NAN
    assert ops.block_amax(x, block, row_offset).isnan().sum() == 1


@pytest.mark.parametrize("shards", [[64, 64, 64], [50, 50, 50, 42], [5, 0, 187], [192]])
@every_format
def test_shards_with_reduced_maxima_give_the_bytes_of_the_whole_matrix(
    device, block, scale_dtype, shards
):
    """Columnwise blocks may be split by every shard boundary."""
    x = data(device, 192, 160)
    unsharded = ops.quantize_blocks(x, E4M3, block, scale_dtype, True, True)
    # Columnwise blocks as they lie in x.
    down = (block[1], block[0])
    amax = ops.block_amax(x, block)
    amax_t = ops.block_amax(x, down).t()
    start = 0
    parts = []
    parts_t = []
    for rows in shards:
        part = x[start : start + rows]
        end = start + rows
        touched = (
            slice(start, end) if block[0] == 1 else slice(start // block[0], -(-end // block[0]))
        )
        across = slice(None) if block[1] == -1 else slice(start // block[1], -(-end // block[1]))
        if rows == 0:
            touched = slice(0, 0)
            across = across if block[1] == -1 else slice(0, 0)
        maxima = {"amax": amax[touched]}
        if block[0] != block[1]:
            maxima["amax_columnwise"] = amax_t[:, across]
        got = ops.quantize_blocks(
            part, E4M3, block, scale_dtype, True, True, row_offset=start, **maxima
        )
        assert torch.equal(
            bits(got[1]), bits(unsharded[1])[touched] if got[1].numel() else bits(got[1])
        )
        if rows:
            # The full columnwise blocks that the part overlaps.
            assert torch.equal(bits(got[3]), bits(unsharded[3][:, across]))
        parts.append(bits(got[0]))
        parts_t.append(bits(got[2]))
        start = end
    assert torch.equal(torch.cat(parts), bits(unsharded[0]))
    assert torch.equal(torch.cat(parts_t, 1), bits(unsharded[2]))


BAD = {
    "x": (TypeError, "x", lambda x: ops.quantize_blocks(x.int(), E4M3, [1, 32], E8M0)),
    "fp8_dtype": (TypeError, "fp8_dtype", lambda x: ops.quantize_blocks(x, F32, [1, 32], E8M0)),
    "scale_dtype": (
        TypeError,
        "scale_dtype",
        lambda x: ops.quantize_blocks(x, E4M3, [1, 32], torch.float16),
    ),
    "scales of the other kind": (
        ValueError,
        "block",
        lambda x: ops.quantize_blocks(x, E4M3, [1, 32], F32),
    ),
    "block": (ValueError, "block", lambda x: ops.quantize_blocks(x, E4M3, [2, 32], E8M0)),
    "one size": (ValueError, "block", lambda x: ops.quantize_blocks(x, E4M3, [32], E8M0)),
    "zero size": (ValueError, "block", lambda x: ops.quantize_blocks(x, E4M3, [0, 32], E8M0)),
    "nothing": (
        ValueError,
        "rowwise",
        lambda x: ops.quantize_blocks(x, E4M3, [1, 32], E8M0, False, False),
    ),
    "rounding": (
        ValueError,
        "rounding",
        lambda x: ops.quantize_blocks(x, E4M3, [1, 32], E8M0, rounding="up"),
    ),
    "packed float32": (
        ValueError,
        "packed",
        lambda x: ops.quantize_blocks(x, E4M3, [1, 128], F32, packed=True),
    ),
    "packed, cut": (
        ValueError,
        "row_offset",
        lambda x: ops.quantize_blocks(x, E4M3, [32, 32], E8M0, packed=True, row_offset=3),
    ),
    "row_offset": (
        ValueError,
        "row_offset",
        lambda x: ops.quantize_blocks(x, E4M3, [1, 32], E8M0, row_offset=-1),
    ),
    "amax_epsilon": (
        ValueError,
        "amax_epsilon",
        lambda x: ops.quantize_blocks(x, E4M3, [1, 128], F32, amax_epsilon=-1.0),
    ),
    "divide": (
        ValueError,
        "divide",
        lambda x: ops.quantize_blocks(x, E4M3, [1, 128], F32, divide=True),
    ),
    "divide E8M0": (
        ValueError,
        "divide",
        lambda x: ops.quantize_blocks(x, E4M3, [1, 32], E8M0, divide=True),
    ),
    "amax shape": (
        ValueError,
        "amax",
        lambda x: ops.quantize_blocks(x, E4M3, [32, 32], E8M0, amax=x.new_zeros(1, 1)),
    ),
    "amax dtype": (
        TypeError,
        "amax",
        lambda x: ops.quantize_blocks(x, E4M3, [1, 32], E8M0, amax=x.new_zeros(64, 3).half()),
    ),
    "columnwise amax of squares": (
        ValueError,
        "amax_columnwise",
        lambda x: ops.quantize_blocks(
            x, E4M3, [32, 32], E8M0, False, True, amax_columnwise=x.new_zeros(3, 2)
        ),
    ),
    "column_scale": (
        ValueError,
        "column_scale",
        lambda x: ops.quantize_blocks(x, E4M3, [1, 128], F32, column_scale=x.new_ones(96)),
    ),
    "column_scale shape": (
        ValueError,
        "column_scale",
        lambda x: ops.quantize_blocks(x, E4M3, [1, -1], F32, column_scale=x.new_ones(95)),
    ),
    "block_amax block": (ValueError, "block", lambda x: ops.block_amax(x, [16, 32])),
    "pack rows": (
        ValueError,
        "scale",
        lambda x: ops.pack_scales(x.new_zeros(64, 3, dtype=E8M0), 65),
    ),
    "pack block_rows": (
        ValueError,
        "block_rows",
        lambda x: ops.pack_scales(x.new_zeros(64, 3, dtype=E8M0), 64, 2),
    ),
    "pack dtype": (TypeError, "scale", lambda x: ops.pack_scales(x.new_zeros(64, 3), 64)),
    "rebase block": (
        ValueError,
        "block",
        lambda x: ops.rebase(x.to(E4M3), x.new_zeros(64, 1, dtype=E8M0), [1, 128], 0),
    ),
    "rebase axis": (
        ValueError,
        "axis",
        lambda x: ops.rebase(x.to(E4M3), x.new_zeros(64, 3, dtype=E8M0), [1, 32], 2),
    ),
    "rebase scales": (
        ValueError,
        "scale",
        lambda x: ops.rebase(x.to(E4M3), x.new_zeros(64, 2, dtype=E8M0), [1, 32], 0),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_name_the_argument(device, name):
    exception, argument, call = BAD[name]
    x = torch.ones(64, 96, device=device)
    with pytest.raises(exception, match=rf"^{argument} (is|has) "):
        call(x)
    assert (x == 1).all()
