"""Operators on lists treat each tensor as the operator for one tensor does."""

import pytest
import torch

from cases import LAYOUTS, SHAPES, data, each_dtype, each_format, scalar
from internals import core
from oracle import tensorwise
from oracle.compare import codes, same
from oracle.elements import E4M3, E5M2, WIDE

ops = torch.ops.fp8rs


@each_dtype
def test_multi_amax_equals_amax_of_each(device, dtype):
    shapes = [*SHAPES, (511, 513)]
    xs = [data(device, *s, dtype=dtype, seed=i) for i, s in enumerate(shapes)]
    xs += [f(lambda *s: data(device, *s, dtype=dtype)) for f in LAYOUTS.values()]
    xs.append(torch.full((3,), float("nan"), dtype=dtype, device=device))
    got = ops.multi_amax(xs)
    assert same(got, torch.stack([tensorwise.amax(x) for x in xs]))


def test_multi_amax_accepts_mixed_dtypes(device):
    xs = [data(device, 9, 5, dtype=dtype, seed=i) for i, dtype in enumerate(WIDE)]
    assert same(ops.multi_amax(xs), torch.stack([tensorwise.amax(x) for x in xs]))


def multi_case(device, fp8_dtype, dtype):
    shapes = [(), (1,), (0, 3), (33, 65), (2, 3, 4), (129, 257), (4096,)]
    xs = [data(device, *s, dtype=dtype, seed=i) for i, s in enumerate(shapes)]
    xs.append(data(device, 40, 30, dtype=dtype).t())
    xs.append(data(device, 4, 9, 40, dtype=dtype)[:, 2:7])
    scales = torch.linspace(0.1, 3.0, len(xs), device=device)
    # One flat buffer, as for the codes of a shard, divided into unaligned adjacent parts.
    flat = torch.full((sum(x.numel() for x in xs) + 1,), 0xAA, dtype=torch.uint8, device=device)
    parts = flat[1:].split([x.numel() for x in xs])
    outs = [p.view(fp8_dtype).view(x.shape) for p, x in zip(parts, xs, strict=True)]
    return xs, scales, flat, outs


@each_format
@each_dtype
def test_multi_quantize_equals_quantize_of_each(device, fp8_dtype, dtype):
    xs, scales, flat, outs = multi_case(device, fp8_dtype, dtype)
    assert ops.multi_quantize(xs, scales, outs) is None
    for x, scale, out in zip(xs, scales, outs, strict=True):
        assert same(codes(out), tensorwise.quantize(x, scale, fp8_dtype))
    assert flat[0] == 0xAA


@each_format
@each_dtype
def test_multi_quantize_delayed_equals_quantize_delayed_of_each(device, fp8_dtype, dtype):
    xs, scales, flat, outs = multi_case(device, fp8_dtype, dtype)
    xs[3][0, 0] = float("nan")
    amaxes = torch.full((len(xs),), 2.0, device=device)
    used = ops.multi_quantize_delayed(xs, scales, amaxes, outs)
    assert flat[0] == 0xAA
    for i, (x, scale, out) in enumerate(zip(xs, scales, outs, strict=True)):
        amax = scalar(2.0, device)
        row, _, scale_used = ops.quantize_delayed(x, scale, amax, fp8_dtype)
        assert same(codes(out), codes(row))
        assert same(used[i], scale_used)
        assert same(amaxes[i], amax)


def test_multi_quantize_of_an_empty_list_does_nothing(device):
    empty = torch.empty(0, device=device)
    with torch.no_grad():
        ops.multi_quantize([], empty, [])
    assert ops.multi_quantize_delayed([], empty, empty.clone(), []).shape == (0,)


def test_multi_quantize_accepts_mixed_formats_and_dtypes(device):
    xs = [data(device, 5, 6, dtype=dtype) for dtype in (*WIDE, torch.float32)]
    outs = [torch.empty(5, 6, dtype=f, device=device) for f in (E4M3, E5M2, E4M3, E5M2)]
    scales = torch.ones(4, device=device)
    ops.multi_quantize(xs, scales, outs)
    for x, scale, out in zip(xs, scales, outs, strict=True):
        assert same(codes(out), tensorwise.quantize(x, scale, out.dtype))


def long_list(device, count, dtypes):
    """Return ``count`` tensors of each dtype that one launch handles: nonempty and aligned."""
    xs = []
    for dtype in dtypes:
        buffer = data(device, 64 * count, dtype=dtype, seed=count)
        xs.append([part[: 1 + i * 7 % 60] for i, part in enumerate(buffer.split(64))])
    xs = [x for together in zip(*xs, strict=True) for x in together]
    xs[5][0] = float("inf")
    return xs


@each_format
@pytest.mark.parametrize("dtypes", [WIDE[1:2], WIDE], ids=["one dtype", "mixed dtypes"])
@pytest.mark.parametrize("count", [64, 65, 1000, 1001])
def test_long_lists_equal_separate_calls(device, fp8_dtype, count, dtypes):
    """A launch handles at most 64 or 1000 tensors of one dtype.

    Test lists below and above both limits.
    """
    xs = long_list(device, count, dtypes)
    n = len(xs)
    scales = torch.linspace(0.01, 3.0, n, device=device)
    before = torch.linspace(0.0, 100.0, n, device=device)
    flat = torch.zeros(2, 64 * n, dtype=torch.uint8, device=device).view(fp8_dtype)
    outs, delayed = ([p[: len(x)] for p, x in zip(f.split(64), xs, strict=True)] for f in flat)
    amaxes = before.clone()
    actual = ops.multi_amax(xs)
    ops.multi_quantize(xs, scales, outs)
    used = ops.multi_quantize_delayed(xs, scales, amaxes, delayed)

    expected = torch.zeros_like(flat[0])
    expected_amaxes = before.clone()
    expected_used = []
    for x, scale, amax, out in zip(xs, scales, expected_amaxes, expected.split(64), strict=True):
        row, _, scale_used = ops.quantize_delayed(x, scale, amax, fp8_dtype)
        out.view(torch.uint8)[: len(x)] = row.view(torch.uint8)
        expected_used.append(scale_used)
    assert same(codes(flat[0]), codes(expected))
    assert same(codes(flat[1]), codes(expected))
    assert same(actual, torch.stack([ops.amax(x) for x in xs]))
    assert same(amaxes, expected_amaxes)
    assert same(used, torch.stack(expected_used))
    # Compare one tensor with the definition, in case both results are wrong.
    assert same(codes(outs[-1]), tensorwise.quantize(xs[-1], scales[-1], fp8_dtype))


def test_columns_of_one_buffer_do_not_count_as_overlapping(device):
    """Slots of a state are columns of one buffer, so their memory ranges interleave."""
    buffer = torch.tensor([[0.5, 1.0], [0.25, 2.0]], device=device)
    scales = buffer[:, 0]
    amaxes = buffer[:, 1]
    xs = [data(device, 6, 8), data(device, 3, 4)]
    outs = [torch.zeros(x.shape, dtype=E4M3, device=device) for x in xs]
    used = ops.multi_quantize_delayed(xs, scales, amaxes, outs)
    assert used.tolist() == [0.5, 0.25]
    assert amaxes.tolist() == [max(1.0, xs[0].abs().max()), max(2.0, xs[1].abs().max())]
    for x, scale, out in zip(xs, (0.5, 0.25), outs, strict=True):
        assert same(codes(out), tensorwise.quantize(x, scalar(scale, device), E4M3))
    with pytest.raises(ValueError, match=r"^amaxes overlaps scales"):
        ops.multi_quantize_delayed(xs, buffer.view(-1)[1:3], amaxes, outs)


@each_format
@pytest.mark.parametrize("width", [None, 1, 32, 100])
def test_rescale_dequantizes_and_quantizes_where_scales_differ(device, fp8_dtype, width):
    shapes = [(1, 1), (0, 3), (33, 65), (129, 257), (300, 64)]
    matrices = [data(device, *s, seed=i).to(fp8_dtype) for i, s in enumerate(shapes)]
    matrices.append(data(device, 40, 33).to(fp8_dtype).t())
    batches = [(3, 40, 70), (0, 4, 4), (2, 0, 5), (1, 1, 1)]
    batches = [data(device, *s, seed=i).to(fp8_dtype) for i, s in enumerate(batches)]
    batches.append(data(device, 4, 64, 48).to(fp8_dtype)[:, 16:40])
    batches.append(data(device, 5, 24, 40).to(fp8_dtype).transpose(1, 2))
    passed = [*matrices, *batches]
    matrices += [matrix for batch in batches for matrix in batch]
    counts = [-(-m.shape[1] // (width or m.shape[1])) for m in matrices]
    scales = data(device, sum(counts), dtype=torch.float32).abs() + 0.1
    new = scales * torch.linspace(0.5, 3, len(scales), device=device)
    new[::3] = scales[::3]
    new[-1] = float("nan")
    expected = []
    for matrix, *parts in zip(matrices, scales.split(counts), new.split(counts), strict=True):
        cols = matrix.shape[1]
        old, to = (part.repeat_interleave(width or cols)[:cols] for part in parts)
        unit_scale = torch.ones((), device=device)
        rounded = ops.quantize(matrix.float() * old * (1.0 / to), unit_scale, fp8_dtype)[0]
        expected.append(torch.where((old == to).cpu(), codes(matrix), codes(rounded)))
    core.multi_rescale(passed, scales, new, width)
    for actual, wanted in zip(matrices, expected, strict=True):
        assert same(codes(actual), wanted)
