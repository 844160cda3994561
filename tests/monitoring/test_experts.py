"""The monitor logs weights of experts, with the statistics of the codes that are gathered."""

from __future__ import annotations

import sys

import pytest
import torch

import fp8rs
from cases import TWO_PLANES
from distributed import ranks
from distributed.batched import BATCHES, build, shard
from distributed.collectives import Collectives
from distributed.models import RECIPES, batch, train
from fp8rs.monitoring import plot
from fp8rs.nn import GroupedLinear, observe
from fp8rs.quantize.recipes import resolve_recipe
from internals import run_in_fp8
from language_models import mixture
from oracle import statistics
from oracle.linear import blocks_of

pytestmark = pytest.mark.newest_torch

every_recipe = pytest.mark.parametrize("recipe", list(RECIPES))
KEYS = {"amax", "scale", "scale_min", "saturated", "underflow", "sqnr_db"}


def expected(weight, recipe):
    """Combine the statistics of all matrices, computed by the oracle in float64."""
    recipe = resolve_recipe(RECIPES[recipe])
    blocks = blocks_of(recipe)
    statistics_E = [
        statistics.of_blocks(
            matrix,
            recipe.fp8_dtype("weight"),
            blocks.weight,
            rounding=blocks.rounding,
            power_2_scale=blocks.power_2_scale,
        )
        for matrix in weight.detach().flatten(1, -2).cpu()
    ]
    signal = weight.detach().cpu().double().flatten(1).square().sum(1)
    sqnr_db = torch.tensor([expert["sqnr_db"] for expert in statistics_E]).double()
    noise = signal / 10 ** (sqnr_db / 10)
    mean = {}
    for key in ("saturated", "underflow"):
        mean[key] = sum(expert[key] for expert in statistics_E) / len(statistics_E)
    return mean | {
        "amax": max(expert["amax"] for expert in statistics_E),
        "scale": max(expert["scale"] for expert in statistics_E),
        "scale_min": min(expert["scale_min"] for expert in statistics_E),
        "sqnr_db": float(10 * torch.log10(signal.sum() / noise.sum())),
    }


def statistics_of(logged, name):
    prefix = f"fp8/{name}/weight/"
    return {n.removeprefix(prefix): v for n, v in logged.items() if n.startswith(prefix)}


def wide(weight):
    """Give a weight values of many magnitudes, of which some become 0."""
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        factors = torch.exp(4 * torch.randn(weight.shape, generator=generator))
        weight.mul_(factors.to(weight.device))


@every_recipe
@pytest.mark.parametrize("gated", [False, True], ids=["3-D", "4-D"])
def test_statistics_of_all_experts_equal_the_oracle(recipe, gated, monkeypatch):
    # Several matrices in a chunk, and a chunk within a matrix.
    monkeypatch.setattr(observe, "CHUNK", 96 * 100)
    model = build("cpu", recipe, 5, hidden=64, gated=gated)
    run_in_fp8(model.experts)
    wide(model.experts.gate_up)
    fp8_gemms = recipe in ("current", "delayed", "rowwise", "rowwise_with_gw_hp")
    logged = fp8rs.monitor(model, every=1).step()
    for name in ("gate_up", "down"):
        actual = statistics_of(logged, f"experts.{name}")
        if not fp8_gemms:
            # Without sharding, this recipe's weights are not quantized.
            assert actual == {}
            continue
        want = expected(model.experts.get_parameter(name), recipe)
        assert actual.keys() == KEYS
        assert actual == pytest.approx(want, rel=1e-5, abs=1e-5)
        if name == "gate_up":
            assert actual["underflow"] > 1e-3


@ranks(1, 2)
@every_recipe
@pytest.mark.parametrize("hidden", list(BATCHES))
def test_shards_have_the_statistics_of_the_whole_weight(rig, recipe, hidden):
    sizes = BATCHES[hidden]
    model = build(rig.device, recipe, sizes.experts)
    wide(model.experts.gate_up)
    want = {
        name: expected(model.experts.get_parameter(name), recipe) for name in ("gate_up", "down")
    }
    plain = build(rig.device, recipe, sizes.experts)
    for module in (model, plain):
        shard(module, rig, 0 if recipe in TWO_PLANES else sizes.dim)
    monitor = fp8rs.monitor(model, every=2)
    for step in range(3):
        calls = []
        for module in (model, plain):
            with Collectives() as collectives:
                train(module, torch.optim.SGD(module.parameters(), 0.0), [batch(rig, step)])
            calls.append([(call.kind, call.nbytes) for call in collectives.calls])
        # The monitor adds no collective to a forward or backward.
        assert calls[0] == calls[1]
        logged = monitor.step()
        assert bool(logged) == (step != 1)
        for name in want if logged else ():
            actual = statistics_of(logged, f"experts.{name}")
            assert actual == pytest.approx(want[name], rel=1e-5, abs=1e-5), name


@ranks(2)
@pytest.mark.parametrize("recipe", ["current", "block"])
def test_fp8_weights_have_amax_and_scales_only(rig, recipe):
    model = build(rig.device, recipe, 8, fp8_weights=True)
    amax = model.experts.down.dequantize().abs().max().item()
    shard(model, rig)
    logged = fp8rs.monitor(model, every=1).step()
    statistics = statistics_of(logged, "experts.down")
    assert statistics.keys() == {"amax", "scale", "scale_min"}
    assert statistics["amax"] == pytest.approx(amax, rel=1e-6)


def test_a_model_with_experts_only_is_monitored_and_plotted(tmp_path):
    pytest.importorskip("matplotlib")
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"up": GroupedLinear(4, 32, 64)})
    fp8rs.convert_to_float8_training(model, experts="fp8")
    file = tmp_path / "monitor.jsonl"
    monitor = fp8rs.monitor(model, every=1, file=file)
    for _ in range(2):
        monitor.step()
    assert monitor.worst()[0].layer == "up.weight"
    plot(file, tmp_path / "monitor.png")
    assert (tmp_path / "monitor.png").stat().st_size > 5_000


def test_weights_of_another_experts_implementation_are_not_quantized():
    model = mixture("mixtral")
    fp8rs.convert_to_float8_training(model, experts="fp8", filter_fqns=["attn", "lm_head"])
    monitor = fp8rs.monitor(model, every=1)
    name = next(name for name, _ in model.named_parameters() if name.endswith("down_proj"))
    results = []
    for following in ("eager", "fp8rs"):
        model(torch.arange(64).view(2, 32)).logits.sum().backward()
        model.set_experts_implementation(following)
        results.append(statistics_of(monitor.step(), name))  # observes the weights of the next step
    assert results[0]["sqnr_db"] > 20
    assert not results[1]


def test_other_steps_do_not_read_the_weights(monkeypatch):
    model = build("cpu", "current", 4)
    run_in_fp8(model.experts)
    monitor = fp8rs.monitor(model, every=3)
    calls = []
    add_batch = observe.add_batch
    monkeypatch.setattr(observe, "add_batch", lambda *a: calls.append(add_batch(*a)))
    for _ in range(6):
        monitor.step()
    assert len(calls) == 2 * 2, "two weights, before steps 3 and 6"
    assert "fp8rs.monitoring.experts" in sys.modules


def test_gemms_of_experts_are_not_switched_to_high_precision():
    model = build("cpu", "current", 4)
    assert fp8rs.high_precision(model, "*") == ["head"]
    with pytest.raises(ValueError, match=r"'experts\.\*' matches only weights of experts, such as"):
        fp8rs.high_precision(model, "experts.*")
    model = torch.nn.ModuleDict({"up": GroupedLinear(4, 32, 64)})
    fp8rs.convert_to_float8_training(model)
    with pytest.raises(ValueError, match=r"'\*' matches only weights of experts, such as 'up\.w"):
        fp8rs.high_precision(model, "*")
    with pytest.raises(
        ValueError, match="'head' matches no linear layer: 1 weights of experts are"
    ):
        fp8rs.high_precision(model, "head")
