"""A model with FP8 weights and a sharded copy of it, to be trained and compared."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.tensor import DTensor

from distributed.batched import BATCHES, make_any, shard_any
from distributed.models import UNEVEN, WIDTH, same_bytes
from fp8rs.optim import AdamW
from fp8rs.tensor.quantized import QuantizedTensor
from internals import handle_of_tensor, handles_of, local_of, storage_of


def batch(rig, step=0):
    """Return a batch that is equal on all ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(16, WIDTH, generator=generator).to(rig.device)


#: Weights of `pair`: linear layers, and batched ones that are sharded by matrices and by rows.
WEIGHTS = {"layers": UNEVEN, **BATCHES}
del WEIGHTS["8 experts"]

each_weights = pytest.mark.parametrize("weights", list(WEIGHTS))


def pair(rig, recipe, hidden=UNEVEN, **options):
    """Return a model with FP8 weights, and a sharded copy of it.

    Args:
        rig: the ranks.
        recipe: a name of `RECIPES`.
        hidden: hidden sizes, or a `Batch`.
        options: of fully_shard.
    """
    reference = make_any(hidden, device=rig.device, recipe=recipe, seed=0, fp8_weights=True)
    options.setdefault("mesh", rig.mesh())
    return reference, shard_any(copy.deepcopy(reference), **options)


def optimizers(*models):
    return [AdamW(m.parameters(), lr=1e-2) for m in models]


def shards(model):
    """Return the local tensors of the sharded weights by name."""
    return {
        name: local_of(module.get_parameter(weight_name))
        for name, module, weight_name in converted(model)
    }


def converted(model):
    """Return the name of each converted parameter, its module and its name there."""
    return [
        (f"{path}.{name}", module, name)
        for path, module in model.named_modules()
        for name in handles_of(module)
    ]


def contents(model):
    """Return copies of the planes of all FP8 weights, sharded or not."""
    tensors = []
    for local in shards(model).values():
        if isinstance(local, QuantizedTensor):
            tensors += [t.clone() for t in storage_of(local).tensors()]
    assert tensors
    return tensors


def same(left, right):
    return all(same_bytes(a, b) for a, b in zip(left, right, strict=True))


def full(parameter):
    """Return the full values of a parameter."""
    if not isinstance(parameter, DTensor):
        return parameter.detach().dequantize() if quantized(parameter) else parameter.detach()
    local = local_of(parameter)
    return DTensor.from_local(
        local.dequantize() if quantized(local) else local.detach(),
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    ).full_tensor()


def quantized(tensor):
    return isinstance(tensor, QuantizedTensor)


def assert_equal(model, reference):
    wanted = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert same_bytes(full(parameter), full(wanted[name])), name


def assert_fp8(model):
    for name, module, weight_name in converted(model):
        local = local_of(module.get_parameter(weight_name))
        assert quantized(local), name
        assert handle_of_tensor(local).module is module


def loss_of(model, x):
    return model(x).square().mean()


def assert_same_training(rig, model, reference, steps=2, forward=loss_of):
    """Assert that two models have equal losses while they train, and equal weights afterwards."""
    models = (reference, model)
    steppers = optimizers(*models)
    for n in range(steps):
        losses = [f(m, batch(rig, n)) for f, m in zip((loss_of, forward), models, strict=True)]
        assert same_bytes(losses[0].detach(), losses[1].detach()), n
        for loss, stepper in zip(losses, steppers, strict=True):
            loss.backward()
            stepper.step()
            stepper.zero_grad()
    assert_equal(model, reference)
