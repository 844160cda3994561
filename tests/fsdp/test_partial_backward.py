"""Under FSDP2, a backward that needs only some gradients runs only their GEMMs."""

import copy

import torch

from distributed import ranks
from distributed.models import EVEN, RECIPES, UNEVEN, batch, linears, make, recipes, shard
from gemms import counted_gemms, zero_bubble, zero_bubble_works


def pipelined(model, rig):
    """Shard a model as pipeline stages are: nothing is freed or reduced between two backwards."""
    shard(model, rig, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    return model


@ranks(2)
@recipes
def test_gradient_of_the_input_runs_dgrads_alone(rig, recipe):
    model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
    other = shard(copy.deepcopy(model), rig)
    shard(model, rig)
    x = batch(rig).requires_grad_()
    other(x).square().sum().backward()
    y = model(x)
    with counted_gemms() as count:
        (dx,) = torch.autograd.grad(y.square().sum(), x)
    assert count.fp8 == len(linears(model))
    assert count.directions == [(True, False)] * len(linears(model))
    assert torch.equal(dx, x.grad)


@zero_bubble_works
@ranks(2)
@recipes
def test_zero_bubble_backwards_give_the_gradients_of_one(rig, recipe):
    for fp8_weights in (False, True):
        model = make(EVEN, recipe=RECIPES[recipe], device=rig.device, fp8_weights=fp8_weights)
        other = pipelined(copy.deepcopy(model), rig)
        pipelined(model, rig)
        x = batch(rig).requires_grad_()
        other(x).square().sum().backward()
        expected = x.grad
        x.grad = None
        with counted_gemms() as count:
            dx = zero_bubble(model, x)
        assert count.fp8 == 3 * len(linears(model))
        assert torch.equal(dx, expected)
        layers = linears(other)
        for name, layer in linears(model).items():
            for mine, its in zip(layer.parameters(), layers[name].parameters(), strict=True):
                assert torch.equal(mine.grad, its.grad), name
