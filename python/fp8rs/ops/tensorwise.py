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

There are no variants with ``out=``: who has room already calls the function of the same name in
``fp8rs._core``, which takes its outputs as arguments, is no operator, and is not to be traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fp8rs import _core
from fp8rs.ops import room
from fp8rs.ops.define import Operation, declared, operator
from fp8rs.ops.room import matrix

_F32 = torch.float32
_WIDE = (torch.float32, torch.bfloat16, torch.float16)


@operator("amax(Tensor x) -> Tensor")
def amax(x: Tensor) -> Operation:
    """The absolute maximum of ``x``: float32, shape ()."""
    out = room.scalar(x)
    return out, lambda: _core.amax(matrix(x), out)


@operator("multi_amax(Tensor[] xs) -> Tensor")
def multi_amax(xs: list[Tensor]) -> Operation:
    """The absolute maximum of each tensor: float32, one element for each."""
    out = xs[0].new_empty(len(xs), dtype=_F32)
    return out, lambda: _core.multi_amax([matrix(x) for x in xs], out)


@operator(
    "scale_from_amax(Tensor amax, ScalarType fp8_dtype, bool power_2_scale=False,"
    " float amax_epsilon=0.0, int margin=0) -> Tensor"
)
def scale_from_amax(
    amax: Tensor,
    fp8_dtype: torch.dtype,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
    margin: int = 0,
) -> Operation:
    """The float32 scale for each absolute maximum (float32, any shape).

    No amax may be negative. This is not checked, because that would wait for the device; what a
    negative one gives is not the same on every device.
    """
    room.check_fp8(fp8_dtype)
    out = torch.empty_like(amax, memory_format=torch.contiguous_format)
    name: Literal["e4m3", "e5m2"] = "e4m3" if fp8_dtype is torch.float8_e4m3fn else "e5m2"
    rule = (power_2_scale, amax_epsilon, margin)
    return out, lambda: _core.scale_from_amax(matrix(amax), out, name, *rule)


@operator(
    "quantize(Tensor x, Tensor scale, ScalarType fp8_dtype, bool rowwise=True,"
    " bool columnwise=False, Tensor? after=None) -> (Tensor rowwise, Tensor columnwise)"
)
def quantize(
    x: Tensor,
    scale: Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
    after: Tensor | None = None,
) -> Operation:
    """Quantize with a known scale (float32, one element)."""
    planes = room.codes(x, fp8_dtype, rowwise, columnwise)
    return room.both(x, fp8_dtype, planes), lambda: _core.quantize(matrix(x), scale, *planes)


_DELAYED = (
    ", ScalarType fp8_dtype, bool rowwise=True, bool columnwise=False)"
    " -> (Tensor rowwise, Tensor columnwise, Tensor scale_used)"
)


@operator("_quantize_delayed(Tensor x, Tensor scale, Tensor amax" + _DELAYED)
def quantize_delayed(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
) -> Operation:
    """Quantize with a known scale and raise ``amax`` to the absolute maximum of ``x``, if finite.

    ``scale`` and ``amax`` are float32 of one element; ``scale_used`` is ``scale``, or NaN where
    ``x`` holds a NaN or an infinity.

    ``_quantize_delayed`` is the same and does not tell autograd or the compiler of its write. It is
    for linear layers: a layer's backward writes the amax that another forward of the layer has been
    given already, which a declared write forbids. The maximum is idempotent, and nothing that is
    traced reads it, so that calls may be merged and ordered at will.
    """
    planes = room.codes(x, fp8_dtype, rowwise, columnwise)
    used = room.scalar(x)
    return (*room.both(x, fp8_dtype, planes), used), lambda: _core.quantize_delayed(
        matrix(x), scale, amax, used, *planes
    )


declared(
    "quantize_delayed(Tensor x, Tensor scale, Tensor(a!) amax" + _DELAYED,
    torch.ops.fp8rs._quantize_delayed.default,
)


@operator("_note_amax(Tensor scale, Tensor amax, Tensor into) -> Tensor")
def note_amax(scale: Tensor, amax: Tensor, into: Tensor) -> Operation:
    """Raise ``into`` (float32, one element) to ``amax``; gives a copy of ``scale``.

    For siblings that share the first one's codes but have histories of their own. As in
    ``_quantize_delayed`` the write is not declared; what is returned keeps the call in a graph.
    """
    used = torch.empty_like(scale)

    def note() -> None:
        slot = into.data  # whose version nobody has saved
        torch.fmax(slot, amax, out=slot)
        used.copy_(scale)

    return used, note


@operator(
    "quantize_current(Tensor x, ScalarType fp8_dtype, bool rowwise=True, bool columnwise=False,"
    " bool power_2_scale=False, float amax_epsilon=0.0)"
    " -> (Tensor rowwise, Tensor columnwise, Tensor scale)"
)
def quantize_current(
    x: Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
) -> Operation:
    """Find the scale of ``x`` and quantize with it."""
    planes = room.codes(x, fp8_dtype, rowwise, columnwise)
    scale = room.scalar(x)
    return (*room.both(x, fp8_dtype, planes), scale), lambda: _core.quantize_current(
        matrix(x), scale, *planes, power_2_scale, amax_epsilon
    )


@operator("multi_quantize(Tensor[] xs, Tensor scales, Tensor(a!)[] outs) -> ()")
def multi_quantize(xs: list[Tensor], scales: Tensor, outs: list[Tensor]) -> Operation:
    """Quantize each tensor with its own scale (float32, one element for each) into ``outs``."""
    return None, lambda: _core.multi_quantize([matrix(x) for x in xs], scales, outs)


@operator(
    "multi_quantize_delayed(Tensor[] xs, Tensor scales, Tensor(a!) amaxes, Tensor(b!)[] outs)"
    " -> Tensor scales_used"
)
def multi_quantize_delayed(
    xs: list[Tensor], scales: Tensor, amaxes: Tensor, outs: list[Tensor]
) -> Operation:
    """``quantize_delayed`` over a list, rowwise: one element of ``amaxes`` and result for each."""
    used = scales.new_empty(len(xs), dtype=_F32)
    return used, lambda: _core.multi_quantize_delayed(
        [matrix(x) for x in xs], scales, amaxes, used, outs
    )


@operator("transpose(Tensor codes, Tensor? after=None) -> Tensor")
def transpose(codes: Tensor, after: Tensor | None = None) -> Operation:
    """The transposed matrix of codes, contiguous."""
    rows, cols = room.matrix_shape(codes)
    out = codes.new_empty((cols, rows))
    return out, lambda: _core.transpose(matrix(codes), out)


@operator("dequantize(Tensor codes, Tensor scale, int[] block, ScalarType dtype) -> Tensor")
def dequantize(codes: Tensor, scale: Tensor, block: Sequence[int], dtype: torch.dtype) -> Operation:
    """Code times scale in float32, then one cast to ``dtype``; the shape of ``codes``.

    ``scale`` (float32 or float8_e8m0fnu) has one element for each ``block`` of (rows, columns).
    """
    room.check_pair(block)
    if dtype not in _WIDE:
        raise TypeError(f"dtype is {dtype}; it must be float32, bfloat16 or float16")
    out = torch.empty_like(codes, dtype=dtype, memory_format=torch.contiguous_format)
    return out, lambda: _core.dequantize(matrix(codes), scale, block[0], block[1], out)
