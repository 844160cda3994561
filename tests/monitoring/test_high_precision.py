"""fp8rs.high_precision: chosen GEMMs equal the GEMMs of nn.Linear."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch._dynamo as dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fp8rs
from fp8rs.nn.debug import GEMMS
from internals import debug_of
from monitoring.recipes import RECIPES, every_recipe

pytestmark = pytest.mark.newest_torch

SUBSETS = [chosen for n in range(len(GEMMS) + 1) for chosen in itertools.combinations(GEMMS, n)]


def build(recipe=None, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32, bias=False)).to(dtype)
    if recipe is None:
        return model
    return fp8rs.convert_to_float8_training(model, recipe=recipe)


def run(layer, dtype=torch.float32, frozen=()):
    """Return the result of each GEMM of a layer, by name, and the gradient of the bias."""
    torch.manual_seed(1)
    x = torch.randn(3, 20, layer.in_features).to(dtype).requires_grad_("dgrad" not in frozen)
    layer.weight.requires_grad_("wgrad" not in frozen)
    layer.zero_grad()
    y = layer(x)
    y.backward(torch.randn(3, 20, layer.out_features).to(y.dtype))
    results = {"forward": y, "dgrad": x.grad, "wgrad": layer.weight.grad}
    if layer.bias is not None:
        results["bias"] = layer.bias.grad
    return {name: t.clone() for name, t in results.items() if t is not None}


@every_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_chosen_gemms_are_exact_and_others_unchanged(recipe, dtype):
    model = build(RECIPES[recipe], dtype)
    plain = build(dtype=dtype)
    for name, layer in model.named_children():
        if not isinstance(layer, fp8rs.Float8Linear):
            continue
        exact = run(plain[int(name)], dtype)
        quantized = run(layer, dtype)
        equal = [gemm for gemm in GEMMS if torch.equal(exact[gemm], quantized[gemm])]
        assert equal == list(layer.recipe.high_precision_gemms)
        for chosen in SUBSETS:
            assert fp8rs.high_precision(model, name, gemms=chosen) == [name]
            got = run(layer, dtype)
            for gemm in got:
                want = exact if gemm in (*chosen, *equal) else quantized
                assert torch.equal(got[gemm], want[gemm]), (chosen, gemm)
        assert debug_of(layer) is not None
        fp8rs.high_precision(model, name, gemms=())
        assert debug_of(layer) is None


def test_no_gradient_if_none_is_required():
    model = build("current")
    plain = build()
    fp8rs.high_precision(model, "0", gemms=("dgrad", "wgrad"))
    for frozen in (("dgrad",), ("wgrad",), ("dgrad", "wgrad")):
        exact = run(plain[0], frozen=frozen)
        got = run(model[0], frozen=frozen)
        assert exact.keys() == got.keys()
        for gemm in exact.keys() - {"forward"}:
            assert torch.equal(exact[gemm], got[gemm])


def test_autocast_sets_the_high_precision_dtype():
    model = build("current")
    plain = build()
    fp8rs.high_precision(model, "*")
    x = torch.randn(8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y = model[0](x)
        exact = plain[0](x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, exact)


def test_histories_record_quantized_operands_only():
    model = build("delayed")
    fp8rs.high_precision(model, "0", gemms=("forward", "dgrad"))
    run(model[0])
    weight, input, grad = model[0].fp8_amax[:3, 0].tolist()
    assert input > 0
    assert grad > 0
    fp8rs.high_precision(model, "0")
    model[0].fp8_amax.zero_()
    run(model[0])
    assert not model[0].fp8_amax.any()
    assert weight > 0


def test_fp8_weights_are_dequantized():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96))
    fp8rs.convert_to_float8_training(model, recipe="block", fp8_weights=True)
    plain = nn.Linear(64, 96)
    with torch.no_grad():
        plain.weight.copy_(model[0].weight.dequantize())
        plain.bias.copy_(model[0].bias)
    fp8rs.high_precision(model, "0")
    x = torch.randn(8, 64, requires_grad=True)
    grads = []
    for layer in (model[0], plain):
        y = layer(x)
        grads.append((y, *torch.autograd.grad(y.square().sum(), [x, layer.weight])))
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
@pytest.mark.parametrize("method", ["layers", "model"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_follow(recipe, method):
    """The next call of a compiled layer uses another graph, which is compiled once."""
    eager = build(recipe)
    model = build(recipe)
    dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    for layer in (model[0], model[2]) if method == "layers" else (model,):
        layer.compile(backend=backend, fullgraph=True)
    x = torch.randn(16, 64, requires_grad=True)
    counts = []
    choices = [(), ("forward", "wgrad"), ("dgrad",), GEMMS]
    for chosen in 2 * choices:
        results = []
        for module in (eager, model):
            fp8rs.high_precision(module, "2", gemms=chosen)
            y = module(x)
            leaves = [x, *module.parameters()]
            results.append([y, *torch.autograd.grad(y.square().mean(), leaves)])
        assert all(map(torch.equal, *results)), chosen
        counts.append(backend.frame_count)
    first = counts[0]  # one or two graphs, depending on the release of torch
    assert first <= 2
    assert counts == [first, first + 1, first + 2, first + 3] + 4 * [first + 3]
    dynamo.reset()


def test_patterns_name_layers():
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), nn.Linear(64, 64))
    fp8rs.convert_to_float8_training(model, recipe="current")
    assert fp8rs.high_precision(model, "*") == ["0.0", "0.1", "1"]
    assert fp8rs.high_precision(model, "0.*", gemms="dgrad") == ["0.0", "0.1"]
    assert fp8rs.high_precision(model, ["1", "*.1"], gemms=()) == ["1", "0.1"]
    high = {
        n: debug_of(m) and debug_of(m).high_precision
        for n, m in model.named_modules()
        if isinstance(m, fp8rs.Float8Linear)
    }
    assert high == {"0.0": (False, True, False), "0.1": None, "1": None}
    assert fp8rs.high_precision(torch.compile(model), "0.0") == ["0.0"]
    with pytest.raises(ValueError, match=r"'2' matches no FP8 layer. The first of 3 is '0\.0'"):
        fp8rs.high_precision(model, "2")
    with pytest.raises(ValueError, match="gemms must be among forward, dgrad, wgrad, not 'fwd'"):
        fp8rs.high_precision(model, "1", gemms=["fwd"])


def test_monitor_keeps_layers_in_high_precision():
    model = build("current")
    fp8rs.high_precision(model, "0", gemms=("wgrad",))
    before = debug_of(model[0])
    monitor = fp8rs.monitor(model, every=2)
    assert debug_of(model[0]).high_precision == (False, False, True)
    model(torch.randn(8, 64)).sum().backward()
    assert {name.split("/")[2] for name in monitor.step()} == {"input", "weight", "grad"}
    assert debug_of(model[0]) == before
    assert debug_of(model[2]) is None


def test_an_fp8_weight_written_since_the_forward_is_an_error():
    model = nn.Sequential(nn.Linear(64, 96))
    fp8rs.convert_to_float8_training(model, recipe="block", fp8_weights=True)
    fp8rs.high_precision(model, "0")
    y = model(torch.randn(8, 64, requires_grad=True))
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: the FP8 weight"):
        y.sum().backward()


@pytest.mark.parametrize(
    "gemms, owner",
    [(GEMMS, "high-precision layers whose operands are cast"), (("wgrad",), "FP8 linear layers")],
)
def test_double_backward_is_refused(gemms, owner):
    """Its operands are cast, so that second derivatives would lack terms."""
    model = build("current")
    fp8rs.high_precision(model, "0", gemms=gemms)
    with torch.autocast("cpu", torch.bfloat16):
        y = model[0](torch.randn(8, 64, requires_grad=True))
    with pytest.raises(RuntimeError, match=f"{owner}.* do not support double backward"):
        torch.autograd.grad(y.float().square().sum(), model[0].weight, create_graph=True)


@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_gradient_penalty_of_layers_in_high_precision_is_that_of_torch(recipe, dtype):
    results = []
    for model in (build(dtype=dtype), build(recipe, dtype)):
        if results:
            fp8rs.high_precision(model, "*")
        torch.manual_seed(1)
        x = torch.randn(8, 64, dtype=dtype, requires_grad=True)
        (dx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        dx.square().sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))


def test_a_dequantized_weight_refuses_double_backward():
    model = nn.Sequential(nn.Linear(64, 96))
    fp8rs.convert_to_float8_training(model, recipe="current", fp8_weights=True)
    fp8rs.high_precision(model, "0")
    x = torch.randn(8, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match="operands are cast or dequantized do not support"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
