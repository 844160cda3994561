"""fp8rs.random_uniform_: numbers that depend only on a seed and on the index of an element."""

import pytest
import torch
from torch.library import opcheck

import fp8rs  # noqa: F401  (registers the operators)

ops = torch.ops.fp8rs
WIDE = [torch.float32, torch.bfloat16, torch.float16]


def philox(counter, key):
    """Compute Philox4x32-10 (Salmon et al., SC 2011) with Python integers."""
    a, b, c, d = counter
    k, l = key  # noqa: E741
    for _ in range(10):
        x = a * 0xD2511F53
        y = c * 0xCD9E8D57
        a = (y >> 32) ^ b ^ k
        b = y & 0xFFFFFFFF
        c = (x >> 32) ^ d ^ l
        d = x & 0xFFFFFFFF
        k, l = (k + 0x9E3779B9) & 0xFFFFFFFF, (l + 0xBB67AE85) & 0xFFFFFFFF  # noqa: E741
    return a, b, c, d


def expected(n, seed, offset, low, high, stream=0, step=0):
    """Compute the numbers that the docstring defines."""
    key = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    words = []
    for i in range(offset, offset + n):
        block = i >> 2
        words.append(philox((block & 0xFFFFFFFF, block >> 32, stream, step), key)[i & 3] >> 8)
    low = torch.tensor(low)
    high = torch.tensor(high)
    return low + torch.tensor(words).float() * 2.0**-24 * (high - low)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4, 2**34 + 7, 2**62])
def test_numbers_are_philox_of_the_index(device, dtype, offset):
    for seed in (0, 1, 2**63 - 1, -1):
        x = torch.empty(37, dtype=dtype, device=device)
        ops.random_uniform_(x, seed, offset, -2.0, 3.0)
        assert torch.equal(x.cpu(), expected(37, seed % 2**64, offset, -2.0, 3.0).to(dtype))


@pytest.mark.parametrize("dtype", WIDE)
def test_parts_are_filled_as_the_whole_tensor(device, dtype):
    unsharded = torch.empty(1001, 131, dtype=dtype, device=device)
    ops.random_uniform_(unsharded, 7)
    parts = torch.empty_like(unsharded)
    for start, end in ((0, 1), (1, 500), (500, 500), (500, 1001)):
        ops.random_uniform_(parts[start:end], 7, start * 131)
    assert torch.equal(parts, unsharded)


@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (1,), (3, 5, 7)], ids=str)
def test_shapes_and_strides_do_not_change_the_numbers(device, shape):
    x = torch.empty(shape, device=device)
    ops.random_uniform_(x, 3)
    flat = torch.empty(x.numel(), device=device)
    ops.random_uniform_(flat, 3)
    assert torch.equal(x.reshape(-1), flat)
    buffer = torch.zeros(40, 50, device=device)
    view = buffer[::2, 3:30:3]
    ops.random_uniform_(view, 3)
    flat = torch.empty(view.numel(), device=device)
    ops.random_uniform_(flat, 3)
    assert torch.equal(view.reshape(-1), flat)
    view.zero_()
    assert not buffer.any()
    transposed = torch.empty(9, 20, device=device).t()
    ops.random_uniform_(transposed, 3)
    assert torch.equal(transposed.reshape(-1), flat)


def test_numbers_are_uniform(device):
    """Mean, variance and sixteen equal bins of a million numbers are within five deviations."""
    n = 1 << 20
    x = torch.empty(n, device=device)
    ops.random_uniform_(x, 12)
    x = x.cpu().double()
    assert x.min() >= 0 and x.max() < 1
    assert abs(x.mean() - 1 / 2) <= 5 * (1 / 12 / n) ** 0.5
    # The variance of (x - 1/2)^2 is 1/80 - 1/144.
    assert abs((x - 1 / 2).square().mean() - 1 / 12) <= 5 * ((1 / 80 - 1 / 144) / n) ** 0.5
    counts = torch.histc(x, 16, 0, 1)
    assert ((counts - n / 16).abs() <= 5 * (n / 16 * 15 / 16) ** 0.5).all()
    # Neighbors are independent, so the mean of their products is a quarter.
    centred = x - 1 / 2
    for lag in (1, 2, 3, 4):
        product = (centred[:-lag] * centred[lag:]).mean()
        assert abs(product) <= 5 * (1 / 12) / (n - lag) ** 0.5


def test_streams_and_steps_are_words_of_the_counter(device):
    x = torch.empty(23, device=device)
    for stream, step in ((0, 0), (1, 0), (0, 1), (2**32 - 1, 2**24)):
        ops.random_uniform_(x, 5, 2, stream=stream, step=torch.tensor(float(step), device=device))
        assert torch.equal(x.cpu(), expected(23, 5, 2, 0.0, 1.0, stream, step))


def test_opcheck(device):
    opcheck(ops.random_uniform_.default, (torch.zeros(5, 7, device=device), 3, 1, -1.0, 1.0))


@pytest.mark.parametrize(
    "x, options, error, message",
    [
        (torch.zeros(3, dtype=torch.int32), {}, TypeError, "x has dtype int32"),
        (torch.zeros(3), {"offset": -1}, ValueError, "offset is -1; it must be at least 0"),
        (torch.zeros(3), {"stream": -1}, ValueError, "stream is -1; it must be"),
        (torch.zeros(3), {"stream": 2**32}, ValueError, "stream is 4294967296; it must"),
        (torch.zeros(3), {"step": torch.zeros(2)}, ValueError, "step has shape"),
        (torch.zeros(3), {"step": torch.tensor(1)}, TypeError, "step has dtype int64"),
        (torch.zeros(3), {"low": 2.0}, ValueError, "high is 1; it must be at least low \\(2\\)"),
        (torch.zeros(3), {"high": float("inf")}, ValueError, "high is inf; it must be finite"),
        (torch.zeros(1).expand(3), {}, ValueError, "x has strides"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(x, options, error, message):
    before = x.clone()
    with pytest.raises(error, match=message):
        ops.random_uniform_(x, 1, **options)
    assert torch.equal(x, before)
