"""Operators on random inputs: any small shape, any strides, any values.

The examples are equal in each run (``derandomize``), so that a failure can be reproduced.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from cases import data, scalar
from oracle import blocks, compare, tensorwise
from oracle.compare import codes, same
from oracle.elements import FORMATS, WIDE
from oracle.tensorwise import matrix
from random_examples import examples

ops = torch.ops.fp8rs

#: No release of torch changes these bytes.
pytestmark = pytest.mark.newest_torch


sizes = st.integers(0, 70)
formats = st.sampled_from(FORMATS)
scales = st.floats(width=32) | st.sampled_from([1.0, 0.37, 2.0**-126, 3e38])
shapes = st.lists(sizes, max_size=2) | st.tuples(st.integers(0, 5), sizes, sizes)
finite = st.sampled_from([0.0, -0.0, 448.0, -57344.0, 65504.0, 2.0**-24, 2.0**-149])
special = finite | st.sampled_from([math.inf, -math.inf, math.nan, 3e38])

#: Views of a tensor with at least one dimension that have another memory layout.
VIEWS = {
    "reversed": lambda x: x.permute(*reversed(range(x.dim()))),
    "every second": lambda x: x[..., ::2],
    "every third row": lambda x: x[::3],
    "without the first": lambda x: x[..., 1:],
    "one row expanded": lambda x: x[:1].expand(x.shape) if x.numel() else x,
    "one column expanded": lambda x: x[..., :1].expand(x.shape) if x.numel() else x,
    "one more dimension": lambda x: x.unsqueeze(-1),
    "a batch": lambda x: x.expand(3, *x.shape),
}


@dataclass
class Input:
    """A tensor, and the views through which operators receive it."""

    whole: torch.Tensor
    views: list[str]

    def on(self, device):
        x = self.whole.to(device)
        for view in self.views:
            x = VIEWS[view](x) if x.dim() else x
        return x


@st.composite
def inputs(draw, shapes=shapes, special=special):
    shape = draw(shapes)
    dtype = draw(st.sampled_from(WIDE))
    x = data("cpu", *shape, dtype=dtype, seed=draw(st.integers(0, 1000)))
    if x.numel():
        where = st.integers(0, x.numel() - 1)
        for index, value in draw(st.dictionaries(where, special, max_size=3)).items():
            x.view(-1)[index] = torch.tensor(value).to(dtype)
    return Input(x, draw(st.lists(st.sampled_from(sorted(VIEWS)), max_size=2)))


@examples(60)
@given(x=inputs(), scale=scales, fp8_dtype=formats)
def test_quantize_equals_the_reference(device, x, scale, fp8_dtype):
    x = x.on(device)
    scale = scalar(scale, device)
    expected = tensorwise.quantize(x, scale, fp8_dtype)
    row, col = ops.quantize(x, scale, fp8_dtype, True, True)
    assert same(codes(row), expected)
    assert same(codes(col), matrix(expected).t())
    actual = tensorwise.amax(x)
    assert same(ops.amax(x), actual)

    amax = scalar(2.0, device)
    row, col, used = ops.quantize_delayed(x, scale, amax, fp8_dtype, True, True)
    assert same(codes(row), expected)
    assert same(codes(col), matrix(expected).t())
    if actual.isfinite():
        assert same(amax, actual.clamp(min=2.0))
        assert same(compare.canonical(used), compare.canonical(scale))
    else:
        assert same(amax, torch.tensor(2.0))
        assert used.isnan()


@examples(60)
@given(
    x=inputs(),
    fp8_dtype=formats,
    power_2_scale=st.booleans(),
    amax_epsilon=st.sampled_from([0.0, 1e-3, 500.0]),
)
def test_quantize_current_equals_the_reference(device, x, fp8_dtype, power_2_scale, amax_epsilon):
    x = x.on(device)
    row, col, scale = ops.quantize_current(x, fp8_dtype, True, True, power_2_scale, amax_epsilon)
    rule = (fp8_dtype, power_2_scale, amax_epsilon)
    assert same(scale, tensorwise.scale_from_amax(tensorwise.amax(x), *rule))
    expected = tensorwise.quantize(x, scale, fp8_dtype)
    assert same(codes(row), expected)
    assert same(codes(col), matrix(expected).t())


@examples(60)
@given(
    xs=st.lists(inputs(), min_size=1, max_size=5),
    scale=st.floats(0.0625, 128, width=32),
    fp8_dtypes=st.lists(formats, min_size=5, max_size=5),
)
def test_list_operators_equal_the_reference(device, xs, scale, fp8_dtypes):
    xs = [x.on(device) for x in xs]
    scales = scale * torch.arange(1.0, len(xs) + 1, device=device)
    assert same(ops.multi_amax(xs), torch.stack([tensorwise.amax(x) for x in xs]))
    pairs = zip(xs, fp8_dtypes, strict=False)
    outs = [torch.empty(x.shape, dtype=f, device=device) for x, f in pairs]
    ops.multi_quantize(xs, scales, outs)
    for x, s, out in zip(xs, scales, outs, strict=True):
        assert same(codes(out), tensorwise.quantize(x, s, out.dtype))


@examples(60)
@given(
    shape=st.tuples(sizes, sizes),
    fp8_dtype=formats,
    dtype=st.sampled_from(WIDE),
    block=st.sampled_from([(-1, -1), (1, -1), (1, 32), (32, 32), (5, 7), (-1, 1), (1, 128)]),
    seed=st.integers(0, 1000),
    transposed=st.booleans(),
)
def test_dequantize_and_transpose_equal_the_reference(
    device, shape, fp8_dtype, dtype, block, seed, transposed
):
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    raw = raw.t() if transposed else raw
    shape = tuple(raw.shape)
    grid = [1 if b == -1 else -(-n // b) for n, b in zip(shape, block, strict=True)]
    scale = data("cpu", *grid, seed=seed).abs()
    raw_codes = raw.to(device).view(fp8_dtype)
    spread = blocks.expand(scale, block, shape)
    expected = tensorwise.dequantize(raw.view(fp8_dtype), spread, dtype)
    got = ops.dequantize(raw_codes, scale.to(device), block, dtype).cpu()
    assert got.dtype == dtype
    assert same(compare.canonical(got.float()), compare.canonical(expected.float()))
    assert same(codes(ops.transpose(raw_codes)), raw.t())


@examples(60)
@given(
    x=inputs(st.tuples(st.integers(1, 70), st.integers(1, 70)), finite),
    fp8_dtype=formats,
    form=st.sampled_from(
        [
            ((1, 32), torch.float8_e8m0fnu),
            ((32, 32), torch.float8_e8m0fnu),
            ((1, 128), torch.float32),
            ((128, 128), torch.float32),
            ((1, -1), torch.float32),
        ]
    ),
    rounding=st.sampled_from(["ceil", "floor"]),
    power_2_scale=st.booleans(),
)
def test_quantize_blocks_equals_the_reference(device, x, fp8_dtype, form, rounding, power_2_scale):
    block, scale_dtype = form
    mx = scale_dtype is torch.float8_e8m0fnu
    # The reference needs finite matrices. test_blocks tests the bytes of others.
    x = x.on(device)
    assume(x.numel() > 0)
    got = ops.quantize_blocks(
        x,
        fp8_dtype,
        block,
        scale_dtype,
        True,
        True,
        rounding=rounding,
        power_2_scale=power_2_scale and not mx,
    )
    x = matrix(x.cpu())
    for (row, scale), of in zip((got[:2], got[2:]), (x, x.t()), strict=True):
        expected, expected_scale = blocks.quantize(
            of, fp8_dtype, block, rounding=rounding if mx else None, power_2_scale=power_2_scale
        )
        assert same(scale.cpu().float(), expected_scale)
        assert same(matrix(codes(row)), codes(expected))


def test_each_view_has_another_memory_layout():
    x = torch.arange(12.0).view(3, 4)
    views = [view(x) for view in VIEWS.values()]
    assert len({(v.shape, v.stride(), v.storage_offset()) for v in views}) == len(VIEWS)
