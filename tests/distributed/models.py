"""Small models for multi-rank tests, their training, and checks of their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import cases
import fp8rs
from fp8rs.quantize.recipes import resolve_recipe
from fp8rs.tensor.quantized import TENSOR_TYPES

from .collectives import Collectives

WIDTH = 32


class Block(nn.Module):
    """Two linear layers and a norm, so that not every parameter is a linear weight."""

    def __init__(self, hidden: int, width: int = WIDTH, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """A stack of blocks with the given hidden sizes.

    A size below the world size gives empty shards.
    """

    def __init__(self, hidden: Iterable[int] = (64, 64), width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(h, width) for h in hidden)
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BLOCKS = cases.BLOCK_RECIPES
"""Recipes with a scale for each row or block."""

RECIPES = {**cases.RECIPES, **BLOCKS}

EVEN, UNEVEN, EMPTY = (64, 48), (50, 27), (5, 3)
"""Hidden sizes whose shards are even, uneven and partly empty on 2 and 4 ranks."""

HIDDEN = {"even": EVEN, "uneven": UNEVEN, "empty": EMPTY}

shardings = pytest.mark.parametrize("hidden", list(HIDDEN))
recipes = pytest.mark.parametrize("recipe", list(RECIPES))

ADAMWS = {
    "fp8rs-adamw": {},
    "fp8rs-adamw-no-masters": {"master_weights": False},
    "fp8rs-adamw-bf16": {"state_dtype": torch.bfloat16},
    "fp8rs-adamw-bf16-no-masters": {"state_dtype": torch.bfloat16, "master_weights": False},
}
"""Arguments of fp8rs.optim.AdamW, by the name of the optimizer in a report."""


def make(
    hidden: Iterable[int] = EVEN,
    *,
    recipe: Any = "current",
    device: Any = "cpu",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **convert: Any,
) -> Stack:
    """Return a converted model, equal on all ranks."""
    torch.manual_seed(seed)
    model = Stack(hidden).to(device=device, dtype=dtype)
    if recipe is not None:
        fp8rs.convert_to_float8_training(model, recipe=recipe, **convert)
    return model


def shard(model: Stack, rig: Any = None, **options: Any) -> Stack:
    """Call fully_shard on each block and on the root."""
    if rig is not None:
        options.setdefault("mesh", rig.mesh())
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the full high-precision weights of all linear layers, sharded or not."""
    weights = {}
    for name, value in model.state_dict().items():
        if name.endswith("weight") and value.dim() == 2:
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            weights[name.removesuffix(".weight")] = full.detach().clone()
    return weights


def whole_planes(weight: torch.Tensor, recipe: str) -> tuple[Any, ...]:
    """Return rowwise codes, rowwise scale, columnwise codes and columnwise scale of a full weight.

    The columnwise ones are None for formats whose rowwise plane serves the forward and the
    backward. With delayed scaling, the scale is the current scale, as in the first step.
    """
    kind = resolve_recipe(RECIPES[recipe]).block_format("weight")
    if kind.per_tensor:
        codes, _, scale = torch.ops.fp8rs.quantize_current(weight, torch.float8_e4m3fn, True, False)
        return codes, scale, None, None
    columnwise = kind.block == (1, 32)
    planes = torch.ops.fp8rs.quantize_blocks(
        weight, torch.float8_e4m3fn, list(kind.block), kind.scale_dtype, True, columnwise
    )
    return tuple(planes) if columnwise else (*planes[:2], None, None)


def expected(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and the scale of a full weight with current scaling."""
    return whole_planes(weight, "current")[:2]


def check_planes(weight: Any, values: torch.Tensor, recipe: str) -> None:
    """Assert that a gathered weight has the bytes of the full weight, and no additional plane."""
    codes, scale, col, col_scale = whole_planes(values, recipe)
    kind = resolve_recipe(RECIPES[recipe]).block_format("weight")
    assert type(weight) is TENSOR_TYPES[kind.scale_dtype]
    assert weight.rowwise.format == kind
    assert same_bytes(weight.rowwise.data, codes)
    assert same_bytes(weight.rowwise.scale, scale)
    if col is not None:
        assert same_bytes(weight.columnwise.data, col)
        assert same_bytes(weight.columnwise.scale, col_scale)
    dequantized = torch.ops.fp8rs.dequantize(codes, scale, list(kind.block), weight.dtype)
    assert same_bytes(weight.dequantize(), dequantized)


def watch_weights(model: nn.Module, callback: Callable[[str, Any], None]) -> None:
    """Call ``callback(name, weight)`` before each linear layer's forward."""
    for name, module in linears(model).items():
        module.register_forward_pre_hook(
            lambda module, args, name=name: callback(name, module.weight)
        )


def batch(rig: Any, step: int = 0, rows: int = 16, width: int = WIDTH) -> torch.Tensor:
    """Return this rank's part of a global batch that does not depend on the world size."""
    generator = torch.Generator().manual_seed(1000 + step)
    global_batch = torch.randn(rows, width, generator=generator)
    return global_batch.chunk(rig.world_size)[rig.rank].to(rig.device)


def bits(t: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, which compare equal for equal NaN."""
    return t.detach().reshape(-1).contiguous().view(torch.uint8)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bytes. Devices may differ."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(bits(a).to(b.device), bits(b))


def assert_same_bytes(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Assert that two dictionaries have the same names and the same bytes under each name."""
    assert actual.keys() == wanted.keys()
    for name, tensor in actual.items():
        assert same_bytes(tensor, wanted[name]), name


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[torch.Tensor],
) -> list[float]:
    """Train a model on a fixed function of its input. Return the loss of each step."""
    losses = []
    for x in batches:
        target = torch.sin(3 * x) + x.roll(1, -1)
        loss = torch.nn.functional.mse_loss(model(x).float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def train_with_histories(
    model: nn.Module, rig: Any, steps: int = 3, lr: float = 1e-2
) -> dict[str, torch.Tensor]:
    """Train until the delayed scale of every sharded weight comes from its history.

    Returns the maximum amax of each full weight over these forwards, from which the next forward
    computes its scale.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-5)
    amaxes: dict[str, torch.Tensor] = {}
    for n in range(steps):
        for name, weight in full_weights(model).items():
            amax = weight.float().abs().amax()
            amaxes[name] = amaxes.get(name, amax).maximum(amax)
        train(model, optimizer, [batch(rig, n)])
    ready = [m.fp8_ready[0] for m in linears(model).values()]
    assert steps >= 3 and all(ready), ready
    return amaxes


def on_all_ranks(t: torch.Tensor) -> bool:
    """Return whether all ranks hold the same bytes. All ranks must call it."""
    others = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(others, t)
    return all(same_bytes(other, t) for other in others)


def reduces(collectives: Collectives) -> list[int]:
    """Return the bytes of each all-reduce, in order."""
    return [c.nbytes for c in collectives.calls if c.kind == "reduce"]
