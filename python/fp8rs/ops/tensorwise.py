"""The operators of one scale per tensor, and those on codes.

What holds for all operators ``torch.ops.fp8rs.*``:

- ``x`` is float32, bfloat16 or float16, of any shape, read as the matrix (product of the leading
  dimensions, last dimension). Strides are free; a tensor of three or more dimensions that is no
  strided matrix (a permuted one, say) is copied first.
- ``scale`` is the factor that recovers the value: ``x ~ codes * scale``.
- ``rowwise`` codes have the shape of ``x``; ``columnwise`` ones are the transposed matrix, stored
  contiguously. One that is not asked for comes back empty, with the shape ``(0,)``.
- Operators are not differentiable: their autograd formulas are in the modules that call them.
- ``after`` is not read. Where an operator is traced it places the operator after that tensor: a
  compiler would compute a weight's second plane in the forward, and keep it for the backward.
- Bad arguments raise TypeError or ValueError that name the argument, before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8rs import _core
from fp8rs.ops import room
from fp8rs.ops.define import in_python, in_rust
from fp8rs.ops.room import matrix

_F32 = torch.float32


@in_rust
def amax(x: Tensor) -> Tensor:
    """The absolute maximum of ``x``: float32, shape ()."""
    return room.scalar(x)


@in_rust
def multi_amax(xs: list[Tensor]) -> Tensor:
    """The absolute maximum of each tensor: float32, one element for each."""
    return xs[0].new_empty(len(xs), dtype=_F32)


@in_rust
def scale_from_amax(
    amax: Tensor,
    fp8_dtype: torch.dtype,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
    margin: int = 0,
) -> Tensor:
    """The float32 scale for each absolute maximum (float32, any shape).

    No amax may be negative. This is not checked, because that would wait for the device; what a
    negative one gives is not the same on every device.
    """
    return amax.new_empty(amax.shape)


@in_rust
def quantize(
    x: Tensor,
    scale: Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize with a known scale (float32, one element).

    Returns:
        Rowwise codes and columnwise codes.
    """
    return room.codes(x, fp8_dtype, rowwise, columnwise)


@in_rust
def _quantize_delayed(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """``quantize_delayed``, which does not tell autograd or the compiler that it writes ``amax``.

    It is for linear layers: a layer's backward writes the amax that another forward of the layer
    has been given already, which a declared write forbids. The maximum is idempotent, and nothing
    that is traced reads it, so that calls may be merged and ordered at will.
    """
    return *room.codes(x, fp8_dtype, rowwise, columnwise), room.scalar(x)


@in_python(torch.ops.fp8rs._quantize_delayed.default, writes=["amax"])
def quantize_delayed(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize with a known scale and raise ``amax`` to the absolute maximum of ``x``, if finite.

    ``scale`` and ``amax`` are float32 of one element.

    Returns:
        Rowwise codes, columnwise codes, and the scale used: ``scale``, or NaN where ``x`` holds a
            NaN or an infinity.
    """
    return _quantize_delayed(x, scale, amax, fp8_dtype, rowwise, columnwise)


def _note(scale: Tensor, amax: Tensor, into: Tensor) -> Tensor:
    slot = into.data  # whose version nobody has saved
    torch.fmax(slot, amax, out=slot)
    return scale.clone()


@in_python(_note)
def _note_amax(scale: Tensor, amax: Tensor, into: Tensor) -> Tensor:
    """Raise ``into`` (float32, one element) to ``amax``; gives a copy of ``scale``.

    For siblings that share the first one's codes but have histories of their own. As in
    ``_quantize_delayed`` the write is not declared; what is returned keeps the call in a graph.
    """
    return torch.empty_like(scale)


@in_rust
def quantize_current(
    x: Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the scale of ``x`` and quantize with it.

    Returns:
        Rowwise codes, columnwise codes, and the scale.
    """
    return *room.codes(x, fp8_dtype, rowwise, columnwise), room.scalar(x)


def _cast_each(xs: list[Tensor], scales: Tensor, outs: list[Tensor]) -> None:
    _core.multi_quantize([matrix(x) for x in xs], scales, outs)


@in_python(_cast_each, writes=["outs"])
def multi_quantize(xs: list[Tensor], scales: Tensor, outs: list[Tensor]) -> None:
    """Quantize each tensor with its own scale (float32, one element for each) into ``outs``."""


def _cast_each_delayed(
    xs: list[Tensor], scales: Tensor, amaxes: Tensor, outs: list[Tensor]
) -> Tensor:
    used = multi_quantize_delayed(xs, scales, amaxes, outs)
    _core.multi_quantize_delayed([matrix(x) for x in xs], scales, amaxes, used, outs)
    return used


@in_python(_cast_each_delayed, writes=["amaxes", "outs"])
def multi_quantize_delayed(
    xs: list[Tensor], scales: Tensor, amaxes: Tensor, outs: list[Tensor]
) -> Tensor:
    """``quantize_delayed`` over a list, rowwise: one element of ``amaxes`` and result for each."""
    return scales.new_empty(len(xs), dtype=_F32)


@in_rust
def transpose(codes: Tensor, after: Tensor | None = None) -> Tensor:
    """The transposed matrix of codes, contiguous."""
    rows, cols = room.matrix_shape(codes.shape)
    return codes.new_empty((cols, rows))


@in_rust
def dequantize(codes: Tensor, scale: Tensor, block: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Code times scale in float32, then one cast to ``dtype``; the shape of ``codes``.

    ``scale`` (float32 or float8_e8m0fnu) has one element for each ``block`` of (rows, columns).
    """
    return codes.new_empty(codes.shape, dtype=dtype)
