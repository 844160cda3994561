"""A block for tensor parallelism, with its plan, its input and one training step."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
)

import cases
import fp8rs
from fp8rs.tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)

RECIPES = {
    **cases.RECIPES,
    "current of powers of 2": fp8rs.Float8CurrentScaling(power_2_scale=True),
}
every_recipe = pytest.mark.parametrize("recipe", list(RECIPES))
both_weights = pytest.mark.parametrize("fp8_weights", [False, True], ids=["masters", "fp8"])
WIDTH = 64
SEQUENCE = 1


class Mixer(nn.Module):
    """The layers of attention: three that share an input, and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.wo = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.wo(torch.tanh(self.wq(x)) * self.wk(x) + self.wv(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixer = Mixer()

    def forward(self, x):
        return x + self.mixer(self.norm(x))


def plan(sequence=True, fp8=True):
    """Return the plan of a `Block`, with sequence-parallel or replicated activations."""
    column, row = (
        (Float8ColwiseParallel, Float8RowwiseParallel)
        if fp8
        else (ColwiseParallel, RowwiseParallel)
    )
    styles = {f"mixer.w{name}": column() for name in "qkv"}
    if not sequence:
        return {**styles, "mixer.wo": row()}
    placed = {"input_layouts": (Shard(SEQUENCE),), "desired_input_layouts": (Replicate(),)}
    return {
        "norm": SequenceParallel(sequence_dim=SEQUENCE),
        "mixer": PrepareFloat8ModuleInput(**placed),
        **styles,
        "mixer.wo": row(output_layouts=Shard(SEQUENCE), use_local_output=False),
    }


def converted(recipe, rig, **options):
    torch.manual_seed(0)
    model = Block().to(rig.device)
    return fp8rs.convert_to_float8_training(model, recipe=RECIPES[recipe], **options)


def tokens(rig, length=10, seed=0):
    """Return (2, length, WIDTH), equal on all ranks, whose shards have different maxima."""
    x = torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(seed))
    x *= torch.linspace(0.5, 4.0, length).view(1, -1, 1)
    return x.to(rig.device)


def run(model, x):
    """Run one step. Return the output and all gradients as full tensors."""
    y = model(x)
    y = y.full_tensor() if isinstance(y, DTensor) else y
    y.square().mean().backward()
    results = {"y": y, **{name: p.grad for name, p in model.named_parameters()}}
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in results.items()}
