"""`QuantSpec` describes how a tensor is quantized, and `quantize_planes` quantizes it.

Quantizers, writes to quantized tensors, and linear layers use both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8rs import ops  # noqa: F401  (registers torch.ops.fp8rs)
from fp8rs._torch import group_named
from fp8rs.tensor.formats import FP8_BOUND, FP8_MAX, BlockFormat
from fp8rs.tensor.planes import Plane, as_bytes

_amax = torch.ops.fp8rs.amax.default
_block_amax = torch.ops.fp8rs.block_amax.default
_quantize = torch.ops.fp8rs.quantize.default
_quantize_blocks = torch.ops.fp8rs.quantize_blocks.default
_quantize_current = torch.ops.fp8rs.quantize_current.default
_quantize_delayed = torch.ops.fp8rs.quantize_delayed.default
_quantize_delayed_silently = torch.ops.fp8rs._quantize_delayed.default
_scale_from_amax = torch.ops.fp8rs.scale_from_amax.default

Planes = tuple[Plane | None, Plane | None]


@dataclass(frozen=True)
class QuantSpec:
    """How a tensor is quantized. Specs are compared and hashed by value.

    A quantized tensor's ``spec`` is used for later writes to it. `Quantizer.spec` is used for the
    tensors that a quantizer makes.

    Args:
        format: block shape and scale dtype.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        power_2_scale: round fp32 scales up to powers of two.
        amax_epsilon: lower bound of the amaxes that fp32 scales are computed from.
        scale_rounding: "ceil" or "floor", for E8M0 scales.
        margin: with delayed scaling, scales are multiplied by 2**margin.
        group: the name of a process group over which a tensor's amax is reduced, or None.
        batched: tensors of three or more dimensions are weights (E, N, K) of E matrices, each of
            which is quantized by itself. Otherwise leading dimensions are rows of one matrix.
    """

    format: BlockFormat
    fp8_dtype: torch.dtype
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    scale_rounding: str = "ceil"
    margin: int = 0
    group: str | None = None
    batched: bool = False

    @cached_property
    def block_options(self) -> dict[str, Any]:
        """Arguments of ``quantize_blocks`` that differ from its defaults."""
        options: dict[str, Any] = {"batched": self.batched}
        if not self.format.microscaled:
            options |= {"power_2_scale": self.power_2_scale, "amax_epsilon": self.amax_epsilon}
        elif self.scale_rounding != "ceil":
            options["rounding"] = self.scale_rounding
        return {name: value for name, value in options.items() if value}

    def scale_from_amax(self, amax: Tensor) -> Tensor:
        """Return fp32 scales for fp32 amaxes of any shape."""
        scale: Tensor = _scale_from_amax(
            amax, self.fp8_dtype, self.power_2_scale, self.amax_epsilon, self.margin
        )
        return scale

    def keep_scale(self, scale: Tensor, amax: Tensor) -> Tensor:
        """Return the scales after a write that changes some elements of each block.

        The scale stays if the largest value fits in it and uses at least half of its range. A value
        up to half a step above the largest code fits, because it is rounded to that code.
        Otherwise, the new scale is the smallest multiple of the scale by a power of two in which
        the largest value fits. The codes of unchanged elements then have other exponents, and only
        codes that become subnormal are rounded.

        If the scale is 0 (nothing was written yet) or NaN, the new scale is a power of two. For an
        all-zero block, it is the previous scale times a power of two, between 1 and 2. An E8M0
        scale is then the smallest one, as in the quantizer.

        Args:
            scale: the previous scales, fp32, any shape.
            amax: the maxima after the write, fp32 of that shape. If one is not finite, its scale is
                NaN.
        """
        largest, bound = FP8_MAX[self.fp8_dtype], FP8_BOUND[self.fp8_dtype]
        if self.amax_epsilon:
            amax = amax.clamp(min=self.amax_epsilon)
        fits = (amax >= scale * (largest / 2)) & (amax <= scale * bound)
        normal = scale.nan_to_num(1.0).clamp(min=2.0**-126)
        significand = ((normal.view(torch.int32) & 0x7FFFFF) | 0x3F800000).view(torch.float32)
        power = _scale_from_amax(amax / (significand * (bound / largest)), self.fp8_dtype, True)
        if self.format.microscaled:
            power = torch.where(amax == 0, 2.0**-127, power)
        return torch.where(fits, scale, power * significand)

    def without_group(self) -> QuantSpec:
        """Return the spec without its group, for use in another process.

        There, the name may belong to another group.
        """
        return self if self.group is None else replace(self, group=None)


@lru_cache(maxsize=64)
def default_spec(format: BlockFormat, fp8_dtype: torch.dtype, batched: bool) -> QuantSpec:
    """Return the spec of a format with default options."""
    return QuantSpec(format, fp8_dtype, batched=batched)


def quantize_planes(
    spec: QuantSpec,
    x: Tensor,
    rowwise: bool,
    columnwise: bool,
    *,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    column_scale: Tensor | None = None,
    after: Tensor | None = None,
    declare_mutation: bool = False,
    block_offset: int = 0,
    block_amaxes: dict[str, Tensor] | None = None,
) -> Planes:
    """Quantize ``x`` (fp32, bf16 or fp16; any strides). Planes that are not requested are None.

    For one scale per tensor, the scale is computed from ``x`` (current scaling) unless ``scale`` is
    given. With an ``amax`` too, ``scale`` is a delayed scale.

    Args:
        spec: how ``x`` is quantized.
        x: the values. Gradients do not reach it.
        rowwise: whether to make the rowwise plane.
        columnwise: whether to make the columnwise plane.
        scale: the fp32 scale if it is known already, for one scale per tensor: one element, or
            (E,) for a batch.
        amax: with ``scale``: fp32 of that shape, raised to the finite amax of ``x``. If ``x`` has
            NaN or Inf, the amax stays and the scale is NaN.
        column_scale: fp32 factors of the columns of ``x``, multiplied into the rowwise plane only.
            It requires blocks of a whole row.
        after: a tensor that compiled code computes before this. It has no effect with current or
            delayed scaling.
        declare_mutation: declare the write to ``amax`` to autograd and compilers.
        block_offset: number of rows by which the first blocks begin before ``x``.
        block_amaxes: fp32 amaxes of whole blocks, if ``x`` has only a part of a block: "amax" (rows
            of blocks, columns of blocks), and "amax_columnwise" for the columnwise plane.

    Raises:
        TypeError, ValueError: an operator rejects an argument. Nothing was written.
    """
    format = spec.format
    if not format.per_tensor:
        # Omit defaults, because each keyword takes half a microsecond.
        options = spec.block_options
        if column_scale is not None or after is not None:
            options = {**options, "column_scale": column_scale, "after": after}
        rowwise_offset = columnwise_offset = (0, 0)
        if block_amaxes is not None:
            options = {**options, **block_amaxes}
        if block_offset:
            options = {**options, "row_offset": block_offset}
            # The remainder is 0 for blocks of one row (1) or of all rows (-1).
            rowwise_offset = block_offset % format.block[0], 0
            columnwise_offset = 0, block_offset % format.block[1]
        row, row_scale, col, col_scale = _quantize_blocks(
            x, spec.fp8_dtype, format.block, format.scale_dtype, rowwise, columnwise, **options
        )
        return (
            Plane(row, row_scale, format, rowwise_offset) if rowwise else None,
            Plane(col, col_scale, format, columnwise_offset) if columnwise else None,
        )
    if column_scale is not None:
        raise ValueError("column_scale is given; it must be None with one scale per tensor")
    dtype, batched = spec.fp8_dtype, spec.batched
    if scale is None and spec.group is not None:
        scale = spec.scale_from_amax(reduce_amax(_amax(x, batched), spec.group))
    if scale is None:
        current = spec.power_2_scale, spec.amax_epsilon, batched
        row, col, scale = _quantize_current(x, dtype, rowwise, columnwise, *current)
    elif amax is None:
        row, col = _quantize(x, scale, dtype, rowwise, columnwise, after, batched)
    else:
        quantize: Any = _quantize_delayed if declare_mutation else _quantize_delayed_silently
        row, col, scale = quantize(x, scale, amax, dtype, rowwise, columnwise, batched)
    assert scale is not None
    return (
        Plane(row, scale, format) if rowwise else None,
        Plane(col, scale, format) if columnwise else None,
    )


def requantize_plane(
    spec: QuantSpec,
    plane: Plane,
    values: Tensor,
    changed: Tensor,
    noted: Tensor | None = None,
) -> Plane:
    """Quantize ``values`` into a new plane, close to the bytes of ``plane``.

    A block in which no element changed keeps its codes and its scale. In the other blocks, the
    elements that did not change keep their value, as far as `QuantSpec.keep_scale` allows it.

    Args:
        spec: quantization of the plane's format.
        plane: the plane before the write.
        values: the values after the write, in the shape of ``plane.matrix``.
        changed: bool of the same shape, whether the write changes an element.
        noted: with delayed scaling, the amax to raise. A non-finite amax does not change it.
    """
    format, batched = plane.format, plane.batched
    block_row_offset, block_col_offset = plane.block_offset

    def maxima(x: Tensor) -> Any:
        if format.per_tensor:
            return _amax(x, batched)
        if block_col_offset:
            # The operator takes an offset of rows only, so reduce the transposed matrix.
            return _block_amax(x.mT, format.block[::-1], block_col_offset, batched).mT
        return _block_amax(x, format.block, block_row_offset, batched)

    amax, any_changed = maxima(values), maxima(changed.to(torch.bfloat16))
    if format.per_tensor and spec.group is not None:
        # The ranks of the group share the scale, so one rank's change is a change for all.
        amax, any_changed = reduce_amax(torch.stack([amax, any_changed]), spec.group).unbind()
    if noted is not None:
        noted.copy_(torch.where(amax.isfinite(), noted.maximum(amax), noted))
    scale = spec.keep_scale(plane.scale.to(torch.float32).view(amax.shape), amax)
    # Devices that flush subnormals would compute the inverse of the least E8M0 scale as infinite.
    inverse, written = (
        Plane(plane.data, x, format, plane.block_offset).expand_scale()
        for x in ((1.0 / scale).clamp(max=2.0**127), any_changed)
    )
    scaled = values.to(torch.float32) * inverse
    codes = _quantize(scaled, scale.new_ones(()), spec.fp8_dtype)[0]
    return Plane(
        _select(written != 0, codes, plane.matrix),
        _select(any_changed != 0, scale.to(format.scale_dtype), plane.scale),
        format,
        plane.block_offset,
    )


def _select(condition: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """``torch.where`` for codes and scales, bit for bit."""
    return torch.where(condition, as_bytes(new), as_bytes(old)).view(old.dtype)


def reduce_amax(amax: Tensor, group: str, *, in_place: bool = False) -> Tensor:
    """Return the maximum of ``amax`` over the ranks of a group.

    The bits are reduced as int32. Amaxes are not negative, so integers have the same order, and NaN
    and Inf reach every rank. A float MAX drops NaN on some ranks.

    Args:
        amax: fp32 of any shape, contiguous.
        group: the name of a process group.
        in_place: write to ``amax``, on the current stream. Compilers cannot trace this.
    """
    bits = amax.view(torch.int32)
    if in_place:
        dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group_named(group))
    else:
        collectives = torch.ops._c10d_functional
        bits = collectives.wait_tensor(collectives.all_reduce(bits, "max", group))
    return bits.view(torch.float32)
