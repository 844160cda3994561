"""Operators over lists: each tensor as the operator for one treats it."""

import torch

import reference
from cases import LAYOUTS, SHAPES, data, each_dtype, each_format, scalar
from reference import E4M3, E5M2, WIDE, codes, same

ops = torch.ops.fp8rs


@each_dtype
def test_multi_amax_is_amax_of_each(device, dtype):
    shapes = [*SHAPES, (511, 513)]
    xs = [data(device, *s, dtype=dtype, seed=i) for i, s in enumerate(shapes)]
    xs += [f(lambda *s: data(device, *s, dtype=dtype)) for f in LAYOUTS.values()]
    xs.append(torch.full((3,), float("nan"), dtype=dtype, device=device))
    got = ops.multi_amax(xs)
    assert same(got, torch.stack([reference.amax(x) for x in xs]))


def test_multi_amax_takes_dtypes_together(device):
    xs = [data(device, 9, 5, dtype=dtype, seed=i) for i, dtype in enumerate(WIDE)]
    assert same(ops.multi_amax(xs), torch.stack([reference.amax(x) for x in xs]))


def multi_case(device, fp8_dtype, dtype):
    shapes = [(), (1,), (0, 3), (33, 65), (2, 3, 4), (129, 257), (4096,)]
    xs = [data(device, *s, dtype=dtype, seed=i) for i, s in enumerate(shapes)]
    xs.append(data(device, 40, 30, dtype=dtype).t())
    xs.append(data(device, 4, 9, 40, dtype=dtype)[:, 2:7])
    scales = torch.linspace(0.1, 3.0, len(xs), device=device)
    # One flat buffer, as a shard's codes have: unaligned parts, one after the other.
    flat = torch.full((sum(x.numel() for x in xs) + 1,), 0xAA, dtype=torch.uint8, device=device)
    parts = flat[1:].split([x.numel() for x in xs])
    outs = [p.view(fp8_dtype).view(x.shape) for p, x in zip(parts, xs, strict=True)]
    return xs, scales, flat, outs


@each_format
@each_dtype
def test_multi_quantize_is_quantize_of_each(device, fp8_dtype, dtype):
    xs, scales, flat, outs = multi_case(device, fp8_dtype, dtype)
    assert ops.multi_quantize(xs, scales, outs) is None
    for x, scale, out in zip(xs, scales, outs, strict=True):
        assert same(codes(out), reference.quantize(x, scale, fp8_dtype))
    assert flat[0] == 0xAA


@each_format
@each_dtype
def test_multi_quantize_delayed_is_quantize_delayed_of_each(device, fp8_dtype, dtype):
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


def test_multi_quantize_of_nothing(device):
    empty = torch.empty(0, device=device)
    with torch.no_grad():
        ops.multi_quantize([], empty, [])
    assert ops.multi_quantize_delayed([], empty, empty.clone(), []).shape == (0,)


def test_multi_quantize_takes_formats_and_dtypes_together(device):
    xs = [data(device, 5, 6, dtype=dtype) for dtype in (*WIDE, torch.float32)]
    outs = [torch.empty(5, 6, dtype=f, device=device) for f in (E4M3, E5M2, E4M3, E5M2)]
    scales = torch.ones(4, device=device)
    ops.multi_quantize(xs, scales, outs)
    for x, scale, out in zip(xs, scales, outs, strict=True):
        assert same(codes(out), reference.quantize(x, scale, out.dtype))
