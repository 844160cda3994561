"""fp8rs.sum_rows_: the float32 sum over ranks, in rank order."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

import fp8rs  # noqa: F401  (registers the operators)

ops = torch.ops.fp8rs
NAN = 0x7FC00000


def summed(x, divisor):
    out = torch.full(x.shape[1:], 7.0, device=x.device)
    ops.sum_rows_(out, x, divisor)
    return out


def expected(x, divisor):
    """Compute the definition in numpy's float32, one addition after the other, with one NaN."""
    rows = x.cpu().float().numpy()
    with np.errstate(all="ignore"):
        total = rows[0]
        for row in rows[1:]:
            total = (total + row).astype(np.float32)
        total = (total / np.float32(divisor)).astype(np.float32)
    bits = total.view(np.int32).copy()
    bits[np.isnan(total)] = NAN
    return torch.from_numpy(bits)


def same(got, x, divisor):
    return torch.equal(got.cpu().view(torch.int32), expected(x, divisor))


def any_bits(rows, cols, seed=0):
    """Return bf16 values of all exponents, subnormals, zeros of both signs, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 15), 1 << 15, (rows, cols), generator=generator)
    return bits.to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 64])
@pytest.mark.parametrize("divisor", [1.0, 2.0, 3.0, 0.7, -8.0])
@pytest.mark.parametrize("cols", [1, 7, 8, 2055, 8192])
def test_bytes_equal_the_definition(device, rows, cols, divisor):
    x = any_bits(rows, cols).to(device)
    assert same(summed(x, divisor), x, divisor)


@settings(max_examples=60, deadline=None)
@given(
    data=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=48),
    rows=st.integers(1, 6),
    divisor=st.floats(2.0**-20, 2.0**20, width=32),
)
def test_random_values_and_divisors_equal_the_definition(data, rows, divisor):
    bits = torch.tensor(data * rows, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = bits.view(len(data), rows).t()
    assert same(summed(x, divisor), x, divisor)


def test_rows_are_added_in_order(device):
    x = torch.tensor([[2.0**24, 1.0], [1.0, 1.0], [1.0, 2.0**24]], device=device).bfloat16()
    assert summed(x, 1.0).tolist() == [2.0**24, 2.0**24 + 2]


def test_strides_and_alignments_do_not_change_the_bytes(device):
    matrix = any_bits(10, 4099).to(device)
    for x in (
        matrix[:, 1:],
        matrix[1:9:2, 3:2051],
        matrix[:3, ::3],
        matrix.t()[:40],
        matrix[:1].expand(4, -1),
    ):
        assert same(summed(x, 3.0), x, 3.0)
    x = matrix[:2, :2048].contiguous()
    buffer = torch.full((2 * 2048 + 1,), 5.0, device=device)
    for out in (buffer[1:2049], buffer[::2][:2048]):
        ops.sum_rows_(out, x, 2.0)
        assert same(out.contiguous(), x, 2.0)
    assert torch.equal(buffer[4096:], torch.tensor([5.0], device=device))


def test_a_sum_without_columns(device):
    assert summed(torch.empty(3, 0, dtype=torch.bfloat16, device=device), 2.0).numel() == 0


def test_denormals_are_kept_if_the_caller_flushes_them():
    x = torch.full((2, 100), 2.0**-130).bfloat16()
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU cannot flush")
        got = summed(x, 4.0)
    finally:
        torch.set_flush_denormal(False)
    assert same(got, x, 4.0)


def test_opcheck(device):
    x = torch.randn(3, 17, device=device).bfloat16()
    opcheck(ops.sum_rows_.default, (torch.zeros(17, device=device), x, 3.0))


BF16 = torch.zeros(2, 5, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "out, x, divisor, error, message",
    [
        (torch.zeros(5), torch.zeros(2, 5), 1.0, TypeError, "x has dtype float32"),
        (torch.zeros(5).bfloat16(), BF16, 1.0, TypeError, "out has dtype bfloat16"),
        (torch.zeros(4), BF16, 1.0, ValueError, r"out has shape \(1, 4\)"),
        (torch.zeros(5), BF16[:0], 1.0, ValueError, "x is a matrix without rows; it must be"),
        (torch.zeros(5), BF16, 0.0, ValueError, "divisor is 0; it must be finite and not zero"),
        (torch.zeros(5), BF16, float("inf"), ValueError, "divisor is inf"),
        (torch.zeros(5), BF16, float("nan"), ValueError, "divisor is NaN"),
        (torch.zeros(1).expand(5), BF16, 1.0, ValueError, "out has strides"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(out, x, divisor, error, message):
    before = out.clone()
    with pytest.raises(error, match=message):
        ops.sum_rows_(out, x, divisor)
    assert torch.equal(out, before)


@pytest.mark.gpu
def test_cuda_gives_the_bytes_of_the_cpu():
    for rows, cols in ((2, 1 << 20), (8, (1 << 17) + 5), (3, 1 << 16)):
        x = any_bits(rows, cols, seed=rows)
        for part in (x, x[:, 1:]):
            got = summed(part.cuda() if part is x else x.cuda()[:, 1:], 7.0)
            assert torch.equal(got.cpu().view(torch.int32), summed(part, 7.0).view(torch.int32))
