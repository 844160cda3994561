"""`QuantSpec`: the options of one quantization. `fp8rs.quantize.cast` runs it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from fp8rs import ops  # noqa: F401  (registers torch.ops.fp8rs)
from fp8rs.quantize.formats import FP8_BOUND, FP8_MAX, BlockFormat

_scale_from_amax = torch.ops.fp8rs.scale_from_amax.default


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
        divide: divide by the scales of the rowwise plane, for one scale per row. Otherwise values
            are multiplied by the reciprocal of their scale, as those of the columnwise plane are.
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
    divide: bool = False
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
            options["divide"] = self.divide
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
        largest = FP8_MAX[self.fp8_dtype]
        bound = FP8_BOUND[self.fp8_dtype]
        if self.amax_epsilon:
            amax = amax.clamp(min=self.amax_epsilon)
        fits = (amax >= scale * (largest / 2)) & (amax <= scale * bound)

        # The new scale is the significand of the old one, times a power of two.
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
