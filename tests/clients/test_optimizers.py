"""Optimizers of other libraries on converted weights, on one device and on FSDP2 shards."""

from __future__ import annotations

import pytest
import torch
from harness import needs
from torch import nn
from torch.distributed.fsdp import fully_shard

import fp8rs
from distributed import ranks
from distributed.models import full_weights, same_bytes, train

#: torchao quantizes the states of parameters with at least 4096 elements, in blocks of 256.
WIDTH = 128

# torchao compiles its step with Inductor, which warns often on CPU.
pytestmark = pytest.mark.filterwarnings("default")


torchao = needs("torchao", "0.18")
schedulefree = needs("schedulefree", "1.4")


def model_for(recipe, device="cpu"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).to(device)
    if recipe is not None:
        fp8rs.convert_to_float8_training(model, recipe=recipe)
    return model


def inputs(rank=0):
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(rank))


def check(model, optimizer, x, steps=4):
    """Assert that losses decrease and every weight moves. Return the losses."""
    before = full_weights(model)
    losses = train(model, optimizer, [x] * steps)
    assert losses[-1] < losses[0]
    after = full_weights(model)
    assert all(not torch.equal(before[n], after[n]) for n in before)
    return losses


@torchao
@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
def test_torchaos_8_bit_adamw_trains(recipe):
    from torchao.optim import AdamW8bit

    losses = []
    for chosen in (None, recipe):
        model = model_for(chosen)
        optimizer = AdamW8bit(model.parameters(), lr=1e-2)
        losses.append(check(model, optimizer, inputs()))
        state = optimizer.state[model[0].weight]
        assert type(state["exp_avg"]).__name__ == "OptimState8bit"
    # Four steps whose gradients are rounded to FP8 (current and delayed to 2**-4 of each value).
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@torchao
@ranks(2, cuda=False, seconds=240)
@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
def test_torchaos_8_bit_adamw_trains_shards(rig, recipe):
    from torchao.optim import AdamW8bit

    losses = []
    for chosen in (None, recipe):
        model = model_for(chosen)
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=rig.mesh())
        fully_shard(model, mesh=rig.mesh())
        optimizer = AdamW8bit(model.parameters(), lr=1e-2)
        losses.append(check(model, optimizer, inputs(rig.rank)))
        state = optimizer.state[model[0].weight]["exp_avg"]
        assert type(state.to_local()).__name__ == "OptimState8bit"
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def schedule_free(model, x):
    """Train, and evaluate with averaged weights. Return the losses."""
    import schedulefree

    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-2)
    optimizer.train()
    losses = check(model, optimizer, x, steps=5)
    with torch.no_grad():
        training = model(x)
        weights = full_weights(model)
        optimizer.eval()
        averages = full_weights(model)
        evaluation = model(x)
    assert all(not torch.equal(weights[n], averages[n]) for n in weights)
    # The forward after the swap uses the averaged weights.
    assert not torch.equal(training, evaluation)
    optimizer.train()
    back = full_weights(model)
    assert all(torch.allclose(back[n], weights[n], atol=1e-6) for n in weights)
    return losses


@schedulefree
@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
def test_schedule_free_trains_and_evaluates(recipe):
    losses = [schedule_free(model_for(chosen), inputs()) for chosen in (None, recipe)]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@schedulefree
@ranks(2, cuda=False)
@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
def test_schedule_free_trains_and_evaluates_shards(rig, recipe):
    losses = []
    for chosen in (None, recipe):
        model = model_for(chosen)
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=rig.mesh())
        fully_shard(model, mesh=rig.mesh())
        losses.append(schedule_free(model, inputs(rig.rank)))
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_the_check_fails_if_no_weight_moves():
    """A learning rate of 0 moves no weight."""
    model = model_for("current")
    before = full_weights(model)
    with pytest.raises(AssertionError):
        check(model, torch.optim.SGD(model.parameters(), lr=0.0), inputs())
    assert all(same_bytes(before[n], w) for n, w in full_weights(model).items())
