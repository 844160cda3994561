"""Converted layers under torch's tensor-parallel plans: the same results as on one rank."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

import fp8rs
from distributed import ranks


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


@ranks(2)
@pytest.mark.parametrize("recipe", ["current", "rowwise", "mxfp8", "delayed"])
def test_column_and_row_parallel_layers_compute_the_whole(rig, recipe):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    whole = fp8rs.convert_to_float8_training(Pair().to(rig.device), recipe=recipe)
    plain, split = Pair().to(rig.device), copy.deepcopy(whole)
    plain.load_state_dict(whole.state_dict())
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(split, rig.mesh(names=("tp",)), plan)
    x = torch.randn(8, 64).to(rig.device)
    results = {}
    for name, model in (("plain", plain), ("whole", whole), ("split", split)):
        y = model(x)
        y.square().sum().backward()
        results[name] = [y, *(p.grad for p in model.parameters())]
    for exact, one, two in zip(*results.values(), strict=True):
        two = two.full_tensor() if hasattr(two, "full_tensor") else two
        error, allowed = (two - exact).norm(), (one - exact).norm()
        # A rank's own scales are no coarser than the whole tensor's: the error is of FP8's size.
        assert 0 < error < 1.5 * allowed + 1e-4 * exact.norm()


@ranks(2)
def test_placements_without_a_rule_are_an_error(rig):
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    mesh = rig.mesh(names=("tp",))
    layer = fp8rs.convert_to_float8_training(nn.Linear(64, 96, bias=False))
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    x = distribute_tensor(torch.randn(8, 64), mesh, [Shard(0)])
    with pytest.raises(TypeError, match="what works is input Replicate"):
        layer(x)


@ranks(2)
@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_an_input_that_is_cut_by_rows_of_a_whole_weight(rig, recipe):
    """The gradients of weight and bias are those of all rows."""
    torch.manual_seed(0)
    plain = nn.Linear(32, 16).to(rig.device)
    model = nn.Sequential(copy.deepcopy(plain))
    fp8rs.convert_to_float8_training(model, recipe=recipe)
    mesh = rig.mesh()
    distribute_module(model, mesh)
    x, factors = (
        torch.randn(8, n, generator=torch.Generator().manual_seed(n)).to(rig.device)
        for n in (32, 16)
    )
    plain(x).mul(factors).sum().backward()
    own_x, own_factors = (distribute_tensor(t, mesh, [Shard(0)]) for t in (x, factors))
    (model(own_x) * own_factors).sum().backward()
    torch.testing.assert_close(model[0].bias.grad.full_tensor(), plain.bias.grad)
    error = (model[0].weight.grad.full_tensor() - plain.weight.grad).norm()
    assert error < 0.1 * plain.weight.grad.norm()
