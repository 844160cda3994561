"""fp8rs.combine_rows: the weighted sum of each token's rows, and its gradients."""

import pytest
import torch
from torch.library import opcheck

from cases import data, each_dtype
from internals import core
from oracle.compare import same

ops = torch.ops.fp8rs
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
#: The bits of NaN, as an integer of a dtype's size.
NANS = {
    F32: (torch.int32, 0x7FC00000),
    BF16: (torch.int16, 0x7FC0),
    F16: (torch.int16, 0x7E00),
}

#: Numbers of tokens, rows of each and columns: around the widths of vectors, warps and blocks, and
#: around the number of rows that kernels load at a time.
SIZES = [
    (1, 1, 1),
    (5, 2, 8),
    (9, 3, 7),
    (33, 2, 264),
    (17, 8, 72),
    (6, 4, 513),
    (3, 9, 256),
    (2, 17, 1032),
    (40, 8, 2048),
    (4, 2, 4096),
]
each_size = pytest.mark.parametrize(
    "tokens, k, cols", SIZES, ids=["x".join(map(str, s)) for s in SIZES]
)


def permutation(tokens, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(tokens * k, generator=generator).view(tokens, k)


def make(tokens, k, cols, dtype=F32, weight_dtype=F32, seed=0):
    """Return a gradient, rows, the rows of each token, and weights on the CPU."""
    grad = data("cpu", tokens, cols, dtype=dtype, seed=seed)
    rows = data("cpu", tokens * k, cols, dtype=dtype, seed=seed + 1)
    weights = torch.rand(tokens, k, generator=torch.Generator().manual_seed(seed)) - 0.3
    return grad, rows, permutation(tokens, k, seed), weights.to(weight_dtype)


def rounded(x, dtype):
    """Round float32 values. Every NaN has the same bits, which differ between torch's kernels."""
    bits, nan = NANS[dtype]
    result = x.to(dtype)
    result.view(bits)[x.isnan()] = nan
    return result


def combined(rows, token_rows, weights=None):
    """Compute the definition in float32, one rounding after each operation."""
    total = torch.zeros(len(token_rows), rows.shape[1])
    for j in range(token_rows.shape[1]):
        values = rows[token_rows[:, j]].float()
        if weights is not None:
            values = weights[:, j : j + 1].float() * values
        total = total + values
    return rounded(total, rows.dtype)


def row_gradients(grad, token_rows, weights):
    """Compute the definition of the gradient of the rows."""
    d_rows = torch.empty(token_rows.numel(), grad.shape[1], dtype=grad.dtype)
    for j in range(token_rows.shape[1]):
        products = weights[:, j : j + 1].float() * grad.float()
        d_rows[token_rows[:, j]] = rounded(products, grad.dtype)
    return d_rows


def weight_gradients(grad, rows, token_rows):
    """Return the gradient of the weights in float64, and the largest error of a float32 sum."""
    products = grad.double().unsqueeze(1) * rows[token_rows].double()
    ulps = max(products.shape[-1], 1) * 2.0**-24
    return products.sum(-1), products.abs().sum(-1) * ulps + 1e-30


def on(device, *tensors):
    return [t if t is None else t.to(device) for t in tensors]


# --- the sum -------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", ["none", "float32", "of the rows"])
@each_dtype
@each_size
def test_bytes_equal_the_definition(device, tokens, k, cols, dtype, weighted):
    weight_dtype = dtype if weighted == "of the rows" else F32
    _, rows, token_rows, weights = make(tokens, k, cols, dtype, weight_dtype)
    weights = None if weighted == "none" else weights
    sums = ops.combine_rows(*on(device, rows, token_rows, weights))
    assert same(sums, combined(rows, token_rows, weights))


@each_dtype
def test_sums_are_close_to_exact_ones(device, dtype):
    _, rows, token_rows, weights = make(24, 8, 96, dtype)
    sums = ops.combine_rows(*on(device, rows, token_rows, weights)).cpu().double()
    terms = weights.double().unsqueeze(-1) * rows[token_rows].double()
    error = (sums - terms.sum(1)).abs()
    largest = terms.abs().sum(1)
    assert (error <= largest * (8 * 2.0**-24 + torch.finfo(dtype).eps)).all()


def test_rows_are_added_in_order(device):
    rows = torch.tensor([[1.0], [1.0], [2.0**24]], device=device)
    token_rows = torch.tensor([[0, 1, 2], [2, 1, 0]], device=device)
    assert ops.combine_rows(rows, token_rows).tolist() == [[2.0**24 + 2], [2.0**24]]


def test_products_are_rounded(device):
    """A fused multiply-add would find the error of the rounded product."""
    rows = torch.tensor([[-1.0], [3.0]], device=device)
    token_rows = torch.tensor([[0, 1]], device=device)
    weights = torch.tensor([[1.0, 1 / 3]], device=device)
    assert ops.combine_rows(rows, token_rows, weights).tolist() == [[0.0]]


@each_dtype
def test_infinities_and_nans_are_kept(device, dtype):
    inf = float("inf")
    nan = float("nan")
    rows = torch.tensor([[inf, inf, nan, 1.0], [1.0, -inf, 1.0, -0.0]], dtype=dtype)
    token_rows = torch.tensor([[0, 1]])
    weights = torch.tensor([[1.0, 1.0]])
    for row_weights in (weights, None):
        sums = ops.combine_rows(*on(device, rows, token_rows, row_weights))
        assert same(sums, combined(rows, token_rows, row_weights))
    zeros = torch.full((1, 2), -0.0)
    assert not ops.combine_rows(*on(device, torch.ones(2, 4), token_rows, zeros)).signbit().any()


def test_a_row_may_be_used_several_times(device):
    _, rows, _, _ = make(6, 2, 40, BF16)
    token_rows = torch.randint(12, (9, 3), generator=torch.Generator().manual_seed(2))
    assert same(ops.combine_rows(*on(device, rows, token_rows)), combined(rows, token_rows))


def layouts(tokens, k, cols):
    """Yield gradients, rows, the rows of each token, and weights, in other layouts."""
    grad, rows, token_rows, weights = make(tokens, k, cols, BF16)
    wide = torch.zeros(tokens * k, 2 * cols + 3, dtype=BF16)
    wide_grad = torch.zeros(tokens, 2 * cols + 3, dtype=BF16)
    for start, step in ((0, 1), (1, 1), (3, 2)):
        columns = slice(start, start + step * cols, step)
        wide[:, columns] = rows
        wide_grad[:, columns] = grad
        yield wide_grad[:, columns], wide[:, columns], token_rows, weights
    yield *(t.t().contiguous().t() for t in (grad, rows)), token_rows, weights
    yield grad[:1].expand(tokens, -1), rows[:1].expand(tokens * k, -1), token_rows, weights


def test_strides_and_alignments_do_not_change_the_bytes(device):
    for grad, rows, token_rows, weights in layouts(7, 3, 64):
        inputs = [_moved(t, device) for t in (grad, rows, token_rows, weights)]
        assert same(ops.combine_rows(*inputs[1:]), combined(rows, token_rows, weights))
        d_rows, d_weights = ops.combine_rows_backward(*inputs)
        assert same(d_rows, row_gradients(grad, token_rows, weights))
        exact, error = weight_gradients(grad, rows, token_rows)
        assert ((d_weights.cpu().double() - exact).abs() <= error).all()


def _moved(t, device):
    """Return a copy on a device with the same strides and offset."""
    storage = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).to(device)
    return storage.as_strided(t.shape, t.stride(), t.storage_offset())


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_dtype", ["float32", "of the rows"])
@each_dtype
@each_size
def test_gradients_equal_the_definition(device, tokens, k, cols, dtype, weight_dtype):
    grad, rows, token_rows, weights = make(
        tokens, k, cols, dtype, dtype if weight_dtype == "of the rows" else F32
    )
    d_rows, d_weights = ops.combine_rows_backward(*on(device, grad, rows, token_rows, weights))
    assert same(d_rows, row_gradients(grad, token_rows, weights))
    assert (d_weights.shape, d_weights.dtype) == ((tokens, k), F32)
    exact, error = weight_gradients(grad, rows, token_rows)
    assert ((d_weights.cpu().double() - exact).abs() <= error).all()


@each_size
def test_one_gradient_is_what_it_is_with_both(device, tokens, k, cols):
    grad, rows, token_rows, weights = on(device, *make(tokens, k, cols, BF16))
    both_gradients = ops.combine_rows_backward(grad, rows, token_rows, weights)
    for wanted in ((True, False), (False, True)):
        for saved_rows in (rows, None) if wanted == (True, False) else (rows,):
            actual = ops.combine_rows_backward(grad, saved_rows, token_rows, weights, *wanted)
            for a, b, want in zip(actual, both_gradients, wanted, strict=True):
                assert a.dtype == b.dtype
                assert same(a, b) if want else a.shape == (0,)


def test_gradients_are_those_of_autograd(device):
    grad, rows, token_rows, weights = on(device, *make(12, 4, 80, F32))
    rows = rows.double().requires_grad_()
    weights = weights.double().requires_grad_()
    (rows[token_rows] * weights.unsqueeze(-1)).sum(1).backward(grad.double())
    gradients = ops.combine_rows_backward(
        grad, rows.detach().float(), token_rows, weights.detach().float()
    )
    torch.testing.assert_close(gradients[0].double(), rows.grad, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients[1].double(), weights.grad, rtol=1e-5, atol=1e-2)


def test_infinities_and_nans_of_gradients_are_kept(device):
    grad = torch.tensor([[float("inf"), 1.0, float("nan")], [2.0, -0.0, 3.0]])
    rows = torch.ones(4, 3)
    token_rows = torch.tensor([[2, 0], [1, 3]])
    weights = torch.tensor([[1.0, 0.0], [-1.0, 0.5]])
    d_rows, d_weights = ops.combine_rows_backward(*on(device, grad, rows, token_rows, weights))
    assert same(d_rows, row_gradients(grad, token_rows, weights))
    assert same(d_weights, torch.tensor([[torch.nan, torch.nan], [5.0, 5.0]]))


# --- shapes and errors ---------------------------------------------------------------------------


@pytest.mark.parametrize("tokens, k, cols", [(0, 2, 8), (3, 0, 8), (3, 2, 0), (0, 0, 0)])
def test_empty_shapes(device, tokens, k, cols):
    grad, rows, token_rows, weights = on(device, *make(tokens, k, cols, BF16))
    for row_weights in (weights, None):
        sums = ops.combine_rows(rows, token_rows, row_weights)
        assert same(sums, torch.zeros(tokens, cols, dtype=BF16))
    d_rows, d_weights = ops.combine_rows_backward(grad, rows, token_rows, weights)
    assert same(d_rows, torch.zeros(tokens * k, cols, dtype=BF16))
    assert same(d_weights, torch.zeros(tokens, k))


def arguments():
    """Valid arguments of the backward. Those of the sum are among them."""
    grad, rows, token_rows, weights = make(4, 2, 8, BF16)
    return {"grad": grad, "rows": rows, "token_rows": token_rows, "weights": weights}


def _changed(token_rows, at, value):
    token_rows = token_rows.clone()
    token_rows.view(-1)[at] = value
    return token_rows


TOKEN_ROWS = arguments()["token_rows"]
BAD = [
    ({"rows": torch.zeros(8, 8, dtype=torch.float64)}, TypeError, "rows has dtype float64"),
    (
        {"rows": torch.zeros(8, 2, 4, dtype=BF16)},
        ValueError,
        "rows has 3 dimensions; it must have 2",
    ),
    ({"token_rows": TOKEN_ROWS.int()}, TypeError, "token_rows has dtype int32; it must be int64"),
    (
        {"token_rows": TOKEN_ROWS.view(-1)},
        ValueError,
        "token_rows has 1 dimensions; it must have 2",
    ),
    ({"weights": torch.zeros(4, 2, dtype=F16)}, TypeError, "weights.*float32 or bfloat16"),
    ({"token_rows": TOKEN_ROWS.t().contiguous().t()}, ValueError, "token_rows is strided"),
    ({"weights": torch.zeros(2, 4).t()}, ValueError, "weights is strided"),
    ({"weights": torch.zeros(4, 3)}, ValueError, r"weights has shape \(4, 3\).*\(4, 2\)"),
]
BAD_BACKWARD = [
    ({"grad": torch.zeros(4, 8)}, TypeError, "weights|rows has dtype bfloat16"),
    ({"grad": torch.zeros(3, 8, dtype=BF16)}, ValueError, r"token_rows has shape \(4, 2\).*grad"),
    ({"rows": torch.zeros(8, 9, dtype=BF16)}, ValueError, r"rows has shape \(8, 9\).*\(8, 8\)"),
    ({"rows": torch.zeros(9, 8, dtype=BF16)}, ValueError, r"rows has shape \(9, 8\).*\(8, 8\)"),
    ({"rows": None}, ValueError, "rows is absent; it must be given"),
    ({"needs_rows": False, "needs_weights": False}, ValueError, "needs_rows is False, and so is"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_arguments_are_named(device, change, error, message):
    inputs = {name: t for name, t in {**arguments(), **change}.items() if name != "grad"}
    with pytest.raises(error, match=message):
        ops.combine_rows(**{name: t.to(device) for name, t in inputs.items()})


@pytest.mark.parametrize(("change", "error", "message"), [*BAD, *BAD_BACKWARD])
def test_bad_arguments_of_gradients_are_named(device, change, error, message):
    inputs = {**arguments(), **change}
    inputs = {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in inputs.items()}
    with pytest.raises(error, match=message):
        ops.combine_rows_backward(**inputs)


@pytest.mark.parametrize("index", [-1, 8, 1 << 40, -(1 << 62)])
def test_indices_that_are_not_rows_are_errors_on_the_cpu(index):
    inputs = arguments() | {"token_rows": _changed(TOKEN_ROWS, 5, index)}
    grad = inputs.pop("grad")
    message = rf"token_rows\[5\] is {index}; it must be at least 0 and below 8"
    with pytest.raises(ValueError, match=message):
        ops.combine_rows(**inputs)
    with pytest.raises(ValueError, match=message):
        ops.combine_rows_backward(grad, **inputs)


def test_indices_that_repeat_a_row_have_no_gradients_on_the_cpu():
    token_rows = _changed(TOKEN_ROWS, 5, TOKEN_ROWS[0, 0])
    with pytest.raises(
        ValueError, match=rf"token_rows\[5\] is {TOKEN_ROWS[0, 0]}, as an earlier one is"
    ):
        ops.combine_rows_backward(**arguments() | {"token_rows": token_rows})


@pytest.mark.gpu
@pytest.mark.parametrize("index", [-1, 8, 1 << 40, -(1 << 62)])
@pytest.mark.parametrize("k", [2, 4])
def test_a_gpu_neither_reads_nor_writes_rows_that_do_not_exist(index, k):
    grad, rows, token_rows, weights = make(8 // k, k, 32, BF16)
    token_rows = _changed(token_rows, 5, index)
    padded = torch.cat((rows, torch.zeros(1, 32, dtype=BF16)))
    existing = torch.where(token_rows == index, 8, token_rows)
    inputs = [t.cuda() for t in (grad, rows, token_rows, weights)]
    assert same(ops.combine_rows(*inputs[1:]), combined(padded, existing, weights))
    d_rows, d_weights = ops.combine_rows_backward(*inputs)
    torch.cuda.synchronize()
    for at, row in enumerate(token_rows.view(-1).tolist()):
        token, j = divmod(at, k)
        if at == 5:
            assert d_weights[token, j] == 0
        else:
            product = (weights[token, j] * grad[token].float()).to(BF16)
            assert same(d_rows[row], product)


# --- devices -------------------------------------------------------------------------------------


@pytest.mark.gpu
@each_dtype
@pytest.mark.parametrize(
    "tokens, k, cols", [(2048, 8, 2048), (1024, 2, 4096), (256, 8, 7168), (300, 6, 1111)]
)
def test_cuda_gives_the_bytes_of_the_cpu(tokens, k, cols, dtype):
    grad, rows, token_rows, weights = make(tokens, k, cols, dtype)
    inputs = [t.cuda() for t in (grad, rows, token_rows, weights)]
    for w, w_cuda in ((weights, inputs[3]), (None, None)):
        sums = ops.combine_rows(inputs[1], inputs[2], w_cuda)
        assert same(sums, ops.combine_rows(rows, token_rows, w))
    d_rows, d_weights = ops.combine_rows_backward(*inputs)
    cpu_rows, cpu_weights = ops.combine_rows_backward(grad, rows, token_rows, weights)
    assert same(d_rows, cpu_rows)
    _, error = weight_gradients(grad, rows, token_rows)
    assert ((d_weights.cpu() - cpu_weights).abs() <= 2 * error).all()
    assert same(d_weights, ops.combine_rows_backward(*inputs)[1])


@pytest.mark.gpu
def test_rows_of_more_than_2_to_31_elements():
    tokens = 2**18 + 8
    k = 4
    cols = 2048
    if torch.cuda.mem_get_info()[0] < 16e9:
        pytest.skip("needs 16 GB of GPU memory")
    rows = torch.zeros(tokens * k, cols, dtype=BF16, device="cuda")
    rows[:, 0] = torch.arange(tokens * k, device="cuda") % 251
    token_rows = torch.arange(tokens * k, device="cuda").flip(0).view(tokens, k)
    weights = torch.ones(tokens, k, device="cuda")
    grad = ops.combine_rows(rows, token_rows, weights)
    assert torch.equal(grad[:, 0], rows[:, 0][token_rows].float().sum(1).to(BF16))
    assert not grad[:, 1:].any()
    d_rows, _ = ops.combine_rows_backward(grad, None, token_rows, weights, True, False)
    assert torch.equal(d_rows[token_rows.view(-1), 0], grad[:, 0].repeat_interleave(k))
    assert not d_rows[:, 1:].any()


@pytest.mark.gpu
def test_captured_graphs_replay_the_sum_and_its_gradients():
    grad, rows, token_rows, weights = (t.cuda() for t in make(33, 8, 264, BF16))

    def run():
        return (
            ops.combine_rows(rows, token_rows, weights),
            *ops.combine_rows_backward(grad, rows, token_rows, weights),
        )

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    _, *others = make(33, 8, 264, BF16, seed=5)
    for into, new in zip((rows, token_rows, weights), others, strict=True):
        into.copy_(new)
    graph.replay()
    assert all(same(a, b) for a, b in zip(captured, run(), strict=True))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_host_does_not_wait_for_the_device():
    inputs = [t.cuda() for t in make(33, 8, 264, BF16)]
    ops.combine_rows(*inputs[1:]), ops.combine_rows_backward(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.combine_rows(*inputs[1:]), ops.combine_rows_backward(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("level", ["scalar", "avx2", "avx512"])
def test_instruction_sets_give_equal_bytes(level):
    inputs = make(9, 3, 1037, BF16)
    expected = ops.combine_rows(*inputs[1:]), *ops.combine_rows_backward(*inputs)
    try:
        core.set_cpu_simd(level)
    except core.UnsupportedError:
        pytest.skip(f"this CPU has no {level}")
    try:
        actual = ops.combine_rows(*inputs[1:]), *ops.combine_rows_backward(*inputs)
    finally:
        core.set_cpu_simd(None)
    assert all(same(a, b) for a, b in zip(actual, expected, strict=True))


def test_denormals_are_kept_if_the_caller_flushes_them():
    rows = torch.full((2, 40), 2.0**-130)
    token_rows = torch.tensor([[0, 1]])
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush")
    try:
        sums = ops.combine_rows(rows, token_rows)
    finally:
        torch.set_flush_denormal(False)
    assert same(sums, torch.full((1, 40), 2.0**-129))


@pytest.mark.parametrize("tokens, k, cols", [(5, 3, 16), (0, 2, 8), (3, 0, 8)])
def test_opcheck(device, tokens, k, cols):
    for dtype, weight_dtype in ((BF16, F32), (F32, F32), (BF16, BF16)):
        inputs = make(tokens, k, cols, dtype, weight_dtype)
        grad, rows, token_rows, weights = on(device, *inputs)
        for w in (weights, None):
            opcheck(ops.combine_rows.default, (rows, token_rows, w))
        for wanted in ((True, True), (True, False), (False, True)):
            opcheck(ops.combine_rows_backward.default, (grad, rows, token_rows, weights, *wanted))
        opcheck(ops.combine_rows_backward.default, (grad, None, token_rows, weights, True, False))
