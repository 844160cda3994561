"""torch.compile under FSDP2: one graph for equal blocks, the bytes of eager, no break of ours."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo as dynamo
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from cases import each_recipe
from compiled_models import batch, build, graphs
from distributed import ranks

some_recipes = each_recipe("current", "delayed", "mxfp8")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(recipe, rig, gather, method=None, backend=None):
    """A model whose blocks are compiled in one of the ways that there are."""
    model = build(recipe, rig.device, gather=gather)
    if method == "block.compile() before":
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
    for block in model.blocks:
        fully_shard(block, mesh=rig.mesh(), mp_policy=BF16)
    if method == "block.compile() after":
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
    if method == "torch.compile(block)":
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block, backend=backend)
    fully_shard(model, mesh=rig.mesh(), mp_policy=BF16)
    run = torch.compile(model, backend=backend) if method == "torch.compile(model)" else model
    return model, run


def train(model, run, rig, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    results = []
    for n in range(steps):
        y = run(batch(rig.device, 10 * n + rig.rank))
        y.float().square().mean().backward()
        results.append(
            [y.detach().clone(), *(p.grad.to_local().clone() for p in model.parameters())]
        )
        optimizer.step()
        optimizer.zero_grad()
    return results


@ranks(2)
@some_recipes
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize(
    ("method", "graph_count"),
    [
        ("block.compile() before", 1),
        ("block.compile() after", 1),
        ("torch.compile(block)", 1),
        # The stem and the head belong to the root: what is around FSDP2's hooks of each block.
        ("torch.compile(model)", 3),
    ],
)
def test_sharded_models_compile(rig, recipe, gather, method, graph_count):
    """Equal blocks are one graph; two where delayed scaling has its first scales."""
    import warnings

    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
    expected = train(*sharded(recipe, rig, gather), rig)
    dynamo.reset()
    dynamo.utils.counters.clear()
    backend = CompileCounterWithBackend("aot_eager")
    got = train(*sharded(recipe, rig, gather, method, backend), rig)
    for step, (left, right) in enumerate(zip(expected, got, strict=True)):
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            assert torch.equal(a, b), (step, i)
    assert backend.frame_count == graphs(recipe, graph_count), backend.frame_count
    breaks = dynamo.utils.counters["graph_break"]
    assert not [reason for reason in breaks if "fp8rs" in reason], breaks
    if method != "torch.compile(model)":
        assert not breaks, breaks
    dynamo.reset()
