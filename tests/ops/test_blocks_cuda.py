"""CUDA gives the bytes of the CPU, including special values, strides and split blocks."""

import pytest
import torch

import fp8rs  # noqa: F401  (registers the operators)
from ops.block_formats import (
    E4M3,
    E8M0,
    F32,
    FORMATS,
    bits,
    data,
    every_dtype,
    every_format,
    every_type,
)

pytestmark = pytest.mark.gpu

ops = torch.ops.fp8rs

#: Sizes that are multiples of every kernel's tile, and sizes that are not.
SHAPES = [
    (128, 128),
    (256, 512),
    (1, 32),
    (1, 8),
    (129, 257),
    (127, 144),
    (300, 40),
    (31, 1000),
    (5, 4096),
    (3, 14336),
    (2, 40000),
    (700, 3),
    (1000, 1),
]


def wild(*shape, dtype=F32, seed=0):
    """Return random bits over the whole range. Half of the rows contain NaN and infinity."""
    x = data("cpu", *shape, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64)
    noise = noise.to(torch.int32).view(F32)
    pick = torch.rand(shape, generator=generator) < 0.02
    pick[::2] = False
    x = torch.where(pick, noise, x).to(dtype)
    x[shape[0] // 2] = 0
    x.view(-1)[-1] = -0.0
    return x


def same(cpu, cuda):
    for a, b in zip(cpu, cuda, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        assert torch.equal(bits(a), bits(b.cpu()))


def on_both_devices(op, *args, **kwargs):
    """Run an operator on the CPU and on CUDA, and compare the bytes."""

    def move(value):
        return value.cuda() if isinstance(value, torch.Tensor) else value

    cpu = op(*args, **kwargs)
    cuda = op(*map(move, args), **{name: move(value) for name, value in kwargs.items()})
    if isinstance(cpu, torch.Tensor):
        cpu = (cpu,)
        cuda = (cuda,)
    return cpu, cuda


@every_format
@every_type
@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize_blocks_gives_the_bytes_of_the_cpu(block, scale_dtype, fp8_dtype, dtype, shape):
    x = wild(*shape, dtype=dtype)
    variants = [{}, {"rounding": "floor", "packed": True}, {"packed": True}]
    if scale_dtype is F32:
        variants = [{}, {"power_2_scale": True, "amax_epsilon": 1e-3}]
    for options in variants:
        for directions in ((True, False), (False, True), (True, True)):
            same(
                *on_both_devices(
                    ops.quantize_blocks, x, fp8_dtype, block, scale_dtype, *directions, **options
                )
            )


@every_format
@every_dtype
def test_strided_inputs_give_the_bytes_of_the_cpu(block, scale_dtype, dtype):
    base = wild(280, 660, dtype=dtype)
    on_cuda = base.cuda()
    views = [
        lambda t: t[:, ::2],
        lambda t: t.t(),
        lambda t: t[3:, 8:400],
        lambda t: t[1:, 5:300],
        lambda t: t[1:2].expand(150, -1),
        lambda t: t[:, 7:8].expand(-1, 150),
        lambda t: t.t()[16:400, 3:],
    ]
    for view in views:
        for directions in ((True, False), (False, True), (True, True)):
            arguments = (E4M3, block, scale_dtype, *directions)
            same(
                ops.quantize_blocks(view(base), *arguments),
                ops.quantize_blocks(view(on_cuda), *arguments),
            )


@every_format
@pytest.mark.parametrize("row_offset", [0, 5, 16, 100, 161])
@pytest.mark.parametrize("with_maxima", [False, True])
@every_dtype
def test_split_blocks_with_given_maxima_give_the_bytes_of_the_cpu(
    block, scale_dtype, row_offset, with_maxima, dtype
):
    x = wild(200, 264, dtype=dtype)
    for directions in ((True, False), (False, True), (True, True)):
        options = {"row_offset": row_offset}
        shapes = [
            t.shape
            for t in ops.quantize_blocks(x, E4M3, block, scale_dtype, *directions, **options)
        ]
        square = block[0] == block[1]
        if with_maxima:
            rowwise = shapes[1] if directions[0] else shapes[3][::-1]
            if directions[0] or square:
                options["amax"] = data("cpu", *rowwise, seed=5).abs() * 100
                options["amax"].view(-1)[0] = float("nan")
            if directions[1] and not square:
                options["amax_columnwise"] = data("cpu", *shapes[3], seed=6).abs()
        same(
            *on_both_devices(
                ops.quantize_blocks, x, E4M3, block, scale_dtype, *directions, **options
            )
        )
        if with_maxima and block == (1, -1) and directions == (True, True):
            del options["amax"]
            same(
                *on_both_devices(
                    ops.quantize_blocks, x, E4M3, block, scale_dtype, *directions, **options
                )
            )


@every_type
@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_column_scale_gives_the_bytes_of_the_cpu(fp8_dtype, dtype, shape):
    x = wild(*shape, dtype=dtype)
    column_scale = data("cpu", shape[1], seed=9)
    for directions in ((True, False), (True, True)):
        for power_2_scale in (False, True):
            same(
                *on_both_devices(
                    ops.quantize_blocks,
                    x,
                    fp8_dtype,
                    [1, -1],
                    F32,
                    *directions,
                    column_scale=column_scale,
                    power_2_scale=power_2_scale,
                )
            )


@pytest.mark.parametrize("rows", [1, 32, 128, -1])
@pytest.mark.parametrize("cols", [1, 32, 128, -1])
@every_dtype
@pytest.mark.parametrize("row_offset", [0, 77])
def test_block_amax_gives_the_bytes_of_the_cpu(rows, cols, dtype, row_offset):
    x = wild(333, 270, dtype=dtype)
    on_cuda = x.cuda()
    for view in (lambda t: t, lambda t: t.t(), lambda t: t[:, 1::2]):
        same(
            [ops.block_amax(view(x), [rows, cols], row_offset)],
            [ops.block_amax(view(on_cuda), [rows, cols], row_offset)],
        )


@pytest.mark.parametrize("block", [(1, 32), (32, 32)])
@every_type
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rebase_and_packing_give_the_bytes_of_the_cpu(block, fp8_dtype, shape):
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    codes[shape[0] // 2] = 0x80
    codes[:, shape[1] // 2] = 0
    grid = (-(-shape[0] // block[0]), -(-shape[1] // 32))
    scale = torch.randint(110, 130, grid, generator=generator, dtype=torch.uint8)
    rare = torch.rand(grid, generator=generator)
    scale[rare < 0.05] = 255
    scale[rare > 0.95] = 0
    codes = codes.view(fp8_dtype)
    scale = scale.view(E8M0)
    for axis in (0, 1):
        same(*on_both_devices(ops.rebase, codes, scale, block, axis))
    same(*on_both_devices(ops.pack_scales, scale, shape[0], block[0]))


def test_dequantize_of_short_blocks_and_nan_scales_gives_the_bytes_of_the_cpu():
    for block, scale_dtype in FORMATS:
        x = wild(150, 145)
        codes, scale, _, _ = ops.quantize_blocks(x, E4M3, block, scale_dtype)
        for dtype in (F32, torch.bfloat16, torch.float16):
            same(*on_both_devices(ops.dequantize, codes, scale, block, dtype))


def test_a_graph_and_another_stream_give_the_same_bytes():
    x = wild(256, 512, dtype=torch.bfloat16).cuda()
    for block, scale_dtype in FORMATS:
        expected = ops.quantize_blocks(x, E4M3, block, scale_dtype, True, True)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            got = ops.quantize_blocks(x, E4M3, block, scale_dtype, True, True)
        torch.cuda.synchronize()
        same([t.cpu() for t in expected], got)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = ops.quantize_blocks(x, E4M3, block, scale_dtype, True, True)
        graph.replay()
        torch.cuda.synchronize()
        same([t.cpu() for t in expected], got)


def needs_memory(gibibytes):
    free, _ = torch.cuda.mem_get_info()
    if free < (gibibytes + 2) << 30:
        pytest.skip(f"needs {gibibytes} GiB of GPU memory")


@pytest.mark.parametrize("column_scale", [False, True])
def test_a_row_with_more_than_2_to_the_32_vectors(column_scale):
    """2^33 elements of fp32 are 2^31 vectors."""
    n = 2**33 + 64
    needs_memory(72 if column_scale else 40)
    x = torch.zeros(1, n, device="cuda")
    at = [0, 2**31 + 5, 2**32 + 3, 2**33 + 1, n - 1]
    x[0, at] = torch.tensor([1.0, -2.0, 4.0, -8.0, 448.0], device="cuda")
    options = {"column_scale": torch.ones(n, device="cuda")} if column_scale else {}
    codes, scale, _, _ = ops.quantize_blocks(x, E4M3, (1, -1), F32, True, False, **options)
    assert scale.item() == 1.0
    got = codes.view(torch.uint8)
    assert got[0, at].tolist() == [0x38, 0xC0, 0x48, 0xD0, 0x7E]
    for part in got[0].split(2**30):
        assert part.count_nonzero().item() <= len(at)
    del x, options, codes, got
    torch.cuda.empty_cache()


def test_rebase_of_a_row_with_more_than_2_to_the_31_vectors():
    """2^35 codes are 2^31 vectors."""
    n = 2**35 + 64
    needs_memory(66)
    codes = torch.zeros(1, n, dtype=torch.uint8, device="cuda")
    at = [0, 2**33 + 5, 2**34 + 3, 2**35 + 1, n - 1]
    codes[0, at] = torch.tensor([0x38, 0xC0, 0x48, 0xD0, 0x7E], dtype=torch.uint8, device="cuda")
    scale = torch.full((1, n // 32), 127, dtype=torch.uint8, device="cuda")
    scale[0, -1] = 128
    out, line = ops.rebase(codes.view(E4M3), scale.view(E8M0), (1, 32), 0)
    assert line.item() == 2.0
    # The values are halved, except in the block that has the scale of the line.
    assert out.view(torch.uint8)[0, at].tolist() == [0x30, 0xB8, 0x40, 0xC8, 0x7E]
    del codes, scale, out
    torch.cuda.empty_cache()


@pytest.mark.parametrize("block_rows", [1, 32])
@every_type
def test_rebase_of_columns_of_zeros_and_nans(block_rows, fp8_dtype):
    """The scale of a column is 1 if no block without NaN has a nonzero code."""
    rows = 300
    cols = 200
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (rows, cols), generator=generator, dtype=torch.uint8)
    codes[:, ::3] = 0
    codes[:, 1::7] = 0x80
    codes[:, 50] = 0x7F
    grid = (-(-rows // block_rows), -(-cols // 32))
    scale = torch.randint(100, 140, grid, generator=generator, dtype=torch.uint8)
    scale[:, 2] = 255
    scale[::2, 4] = 255
    scale[:, 5] = 0
    codes = codes.view(fp8_dtype)
    scale = scale.view(E8M0)
    for axis in (0, 1):
        cpu, cuda = on_both_devices(ops.rebase, codes, scale, (block_rows, 32), axis)
        same(cpu, cuda)
        assert (cuda[1] > 0).all()
    # Columns of zeros along the last axis.
    assert (cuda[1].flatten()[::3] == 1.0).all()


@every_type
@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_division_gives_the_bytes_of_the_cpu(fp8_dtype, dtype, shape):
    x = wild(*shape, dtype=dtype)
    column_scale = data("cpu", shape[-1], seed=1).abs()
    amax = x.float().abs().amax(-1, keepdim=True).nan_to_num(1.0)
    arguments = (fp8_dtype, (1, -1), F32)
    for options in (
        {},
        {"power_2_scale": True, "amax_epsilon": 1e-3},
        {"amax_epsilon": 1 / 512},
        {"column_scale": column_scale},
        {"amax": amax},
    ):
        for columnwise in (False, True):
            got = on_both_devices(
                ops.quantize_blocks, x, *arguments, True, columnwise, divide=True, **options
            )
            same(*got)


@every_dtype
def test_division_of_strided_inputs_gives_the_bytes_of_the_cpu(dtype):
    base = wild(280, 660, dtype=dtype)
    on_cuda = base.cuda()
    views = [
        lambda t: t[:, ::2],
        lambda t: t.t(),
        lambda t: t[3:, 8:400],
        lambda t: t[1:, 5:300],
        lambda t: t[1:2].expand(150, -1),
        lambda t: t[:, 7:8].expand(-1, 150),
        lambda t: t.t()[16:400, 3:],
        lambda t: t[:0],
        lambda t: t[:, :0],
    ]
    for view in views:
        for directions in ((True, False), (False, True), (True, True)):
            arguments = (E4M3, (1, -1), F32, *directions)
            same(
                ops.quantize_blocks(view(base), *arguments, divide=True),
                ops.quantize_blocks(view(on_cuda), *arguments, divide=True),
            )


def test_division_of_a_batch_gives_the_bytes_of_the_cpu():
    x = wild(3, 50, 200, dtype=torch.bfloat16)
    for directions in ((True, False), (True, True)):
        same(
            *on_both_devices(
                ops.quantize_blocks, x, E4M3, (1, -1), F32, *directions, divide=True, batched=True
            )
        )


@every_dtype
@pytest.mark.parametrize("shape", [(1030, 770), (129, 4096)], ids=str)
def test_both_directions_of_a_row_over_many_tiles(dtype, shape):
    """Tiles are processed from the end, where maxima have just been computed."""
    x = wild(*shape, dtype=dtype)
    for options in ({}, {"power_2_scale": True}):
        same(*on_both_devices(ops.quantize_blocks, x, E4M3, (1, -1), F32, True, True, **options))
