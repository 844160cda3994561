"""The statistics of operands equal an oracle in float64."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8rs
from cases import skip_without_block_gemms
from fp8rs.model.linear_spec import ROLES
from fp8rs.nn import observe
from fp8rs.quantize.recipes import quant_spec, resolve_recipe
from internals import debug_of
from monitoring.recipes import RECIPES, every_recipe
from oracle import statistics
from oracle.linear import blocks_of

pytestmark = pytest.mark.newest_torch

IN, OUT, TOKENS = 200, 136, 150


def wild(*shape, seed=0, spread=3.0):
    """Return normal numbers of many magnitudes. One in ten is 0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp(spread * torch.randn(shape, generator=generator))
    return x * (torch.rand(shape, generator=generator) > 0.1)


def layer_of(recipe, device="cpu"):
    model = nn.Sequential(nn.Linear(IN, OUT)).to(device)
    with torch.no_grad():
        model[0].weight.copy_(wild(OUT, IN, seed=1))
    return fp8rs.convert_to_float8_training(model, recipe=RECIPES[recipe])


def step(model, monitor, x, dy):
    """Run a forward and a backward without an optimizer step, and return the statistics."""
    model(x).backward(dy)
    return monitor.step()


def expected(x, recipe, role):
    """Compute the statistics of an operand of a first step with the oracle."""
    recipe = resolve_recipe(RECIPES[recipe])
    blocks = blocks_of(recipe)
    block = blocks.weight if role == "weight" else blocks.input
    exact_wgrad = "wgrad" in recipe.high_precision_gemms
    if role == "grad" and block == (1, -1) and not exact_wgrad:
        x = x.t()  # the operand of wgrad is not multiplied by the weight's scales
    result = statistics.of_blocks(
        x,
        recipe.fp8_dtype(role),
        block,
        rounding=blocks.rounding,
        power_2_scale=blocks.power_2_scale,
    )
    if recipe.delayed:
        result["amax_to_history"] = 1.0
    if recipe.block_format(role).per_tensor:
        del result["scale_min"]
    return result


def assert_close(got, want, name):
    """Compare statistics. Shares are counts and equal. Sums have the tolerance of fp32."""
    got = {n.removeprefix(name): v for n, v in got.items() if n.startswith(name)}
    assert got.keys() == want.keys()
    for statistic, value in want.items():
        assert got[statistic] == pytest.approx(value, rel=2e-6, abs=1e-5), statistic


@every_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_operand_statistics_equal_the_oracle(recipe, dtype, monkeypatch):
    monkeypatch.setattr(observe, "CHUNK", 40 * IN)  # several chunks, which split blocks of 128
    model = layer_of(recipe).to(dtype)
    x = wild(3, TOKENS // 3, IN).to(dtype)
    dy = wild(3, TOKENS // 3, OUT, seed=2).to(dtype)
    got = step(model, fp8rs.monitor(model), x.requires_grad_(), dy)
    operands = {"input": x.detach().flatten(0, 1), "weight": model[0].weight.detach()}
    operands["grad"] = dy.flatten(0, 1)
    if "wgrad" in model[0].recipe.high_precision_gemms:
        # Only dgrad reads the gradient's codes, which are multiplied by the row scales.
        spec = quant_spec(model[0].recipe, "weight")
        row_scales = spec.scale_from_amax(operands["weight"].float().abs().amax(1))
        operands["grad"] = operands["grad"].float() * row_scales
    for role, values in operands.items():
        assert_close(got, expected(values, recipe, role), f"fp8/0/{role}/")


def test_values_above_a_delayed_scale_saturate():
    model = layer_of("delayed")
    monitor = fp8rs.monitor(model, every=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    x = wild(TOKENS, IN)
    dy = wild(TOKENS, OUT, seed=2)
    for _ in range(2):
        step(model, monitor, x, dy)
        optimizer.step()
    scale = torch.ops.fp8rs.scale_from_amax(x.abs().amax(), torch.float8_e4m3fn)
    larger = 50 * wild(TOKENS, IN, seed=3)
    got = step(model, monitor, larger, dy)
    want = statistics.of_scale(larger, torch.float8_e4m3fn, scale)
    del want["scale_min"]
    want["amax_to_history"] = (larger.abs().amax() / x.abs().amax()).item()
    assert want["saturated"] > 1e-4
    assert want["amax_to_history"] > 2
    assert_close(got, want, "fp8/0/input/")
    assert got["fp8/0/grad/amax_to_history"] == 1


def test_blocks_of_rounded_down_scales_saturate():
    x = wild(TOKENS, IN)
    assert expected(x, "mxfp8 rounded down", "input")["saturated"] > 1e-3
    assert expected(x, "mxfp8", "input")["saturated"] == 0


def test_a_gradient_for_a_frozen_rowwise_weight_has_its_scales():
    """Only dgrad needs it, so it is quantized after it is multiplied by the row scales."""
    model = layer_of("rowwise").requires_grad_(False)
    x = wild(TOKENS, IN).requires_grad_()
    dy = wild(TOKENS, OUT, seed=2)
    got = step(model, fp8rs.monitor(model), x, dy)
    spec = quant_spec(model[0].recipe, "weight")
    scales = spec.scale_from_amax(model[0].weight.abs().amax(1))
    want = statistics.of_blocks(dy * scales, torch.float8_e4m3fn, (1, -1))
    assert_close(got, want, "fp8/0/grad/")


@every_recipe
def test_monitor_does_not_change_training(device, recipe):
    """Losses, gradients and histories have equal bytes in logged and other steps."""
    if recipe == "block":
        skip_without_block_gemms(device)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)).to(device)
    fp8rs.convert_to_float8_training(plain, recipe=RECIPES[recipe])
    watched = copy.deepcopy(plain)
    monitor = fp8rs.monitor(watched, every=2)
    runs = []
    for model in (plain, watched):
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        tensors = []
        for n in range(4):
            x = torch.randn(48, 64, generator=torch.Generator().manual_seed(n)).to(device)
            loss = model(x).square().mean()
            loss.backward()
            tensors += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
            if model is watched:
                assert bool(monitor.step()) == (n % 2 == 0)
        runs.append([*tensors, *model.buffers()])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_micro_batches_are_one_step():
    model = layer_of("rowwise")
    x = wild(TOKENS, IN)
    dy = wild(TOKENS, OUT, seed=2)
    logged = step(model, fp8rs.monitor(model), x, dy)
    monitor = fp8rs.monitor(model)
    for part, of in zip(x.split(50), dy.split(50), strict=True):
        model(part).backward(of)
    parts = monitor.step()
    assert parts.keys() == logged.keys()
    for name, value in logged.items():
        if "grad" not in name:  # scales of gradients depend on the micro-batch
            assert parts[name] == pytest.approx(value, rel=2e-6), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_changes_no_statistic(reentrant):
    """Its operands are counted twice, which does not change shares or ratios."""
    model = layer_of("block")
    x = wild(TOKENS, IN).requires_grad_()
    dy = wild(TOKENS, OUT, seed=2)
    plain = step(model, fp8rs.monitor(model), x, dy)
    monitor = fp8rs.monitor(model)
    checkpoint(model, x, use_reentrant=reentrant).backward(dy)
    assert monitor.step() == pytest.approx(plain, rel=1e-12)


def test_evaluations_are_not_monitored():
    model = layer_of("current")
    x = wild(TOKENS, IN)
    dy = wild(TOKENS, OUT, seed=2)
    logged = step(model, fp8rs.monitor(model), x, dy)
    monitor = fp8rs.monitor(model)
    model.eval()
    model(100 * x)
    model.train()
    assert step(model, monitor, x, dy) == logged


def test_high_precision_operands_have_no_statistics():
    model = layer_of("current")
    monitor = fp8rs.monitor(model)
    assert monitor.step() == {}
    monitor = fp8rs.monitor(model)
    fp8rs.high_precision(model, "0", gemms=("dgrad", "wgrad"))
    got = step(model, monitor, wild(TOKENS, IN), wild(TOKENS, OUT))
    assert {name.split("/")[2] for name in got} == {"input", "weight"}


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_non_finite_values_are_worst(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    fp8rs.convert_to_float8_training(model, recipe=recipe)
    with torch.no_grad():
        model[1].weight[3, 3] = torch.nan
    monitor = fp8rs.monitor(model)
    got = step(model, monitor, wild(32, 64), wild(32, 64, seed=2))
    assert math.isnan(got["fp8/1/weight/sqnr_db"])
    assert math.isnan(got["fp8/1/weight/amax"])
    worst = monitor.worst(1)[0]
    assert (worst.layer, worst.operand) != ("0", "weight")
    assert math.isnan(worst.sqnr_db)


def test_worst_names_layers_with_the_least_sqnr():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    fp8rs.convert_to_float8_training(model, recipe="current")
    with torch.no_grad():
        model[2].weight[0, 0] = 1e6  # the other values underflow
    monitor = fp8rs.monitor(model)
    assert monitor.worst() == []
    step(model, monitor, wild(32, 64, spread=0.1), wild(32, 64, seed=2, spread=0.1))
    worst = monitor.worst()
    assert sorted(record.layer for record in worst) == ["0", "1", "2", "3"]
    assert [record.sqnr_db for record in worst] == sorted(record.sqnr_db for record in worst)
    assert worst[:2] == monitor.worst(2)
    for record in worst:
        losses = {o: monitor.latest[f"fp8/{record.layer}/{o}/sqnr_db"] for o in ROLES}
        assert (record.operand, record.sqnr_db) == min(losses.items(), key=lambda item: item[1])


def test_copies_and_closed_monitors_are_not_monitored():
    model = layer_of("current")
    monitor = fp8rs.monitor(model)
    twin = copy.deepcopy(model)
    twin(wild(TOKENS, IN)).sum().backward()
    assert monitor.step() == {}
    with fp8rs.monitor(model):
        assert debug_of(model[0]) is not None
    assert debug_of(model[0]) is None


def test_bad_arguments_are_refused():
    model = layer_of("current")
    with pytest.raises(ValueError, match="every must be at least 1, not 0"):
        fp8rs.monitor(model, every=0)
    with pytest.raises(TypeError, match=r"every must be an int, not 1\.5"):
        fp8rs.monitor(model, every=1.5)
    with pytest.raises(TypeError, match="model must be a torch"):
        fp8rs.monitor(3)
    with pytest.raises(ValueError, match="model has no FP8 layer"):
        fp8rs.monitor(nn.Linear(4, 4))


class Reads(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts operators that make the host wait for values of a tensor."""

    NAMES = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in self.NAMES
        return func(*args, **(kwargs or {}))


@every_recipe
def test_nothing_is_read_before_the_end_of_a_step(recipe):
    """On a GPU, each of these operators would wait. The copy in `step` is not counted."""
    model = layer_of(recipe)
    monitor = fp8rs.monitor(model, every=2)
    with Reads() as reads:
        for _ in range(3):
            step(model, monitor, wild(TOKENS, IN), wild(TOKENS, OUT, seed=2))
    assert reads.count == 0


@pytest.mark.gpu
@every_recipe
def test_a_logged_step_has_one_copy_to_the_host_and_others_none(recipe):
    import warnings

    device = torch.device("cuda")
    if recipe == "block":
        skip_without_block_gemms(device)
    model = layer_of(recipe, device)
    x = wild(TOKENS, IN).to(device)
    dy = wild(TOKENS, OUT, seed=2).to(device)
    monitor = fp8rs.monitor(model, every=3)
    for _ in range(3):  # load modules and fill caches
        step(model, monitor, x, dy)
    torch.cuda.synchronize()
    counts = []
    for _ in range(4):
        with warnings.catch_warnings(record=True) as recorded_warnings:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")  # warns that it is a prototype
            try:
                step(model, monitor, x, dy)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts.append(
            sum("synchronizing CUDA operation" in str(w.message) for w in recorded_warnings)
        )
    assert counts == [1, 0, 0, 1]
