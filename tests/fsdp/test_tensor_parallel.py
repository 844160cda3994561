"""FSDP2 over tensor parallelism, as torchtitan composes them: a 2-D mesh."""

from __future__ import annotations

import copy
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

import fp8rs
from cases import each_recipe
from distributed import ranks
from distributed.models import RECIPES, Stack, batch, linears, make
from fp8rs.optim import AdamW

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


def full_value(parameter):
    """The values of a parameter on one device."""
    value = parameter.detach()
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.dequantize() if isinstance(value, fp8rs.QuantizedTensor) else value


def trained(model, rig, steps=3):
    """The outputs and this rank's gradients of some steps."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    results = []
    for n in range(steps):
        y = model(batch(rig, n))
        y.square().mean().backward()
        results.append(
            [y.detach().clone(), *(p.grad.to_local().clone() for p in model.parameters())]
        )
        optimizer.step()
        optimizer.zero_grad()
    return results


@ranks(4)
@each_recipe("delayed", "mxfp8", of=RECIPES)
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


@ranks(4)
@every_recipe
@pytest.mark.parametrize("sharded", [False, True], ids=["tp", "fsdp and tp"])
def test_masters_begin_with_the_first_values_of_a_ranks_own_part(rig, recipe, sharded):
    """Sizes that are divided evenly and unevenly, also with empty parts."""
    mesh = rig.mesh(2, 2, names=("data", "tensor"))
    with fp8rs.quantized_init(RECIPES[recipe], preserve_high_precision_init_val=True):
        model = Stack((64, 50, 3)).to(rig.device)
    first = {
        name: layer.weight.get_high_precision_init_val().clone()
        for name, layer in linears(model).items()
    }
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], PLAN)
        if sharded:
            fully_shard(block, mesh=mesh["data"])
    if sharded:
        fully_shard(model, mesh=mesh["data"])
    optimizer = AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, layer in linears(model).items():
        master = full_value(optimizer.state[layer.weight]["master"])
        weight = full_value(layer.weight)
        assert torch.equal(master.cpu(), first[name]), name
        # Half of the distance between codes where they are farthest apart, with E8M0 scales.
        assert (weight - master).abs().max() <= master.abs().max() / 14, name


def stepped_at_random(model):
    """One step of equal gradients, whose codes are rounded up or down."""
    optimizer = AdamW(model.parameters(), lr=0.03, weight_decay=0.0, master_weights=False)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return model


@ranks(4)
@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "mxfp8", "mxfp8 of 1x32"])
@pytest.mark.parametrize("sharded", [False, True], ids=["tp", "fsdp and tp"])
def test_codes_are_rounded_with_other_numbers_on_each_rank(rig, recipe, sharded):
    """With equal rows, parts that are rounded with equal numbers would stay equal."""
    mesh = rig.mesh(2, 2, names=("data", "tensor"))
    model = make((64,), recipe=RECIPES[recipe], device=rig.device, fp8_weights=True)
    block = model.blocks[0]
    for layer in (block.up, block.down):  # the even columns have the scales, whatever is cut
        layer.weight.detach().copy_(2.0 - torch.arange(layer.in_features) % 2)
    unsharded_up = stepped_at_random(copy.deepcopy(model)).blocks[0].up.weight.dequantize()
    parallelize_module(block, mesh["tensor"], PLAN)
    if sharded:
        fully_shard(block, mesh=mesh["data"])
    stepped_at_random(model)
    up, down = (full_value(layer.weight) for layer in (block.up, block.down))
    if not sharded or recipe in ("rowwise", "mxfp8"):
        # By rows it does not matter how a weight is cut.
        assert torch.equal(up, unsharded_up)
    for parts in (up[:, 1::2].chunk(4), down[:, 1::2].chunk(2, 1), down[:, 1::2].chunk(2)):
        for i, a in enumerate(parts):
            assert len(a.unique()) == 2, "up or down"
            for b in parts[:i]:
                assert 0.1 < (a != b).float().mean() < 0.7
