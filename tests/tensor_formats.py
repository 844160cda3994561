"""Quantizers of every format, test tensors, and comparisons of planes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import cases
import fp8rs
from fp8rs.quantize import formats
from fp8rs.quantize.recipes import resolve_recipe
from fp8rs.tensor.quantized import QuantizedTensor

E4M3 = torch.float8_e4m3fn


def quantizer_of(
    format: str,
    fp8_dtype: torch.dtype = E4M3,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    delayed: tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> fp8rs.Quantizer:
    """Return a quantizer of a format, with options of its `QuantSpec`."""
    spec = fp8rs.QuantSpec(formats.FORMATS[format], fp8_dtype, **options)
    return fp8rs.Quantizer(spec, rowwise=rowwise, columnwise=columnwise, delayed=delayed)


#: The quantizer of each format.
FORMATS = {name: partial(quantizer_of, name) for name in formats.FORMATS}
#: A recipe whose weights have the format. For 1x128, the inputs have it: recipes use it for no
#: weights.
RECIPES = {}
for _role in ("weight", "input"):
    for _recipe in map(resolve_recipe, cases.RECIPES.values()):
        RECIPES.setdefault(_recipe.block_format(_role).name, _recipe)
SQUARE = [format.name for format in formats.FORMATS.values() if format.square]

PLANES = {
    "both": {"rowwise": True, "columnwise": True},
    "rowwise": {"rowwise": True, "columnwise": False},
    "columnwise": {"rowwise": False, "columnwise": True},
}

every_format = pytest.mark.parametrize("format", list(FORMATS))
every_plane = pytest.mark.parametrize("planes", list(PLANES))

#: Several blocks of each format along both axes. The last block is partial.
SHAPE = (200, 320)


def data(device: torch.device, *shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Return values whose rows and columns have different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * scale
    if len(shape) > 1:
        x = x * torch.randn(shape[-1], generator=generator).exp()
        x = x * torch.randn(shape[-2], 1, generator=generator).exp()
    return x.to(device)


def make(
    format: str, planes: str, device: torch.device, *shape: int, seed: int = 0, scale: float = 1.0
) -> QuantizedTensor:
    return FORMATS[format](**PLANES[planes])(
        data(device, *(shape or SHAPE), seed=seed, scale=scale)
    )


def values(t: QuantizedTensor) -> dict[str, Tensor]:
    """Return the values of each plane."""
    values_by_plane = {}
    if t.rowwise is not None:
        values_by_plane["rowwise"] = t.rowwise.dequantize(torch.float32)
    if t.columnwise is not None:
        matrix = t.columnwise.dequantize(torch.float32).t()
        values_by_plane["columnwise"] = matrix.contiguous().view(t.shape)
    return values_by_plane


def scales(t: QuantizedTensor) -> dict[str, Tensor]:
    """Return the scale of each element, for each plane."""
    scales_by_plane = {}
    if t.rowwise is not None:
        scales_by_plane["rowwise"] = t.rowwise.expand_scale().expand(t.shape).clone()
    if t.columnwise is not None:
        scales_by_plane["columnwise"] = (
            t.columnwise.expand_scale().expand(t.shape[::-1]).t().clone()
        )
    return scales_by_plane


def same_values(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def bits(x: Tensor) -> Tensor:
    return x.reshape(-1).contiguous().view(torch.uint8)


def same_bytes(got: QuantizedTensor, want: QuantizedTensor) -> None:
    """Assert that two tensors have the same planes, with equal codes and scales."""
    assert type(got) is type(want)
    assert got.shape == want.shape
    for name in ("rowwise", "columnwise"):
        a = getattr(got, name)
        b = getattr(want, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.format == b.format
            assert a.scale.shape == b.scale.shape
            assert torch.equal(bits(a.data).cpu(), bits(b.data).cpu()), name
            assert torch.equal(bits(a.scale).cpu(), bits(b.scale).cpu()), name
