"""Bounds and quantization of groups of rows, against quantization of each group by itself."""

import os
import subprocess
import sys
from contextlib import suppress

import pytest
import torch
from torch.nn import functional as F

from cases import data
from fp8rs.nn.functional import check_offsets
from internals import core
from oracle.activations import gated

ops = torch.ops.fp8rs
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

#: The lengths of groups, and the rows after the last one.
LENGTHS = {
    "even": ([16, 16, 16], 0),
    "uneven": ([5, 0, 33, 1], 0),
    "rows after the last group": ([7, 40], 9),
    "one group": ([70], 0),
    "only empty groups": ([0, 0, 0], 6),
    "first and last are empty": ([0, 31, 17, 0], 0),
}


def bounds_of(lengths, rows, device):
    offsets = torch.tensor(lengths, device=device).cumsum(0).to(torch.int32)
    return ops.group_bounds(offsets, torch.empty(rows, 0, device=device))


def make(rows, cols, device, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * torch.logspace(-3, 3, cols)
    return x.to(device, dtype)


def expected(x, lengths, fp8_dtype, **options):
    """Quantize each group by itself with a scale per row, and lay the results out."""
    rows = len(x)
    cols = x.shape[1]
    used = sum(lengths)
    columns = (rows + 15 * min(len(lengths), rows)) // 16 * 16
    codes = torch.zeros(rows, cols, dtype=torch.uint8, device=x.device)
    scale = torch.ones(rows, 1, device=x.device)
    transposed = torch.zeros(cols, columns, dtype=torch.uint8, device=x.device)
    transposed_scale = torch.ones(len(lengths), cols, device=x.device)

    def by_rows(x):
        actual = ops.quantize_blocks(x, fp8_dtype, (1, -1), torch.float32, **options)
        return actual[0].view(torch.uint8), actual[1]

    if used:
        codes[:used], scale[:used] = by_rows(x[:used])
    start = to = 0
    for group, length in enumerate(lengths):
        if length:
            part, part_scale = by_rows(x[start : start + length].t().contiguous())
            transposed[:, to : to + length] = part
            transposed_scale[group] = part_scale[:, 0]
        start = start + length
        to = to + -(-length // 16) * 16
    return codes, scale, transposed, transposed_scale


def check(actual, wanted):
    for name, a, b in zip(
        ("row", "row scale", "column", "column scale"), actual, wanted, strict=True
    ):
        a = a.view(torch.uint8) if a.element_size() == 1 else a
        assert a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", list(LENGTHS))
def test_each_group_is_quantized_by_itself(device, case, dtype, fp8_dtype):
    lengths, more = LENGTHS[case]
    x = make(sum(lengths) + more, 80, device, dtype)
    actual = ops.quantize_groups(x, *bounds_of(lengths, len(x), device), fp8_dtype)
    check(actual, expected(x, lengths, fp8_dtype))


@pytest.mark.parametrize("cols", [16, 257, 1040])
@pytest.mark.parametrize("power_2_scale", [False, True])
def test_any_width_and_scale_rule(device, cols, power_2_scale):
    lengths = [130, 3, 259]
    x = make(sum(lengths), cols, device)
    rule = {"power_2_scale": power_2_scale, "amax_epsilon": 1e-3}
    actual = ops.quantize_groups(x, *bounds_of(lengths, len(x), device), E4M3, **rule)
    check(actual, expected(x, lengths, E4M3, **rule))


def test_rows_after_the_last_group_are_not_read(device):
    lengths = [20, 12]
    x = make(40, 32, device)
    x[32:] = float("nan")
    actual = ops.quantize_groups(x, *bounds_of(lengths, len(x), device), E4M3)
    check(actual, expected(x, lengths, E4M3))
    assert all(torch.isfinite(scale).all() for scale in (actual[1], actual[3]))


def test_a_nan_changes_its_row_and_its_column_of_its_group(device):
    lengths = [20, 12]
    x = make(32, 32, device)
    x[21, 5] = float("nan")
    actual = ops.quantize_groups(x, *bounds_of(lengths, len(x), device), E4M3)
    check(actual, expected(x, lengths, E4M3))
    assert actual[1].isnan().nonzero().tolist() == [[21, 0]]
    assert actual[3].isnan().nonzero().tolist() == [[1, 5]]


def test_an_index_selects_rows(device):
    x = make(24, 48, device)
    lengths = [30, 0, 18]
    index = torch.randint(24, (48,), generator=torch.Generator().manual_seed(1)).to(device)
    bounds = bounds_of(lengths, 48, device)
    actual = ops.quantize_groups(x, *bounds, E4M3, index=index)
    check(actual, expected(x[index], lengths, E4M3))
    outside = index.clone()
    outside[3] = -5
    outside[4] = -(1 << 33)
    outside[40] = 1000
    outside[41] = 1 << 33
    index[3:5] = 0
    index[40:42] = 23
    actual = ops.quantize_groups(x, *bounds, E4M3, index=outside)
    check(actual, expected(x[index], lengths, E4M3))


@pytest.mark.parametrize("rowwise", [True, False])
def test_one_direction_gives_the_bytes_of_both(device, rowwise):
    x = make(64, 64, device)
    bounds = bounds_of([33, 31], 64, device)
    two_directions = ops.quantize_groups(x, *bounds, E4M3)
    one_direction = ops.quantize_groups(x, *bounds, E4M3, rowwise, not rowwise)
    for i, (a, b) in enumerate(zip(one_direction, two_directions, strict=True)):
        wanted = (i < 2) == rowwise
        assert a.shape == (b.shape if wanted else (0,)), i
        assert not wanted or torch.equal(a.view(torch.uint8), b.view(torch.uint8)), i


# --- activations ---------------------------------------------------------------------------------

ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def values(planes):
    """The values that rowwise codes stand for."""
    return planes[0].float() * planes[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_an_activation_is_torchs_up_to_rounding(device, activation, dtype):
    h = data(device, 64, 96, dtype=dtype)
    planes = ops.quantize_gated(h, *bounds_of([40, 24], 64, device), activation, E4M3)
    gate, up = h.double().chunk(2, 1)
    y = ACTIVATIONS[activation](gate) * up
    error = (values(planes) - y).abs().amax(1) / y.abs().amax(1)
    assert error.max() < 2**-4


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_gradients_of_an_activation_are_torchs_up_to_rounding(device, activation):
    h = data(device, 64, 96)
    dy = data(device, 64, 48, seed=1)
    bounds = bounds_of([40, 24], 64, device)
    planes = ops.quantize_gated(h, *bounds, activation, E4M3, dy=dy)
    exact_h = h.double().requires_grad_()
    gate, up = exact_h.chunk(2, 1)
    (ACTIVATIONS[activation](gate) * up).backward(dy.double())
    error = (values(planes) - exact_h.grad).abs().amax(1) / exact_h.grad.abs().amax(1)
    assert error.max() < 2**-4


@pytest.mark.parametrize("case", ["uneven", "rows after the last group"])
@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_rounded_values_are_quantized(device, case, dtype, fp8_dtype, backward, activation):
    lengths, more = LENGTHS[case]
    h = data("cpu", sum(lengths) + more, 96, dtype=dtype)
    h[1, :6] = torch.tensor([torch.nan, torch.inf, -torch.inf, 88.5, -87.5, -0.0])
    dy = data("cpu", len(h), 48, dtype=dtype, seed=1) if backward else None
    wanted = expected(gated(activation, h, dy), lengths, fp8_dtype)
    bounds = bounds_of(lengths, len(h), device)
    options = {} if dy is None else {"dy": dy.to(device)}
    actual = ops.quantize_gated(h.to(device), *bounds, activation, fp8_dtype, **options)
    check([t.cpu() for t in actual], wanted)


# --- bounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offsets", "rows", "padded_ends"),
    [([3, 3, 20, 36], 40, [16, 16, 48, 64]), ([5, 5], 8, [16, 16]), ([], 8, [])],
)
def test_bounds_are_padded(device, offsets, rows, padded_ends):
    offs = torch.tensor(offsets, dtype=torch.int32, device=device)
    bounds = ops.group_bounds(offs, torch.empty(rows, 0, device=device))
    assert [t.tolist() for t in bounds] == [offsets, padded_ends]


#: Invalid offsets into 8 rows, the error on the CPU, and the bounds on CUDA.
INVALID = [
    ([-4, 5], r"offs\[0\] is -4; it must be from 0 to 8", [0, 5], [0, 16]),
    ([5, 3, 8], r"offs\[1\] is 3; it must be from 5 to 8", [5, 5, 8], [16, 16, 32]),
    ([2, 9], r"offs\[1\] is 9; it must be from 2 to 8", [2, 8], [16, 32]),
]


@pytest.mark.parametrize(("offsets", "message"), [case[:2] for case in INVALID])
def test_invalid_offsets_are_errors_on_the_cpu(offsets, message):
    with pytest.raises(ValueError, match=message):
        ops.group_bounds(torch.tensor(offsets, dtype=torch.int32), torch.empty(8, 0))
    check_offsets()


LATE = r"offs was invalid in a grouped GEMM on cuda:0.*CUDA_LAUNCH_BLOCKING=1"


@pytest.fixture
def flag():
    """Load the kernels, because loading may synchronize, and clear the flag after a test."""
    torch.cuda._sleep(1)
    ops.group_bounds(*torch.zeros(2, 1, dtype=torch.int32, device="cuda"))
    torch.cuda.synchronize()
    check_offsets()
    yield
    torch.cuda.synchronize()
    with suppress(RuntimeError):
        check_offsets()


def late_bounds(offs):
    """Return the bounds. The kernel waits, so that this call does not find the flag itself."""
    torch.cuda._sleep(100_000_000)
    return ops.group_bounds(offs, torch.empty(8, 0, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(("offsets", "ends", "padded_ends"), [(c[0], *c[2:]) for c in INVALID])
def test_a_gpu_clamps_invalid_offsets_and_sets_a_flag(flag, offsets, ends, padded_ends):
    bounds = late_bounds(torch.tensor(offsets, dtype=torch.int32, device="cuda"))
    assert [t.tolist() for t in bounds] == [ends, padded_ends]
    with pytest.raises(RuntimeError, match=LATE):
        check_offsets()
    check_offsets()


@pytest.mark.gpu
def test_the_next_call_raises_the_error_of_an_earlier_one(flag):
    bad = torch.tensor([5, 3], dtype=torch.int32, device="cuda")
    good = torch.tensor([3, 5], dtype=torch.int32, device="cuda")
    late_bounds(bad)
    late_bounds(good)  # does not clear the flag
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=LATE):
        ops.group_bounds(good, torch.empty(8, 0, device="cuda"))
    ops.group_bounds(good, torch.empty(8, 0, device="cuda"))


@pytest.mark.gpu
def test_a_replayed_graph_sets_the_flag(flag):
    offs = torch.tensor([3, 5], dtype=torch.int32, device="cuda")
    x = torch.empty(8, 0, device="cuda")
    ops.group_bounds(offs, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ends, _ = ops.group_bounds(offs, x)
    graph.replay()
    torch.cuda.synchronize()
    check_offsets()
    offs.copy_(torch.tensor([3, 50], dtype=torch.int32))
    graph.replay()
    assert ends.tolist() == [3, 8]
    with pytest.raises(RuntimeError, match=LATE):
        check_offsets()


@pytest.mark.gpu
def test_launch_blocking_raises_the_error_in_the_call():
    code = (
        "import torch, fp8rs\n"
        "offs = torch.tensor([5, 3], dtype=torch.int32, device='cuda')\n"
        "torch.ops.fp8rs.group_bounds(offs, torch.empty(8, 0, device='cuda'))\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CUDA_LAUNCH_BLOCKING": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 1 and "RuntimeError: offs was invalid" in process.stderr


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("cols", [1, 80, 257])
@pytest.mark.parametrize("ends", [[0, 0], [3, 20], [3, 33], [40, 40], []])
def test_rows_after_the_last_group_are_zeroed(device, ends, cols, dtype):
    x = torch.full((40, 512), float("nan"), dtype=dtype, device=device)[:, 3 : 3 + cols]
    for out in (x, x.contiguous()):
        core.zero_tail(out, torch.tensor(ends, dtype=torch.int32, device=device))
        last = ends[-1] if ends else 0
        assert out[:last].isnan().all()
        assert (out[last:] == 0).all() and not out[last:].signbit().any()
    assert x.untyped_storage().nbytes() == 40 * 512 * dtype.itemsize
    assert torch.as_strided(x, (40, 512), (512, 1), 0)[:, [0, 2, 3 + cols, 511]].isnan().all()


def test_zeroing_names_bad_arguments(device):
    ends = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="out is strided"):
        core.zero_tail(torch.zeros(8, 16, device=device).t(), ends)
    with pytest.raises(TypeError, match="ends has dtype int64"):
        core.zero_tail(torch.zeros(8, 16, device=device), ends.long())


def test_bounds_of_a_thousand_groups(device):
    lengths = torch.randint(0, 50, (1023,), generator=torch.Generator().manual_seed(0))
    offsets = lengths.cumsum(0).to(device, torch.int32)
    ends, padded_ends = ops.group_bounds(offsets, torch.empty(int(lengths.sum()), device=device))
    assert torch.equal(ends, offsets)
    assert torch.equal(padded_ends.cpu().long(), ((lengths + 15) // 16 * 16).cumsum(0))


# --- routes --------------------------------------------------------------------------------------


def routed(top_k_index, experts):
    """Route pairs of a token and an expert with torch's operators."""
    row_experts, row_pairs = top_k_index.reshape(-1).sort()
    ids = torch.arange(experts, device=top_k_index.device)
    offsets = torch.searchsorted(row_experts, ids, right=True, out_int32=True)
    bounds = ops.group_bounds(offsets, row_experts)
    row_tokens = row_pairs // top_k_index.shape[1]
    return *bounds, row_tokens, row_pairs.argsort()


@pytest.mark.parametrize(
    ("tokens", "k", "experts"),
    [(40, 2, 5), (1, 1, 1), (700, 4, 128), (300, 8, 1500), (0, 2, 3), (6, 2, 0)],
)
def test_rows_are_routed_as_with_operators_of_torch(device, tokens, k, experts):
    generator = torch.Generator().manual_seed(0)
    # Some pairs have experts of other ranks, and some experts have no pair.
    top_k_index = torch.randint(experts + 2, (tokens, k), generator=generator).to(device)
    top_k_index[top_k_index == 3] = 0
    row_experts, row_pairs = top_k_index.reshape(-1).sort()
    actual = ops.route_rows(row_experts, row_pairs, experts, k)
    for result, wanted in zip(actual, routed(top_k_index, experts), strict=True):
        assert result.dtype == wanted.dtype
        assert torch.equal(result, wanted)


def test_negative_experts_belong_to_the_first_one(device):
    row_experts = torch.tensor([-3, 0, 2], device=device)
    row_pairs = torch.tensor([2, 0, 1], device=device)
    ends, padded_ends, row_tokens, pair_rows = ops.route_rows(row_experts, row_pairs, 2, 1)
    assert (ends.tolist(), padded_ends.tolist()) == ([2, 2], [16, 16])
    assert (row_tokens.tolist(), pair_rows.tolist()) == ([2, 0, 1], [1, 2, 0])


@pytest.mark.parametrize("pair", [-1, 3])
def test_a_pair_that_is_not_a_row_is_an_error_on_the_cpu(pair):
    row_pairs = torch.tensor([0, pair, 1])
    with pytest.raises(ValueError, match=rf"row_pairs\[1\] is {pair}; it must be from 0 to 2"):
        ops.route_rows(torch.zeros(3, dtype=torch.int64), row_pairs, 2, 1)


@pytest.mark.gpu
def test_a_pair_that_is_not_a_row_has_the_first_token_on_a_gpu():
    row_pairs = torch.tensor([0, 7, -2], device="cuda")
    *_, row_tokens, _ = ops.route_rows(torch.zeros_like(row_pairs), row_pairs, 2, 1)
    assert row_tokens.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"row_experts": torch.zeros(8, dtype=torch.int32)}, TypeError, "row_experts"),
        ({"row_pairs": torch.zeros(7, dtype=torch.int64)}, ValueError, "row_pairs"),
        ({"experts": -1}, ValueError, "experts is -1"),
        ({"k": 0}, ValueError, "k is 0"),
    ],
)
def test_bad_arguments_of_routes_are_named(device, change, error, message):
    arguments = {
        "row_experts": torch.zeros(8, dtype=torch.int64),
        "row_pairs": torch.arange(8),
        "experts": 2,
        "k": 2,
        **change,
    }
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            arguments[name] = value.to(device)
    with pytest.raises(error, match=message):
        ops.route_rows(**arguments)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ends": torch.zeros(2, dtype=torch.int64)}, TypeError, "ends"),
        ({"padded_ends": torch.zeros(3, dtype=torch.int32)}, ValueError, "padded_ends"),
        ({"index": torch.zeros(8, dtype=torch.int32)}, TypeError, "index"),
        ({"ends": torch.tensor([4, 0, 8, 0], dtype=torch.int32)}, ValueError, "ends is strided"),
        ({"rowwise": False, "columnwise": False}, ValueError, "rowwise"),
        ({"fp8_dtype": torch.bfloat16}, TypeError, "fp8_dtype"),
    ],
)
def test_bad_arguments_are_named(device, change, error, message):
    arguments = {
        "x": torch.zeros(8, 8),
        "ends": torch.tensor([4, 8], dtype=torch.int32),
        "padded_ends": torch.tensor([16, 32], dtype=torch.int32),
        "fp8_dtype": E4M3,
        **change,
    }
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    if "strided" in message:
        arguments["ends"] = arguments["ends"][::2]
    with pytest.raises(error, match=message):
        ops.quantize_groups(**arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"h": torch.zeros(8, 5)}, ValueError, "h.*5 columns.*even"),
        ({"activation": "relu"}, ValueError, "activation is .relu.*silu"),
        ({"dy": torch.zeros(8, 8)}, ValueError, "dy.*half the columns"),
        ({"dy": torch.zeros(8, 4, dtype=torch.bfloat16)}, TypeError, "dy"),
    ],
)
def test_bad_arguments_of_an_activation_are_named(device, change, error, message):
    arguments = {
        "h": torch.zeros(8, 8),
        "ends": torch.tensor([4, 8], dtype=torch.int32),
        "padded_ends": torch.tensor([16, 32], dtype=torch.int32),
        "activation": "silu",
        "fp8_dtype": E4M3,
        **change,
    }
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    with pytest.raises(error, match=message):
        ops.quantize_gated(**arguments)


def test_opcheck(device):
    x = make(40, 32, device)
    bounds = bounds_of([20, 12], 40, device)
    torch.library.opcheck(ops.group_bounds.default, (bounds[0], x))
    torch.library.opcheck(ops.quantize_groups.default, (x, *bounds, E4M3))
    pairs = torch.arange(40, device=device)
    torch.library.opcheck(ops.route_rows.default, (pairs // 9, pairs, 3, 2))
    torch.library.opcheck(ops.quantize_gated.default, (x, *bounds, "silu", E4M3, True, False))
