"""The operators ``torch.ops.fp8rs.*``.

Each allocates its outputs and hands everything to ``_core``, which checks the arguments and writes
on the caller's current stream. What holds for all:

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

Python kernels cost about 1.4 us a call this way; ``torch.library.custom_op`` costs about 9.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fp8rs import _core

_E4M3 = torch.float8_e4m3fn
_E5M2 = torch.float8_e5m2
_F32 = torch.float32
_WIDE = (torch.float32, torch.bfloat16, torch.float16)

_library = torch.library.Library("fp8rs", "DEF")
_increment_version = torch._C._increment_version


def _operator(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define an operator whose CPU and CUDA kernel the decorated function is."""
    _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    name = schema.partition("(")[0]

    def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
        _library.impl(name, kernel, "CPU")
        _library.impl(name, kernel, "CUDA")
        return kernel

    return register


def _fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what the operator returns for fake and meta tensors."""
    register: Callable[[Callable[..., Any]], Callable[..., Any]]
    register = torch.library.register_fake(f"fp8rs::{name}", lib=_library)
    return register


def _matrix(x: Tensor) -> Tensor:
    """``x``, or a copy if its leading dimensions do not collapse into one stride."""
    if x.dim() < 3 or x.is_contiguous() or x.numel() == 0:
        return x
    span = None
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if span is not None and span != stride:
            return x.contiguous()
        span = size * stride
    return x


def _matrix_shape(x: Tensor) -> tuple[int, int]:
    shape = x.shape
    if len(shape) == 2:
        return shape[0], shape[1]
    if len(shape) == 0:
        return 1, 1
    return math.prod(shape[:-1]), shape[-1]


def _check_fp8(fp8_dtype: torch.dtype) -> None:
    if fp8_dtype is not _E4M3 and fp8_dtype is not _E5M2:
        raise TypeError(
            f"fp8_dtype is {fp8_dtype}; it must be torch.float8_e4m3fn or torch.float8_e5m2"
        )


def _planes(
    x: Tensor, fp8_dtype: torch.dtype, rowwise: bool, columnwise: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Room for the codes that are asked for."""
    if fp8_dtype is not _E4M3 and fp8_dtype is not _E5M2:
        _check_fp8(fp8_dtype)
    row = col = None
    # The cheapest allocations that torch has for each: 0.8 us, against 1.6 of new_empty(x.shape).
    if rowwise:
        row = torch.empty_like(x, dtype=fp8_dtype, memory_format=torch.contiguous_format)
    if columnwise:
        rows, cols = _matrix_shape(x)
        col = torch.empty_strided((cols, rows), (rows, 1), dtype=fp8_dtype, device=x.device)
    return row, col


def _or_empty(x: Tensor, fp8_dtype: torch.dtype, codes: Tensor | None) -> Tensor:
    return x.new_empty(0, dtype=fp8_dtype) if codes is None else codes


@_operator("amax(Tensor x) -> Tensor")
def _amax(x: Tensor) -> Tensor:
    out = x.new_empty((), dtype=_F32)
    _core.amax(_matrix(x), out)
    return out


@_fake("amax")
def _(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=_F32)


@_operator("multi_amax(Tensor[] xs) -> Tensor")
def _multi_amax(xs: list[Tensor]) -> Tensor:
    out = xs[0].new_empty(len(xs), dtype=_F32)
    _core.multi_amax([_matrix(x) for x in xs], out)
    return out


@_fake("multi_amax")
def _(xs: list[Tensor]) -> Tensor:
    return xs[0].new_empty(len(xs), dtype=_F32)


@_operator(
    "scale_from_amax(Tensor amax, ScalarType fp8_dtype, bool power_2_scale=False,"
    " float amax_epsilon=0.0, int margin=0) -> Tensor"
)
def _scale_from_amax(
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
    _check_fp8(fp8_dtype)
    amax = _matrix(amax)
    out = torch.empty_like(amax, memory_format=torch.contiguous_format)
    name: Literal["e4m3", "e5m2"] = "e4m3" if fp8_dtype is _E4M3 else "e5m2"
    _core.scale_from_amax(amax, out, name, power_2_scale, amax_epsilon, margin)
    return out


@_fake("scale_from_amax")
def _(
    amax: Tensor,
    fp8_dtype: torch.dtype,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
    margin: int = 0,
) -> Tensor:
    _check_fp8(fp8_dtype)
    return torch.empty_like(amax, memory_format=torch.contiguous_format)


@_operator(
    "quantize(Tensor x, Tensor scale, ScalarType fp8_dtype, bool rowwise=True,"
    " bool columnwise=False, Tensor? after=None) -> (Tensor rowwise, Tensor columnwise)"
)
def _quantize(
    x: Tensor,
    scale: Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    row, col = _planes(x, fp8_dtype, rowwise, columnwise)
    _core.quantize(_matrix(x), scale, row, col)
    return _or_empty(x, fp8_dtype, row), _or_empty(x, fp8_dtype, col)


@_fake("quantize")
def _(
    x: Tensor,
    scale: Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    row, col = _planes(x, fp8_dtype, rowwise, columnwise)
    return _or_empty(x, fp8_dtype, row), _or_empty(x, fp8_dtype, col)


@_operator(
    "quantize_delayed(Tensor x, Tensor scale, Tensor(a!) amax, ScalarType fp8_dtype,"
    " bool rowwise=True, bool columnwise=False)"
    " -> (Tensor rowwise, Tensor columnwise, Tensor scale_used)"
)
def _quantize_delayed(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    row, col = _planes(x, fp8_dtype, rowwise, columnwise)
    scale_used = x.new_empty((), dtype=_F32)
    _core.quantize_delayed(_matrix(x), scale, amax, scale_used, row, col)
    _increment_version((amax,))
    return _or_empty(x, fp8_dtype, row), _or_empty(x, fp8_dtype, col), scale_used


@_fake("quantize_delayed")
def _(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    row, col = _planes(x, fp8_dtype, rowwise, columnwise)
    scale_used = x.new_empty((), dtype=_F32)
    return _or_empty(x, fp8_dtype, row), _or_empty(x, fp8_dtype, col), scale_used


@_operator(
    "_quantize_delayed(Tensor x, Tensor scale, Tensor amax, ScalarType fp8_dtype,"
    " bool rowwise=True, bool columnwise=False)"
    " -> (Tensor rowwise, Tensor columnwise, Tensor scale_used)"
)
def _quantize_delayed_silently(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """``quantize_delayed`` that does not tell autograd or the compiler of its write to ``amax``.

    For linear layers: a layer's backward writes a slot that another forward of the layer has been
    given already, which a declared write forbids. The maximum is idempotent, and nothing that is
    traced reads it, so that calls may be merged and ordered at will.
    """
    row, col = _planes(x, fp8_dtype, rowwise, columnwise)
    scale_used = x.new_empty((), dtype=_F32)
    _core.quantize_delayed(_matrix(x), scale, amax, scale_used, row, col)
    return _or_empty(x, fp8_dtype, row), _or_empty(x, fp8_dtype, col), scale_used


@_fake("_quantize_delayed")
def _(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    row, col = _planes(x, fp8_dtype, rowwise, columnwise)
    scale_used = x.new_empty((), dtype=_F32)
    return _or_empty(x, fp8_dtype, row), _or_empty(x, fp8_dtype, col), scale_used


@_operator("_note_amax(Tensor scale, Tensor amax, Tensor into) -> Tensor")
def _note_amax(scale: Tensor, amax: Tensor, into: Tensor) -> Tensor:
    """Raise ``into`` (fp32, one element) to ``amax``; returns a copy of ``scale``.

    For siblings that share the first one's codes but have histories of their own. As in
    ``_quantize_delayed`` the write is not declared; what is returned keeps the call in a graph.
    """
    into = into.data  # whose version nobody has saved
    torch.maximum(into, amax, out=into)
    return scale.clone()


@_fake("_note_amax")
def _(scale: Tensor, amax: Tensor, into: Tensor) -> Tensor:
    return torch.empty_like(scale)


@_operator(
    "quantize_current(Tensor x, ScalarType fp8_dtype, bool rowwise=True, bool columnwise=False,"
    " bool power_2_scale=False, float amax_epsilon=0.0)"
    " -> (Tensor rowwise, Tensor columnwise, Tensor scale)"
)
def _quantize_current(
    x: Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    row, col = _planes(x, fp8_dtype, rowwise, columnwise)
    scale = x.new_empty((), dtype=_F32)
    _core.quantize_current(_matrix(x), scale, row, col, power_2_scale, amax_epsilon)
    return _or_empty(x, fp8_dtype, row), _or_empty(x, fp8_dtype, col), scale


@_fake("quantize_current")
def _(
    x: Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    row, col = _planes(x, fp8_dtype, rowwise, columnwise)
    scale = x.new_empty((), dtype=_F32)
    return _or_empty(x, fp8_dtype, row), _or_empty(x, fp8_dtype, col), scale


@_operator("multi_quantize(Tensor[] xs, Tensor scales, Tensor(a!)[] outs) -> ()")
def _multi_quantize(xs: list[Tensor], scales: Tensor, outs: list[Tensor]) -> None:
    _core.multi_quantize([_matrix(x) for x in xs], scales, outs)
    _increment_version(outs)


@_fake("multi_quantize")
def _(xs: list[Tensor], scales: Tensor, outs: list[Tensor]) -> None:
    return None


@_operator(
    "multi_quantize_delayed(Tensor[] xs, Tensor scales, Tensor(a!) amaxes, Tensor(b!)[] outs)"
    " -> Tensor scales_used"
)
def _multi_quantize_delayed(
    xs: list[Tensor], scales: Tensor, amaxes: Tensor, outs: list[Tensor]
) -> Tensor:
    scales_used = scales.new_empty(len(xs), dtype=_F32)
    _core.multi_quantize_delayed([_matrix(x) for x in xs], scales, amaxes, scales_used, outs)
    _increment_version((amaxes, *outs))
    return scales_used


@_fake("multi_quantize_delayed")
def _(xs: list[Tensor], scales: Tensor, amaxes: Tensor, outs: list[Tensor]) -> Tensor:
    return scales.new_empty(len(xs), dtype=_F32)


@_operator("transpose(Tensor codes, Tensor? after=None) -> Tensor")
def _transpose(codes: Tensor, after: Tensor | None = None) -> Tensor:
    rows, cols = _matrix_shape(codes)
    out = codes.new_empty((cols, rows))
    _core.transpose(_matrix(codes), out)
    return out


@_fake("transpose")
def _(codes: Tensor, after: Tensor | None = None) -> Tensor:
    rows, cols = _matrix_shape(codes)
    return codes.new_empty((cols, rows))


@_operator("dequantize(Tensor codes, Tensor scale, int[] block, ScalarType dtype) -> Tensor")
def _dequantize(codes: Tensor, scale: Tensor, block: Sequence[int], dtype: torch.dtype) -> Tensor:
    _check_dequantize(block, dtype)
    out = torch.empty_like(codes, dtype=dtype, memory_format=torch.contiguous_format)
    _core.dequantize(_matrix(codes), scale, block[0], block[1], out)
    return out


@_fake("dequantize")
def _(codes: Tensor, scale: Tensor, block: Sequence[int], dtype: torch.dtype) -> Tensor:
    _check_dequantize(block, dtype)
    return torch.empty_like(codes, dtype=dtype, memory_format=torch.contiguous_format)


def _check_dequantize(block: Sequence[int], dtype: torch.dtype) -> None:
    if len(block) != 2:
        raise ValueError(f"block is {list(block)}; it must be two sizes, -1 for the whole extent")
    if dtype not in _WIDE:
        raise TypeError(f"dtype is {dtype}; it must be float32, bfloat16 or float16")
