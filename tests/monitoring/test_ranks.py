"""Statistics over ranks: of shards and of all ranks' tokens, with one collective."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch._dynamo as dynamo
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import fp8rs
from distributed import ranks
from distributed.collectives import Collectives
from distributed.models import HIDDEN, RECIPES, batch, make, recipes, shard, shardings
from tensor_parallel import blocks

OPERANDS = ("input", "weight", "grad")


def step(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def sgd(model):
    return torch.optim.SGD(model.parameters(), 1e-2)


def assert_equal_on_all_ranks(rig, value):
    others = [None] * rig.world_size
    dist.all_gather_object(others, value)
    assert all(other == value for other in others)


@ranks(2, cuda=False)
@recipes
@shardings
@pytest.mark.parametrize("gather", [True, False], ids=["fp8", "high"])
def test_statistics_of_sharded_weights_equal_the_whole(rig, recipe, hidden, gather):
    """Shards may split blocks or be empty. The first step and later steps are compared."""
    options = {"recipe": RECIPES[recipe], "device": rig.device}
    reference = make(HIDDEN[hidden], **options)
    sharded = shard(make(HIDDEN[hidden], **options, enable_fsdp_float8_all_gather=gather), rig)
    results = []
    for model in (reference, sharded):
        monitor = fp8rs.monitor(model, every=2)
        optimizer = sgd(model)
        for n in range(3):
            # All ranks have the same tokens, so the sharded model takes the whole model's steps.
            step(
                model,
                optimizer,
                batch(rig, n, rows=16).new_tensor(torch.arange(512.0).view(16, 32)).sin(),
            )
            monitor.step()
        if model is sharded:
            assert_equal_on_all_ranks(rig, monitor.latest)
        results.append({n: v for n, v in monitor.latest.items() if "/weight/" in n})
    want, got = results
    assert want.keys() == got.keys()
    assert len(want) >= 5 * 5
    for name, value in want.items():
        assert got[name] == pytest.approx(value, rel=1e-4), name


@ranks(2, cuda=False)
def test_a_logged_step_has_one_collective_and_others_none(rig):
    model = shard(make(device=rig.device), rig)
    monitor = fp8rs.monitor(model, every=3)
    optimizer = sgd(model)
    counts = []
    for n in range(4):
        with Collectives() as collectives:
            step(model, optimizer, batch(rig, n))
            before = collectives.counts()
            monitor.step()
        counts.append((collectives.counts() - before).total())
        assert ("gather", torch.float64) not in before
    assert counts == [1, 0, 0, 1]


@ranks(2, cuda=False)
def test_statistics_cover_the_tokens_of_all_ranks(rig):
    """With scales per row, two ranks have the statistics of one rank with both parts."""
    model = make(recipe="rowwise", device=rig.device)
    parts = [batch(replace(rig, rank=rank)) for rank in range(rig.world_size)]
    parts[1][0, 0] = 100.0
    alone = dist.new_group([rig.rank], use_local_synchronization=True)
    monitor_of_all = fp8rs.monitor(model.head, group=alone)
    model.head(torch.cat(parts)).sum().backward()
    want = monitor_of_all.step()
    monitor = fp8rs.monitor(model.head)
    model.head(parts[rig.rank]).sum().backward()
    got = monitor.step()
    assert_equal_on_all_ranks(rig, got)
    assert got["fp8/root/input/amax"] == 100.0
    for name in (n for n in want if "/input/" in n):
        assert got[name] == pytest.approx(want[name], rel=2e-6), name


@ranks(2)
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_compiled_blocks_are_monitored(rig, recipe):
    """Monitored steps use a graph of their own and do not change the training."""
    import warnings

    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    runs = []
    for compiled, monitored in ((False, False), (False, True), (True, True)):
        dynamo.reset()
        backend = CompileCounterWithBackend("aot_eager")
        model = make((64, 64), recipe=recipe, device=rig.device)
        for block in model.blocks if compiled else ():
            block.compile(backend=backend, fullgraph=True)
        shard(model, rig, mp_policy=policy)
        monitor = fp8rs.monitor(model, every=2) if monitored else None
        optimizer = sgd(model)
        tensors = []
        logged = []
        graphs = []
        for n in range(7):
            # Whether the input requires a gradient selects the graph.
            tensors.append(step(model, optimizer, batch(rig, n).requires_grad_()))
            logged.append(monitor.step() if monitored else None)
            graphs.append(backend.frame_count)
        tensors += [p.to_local().detach() for p in model.parameters()]
        runs.append((tensors, logged, graphs))
    plain, eager, compiled = runs
    for other in (eager, compiled):
        assert all(torch.equal(a, b) for a, b in zip(plain[0], other[0], strict=True))
    assert eager[1] == compiled[1]
    assert [bool(statistics) for statistics in eager[1]] == [True, False] * 3 + [True]
    # With and without a monitor. Delayed scaling has two more graphs for first scales.
    assert compiled[2][-1] == compiled[2][-3] == (4 if recipe == "delayed" else 2), compiled[2]
    dynamo.reset()


@ranks(2, cuda=False)
@pytest.mark.parametrize("recipe", ["current", "block"])
def test_fp8_weights_have_only_amax_and_scales(rig, recipe):
    model = make(recipe=recipe, device=rig.device, fp8_weights=True)
    largest = model.head.weight.dequantize().abs().max().item()
    shard(model, rig)
    monitor = fp8rs.monitor(model)
    step(model, fp8rs.optim.AdamW(model.parameters()), batch(rig))
    got = monitor.step()
    assert got["fp8/head/weight/amax"] == largest
    names = {n.rsplit("/", 1)[1] for n in got if "/weight/" in n}
    assert names == {"amax", "scale"} | ({"scale_min"} if recipe == "block" else set())
    assert "fp8/head/input/sqnr_db" in got
    assert_equal_on_all_ranks(rig, got)


@ranks(2, cuda=False)
@pytest.mark.parametrize("gather", [True, False], ids=["fp8", "high"])
def test_high_precision_uses_the_gathered_weight(rig, gather):
    """After an FP8 all-gather it is the dequantized weight, otherwise the weight itself."""
    model = make(recipe="current", device=rig.device, enable_fsdp_float8_all_gather=gather)
    reference = make(recipe="current", device=rig.device)
    if gather:
        fp8rs.monitor(reference).close()
        for layer in (m for m in reference.modules() if isinstance(m, fp8rs.Float8Linear)):
            quantizer = fp8rs.Quantizer("current", columnwise=False)
            with torch.no_grad():
                layer.weight.copy_(quantizer(layer.weight).dequantize())
    assert len(fp8rs.high_precision(reference, "*")) == 5
    shard(model, rig)
    fp8rs.high_precision(model, "*")
    x = batch(rig)
    grads = []
    for module in (reference, model):
        y = module(x)
        y.square().mean().backward()
        grads.append([y, module.blocks[0].norm.weight.grad])
    assert torch.equal(grads[0][0], grads[1][0])
    mean = grads[0][1].clone()
    dist.all_reduce(mean)
    got = grads[1][1].full_tensor()
    assert torch.allclose(got, mean / rig.world_size, rtol=1e-5, atol=1e-7)


@ranks(2, cuda=False)
@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "mxfp8"])
@pytest.mark.parametrize("fp8", [True, False], ids=["styles of ours", "torch's"])
def test_tensor_parallel_layers_are_monitored(rig, recipe, fp8):
    """Operands that are gathered in FP8 have amax and scale only. Others have all statistics."""
    model = blocks.converted(recipe, rig)
    mesh = rig.mesh(names=("tp",))
    x = blocks.tokens(rig)
    if fp8:
        parallelize_module(model, mesh, blocks.plan())
        x = distribute_tensor(x, mesh, [Shard(blocks.SEQUENCE)])
    else:
        parallelize_module(model, mesh, blocks.plan(sequence=False, fp8=False))
    monitor = fp8rs.monitor(model, every=1)
    blocks.run(model, x)
    got = monitor.step()
    assert_equal_on_all_ranks(rig, got)
    for layer in ("wq", "wk", "wv", "wo"):
        for operand in OPERANDS:
            assert got[f"fp8/mixer.{layer}/{operand}/amax"] > 0
            assert got[f"fp8/mixer.{layer}/{operand}/scale"] > 0
    assert ("fp8/mixer.wq/input/sqnr_db" in got) != fp8
    assert "fp8/mixer.wo/input/sqnr_db" in got
    fp8rs.high_precision(model, "*")
    assert blocks.run(model, x)["y"].isfinite().all()
    assert monitor.step() == {}
