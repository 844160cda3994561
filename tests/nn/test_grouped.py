"""The grouped linear layer against high-precision products of each group."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import fp8rs
from cases import data
from distributed import ranks
from fp8rs.gemm import estimates
from fp8rs.gemm import grouped as grouped_gemm
from fp8rs.nn.functional import grouped_linear, key_of
from fp8rs.nn.grouped_function import bounds_of, grouped
from fp8rs.quantize.recipes import quant_spec, resolve_recipe
from fp8rs.tensor.quantizer import Quantizer
from oracle.elements import encode

#: The lengths of groups, and the rows after the last one.
LENGTHS = {
    "even": ([16, 16, 16], 0),
    "uneven": ([5, 0, 33, 1], 0),
    "rows after the last group": ([7, 40], 9),
    "empty": ([0, 0], 0),
    "no rows in groups": ([0, 0], 4),
}
IN, OUT = 64, 48


def operands(device, case, dtype=torch.bfloat16):
    lengths, more = LENGTHS[case]
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x = normal(sum(lengths) + more, IN)
    weight = normal(len(lengths), OUT, IN)
    bias = normal(len(lengths), OUT)
    dy = normal(sum(lengths) + more, OUT)
    offs = torch.tensor(lengths, device=device).cumsum(0).to(torch.int32)
    return x, weight, bias, offs, dy


def reference(x, weight, bias, offs, dy):
    """The output and the gradients in fp64."""
    x, weight, bias = (t.double().requires_grad_() for t in (x, weight, bias))
    parts = []
    start = 0
    for group, end in enumerate(offs.tolist()):
        parts.append(x[start:end] @ weight[group].t() + bias[group])
        start = end
    y = torch.cat([*parts, x.new_zeros(len(x) - start, weight.shape[1])])
    y.backward(dy.double())
    return y.detach(), x.grad, weight.grad, bias.grad


def run(x, weight, bias, offs, dy, **options):
    x, weight, bias = (t.clone().requires_grad_() for t in (x, weight, bias))
    y = grouped_linear(x, weight, offs, bias=bias, **options)
    y.backward(dy)
    return y.detach(), x.grad, weight.grad, bias.grad


def error(actual, wanted):
    scale = wanted.norm()
    return 0.0 if scale == 0 and not actual.any() else ((actual - wanted).norm() / scale).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("case", list(LENGTHS))
def test_each_group_is_multiplied_by_its_own_matrix(device, case, dtype):
    inputs = operands(device, case, dtype)
    actual = run(*inputs)
    wanted = reference(*inputs)
    for name, a, b in zip(("y", "dx", "dw", "db"), actual, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == dtype, name
        # E4M3 rounds to 1/16 of a value: two operands of independent errors.
        assert error(a, b) < (0.01 if name == "db" else 0.05), name


def test_rows_after_the_last_group_are_not_read(device):
    x, weight, bias, offs, dy = operands(device, "rows after the last group")
    expected = run(x, weight, bias, offs, dy)
    x[offs[-1] :] = float("nan")
    dy[offs[-1] :] = float("nan")
    for a, b in zip(run(x, weight, bias, offs, dy), expected, strict=True):
        assert torch.equal(a, b)


def test_a_group_is_independent_of_the_others(device):
    """The scales of a row, a column of a group and an expert contain nothing of other groups."""
    x, weight, bias, offs, dy = operands(device, "uneven")
    expected = run(x, weight, bias, offs, dy)
    weight[2] *= 100
    x[5:38] *= 100
    actual = run(x, weight, bias, offs, dy)
    for a, b in zip(actual[:2], expected[:2], strict=True):
        assert torch.equal(a[:5], b[:5]) and torch.equal(a[38:], b[38:])
    for a, b in zip(actual[2:], expected[2:], strict=True):
        assert torch.equal(a[[0, 1, 3]], b[[0, 1, 3]])


#: Recipes with FP8 GEMMs for groups, and recipes with GEMMs in high precision.
FP8_RECIPES = ["current", "delayed", "rowwise", "rowwise_with_gw_hp"]
PLAIN_RECIPES = ["block", "mxfp8"]


def quantized(weight, recipe):
    """The weight as FSDP2 gathers it."""
    spec = quant_spec(resolve_recipe(recipe), "weight")
    return Quantizer(spec, rowwise=True, columnwise=False)(weight)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_codes_of_a_gathered_weight_are_used_as_they_are(device, recipe, transposed):
    """Compare with a weight that the function quantizes."""
    x, weight, bias, offs, dy = operands(device, "uneven")
    if transposed:
        x, bias, dy = dy, x[: len(bias)], x
    results = []
    for stored in (weight, quantized(weight, recipe)):
        leaves = [t.detach().requires_grad_() for t in (x, stored, bias)]
        weight_operand = leaves[1].transpose(-2, -1) if transposed else leaves[1]
        y = grouped_linear(leaves[0], weight_operand, offs, bias=leaves[2], recipe=recipe)
        y.backward(dy)
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
        assert leaves[1].grad.shape == weight.shape
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    values = weight.transpose(-2, -1) if transposed else weight
    wanted = [values, bias, offs]
    y, dx, dw, db = reference(x, *wanted, dy)
    for a, b in zip(
        results[0], (y, dx, dw.transpose(-2, -1) if transposed else dw, db), strict=True
    ):
        assert error(a, b) < 0.05


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("recipe", PLAIN_RECIPES)
def test_other_recipes_multiply_the_dequantized_weight(device, recipe, transposed):
    x, weight, bias, offs, dy = operands(device, "rows after the last group")
    if transposed:
        x, bias, dy = dy, x[: len(bias)], x
    gathered = quantized(weight, recipe).requires_grad_()
    leaf = x.clone().requires_grad_()
    weight_operand = gathered.transpose(-2, -1) if transposed else gathered
    grouped_linear(leaf, weight_operand, offs, bias=bias, recipe=recipe).backward(dy)
    values = weight_operand.detach().dequantize()
    _, dx, dw, _ = reference(x, values, bias, offs, dy)
    assert error(leaf.grad, dx) < 0.01
    assert error(gathered.grad, dw.transpose(-2, -1) if transposed else dw) < 0.01


def rounded(x, dim):
    """Round fp64 values to E4M3 with one scale for each slice along ``dim``."""
    if not x.numel():
        return x
    scale = x.abs().amax(dim, keepdim=True) / 448
    codes = encode((x / scale.clamp(min=1e-30)).float(), torch.float8_e4m3fn)
    return codes.to(torch.uint8).view(torch.float8_e4m3fn).double() * scale


def simulated(x, weight, offs, dy, recipe):
    """The gradients of input and weight on rounded operands, with exact products, in fp64."""
    x, weight, dy = (t.detach().double() for t in (x, weight, dy))
    dx = []
    dw = []
    start = 0
    for group, end in enumerate(offs.tolist()):
        w = weight[group]
        part = x[start:end]
        part_dy = dy[start:end]
        if recipe in FP8_RECIPES:
            if recipe.startswith("rowwise"):  # scales of rows are multiplied into the gradient
                scale = w.abs().amax(1) / 448
                w_codes = rounded(w, 1) / scale[:, None]
                g = rounded(part_dy * scale, 1)
            else:
                w_codes = rounded(w, (0, 1))
                g = rounded(part_dy, 1)
            dx.append(g @ w_codes)
            if recipe == "rowwise_with_gw_hp":
                dw.append(part_dy.t() @ part)
            else:
                dw.append(rounded(part_dy, 0).t() @ rounded(part, 0))
        else:
            dx.append(part_dy @ quantized(weight.float(), recipe).dequantize()[group].double())
            dw.append(part_dy.t() @ part)
        start = end
    return torch.cat(dx), torch.stack(dw)


@pytest.mark.parametrize("recipe", [*FP8_RECIPES, *PLAIN_RECIPES])
def test_errors_of_gradients_are_those_of_a_simulation(recipe):
    """Against fp64 products of the same data, to 2%."""
    lengths = [300, 4, 0, 96]
    n = 96
    k = 160
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(sum(lengths), size, generator=generator) for size in (k, n))
    weight = torch.randn(len(lengths), n, k, generator=generator)
    dy *= torch.logspace(-2, 0, n)
    offs = torch.tensor(lengths).cumsum(0).int()
    leaf = x.clone().requires_grad_()
    w = weight.clone()
    w = (w if recipe in FP8_RECIPES else quantized(w, recipe)).requires_grad_()
    grouped_linear(leaf, w, offs, recipe=recipe).backward(dy)
    bias = torch.zeros(len(lengths), n)
    _, dx, dw, _ = reference(x, weight, bias, offs, dy)
    errors = [error(leaf.grad, dx), error(w.grad, dw)]
    simulations = simulated(x, weight, offs, dy, recipe)
    for actual, simulation, exact in zip(errors, simulations, (dx, dw), strict=True):
        assert actual == pytest.approx(error(simulation, exact), rel=0.02, abs=1e-6)


@pytest.mark.parametrize("case", list(LENGTHS))
@pytest.mark.parametrize("gathered", [False, True])
def test_only_wgrad_of_rowwise_with_gw_hp_is_in_high_precision(device, case, gathered):
    x, weight, bias, offs, dy = operands(device, case)
    stored = quantized(weight, "rowwise") if gathered else weight
    results = {}
    for recipe in ("rowwise", "rowwise_with_gw_hp", "block"):
        # `block` has no grouped FP8 GEMMs, so its wgrad is that of torch.
        results[recipe] = run(
            x, weight if recipe == "block" else stored, bias, offs, dy, recipe=recipe
        )
    y, dx, dw, db = results["rowwise_with_gw_hp"]
    assert torch.equal(y, results["rowwise"][0])
    assert torch.equal(dx, results["rowwise"][1])
    assert torch.equal(dw, results["block"][2])
    assert torch.equal(db, results["block"][3])


@pytest.mark.parametrize("gemm", ["forward", "dgrad"])
def test_experts_run_forward_and_dgrad_with_one_precision(device, gemm):
    x, weight, bias, offs, dy = operands(device, "uneven")
    recipe = fp8rs.Float8RowwiseScaling(high_precision_gemms=(gemm,))
    results = run(x, weight, bias, offs, dy, recipe=recipe)
    exact = run(x, weight, bias, offs, dy, recipe="block")
    assert all(torch.equal(a, b) for a, b in zip(results, exact, strict=True))


@pytest.mark.parametrize("options", [{"input_amax_epsilon": 1 / 512}, {"divide_input": True}])
def test_experts_run_in_high_precision_with_options_for_inputs(device, options):
    x, weight, bias, offs, dy = operands(device, "uneven")
    recipe = fp8rs.Float8RowwiseScaling(**options)
    results = run(x, weight, bias, offs, dy, recipe=recipe)
    exact = run(x, weight, bias, offs, dy, recipe="block")
    assert all(torch.equal(a, b) for a, b in zip(results, exact, strict=True))


def test_rows_of_four_dimensions_are_those_of_one_matrix(device):
    x, weight, bias, offs, dy = operands(device, "uneven")
    expected = run(x, weight, bias, offs, dy)
    actual = run(x, weight.view(-1, 3, OUT // 3, IN), bias, offs, dy)
    assert actual[2].shape == (len(offs), 3, OUT // 3, IN)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b.view(a.shape))


def test_options_of_a_recipe_apply_to_scales(device):
    inputs = operands(device, "uneven")
    actual = run(*inputs, recipe=fp8rs.Float8CurrentScaling(power_2_scale=True))
    assert not torch.equal(actual[0], run(*inputs)[0])
    # Powers of two commute with the scales.
    x, *others = inputs
    assert torch.equal(
        run(x * 2, *others, recipe=fp8rs.Float8CurrentScaling(power_2_scale=True))[1], actual[1]
    )


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_autocast_computes_in_its_dtype(device, recipe):
    """Only the input is cast. The CPU's GEMMs run in fp32 as without autocast."""
    x, weight, bias, offs, dy = operands(device, "uneven")
    expected = run(x, weight, bias, offs, dy, recipe=recipe)
    with torch.autocast(device.type, torch.bfloat16):
        actual = run(x.float(), weight.float(), bias.float(), offs, dy, recipe=recipe)
    assert [t.dtype for t in actual] == [torch.bfloat16] + 3 * [torch.float32]
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(actual, expected, strict=True))


def force(monkeypatch, choice):
    monkeypatch.setattr(estimates, "choose", lambda *sizes: choice)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("case", ["uneven", "rows after the last group", "no rows in groups"])
def test_wgrad_alone_runs_in_high_precision(device, monkeypatch, recipe, transposed, case):
    force(monkeypatch, estimates.HIGH_PRECISION_WGRAD)
    x, weight, bias, offs, dy = operands(device, case)
    if transposed:
        x, bias, dy = dy, x[: len(bias)], x
    results = {}
    for gemms in ("auto", "fp8", "gather"):
        leaves = [t.clone().requires_grad_() for t in (x, quantized(weight, recipe), bias)]
        key = key_of(resolve_recipe(recipe))
        bounds = bounds_of(offs, x)
        y = grouped(leaves[0], leaves[1], bounds, leaves[2], key, transposed, gemms)
        y.backward(dy)
        results[gemms] = [y.detach(), *(leaf.grad for leaf in leaves)]
    for i, other in enumerate(("fp8", "fp8", "gather", "fp8")):
        assert torch.equal(results["auto"][i], results[other][i])
    has_equal_wgrad = case == "no rows in groups" or recipe == "rowwise_with_gw_hp"
    assert torch.equal(results["fp8"][2], results["gather"][2]) == has_equal_wgrad


def test_parts_of_groups_are_equal_and_aligned():
    ends = torch.tensor([0, 16, 64, 64, 288], dtype=torch.int32)
    expected = [0, 0, 0, 16, 16, 16, 32, 48, 64, 64, 64, 64, 144, 224, 288]
    assert grouped_gemm.part_ends(ends, 3).tolist() == expected


@pytest.mark.parametrize(
    "case, parts", [("even", 2), ("uneven", 2), ("rows after the last group", 4)]
)
def test_wgrad_of_long_groups_is_the_sum_of_parts(device, monkeypatch, case, parts):
    inputs = operands(device, case)
    expected = run(*inputs)
    split = []
    part_ends = grouped_gemm.part_ends

    def recording_part_ends(*args):
        split.append(args[1])
        return part_ends(*args)

    monkeypatch.setattr(grouped_gemm, "MAX_WGRAD_ROWS", 8)
    monkeypatch.setattr(grouped_gemm, "part_ends", recording_part_ends)
    actual = run(*inputs)
    assert split == [parts] * grouped_gemm.has_grouped_gemm(device)
    # On CUDA, each part is rounded to bf16.
    largest = expected[2].abs().max().item()
    torch.testing.assert_close(actual[2], expected[2], rtol=0.02, atol=parts * 2**-9 * largest)
    for i in (0, 1, 3):
        assert torch.equal(actual[i], expected[i])


def test_a_long_sum_of_terms_with_a_mean_is_accurate(device):
    """Hopper's error of one sum of 65,536 terms is 16%."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (
        torch.randn(65536, n, generator=generator) + 0.3 * torch.randn(n, generator=generator)
        for n in (IN, OUT)
    )
    weight = torch.zeros(1, OUT, IN, device=device, dtype=torch.bfloat16).requires_grad_()
    offs = torch.tensor([65536], dtype=torch.int32, device=device)
    x, dy = (t.to(device, torch.bfloat16) for t in (x, dy))
    grouped_linear(x, weight, offs).backward(dy)
    assert error(weight.grad[0], dy.double().t() @ x.double()) < 0.04


def test_each_number_of_rows_is_estimated_once(monkeypatch):
    estimated = []

    def choose(rows, _):
        estimated.append(rows)
        return estimates.HIGH_PRECISION

    monkeypatch.setattr(estimates, "choose", choose)
    weight = torch.randn(3, OUT, IN)
    offs = torch.tensor([4, 7, 16], dtype=torch.int32)
    for rows in (32, 16, 32, 16):
        x = torch.randn(rows, IN)
        grouped(x, weight, bounds_of(offs, x), None, key_of("current"), gemms="auto")
    assert estimated == [32, 16]


@pytest.mark.parametrize("choice", [estimates.HIGH_PRECISION_WGRAD, estimates.FP8])
def test_codes_or_the_input_are_saved_for_wgrad(device, monkeypatch, choice):
    force(monkeypatch, choice)
    x, weight, bias, offs, _ = operands(device, "even")
    leaf = x.clone().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        grouped(
            leaf,
            quantized(weight, "current").requires_grad_(),
            bounds_of(offs, x),
            bias,
            key_of("current"),
            gemms="auto",
        )
    saved_dtypes = [t.dtype for t in saved if t.dtype not in (torch.float32, torch.int32)]
    assert saved_dtypes == [torch.float8_e4m3fn if choice.wgrad else torch.bfloat16]


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_the_choice_is_by_rows_or_by_typical_rows_if_a_compiler_does_not_know_them(
    device, monkeypatch, dynamic
):
    """One graph for all numbers of rows has one choice."""
    torch._dynamo.reset()
    fp8_rows = (40, 4 * estimates.TYPICAL_ROWS)

    def choose(rows, *sizes):
        return estimates.FP8 if rows in fp8_rows else estimates.HIGH_PRECISION

    monkeypatch.setattr(estimates, "choose", choose)
    layer = fp8rs.nn.GroupedLinear(4, IN, OUT, device=device, dtype=torch.bfloat16)
    layers = {}
    for mode in ("auto", "fp8", "gather"):
        layers[mode] = copy.deepcopy(layer)
        fp8rs.convert_to_float8_training(layers[mode], experts=mode)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layers["auto"], backend=counter, fullgraph=True, dynamic=dynamic)
    for count in (40, 64, 200):
        x = torch.randn(count, IN, device=device, dtype=torch.bfloat16)
        inputs = x, torch.tensor([7, 7, 30, count], dtype=torch.int32, device=device)
        chosen = layers["fp8" if count == 40 else "gather"]
        assert torch.equal(layers["auto"](*inputs), chosen(*inputs))
        # By default, the second number of rows makes a graph for all.
        if dynamic or (dynamic is None and count != 40):
            chosen = layers["fp8"]
        assert torch.equal(compiled(*inputs), chosen(*inputs))
    assert counter.frame_count == {None: 2, False: 3, True: 1}[dynamic]
    torch._dynamo.reset()


@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_one_gradient_is_what_it_is_with_all(device, wanted):
    inputs = operands(device, "uneven")
    everything = run(*inputs)
    names = ("x", "weight", "bias")
    leaves = [t.clone().requires_grad_(n == wanted) for n, t in zip(names, inputs, strict=False)]
    grouped_linear(leaves[0], leaves[1], inputs[3], bias=leaves[2]).backward(inputs[4])
    i = names.index(wanted)
    assert torch.equal(leaves[i].grad, everything[i + 1])
    assert all(leaves[j].grad is None for j in range(3) if j != i)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("recipe", ["current", "rowwise", "mxfp8"])
def test_without_experts_all_rows_are_zero(device, recipe, transposed):
    x = torch.full((3, IN), float("nan"), device=device, requires_grad=True)
    weight = torch.zeros(0, *((IN, OUT) if transposed else (OUT, IN)), device=device)
    bias = torch.zeros(0, OUT, device=device, requires_grad=True)
    leaf = weight.requires_grad_()
    offs = torch.zeros(0, device=device, dtype=torch.int32)
    y = grouped_linear(x, leaf.mT if transposed else leaf, offs, bias=bias, recipe=recipe)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(3, OUT, device=device))
    assert torch.equal(x.grad, torch.zeros(3, IN, device=device))
    assert leaf.grad.shape == weight.shape and bias.grad.shape == bias.shape


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@pytest.mark.parametrize("strides", ["columns", "every other column"])
def test_inputs_of_any_strides_are_those_of_a_contiguous_one(device, strides, recipe):
    x, weight, bias, offs, dy = operands(device, "uneven")
    expected = run(x, weight, bias, offs, dy, recipe=recipe)

    def strided(t):
        other = t.mT.contiguous().mT if strides == "columns" else torch.stack([t, t], -1)[..., 0]
        return other.detach().requires_grad_()

    leaves = strided(x), weight.clone().requires_grad_(), bias.clone().requires_grad_()
    y = grouped_linear(leaves[0], leaves[1], offs, bias=leaves[2], recipe=recipe)
    y.backward(strided(dy).detach())
    for actual, wanted in zip((y, *(t.grad for t in leaves)), expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["current", "rowwise", "mxfp8"])
def test_a_captured_graph_takes_other_offsets(recipe):
    x, weight, bias, offs, dy = operands("cuda", "uneven")
    other = torch.tensor([20, 20, 30, 39], device="cuda", dtype=torch.int32)
    expected = run(x, weight, bias, other, dy, recipe=recipe)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]

    def step():
        y = grouped_linear(leaves[0], leaves[1], offs, bias=leaves[2], recipe=recipe)
        return (y.detach(), *torch.autograd.grad(y, leaves, dy))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = step()
    offs.copy_(other)
    for _ in range(2):
        graph.replay()
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def test_double_backward_raises(device):
    x, weight, _, offs, _ = operands(device, "uneven")
    y = grouped_linear(x.requires_grad_(), weight, offs)
    with pytest.raises(RuntimeError, match="grouped linear layers do not support double backward"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_compiled_is_eager_and_any_number_of_rows_is_one_graph(device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(grouped_linear, backend=counter, fullgraph=True, dynamic=True)
    _, weight, bias, offs, _ = operands(device, "uneven")
    for rows in (39, 64, 200):
        values = data(device, rows, IN, dtype=torch.bfloat16)
        ends = offs.clone()
        ends[-1] = rows
        outputs = []
        for function in (compiled, grouped_linear):
            leaf = values.clone().requires_grad_()
            y = function(leaf, weight, ends, bias=bias)
            y.sum().backward()
            outputs.append((y.detach(), leaf.grad))
        assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    assert counter.frame_count == 1
    torch._dynamo.reset()


FIRST_USE = """
import torch
from fp8rs.nn.functional import grouped_linear
x, weight = torch.ones(32, 64, requires_grad=True), torch.ones(2, 48, 64)
offs = torch.tensor([10, 32], dtype=torch.int32)
torch.compile(grouped_linear, backend="aot_eager", fullgraph=True)(x, weight, offs).sum().backward()
"""


def test_the_first_use_in_a_process_compiles():
    """Other tests have created layers, which prepares compilers."""
    subprocess.run([sys.executable, "-W", "error", "-c", FIRST_USE], check=True, timeout=120)


@pytest.mark.parametrize(
    ("change", "exception", "message"),
    [
        ({"weight": torch.zeros(48, 64)}, ValueError, r"weight has shape \(48, 64\)"),
        ({"weight": torch.zeros(2, 40, 64)}, ValueError, "multiples of 16"),
        ({"x": torch.zeros(8, 32)}, ValueError, r"x has shape \(8, 32\)"),
        ({"offs": torch.zeros(3, dtype=torch.int32)}, ValueError, r"offs has shape \(3,\)"),
        ({"offs": torch.zeros(2, dtype=torch.int64)}, TypeError, "offs is torch.int64"),
        ({"x": torch.zeros(8, 64, dtype=torch.float64)}, TypeError, "x is torch.float64"),
        ({"x": torch.zeros(8, 64, dtype=torch.bfloat16)}, TypeError, "weight is torch.float32"),
        ({"bias": torch.zeros(2, 64)}, ValueError, r"bias has shape \(2, 64\)"),
        ({"bias": torch.zeros(2, 48).bfloat16()}, TypeError, "bias is torch.bfloat16 and x is"),
        (
            {"weight": torch.zeros(2, 48, 64).to(torch.float8_e4m3fn)},
            TypeError,
            "weight is torch.f",
        ),
        ({"x": [[0.0] * 64] * 8}, TypeError, "x must be a torch.Tensor, not list"),
        ({"weight": [[]]}, TypeError, "weight must be a torch.Tensor, not list"),
        ({"offs": [4, 8]}, TypeError, "offs must be a torch.Tensor, not list"),
        ({"bias": [0.0] * 48}, TypeError, "bias must be a torch.Tensor, not list"),
        (
            {
                "weight": torch.zeros(1024, 16, 64),
                "offs": torch.zeros(1024, dtype=torch.int32),
            },
            ValueError,
            "fewer than 1024",
        ),
    ],
)
def test_bad_arguments_are_named(device, change, exception, message):
    arguments = {
        "x": torch.zeros(8, 64),
        "weight": torch.zeros(2, 48, 64),
        "offs": torch.tensor([4, 8], dtype=torch.int32),
        "bias": None,
        **change,
    }
    arguments = {n: t.to(device) if hasattr(t, "to") else t for n, t in arguments.items()}
    bias = arguments.pop("bias")
    with pytest.raises(exception, match=message):
        grouped_linear(**arguments, bias=bias)


@pytest.mark.parametrize("recipe", ["current", "block"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float64], ids=str)
def test_autocast_casts_weights_of_supported_dtypes_only(device, recipe, dtype):
    """Otherwise codes without scales would count as values."""
    x, weight, _, offs, _ = operands(device, "even")
    with torch.autocast(x.device.type, torch.bfloat16), pytest.raises(TypeError, match="weight is"):
        grouped_linear(x, weight.to(dtype), offs, recipe=recipe)


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_shapes_are_computed_on_meta(recipe):
    x, weight, bias, offs, dy = (t.to("meta") for t in operands("cpu", "uneven"))
    results = run(x, weight, bias, offs, dy, recipe=recipe)
    assert [t.shape for t in results] == [dy.shape, x.shape, weight.shape, bias.shape]
    layer = fp8rs.nn.GroupedLinear(len(offs), IN, OUT, device="meta", dtype=x.dtype, recipe=recipe)
    assert layer(x, offs).shape == dy.shape


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["current", "block"])
@pytest.mark.parametrize("ends", [[4, 9], [5, 4], [-1, 8]])
def test_bad_offsets_are_errors_on_the_cpu(ends, recipe, compiled):
    run = torch.compile(grouped_linear, backend="aot_eager") if compiled else grouped_linear
    arguments = torch.zeros(8, 64), torch.zeros(2, 48, 64), torch.tensor(ends, dtype=torch.int32)
    message = r"offs\[.\] is .*: offs are the ends of groups, the cumulative sums of their sizes"
    with pytest.raises(ValueError, match=message):
        run(*arguments, recipe=recipe)


def test_the_module_computes_the_function(device):
    x, weight, bias, offs, dy = operands(device, "uneven")
    expected = run(x, weight, bias, offs, dy, recipe="rowwise")
    layer = fp8rs.nn.GroupedLinear(
        len(offs), IN, OUT, device=device, dtype=torch.bfloat16, recipe="rowwise"
    )
    assert all(p.abs().max() <= IN**-0.5 for p in layer.parameters())
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    leaf = x.clone().requires_grad_()
    y = layer(leaf, offs)
    y.backward(dy)
    actual = y, leaf.grad, layer.weight.grad, layer.bias.grad
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert "num_groups=4, in_features=64, out_features=48, bias=True, recipe=rowwise" in repr(layer)
    bare = fp8rs.nn.GroupedLinear(2, 16, 32, bias=False)
    assert list(dict(bare.named_parameters())) == ["weight"]


@pytest.mark.parametrize(
    "sizes, message",
    [
        ((4, 40, 64), "in_features is 40; it must be a multiple of 16"),
        ((4, 64, 40), "out_features is 40; it must be a multiple of 16"),
        ((1024, 16, 16), "num_groups is 1024; it must be less than 1024"),
        ((4, -16, 64), "in_features is -16; it must be a multiple of 16 and not negative"),
        ((4, 64, -16), "out_features is -16; it must be a multiple of 16 and not negative"),
        ((-1, 16, 16), "num_groups is -1; it must be less than 1024 and not negative"),
    ],
)
def test_a_layer_of_an_unsupported_size_cannot_be_built(sizes, message):
    with pytest.raises(ValueError, match=message):
        fp8rs.nn.GroupedLinear(*sizes)


@pytest.mark.parametrize("sizes", [(0, 16, 32), (4, 0, 32), (4, 16, 0)])
def test_any_size_may_be_zero(device, sizes):
    groups, in_features, out_features = sizes
    layer = fp8rs.nn.GroupedLinear(*sizes, device=device)
    x = torch.randn(8, in_features, device=device)
    offs = torch.arange(2, 2 + groups, dtype=torch.int32, device=device)
    assert layer(x, offs).shape == (8, out_features)


@ranks(2)
@pytest.mark.parametrize("fp8", [False, True])
def test_ranks_draw_different_experts(rig, fp8):
    """Torch's generator would give ranks of a CPU mesh equal shards."""
    results = []
    for dim in (0, 1):
        model = nn.ModuleDict({"up": fp8rs.nn.GroupedLinear(4, IN, OUT, device="meta")})
        fp8rs.convert_to_float8_training(model, fp8_weights=fp8)
        fully_shard(model["up"], mesh=rig.mesh(), shard_placement_fn=lambda p, dim=dim: Shard(dim))
        model.to_empty(device=rig.device)
        torch.manual_seed(3)
        model["up"].reset_parameters()
        model["up"].unshard()
        weight = model["up"].weight.dequantize()
        bias = model["up"].bias
        assert weight.abs().max() <= IN**-0.5
        assert weight.std() > 0.5 * IN**-0.5
        for values in (weight, bias):
            assert len(values.flatten(1).unique(dim=0)) == 4
        results.append((weight, bias))
    assert all(map(torch.equal, *results))
