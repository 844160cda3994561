"""Codes rounded up or down at random, right in the mean.

The definition of `format/fp8.rs` in torch's operators, for the formats and the shards whose codes
``adamw_`` does not write itself. All of it is exact, so that every device gives the same bytes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp8rs.tensor.formats import E4M3, E5M2, FP8_BOUND, FP8_MAX
from fp8rs.tensor.planes import Plane

_random_uniform = torch.ops.fp8rs.random_uniform_.default

#: Mantissa bits, and the exponent of the smallest normal number.
_SIZES = {E4M3: (3, -6), E5M2: (2, -14)}

_EXPONENT = 0x7F800000


def units(values: Tensor, seed: int, stream: int, step: Tensor, offset: int) -> Tensor:
    """A number of [0, 1) for each element: the one that ``adamw_`` rounds it with.

    Args:
        values: of a local part, row by row.
        seed, stream, step: see ``random_uniform_``.
        offset: the index of the first element in the whole weight.
    """
    numbers = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    _random_uniform(numbers, seed, offset, 0.0, 1.0, stream, step)
    return numbers


def encode(plane: Plane, values: Tensor, numbers: Tensor | float) -> Tensor:
    """The codes of ``values`` at the scales of a plane.

    Args:
        plane: what is beyond its largest code is cut to that.
        values: fp32, the matrix of the plane.
        numbers: of [0, 1), one for each: values go up where these are less than how far they are on
            the way there.
    """
    dtype = plane.data.dtype
    mantissa, smallest = _SIZES[dtype]
    scaled = values * (1.0 / plane.spread())
    magnitude = scaled.abs().clamp(max=FP8_MAX[dtype])
    # Counted in the format's steps around it: a whole number of them is a code's value.
    exponent = (magnitude.view(torch.int32) & _EXPONENT).clamp(min=(smallest + 127) << 23)
    step = (exponent - (mantissa << 23)).view(torch.float32)
    counted = magnitude / step
    whole = counted.floor()
    way = ((counted - whole) * 2.0**24).floor()
    up = (numbers * 2.0**24 < way).to(torch.float32)
    rounded = ((whole + up) * step).copysign(scaled)
    rounded = torch.where(scaled.isnan(), torch.nan, rounded)
    return rounded.to(dtype)


def is_of(plane: Plane, values: Tensor, stochastic: bool, saturates: bool) -> Tensor:
    """Where a plane's codes are those of ``values``: to nearest, or one of the two around them.

    Args:
        plane: the codes.
        values: fp32, the matrix of the plane.
        stochastic: whether codes are rounded up or down at random.
        saturates: whether scales may be too small for their values (those that are rounded down).
            The largest code is then that of values up to the next power of two, else of those that
            are half a step beyond it at most.
    """
    codes = plane.matrix.view(torch.uint8)
    dtype = plane.data.dtype
    largest = FP8_MAX[dtype]
    scaled = values * (1.0 / plane.spread())
    if stochastic:
        down, up = (encode(plane, values, number).view(torch.uint8) for number in (1.0, 0.0))
        same = (codes == down) | (codes == up)
    else:
        same = codes == scaled.clamp(-largest, largest).to(dtype).view(torch.uint8)
    beyond = 2.0 ** math.ceil(math.log2(largest)) if saturates else FP8_BOUND[dtype]
    return same & (scaled.abs() < beyond)
