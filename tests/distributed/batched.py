"""A model with batched weights (E, N, K), and the same model with a parameter for each matrix."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import fp8rs
from cases import TWO_PLANES
from fp8rs.convert.fp8_weights import quantize_weight
from fp8rs.nn.fp8_params import add_fp8_params
from fp8rs.quantize.planes import Plane
from fp8rs.quantize.recipes import resolve_recipe
from internals import local_of, state_of

from . import models
from .models import RECIPES, same_bytes, whole_planes

NAMES = ("gate_up", "down")

#: Recipes with the dimensions that FSDP2 can shard batched weights along.
SHARDINGS = [(r, dim) for r in RECIPES for dim in ((0,) if r in TWO_PLANES else (0, 1))]


class Batch(NamedTuple):
    """Batched weights of a model, in place of the hidden sizes of `distributed.models.make`.

    Attributes:
        experts: number of matrices of each weight.
        dim: the dimension that FSDP2 shards.
    """

    experts: int
    dim: int


BATCHES = {"8 experts": Batch(8, 0), "3 experts": Batch(3, 0), "rows of 3 experts": Batch(3, 1)}
"""Batched weights whose shards are even, uneven and empty, and parts of each matrix."""

SAVED_BATCHES = {**BATCHES, "1 expert": Batch(1, 0), "rows of 1 expert": Batch(1, 1)}
"""Batched weights of checkpoints: also one matrix, on one rank or in parts."""


class Experts(nn.Module):
    """An MLP for each expert. Every token visits all experts.

    Args:
        gate_up: (E, hidden, width), or a matrix for each expert.
        down: (E, width, hidden), or a matrix for each expert.
    """

    def __init__(self, gate_up: Any, down: Any) -> None:
        super().__init__()
        if isinstance(gate_up, torch.Tensor):
            self.gate_up = nn.Parameter(gate_up)
            self.down = nn.Parameter(down)
        else:
            self.each = nn.ModuleList(Experts(*pair) for pair in zip(gate_up, down, strict=True))

    def weight(self, name: str) -> torch.Tensor:
        if hasattr(self, "each"):
            return torch.stack([getattr(expert, name) for expert in self.each])
        return getattr(self, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, down = map(self.weight, NAMES)
        x = x.expand(gate_up.shape[0], *x.shape)
        h = torch.bmm(x, gate_up.flatten(1, -2).transpose(-1, -2)).relu()
        return torch.bmm(h, down.transpose(-1, -2)).mean(0)


class Model(nn.Module):
    """Experts and a head. Features are repeated to the model's width.

    Attributes:
        dim: the dimension along which `shard` shards the experts.
    """

    dim = 0

    def __init__(self, experts: Experts, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, width, bias=False)
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.repeat(1, self.head.in_features // x.shape[1])
        return self.head(wide + self.experts(wide))[:, : x.shape[1]].clone()


def build(
    device: Any,
    recipe: Any,
    experts: int,
    *,
    hidden: int = 48,
    width: int = 96,
    fp8_weights: bool = False,
    separate: bool = False,
    gated: bool = False,
    seed: int = 0,
    keep_init: bool = False,
) -> Model:
    """Return a converted model, equal on all ranks.

    Args:
        device: the device.
        recipe: a recipe, or a name of `RECIPES`.
        experts: number of experts.
        hidden: rows of each expert's first matrix.
        width: columns of that matrix.
        fp8_weights: whether codes and scales are stored.
        separate: make a parameter for each matrix.
        gated: give the first weight the shape (E, 2, hidden / 2, width).
        seed: of the values.
        keep_init: keep the values from before the first rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    gate_up, down = (
        torch.randn(experts, *shape, generator=generator) / 8
        for shape in ((hidden, width), (width, hidden))
    )
    # The scales of experts differ.
    gate_up *= torch.arange(1, experts + 1).view(-1, 1, 1)
    if gated:
        gate_up = gate_up.unflatten(1, (2, -1))
    torch.manual_seed(seed)
    model = Model(Experts(*((list(gate_up), list(down)) if separate else (gate_up, down))), width)
    model.to(device)
    options = {"preserve_high_precision_init_val": keep_init} if fp8_weights else {}
    kind = resolve_recipe(RECIPES.get(recipe, recipe))
    fp8rs.convert_to_float8_training(model, recipe=kind, fp8_weights=fp8_weights, **options)
    for name, module in model.named_modules():
        if isinstance(module, Experts) and not hasattr(module, "each"):
            for parameter in NAMES if fp8_weights else ():
                quantize_weight(module, parameter, kind, keep_init)
            add_fp8_params(module, NAMES, state_of(model.head), name)
    return model


def shard(
    model: Model, rig: Any = None, dim: int = 0, *, root: bool = True, **options: Any
) -> Model:
    """Call fully_shard on the experts and, with ``root``, on the model."""
    if rig is not None:
        options.setdefault("mesh", rig.mesh())
    fully_shard(model.experts, shard_placement_fn=lambda p: Shard(dim), **options)
    return fully_shard(model, **options) if root else model


def make_any(
    hidden: Any,
    *,
    device: Any,
    recipe: Any,
    fp8_weights: bool,
    seed: int = 0,
    keep_init: bool = False,
) -> nn.Module:
    """Return a converted model with batched weights or, for hidden sizes, with linear layers."""
    if not isinstance(hidden, Batch):
        options = {"preserve_high_precision_init_val": True} if keep_init else {}
        return models.make(
            hidden,
            recipe=RECIPES.get(recipe, recipe),
            device=device,
            seed=seed,
            fp8_weights=fp8_weights,
            **options,
        )
    model = build(
        device, recipe, hidden.experts, fp8_weights=fp8_weights, seed=seed, keep_init=keep_init
    )
    model.dim = 0 if recipe in TWO_PLANES else hidden.dim
    return model


def shard_any(model: Any, **options: Any) -> Any:
    """Shard a model of `make_any`."""
    if isinstance(model, Model):
        return shard(model, dim=model.dim, **options)
    return models.shard(model, **options)


def wholes(model: Model) -> dict[str, torch.Tensor]:
    """Return copies of the whole batched weights, dequantized."""
    values = {}
    for name in NAMES:
        value = model.experts.weight(name).detach()
        if isinstance(value, DTensor):
            local = local_of(value)
            local = getattr(local, "high_precision", local)
            plain = local.dequantize() if hasattr(local, "dequantize") else local
            value = DTensor.from_local(
                plain.contiguous(),
                value.device_mesh,
                value.placements,
                shape=value.shape,
                stride=value.stride(),
            ).full_tensor()
        values[name] = value.dequantize().clone() if hasattr(value, "rowwise") else value.clone()
    return values


def check_gathered(model: Model, full_values: dict[str, torch.Tensor], recipe: str) -> None:
    """Assert that each gathered matrix has the bytes of a matrix that is quantized alone."""
    for name, values in full_values.items():
        check_planes(getattr(model.experts, name), values, recipe)


def check_values(gathered: Any, values: torch.Tensor, recipe: str) -> None:
    """Assert that each matrix of a gathered weight has the values of the quantized values.

    A columnwise plane is compared with that of rounded values.
    """
    for i, matrix in enumerate(values):
        codes, scale, *_ = whole_planes(matrix.flatten(0, -2), recipe)
        rowwise = Plane(codes, scale, gathered.format)
        assert same_values(gathered.rowwise[i], rowwise)

        rounded = rowwise.dequantize(torch.float32)
        _, _, col, col_scale = whole_planes(rounded, recipe)
        if col is not None:
            columnwise = Plane(col, col_scale, gathered.format)
            assert same_values(gathered.columnwise[i], columnwise)


def same_values(plane: Plane, expected: Plane) -> bool:
    """Return whether two planes of a matrix have equal values, maybe with other exponents."""
    values = plane.dequantize(torch.float32).flatten(0, -2)
    return torch.equal(values, expected.dequantize(torch.float32))


def check_planes(gathered: Any, values: torch.Tensor, recipe: str) -> None:
    """Assert that each matrix of a gathered weight has the bytes of the quantized values."""
    assert isinstance(gathered, fp8rs.QuantizedTensor) and gathered.shape == values.shape
    for i, matrix in enumerate(values):
        codes, scale, col, col_scale = whole_planes(matrix.flatten(0, -2), recipe)
        assert same_bytes(gathered.rowwise.data[i].flatten(0, -2), codes)
        assert same_bytes(gathered.rowwise.scale[i], scale)
        if col is not None:
            assert same_bytes(gathered.columnwise.data[i], col)
            assert same_bytes(gathered.columnwise.scale[i], col_scale)
    assert (gathered.columnwise is not None) == (recipe in TWO_PLANES)
