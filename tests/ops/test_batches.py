"""Operators on batches give each matrix the bytes of a separate call."""

import pytest
import torch
from torch.library import opcheck

from cases import data, each_format
from internals import core
from ops.block_formats import FORMATS
from oracle.compare import same
from oracle.elements import E4M3

#: torch's schema check multiplies its inputs, which is not implemented for FP8.
WITHOUT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
EVERYTHING = ("test_schema", *WITHOUT_SCHEMA)

ops = torch.ops.fp8rs
E8M0 = torch.float8_e8m0fnu
F32 = torch.float32

#: (E, rows, columns). The rows are multiples of 32 and 128, or of neither.
SHAPES = [(1, 33, 40), (3, 128, 96), (3, 45, 129), (8, 32, 64), (2, 0, 16), (0, 5, 7)]
#: The blocks of the formats that a step of AdamW writes.
BLOCKS_IN_ADAMW = [format["block"] for format in core.block_formats() if format["in_adamw"]]

each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_block = pytest.mark.parametrize("block, scale_dtype", FORMATS, ids=str)


def batch(device, shape, strided=False):
    """Return random bf16 matrices.

    With ``strided``, their rows are not adjacent, as in a Shard(1) view.
    """
    rows = shape[1] + 5 if strided else shape[1]
    return data(device, shape[0], rows, shape[2])[:, : shape[1]]


def check_each(op, x, *args, **options):
    """Compare a batched call with a call for each matrix. Return the batched result."""
    got = op(x, *args, **options, batched=True)
    results = got if isinstance(got, tuple) else (got,)
    for i, matrix in enumerate(x):
        matrix_args = [a[i] if isinstance(a, torch.Tensor) else a for a in args]
        named = {k: v[i] if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        expected = op(matrix, *matrix_args, **named)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for result, single in zip(results, expected, strict=True):
            requested = single.shape != (0,)
            assert same(result[i] if requested else result, single)
    return got


@each_shape
@each_format
@pytest.mark.parametrize("strided", [False, True])
def test_tensorwise_operators_scale_each_matrix(device, shape, fp8_dtype, strided):
    x = batch(device, shape, strided)
    amax = check_each(ops.amax, x)
    assert amax.shape == shape[:1]
    scale = ops.scale_from_amax(amax, fp8_dtype)
    for row, col in ((True, False), (False, True), (True, True)):
        check_each(ops.quantize, x, scale, fp8_dtype, row, col)
        check_each(ops.quantize_current, x, fp8_dtype, row, col)
    codes = ops.quantize(x, scale, fp8_dtype, True, False, None, True)[0]
    transposed = check_each(ops.transpose, codes)
    assert transposed.shape == (shape[0], shape[2], shape[1])
    check_each(ops.dequantize, codes, scale, [-1, -1], torch.bfloat16)


def test_delayed_scaling_follows_the_amax_of_each_matrix(device):
    x = batch(device, (3, 33, 40))
    x[1, 2, 3] = float("inf")
    scale = torch.rand(3, device=device) + 0.5
    amax = torch.zeros(3, device=device)
    _, _, used = ops.quantize_delayed(x, scale, amax, E4M3, batched=True)
    assert used.isnan().tolist() == [False, True, False]
    assert same(amax, torch.where(used.isnan(), 0.0, ops.amax(x, batched=True)))


@each_shape
@each_block
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("row_offset", [0, 17])
def test_blocks_stay_within_each_matrix(
    device, shape, block, scale_dtype, strided, columnwise, row_offset
):
    x = batch(device, shape, strided)
    args = (E4M3, block, scale_dtype, True, columnwise)
    codes, scale, *_ = check_each(ops.quantize_blocks, x, *args, row_offset=row_offset)
    if row_offset == 0:
        check_each(ops.dequantize, codes, scale, block, torch.float32)
    for extent in (block, (block[1], block[0])):
        amaxes = check_each(ops.block_amax, x, extent, row_offset=row_offset)
        if extent == block:
            check_each(ops.quantize_blocks, x, *args[:4], row_offset=row_offset, amax=amaxes)


@each_shape
@pytest.mark.parametrize("block", [(1, 32), (32, 32)], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_rebase_scales_the_rows_of_each_matrix(device, shape, block, axis):
    x = batch(device, shape)
    codes, scale, *_ = ops.quantize_blocks(x, E4M3, block, E8M0, batched=True)
    check_each(ops.rebase, codes, scale, block, axis)


def test_lists_take_each_matrix_of_a_batch_as_an_entry(device):
    xs = [batch(device, (3, 33, 40), True), data(device, 7, 5), batch(device, (1, 4, 4))]
    singles = [*xs[0], xs[1], *xs[2]]
    amaxes = ops.multi_amax(xs, batched=True)
    assert same(amaxes, ops.multi_amax(singles))
    scales = ops.scale_from_amax(amaxes, E4M3)
    outs = [torch.zeros(x.shape, dtype=E4M3, device=device) for x in xs]
    expected = [torch.zeros(x.shape, dtype=E4M3, device=device) for x in singles]
    ops.multi_quantize(xs, scales, outs, batched=True)
    ops.multi_quantize(singles, scales, expected)
    for got, single in zip([*outs[0], outs[1], *outs[2]], expected, strict=True):
        assert same(got.view(torch.uint8), single.view(torch.uint8))
    recorded = torch.zeros_like(scales)
    used = ops.multi_quantize_delayed(xs, scales, recorded, outs, batched=True)
    assert same(used, scales) and same(recorded, amaxes)


@each_block
def test_adamw_steps_each_matrix_of_a_batch(device, block, scale_dtype):
    if block not in BLOCKS_IN_ADAMW:
        pytest.skip("adamw_ does not write these blocks")
    shape = (3, 45, 96)
    values = data(device, *shape, dtype=F32)
    codes, scale, *_ = ops.quantize_blocks(values, E4M3, block, scale_dtype, batched=True)
    state = [data(device, *shape, dtype=F32, seed=i).abs() for i in range(1, 4)]
    step = torch.ones((), device=device)

    def run(grad, exp_avg, exp_avg_sq, codes, scale, offset, batched):
        ops.adamw_(
            [grad], [exp_avg], [exp_avg_sq], [codes], [], [step], [scale], [], [], [], [], [offset],
            [0],
            lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, maximize=False, seed=1,
            block=block, batched=batched,
        )  # fmt: skip

    tensors = [*state, codes, scale]
    expected = [t.clone() for t in tensors]
    for i in range(shape[0]):
        run(*(t[i] for t in expected), i * 45 * 96, False)
    run(*tensors, 0, True)
    for got, single in zip(tensors, expected, strict=True):
        assert same(got.contiguous().view(torch.uint8), single.contiguous().view(torch.uint8))


def test_operators_on_batches_pass_opcheck(device):
    x = batch(device, (3, 33, 40))
    scale = torch.ones(3, device=device)
    codes = ops.quantize(x, scale, E4M3, True, False, None, True)[0]
    blocks = ops.quantize_blocks(x, E4M3, (32, 32), E8M0, batched=True)
    for op, args in (
        (ops.amax, (x, True)),
        (ops.multi_amax, ([x, x[0]], True)),
        (ops.quantize, (x, scale, E4M3, True, True, None, True)),
        (ops.quantize_current, (x, E4M3, True, True, False, 0.0, True)),
        (ops.transpose, (codes, None, True)),
        (ops.dequantize, (codes, scale, [-1, -1], F32, True)),
        (ops.block_amax, (x, [32, 32], 0, True)),
        (ops.rebase, (*blocks[:2], [32, 32], 1, None, True)),
    ):
        fp8 = args[0] is codes or args[0] is blocks[0]
        opcheck(op.default, args, test_utils=WITHOUT_SCHEMA if fp8 else EVERYTHING)


def test_a_scale_for_each_matrix_is_required(device):
    x = batch(device, (3, 33, 40))
    with pytest.raises(ValueError, match=r"scale is a batch of 2 matrices.*a batch of 3, as x is"):
        ops.quantize(x, torch.ones(2, device=device), E4M3, batched=True)
    with pytest.raises(ValueError, match=r"scales has 1 .*3"):
        ops.multi_quantize([x], torch.ones(1, device=device), [x.to(E4M3)], batched=True)
    with pytest.raises(ValueError, match="packed is True"):
        ops.quantize_blocks(x, E4M3, (1, 32), E8M0, packed=True, batched=True)
