"""A small model to compile, eager or sharded, and how many graphs it has."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import torch
import torch._dynamo as dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fp8rs
from cases import RECIPES

WIDTH = 32


class Block(nn.Module):
    """A norm, three layers that share its output, and an output layer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        h = self.norm(x)
        return x + self.o(torch.sigmoid(self.q(h)) * self.k(h) + self.v(h))


class Model(nn.Module):
    def __init__(self, wrap=None, blocks=2):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 48)
        self.wrap = wrap

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) if self.wrap is None else self.wrap(block, x)
        return self.head(x)


def build(recipe, device, wrap=None, gather=True, blocks=2):
    """Convert a `Model` with a recipe, or with one of `RECIPES` by name.

    Most of a test's time is the compiler's, and proportional to ``blocks``.
    """
    torch.manual_seed(0)
    model = Model(wrap, blocks).to(device)
    return fp8rs.convert_to_float8_training(
        model, recipe=RECIPES.get(recipe, recipe), enable_fsdp_float8_all_gather=gather
    )


def selective(block, x):
    """Run a block under selective checkpointing that saves matrix products."""
    saved = (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default)

    def policy(ctx, op, *args, **kwargs):
        save = op in saved
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def batch(device, n=0, length=8):
    generator = torch.Generator().manual_seed(n)
    return torch.randn(2, length, WIDTH, generator=generator).to(device)


@contextmanager
def counting():
    """Yield a backend that counts graphs. Reset Dynamo before and after."""
    dynamo.reset()
    yield CompileCounterWithBackend("aot_eager")
    dynamo.reset()


def graphs(recipe, count):
    """Return how many graphs a training compiles, if a step has ``count``.

    Delayed scaling compiles its first steps separately.
    """
    return 2 * count if recipe == "delayed" else count
