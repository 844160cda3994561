"""Operators of formats with one scale per tensor, and operators on codes.

Rules for all operators ``torch.ops.fp8rs.*``:

- ``x`` is float32, bfloat16 or float16, of any shape. It is read as the matrix (product of the
  leading dimensions, last dimension). Any strides are supported. A tensor of three or more
  dimensions whose leading dimensions do not collapse into one stride (a permuted one, for example)
  is copied first.
- With ``batched=True``, a tensor of three or more dimensions is read as a batch of matrices along
  its first dimension. Each matrix has scales of its own, which have the batch dimension in front,
  and blocks never span two matrices.
- ``scale`` is the factor that recovers the value: ``x ~ codes * scale``.
- ``rowwise`` codes have the shape of ``x``. ``columnwise`` codes are the transposed matrix, stored
  contiguously. Codes that are not requested are returned with the shape ``(0,)``.
- Operators are not differentiable: their autograd formulas are in the modules that call them.
- The values of ``after`` are not read. In a trace, ``after`` orders the operator after that tensor.
  Without it, a compiler would compute a weight's second plane in the forward and save it for the
  backward.
- Bad arguments raise TypeError or ValueError that name the argument, before anything is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fp8rs._core import multi_quantize as native_multi_quantize
from fp8rs._core import multi_quantize_delayed as native_multi_quantize_delayed
from fp8rs.ops.define import native_op, python_op
from fp8rs.ops.shapes import allocate_codes, allocate_scalars, split_batch

_F32 = torch.float32


@native_op
def amax(x: Tensor, batched: bool = False) -> Tensor:
    """Compute the absolute maximum of ``x``: float32, shape ()."""
    return allocate_scalars(x, batched)


@native_op
def multi_amax(xs: list[Tensor], batched: bool = False) -> Tensor:
    """Compute the absolute maximum of each tensor or matrix of a batch: float32, 1-D."""
    return xs[0].new_empty(_matrices(xs, batched), dtype=_F32)


def _matrices(xs: list[Tensor], batched: bool) -> int:
    return sum(math.prod(split_batch(x.shape, batched)[0]) for x in xs)


@native_op
def scale_from_amax(
    amax: Tensor,
    fp8_dtype: torch.dtype,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
    margin: int = 0,
) -> Tensor:
    """Compute the float32 scale for each absolute maximum (float32, any shape).

    An amax must not be negative. This is not checked, because it would synchronize with the device,
    and the result for a negative amax differs between devices.
    """
    return amax.new_empty(amax.shape)


@native_op
def quantize(
    x: Tensor,
    scale: Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
    after: Tensor | None = None,
    batched: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantize with a known scale (float32, one element).

    Returns:
        Rowwise codes and columnwise codes.
    """
    return allocate_codes(x, fp8_dtype, rowwise, columnwise, batched)


def quantize_delayed(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
    batched: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize with a known scale and raise ``amax`` to the absolute maximum of ``x``, if finite.

    ``scale`` and ``amax`` are float32 of one element.

    The operator ``_quantize_delayed`` does not declare the write to ``amax``. A linear layer's
    backward writes the amax that another forward of the layer may have read, which autograd and
    compilers would forbid. The maximum is idempotent and no traced code reads it, so calls may be
    merged and reordered.

    Returns:
        Rowwise codes, columnwise codes, and the scale used: ``scale``, or NaN if ``x`` has a NaN or
            an infinity.
    """
    return *allocate_codes(x, fp8_dtype, rowwise, columnwise, batched), allocate_scalars(x, batched)


native_op(quantize_delayed, name="_quantize_delayed")
python_op(torch.ops.fp8rs._quantize_delayed.default, mutates_args=["amax"])(quantize_delayed)


def _note(scale: Tensor, amax: Tensor, into: Tensor) -> Tensor:
    slot = into.data  # writes to it do not change the version of `into`
    torch.fmax(slot, amax, out=slot)
    return scale.clone()


@python_op(_note)
def _note_amax(scale: Tensor, amax: Tensor, into: Tensor) -> Tensor:
    """Raise ``into`` (float32, one element) to ``amax``, and return a copy of ``scale``.

    Sibling layers share the codes of their input and have their own histories. The write is not
    declared, as in ``_quantize_delayed``. The result keeps the call in a graph.
    """
    return torch.empty_like(scale)


@native_op
def quantize_current(
    x: Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
    batched: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the scale of ``x`` and quantize with it.

    Returns:
        Rowwise codes, columnwise codes, and the scale.
    """
    return *allocate_codes(x, fp8_dtype, rowwise, columnwise, batched), allocate_scalars(x, batched)


def _collapsed(xs: list[Tensor]) -> list[Tensor]:
    """Copy tensors whose leading dimensions may not collapse into one stride."""
    matrices = []
    for x in xs:
        matrices.append(x.contiguous() if x.dim() > 2 else x)
    return matrices


def _multi_quantize(
    xs: list[Tensor], scales: Tensor, outs: list[Tensor], batched: bool = False
) -> None:
    native_multi_quantize(_collapsed(xs), scales, outs, batched)


@python_op(_multi_quantize, mutates_args=["outs"])
def multi_quantize(
    xs: list[Tensor], scales: Tensor, outs: list[Tensor], batched: bool = False
) -> None:
    """Quantize each tensor, or each matrix of batches, with its own scale into ``outs``.

    ``scales`` is float32, 1-D, with one element for each tensor or matrix.
    """


def _multi_quantize_delayed(
    xs: list[Tensor], scales: Tensor, amaxes: Tensor, outs: list[Tensor], batched: bool = False
) -> Tensor:
    used_scales = multi_quantize_delayed(xs, scales, amaxes, outs, batched)  # allocates only
    native_multi_quantize_delayed(_collapsed(xs), scales, amaxes, used_scales, outs, batched)
    return used_scales


@python_op(_multi_quantize_delayed, mutates_args=["amaxes", "outs"])
def multi_quantize_delayed(
    xs: list[Tensor], scales: Tensor, amaxes: Tensor, outs: list[Tensor], batched: bool = False
) -> Tensor:
    """Run ``quantize_delayed`` rowwise for each tensor, or each matrix of batches, into ``outs``.

    ``scales`` and ``amaxes`` are float32, 1-D, with one element for each tensor or matrix.

    Returns:
        The scales used, in the shape of ``scales``.
    """
    return scales.new_empty(_matrices(xs, batched), dtype=_F32)


@native_op
def transpose(codes: Tensor, after: Tensor | None = None, batched: bool = False) -> Tensor:
    """Return the transposed matrix of codes, contiguous."""
    batch, (rows, cols) = split_batch(codes.shape, batched)
    return codes.new_empty((*batch, cols, rows))


@native_op
def dequantize(
    codes: Tensor, scale: Tensor, block: Sequence[int], dtype: torch.dtype, batched: bool = False
) -> Tensor:
    """Multiply codes by scales in float32 and cast to ``dtype``. The result has the codes' shape.

    ``scale`` (float32 or float8_e8m0fnu) has one element for each ``block`` of (rows, columns).
    """
    return codes.new_empty(codes.shape, dtype=dtype)
