"""FSDP2 over tensor parallelism, as torchtitan composes them: a 2-D mesh."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch._dynamo as dynamo
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from distributed import ranks
from distributed.models import RECIPES, batch, make

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
every_recipe = pytest.mark.parametrize("recipe", list(RECIPES))
both_weights = pytest.mark.parametrize("fp8_weights", [False, True], ids=["masters", "fp8"])


def parallel(rig, recipe, backend=None, hidden=(64,), **options):
    """A model whose blocks are split by tensor parallelism, compiled, then sharded."""
    mesh = rig.mesh(2, 2, names=("data", "tensor"))
    model = make(hidden, recipe=RECIPES[recipe], device=rig.device, **options)
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], PLAN)
        if backend is not None:
            block.compile(backend=backend, fullgraph=True)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model


def trained(model, rig, steps=3):
    """The outputs and this rank's gradients of some steps."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    seen = []
    for n in range(steps):
        y = model(batch(rig, n))
        y.square().mean().backward()
        seen.append([y.detach().clone(), *(p.grad.to_local().clone() for p in model.parameters())])
        optimizer.step()
        optimizer.zero_grad()
    return seen


@ranks(4)
@every_recipe
@both_weights
def test_compiled_blocks_compute_what_eager_ones_do(rig, recipe, fp8_weights):
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
    expected = trained(parallel(rig, recipe, fp8_weights=fp8_weights), rig)
    dynamo.reset()
    got = trained(parallel(rig, recipe, "aot_eager", fp8_weights=fp8_weights), rig)
    for step, (left, right) in enumerate(zip(expected, got, strict=True)):
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            assert torch.equal(a, b), (step, i)
    dynamo.reset()
