"""Amax, scales and quantization: every byte equals the reference."""

import pytest
import torch

from cases import LAYOUTS, SHAPES, data, each_direction, each_dtype, each_format, scalar
from oracle import compare, elements, tensorwise
from oracle.compare import codes, same
from oracle.elements import E4M3, E5M2, MAX
from oracle.tensorwise import matrix

ops = torch.ops.fp8rs


def check_planes(x, scale, fp8_dtype, row, col, rowwise, columnwise):
    expected = tensorwise.quantize(x, scale, fp8_dtype)
    assert row.dtype == col.dtype == fp8_dtype
    assert row.device == col.device == x.device
    if rowwise:
        assert row.is_contiguous()
        assert same(codes(row), expected)
    else:
        assert row.shape == (0,)
    if columnwise:
        assert col.is_contiguous()
        assert same(codes(col), matrix(expected).t())
    else:
        assert col.shape == (0,)


@each_format
@each_dtype
@each_direction
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize_equals_the_reference(device, fp8_dtype, dtype, rowwise, columnwise, shape):
    x = data(device, *shape, dtype=dtype)
    scale = scalar(0.37, device)
    row, col = ops.quantize(x, scale, fp8_dtype, rowwise, columnwise)
    check_planes(x, scale, fp8_dtype, row, col, rowwise, columnwise)


@each_format
@each_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_bytes_of_its_copy(device, fp8_dtype, dtype, layout):
    x = LAYOUTS[layout](lambda *shape: data(device, *shape, dtype=dtype))
    scale = scalar(3.0, device)
    row, col = ops.quantize(x, scale, fp8_dtype, True, True)
    check_planes(x, scale, fp8_dtype, row, col, True, True)
    assert same(ops.amax(x), tensorwise.amax(x))
    both_planes = ops.quantize_current(x, fp8_dtype, True, True)
    expected = ops.quantize_current(x.clone(memory_format=torch.contiguous_format), fp8_dtype)
    assert same(both_planes[0], expected[0])
    assert same(both_planes[2], expected[2])


@each_format
def test_every_bf16_value_equals_the_reference(device, fp8_dtype):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(device)
    for scale in (1.0, 0.0123, 2.0**-126, 3e38, float("inf"), float("nan")):
        scale = scalar(scale, device)
        row, col = ops.quantize(x.view(256, 256), scale, fp8_dtype, True, True)
        check_planes(x.view(256, 256), scale, fp8_dtype, row, col, True, True)


@each_format
def test_every_fp16_value_equals_the_reference(device, fp8_dtype):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).to(device)
    for scale in (1.0, 7.0, 1e-5):
        row, _ = ops.quantize(x, scalar(scale, device), fp8_dtype)
        assert same(codes(row), tensorwise.quantize(x, scalar(scale, device), fp8_dtype))


@each_format
def test_ties_and_neighbours_of_every_code_equal_the_reference(device, fp8_dtype):
    table = elements.values(fp8_dtype)
    middle = ((table[1:] + table[:-1]) / 2).float()
    points = torch.cat([table.float(), middle])
    bits = points.view(torch.int32)
    x = torch.cat([(bits + step).clamp(min=0).view(torch.float32) for step in (-1, 0, 1)])
    x = torch.cat([x, -x]).to(device)
    row, _ = ops.quantize(x, scalar(1.0, device), fp8_dtype)
    assert same(codes(row), elements.encode(x.cpu(), fp8_dtype))


@each_format
def test_values_in_range_equal_torchs_cast(device, fp8_dtype):
    x = data(device, 64, 64)
    x = x.clamp(-MAX[fp8_dtype], MAX[fp8_dtype])
    row, _ = ops.quantize(x, scalar(1.0, device), fp8_dtype)
    assert same(codes(row), codes(x.cpu().to(fp8_dtype)))


@pytest.mark.parametrize(
    "fp8_dtype, expected",
    [
        (E4M3, [0x7E, 0xFE, 0x7E, 0xFE, 0x7F, 0x00, 0x80, 0x7E, 0x7E]),
        (E5M2, [0x7B, 0xFB, 0x7B, 0xFB, 0x7F, 0x00, 0x80, 0x5F, 0x7B]),
    ],
    ids=["e4m3", "e5m2"],
)
def test_special_values(device, fp8_dtype, expected):
    inf = float("inf")
    nan = float("nan")
    x = torch.tensor([3e38, -3e38, inf, -inf, nan, 0.0, -0.0, 464.0, 1e30], device=device)
    row, _ = ops.quantize(x, scalar(1.0, device), fp8_dtype)
    assert codes(row).tolist() == expected


@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_amax_equals_the_reference(device, dtype, shape):
    x = data(device, *shape, dtype=dtype)
    got = ops.amax(x)
    assert got.shape == ()
    assert same(got, tensorwise.amax(x))


@each_dtype
@pytest.mark.parametrize(
    "values, expected",
    [
        ([1.0, -7.0], 7.0),
        ([1.0, float("-inf")], float("inf")),
        ([float("inf"), float("nan"), 1.0], float("nan")),
        ([-float("nan")], float("nan")),
        ([-0.0], 0.0),
    ],
)
def test_amax_propagates_non_finite_values(device, dtype, values, expected):
    x = torch.tensor(values, dtype=dtype).repeat(50).to(device)
    assert same(ops.amax(x), compare.canonical(torch.tensor(expected)))


@each_format
@pytest.mark.parametrize("power_2_scale", [False, True])
@pytest.mark.parametrize("amax_epsilon", [0.0, 0.5])
@pytest.mark.parametrize("margin", [0, 2, -1])
def test_scale_from_amax_equals_the_reference(
    device, fp8_dtype, power_2_scale, amax_epsilon, margin
):
    special = [0.0, 1e-45, 1e-38, 448.0, 449.0, 57344.0, 3.4e38, float("inf"), float("nan")]
    amax = torch.cat([torch.tensor(special), data("cpu", 1000).abs()]).to(device)
    options = (fp8_dtype, power_2_scale, amax_epsilon, margin)
    for shaped in (amax, amax[3], amax[:12].view(3, 4), amax[:12].view(3, 4).t(), amax[:0]):
        got = ops.scale_from_amax(shaped, *options)
        assert got.shape == shaped.shape
        assert same(got, tensorwise.scale_from_amax(shaped.cpu(), *options))


@each_format
@each_dtype
@each_direction
@pytest.mark.parametrize("power_2_scale", [False, True])
@pytest.mark.parametrize("shape", [(33, 65), (5,), (), (0, 3), (2, 3, 9)], ids=str)
def test_quantize_current_equals_the_reference(
    device, fp8_dtype, dtype, rowwise, columnwise, power_2_scale, shape
):
    x = data(device, *shape, dtype=dtype)
    row, col, scale = ops.quantize_current(
        x, fp8_dtype, rowwise, columnwise, power_2_scale, amax_epsilon=1e-3
    )
    amax = tensorwise.amax(x)
    assert same(scale, tensorwise.scale_from_amax(amax, fp8_dtype, power_2_scale, 1e-3))
    check_planes(x, scale, fp8_dtype, row, col, rowwise, columnwise)


@each_format
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_current_scaling_propagates_non_finite_values(device, fp8_dtype, bad):
    x = data(device, 17, 40)
    x[3, 5] = bad
    row, col, scale = ops.quantize_current(x, fp8_dtype, True, True)
    assert same(scale, torch.tensor(torch.nan))
    assert (codes(row) == elements.NAN_CODE).all()
    assert (codes(col) == elements.NAN_CODE).all()


@each_format
@each_dtype
@each_direction
@pytest.mark.parametrize("shape", [(33, 65), (5,), (), (0, 3), (2, 3, 9)], ids=str)
def test_quantize_delayed_equals_the_reference(
    device, fp8_dtype, dtype, rowwise, columnwise, shape
):
    x = data(device, *shape, dtype=dtype)
    scale = scalar(0.37, device)
    for before in (0.0, 1e30):
        amax = scalar(before, device)
        row, col, used = ops.quantize_delayed(x, scale, amax, fp8_dtype, rowwise, columnwise)
        check_planes(x, scale, fp8_dtype, row, col, rowwise, columnwise)
        assert same(used, scale)
        assert same(amax, torch.maximum(tensorwise.amax(x), torch.tensor(before)))


@each_format
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_delayed_scaling_keeps_non_finite_values_out_of_the_history(device, fp8_dtype, bad):
    x = data(device, 17, 40)
    x[3, 5] = bad
    scale = scalar(0.5, device)
    amax = scalar(3.0, device)
    row, col, used = ops.quantize_delayed(x, scale, amax, fp8_dtype, True, True)
    assert same(amax, torch.tensor(3.0))
    assert same(used, torch.tensor(torch.nan))
    check_planes(x, scale, fp8_dtype, row, col, True, True)


def test_a_nan_amax_is_replaced_by_the_new_amax(device):
    """A history with a NaN recovers, as with `fmax` on CUDA. Non-finite values change nothing."""
    x = torch.tensor([[1.0, -3.0]], device=device)
    for bits in (0x7FC00000, -0x400000, 0x7F800001):
        nan = torch.tensor(bits, dtype=torch.int32, device=device).view(torch.float32)
        amaxes = torch.stack([nan, nan])
        ops.quantize_delayed(x, scalar(0.5, device), amaxes[0], E4M3)
        ops.multi_quantize_delayed(
            [x], amaxes.new_ones(1), amaxes[1:], [torch.empty_like(x, dtype=E4M3)]
        )
        assert amaxes.tolist() == [3.0, 3.0]
    amax = torch.tensor(float("nan"), device=device)
    ops.quantize_delayed(x * float("inf"), scalar(0.5, device), amax, E4M3)
    assert amax.isnan()
    for before, after in ((float("inf"), float("inf")), (-7.0, 3.0), (-0.0, 3.0), (5.0, 5.0)):
        amax = torch.tensor(before, device=device)
        ops.quantize_delayed(x, scalar(0.5, device), amax, E4M3)
        assert amax.item() == after
    amax = torch.tensor(-0.0, device=device)
    ops.quantize_delayed(torch.zeros_like(x), scalar(0.5, device), amax, E4M3)
    assert not amax.signbit()
