"""What the benchmarks count: collectives, stored bytes and peak memory."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from distributed import ranks
from fp8rs import convert_to_float8_training
from fp8rs.demo.model import Llama, LlamaConfig, parameter_count
from fp8rs.demo.train import HIGH_PRECISION, Settings, shard
from fp8rs.optim import AdamW

sys.path.append(str(Path(__file__).parents[2] / "benches"))
from meter import Meter, converted_weights, peak_memory
from traffic import counted

BENCHES = Path(__file__).parents[2] / "benches"
TINY = LlamaConfig(vocabulary=256, dim=32, layers=2, heads=4, kv_heads=2, hidden=64)


@ranks(2, cuda=False)
def test_benches_count_the_collectives_of_fp8_weights(rig: Any) -> None:
    config = LlamaConfig(vocabulary=64, dim=64, layers=2, heads=2, kv_heads=1, hidden=128)
    model = Llama(config)
    model.init_weights(torch.Generator().manual_seed(0))
    names = converted_weights(model)
    elements = parameter_count(model)
    converted = sum(p.numel() for n, p in model.named_parameters() if n in names)
    convert_to_float8_training(
        model, recipe="current", filter_fqns=HIGH_PRECISION, fp8_weights=True
    )
    shard(model)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    with counted(model, rig.world_size) as traffic:
        model.loss(torch.arange(66).reshape(2, 33) % 64).backward()
        optimizer.step()
    # One byte per element, in the forward and in the backward.
    assert traffic.handed_over == 2 * converted
    assert sum(traffic.scatters) == 4 * elements
    # Four fp32 values per weight synchronize the scales, then fp8rs.optim reduces its amax.
    assert traffic.all_reduces == [16 * len(names), 4 * len(names)]


def test_benches_count_a_copy_of_the_weights() -> None:
    meter = Meter()
    model = Llama(TINY)
    model.init_weights(torch.Generator().manual_seed(0))
    names = converted_weights(model)
    elements = sum(p.numel() for n, p in model.named_parameters() if n in names)
    convert_to_float8_training(
        model,
        recipe="current",
        filter_fqns=HIGH_PRECISION,
        fp8_weights=True,
        preserve_high_precision_init_val=True,
    )
    optimizer = AdamW(model.parameters())
    # The values before quantization are kept until the masters are initialized with them.
    assert meter.at_rest(model, optimizer, names).weights == pytest.approx(5, rel=0.01)
    model.loss(torch.zeros(1, 9, dtype=torch.int64)).backward()
    optimizer.step()
    bytes_at_rest = meter.at_rest(model, optimizer, names)
    assert bytes_at_rest.weights == pytest.approx(1, rel=0.01)
    assert bytes_at_rest.optimizer == pytest.approx(12, rel=0.01)
    weight_copy = torch.zeros(elements)
    assert meter.at_rest(model, optimizer, names).weights == pytest.approx(5, rel=0.01)
    assert weight_copy.numel() == elements


def test_peak_memory_counts_freed_tensors() -> None:
    before = peak_memory("cpu")
    nbytes = 2 * before
    torch.zeros(nbytes, dtype=torch.uint8).add_(1)
    assert peak_memory("cpu") >= nbytes


def bench_of_fp8_weights() -> ModuleType:
    """Import benches/fp8_weights.py, whose name is also that of a folder of tests."""
    spec = importlib.util.spec_from_file_location("bench", BENCHES / "fp8_weights.py")
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    return bench


@pytest.mark.long
@ranks(2, cuda=False)
@pytest.mark.parametrize(("recipe", "weight_bytes"), [("delayed", 1), ("mxfp8", 1 + 1 / 1024)])
def test_the_bench_of_fp8_weights_trains_with_masters_as_with_master_weights(
    rig: Any, recipe: str, weight_bytes: float
) -> None:
    bench = bench_of_fp8_weights()
    settings = Settings.choose("cpu", rig.world_size, steps=3)
    lines: list[dict[str, Any]] = []
    master = bench.train(settings, recipe, "master", lines.append)
    fp8 = bench.train(settings, recipe, "masters", lines.append)
    assert len(lines) == 6

    losses = [[run["held_out"][0][1], run["held_out"][-1][1]] for run in (master, fp8)]
    assert losses[1][0] == pytest.approx(losses[0][0], rel=2e-3)
    assert losses[1][1] == pytest.approx(losses[0][1], rel=1e-2)

    assert master["at_rest"] == pytest.approx({"weights": 4, "optimizer": 8}, rel=0.01)
    # Scales of tensors and counters of steps add a few bytes.
    assert weight_bytes <= fp8["at_rest"]["weights"] <= weight_bytes + 0.01
    # The optimizer stores masters and two moments in fp32.
    assert 12 <= fp8["at_rest"]["optimizer"] <= 12.01
