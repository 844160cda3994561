"""Rounding to FP8 codes with PyTorch operators, and the inverse question: are codes rounded values?

Stochastic rounding follows the definition in ``src/format/fp8.rs``, for formats and shards whose
codes ``adamw_`` does not write itself. The rounding is exact arithmetic, so every device gives the
same bytes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp8rs.quantize.formats import E4M3, E5M2, FP8_BOUND, FP8_MAX
from fp8rs.quantize.planes import Plane, Planes

#: Mantissa bits, and the exponent of the smallest normal number.
_SIZES = {E4M3: (3, -6), E5M2: (2, -14)}

_EXPONENT = 0x7F800000


def stochastic_round(plane: Plane, values: Tensor, numbers: Tensor | float) -> Tensor:
    """Round ``values`` stochastically to FP8 codes, at the scales of a plane.

    Args:
        plane: its scales and dtype of codes are used. Values beyond the largest code saturate.
        values: fp32, in the shape of ``plane.matrix``.
        numbers: random numbers in [0, 1), one for each element. A magnitude is rounded up if its
            number is less than its distance from the code below, as a fraction of the distance
            between the two neighboring codes. With 1, all magnitudes are rounded down.
    """
    dtype = plane.data.dtype
    mantissa, smallest = _SIZES[dtype]
    scaled = values * (1.0 / plane.expand_scale())
    magnitude = scaled.abs().clamp(max=FP8_MAX[dtype])

    # Divide each magnitude by the format's spacing around it. Integers are values of codes.
    exponent = (magnitude.view(torch.int32) & _EXPONENT).clamp(min=(smallest + 127) << 23)
    step = (exponent - (mantissa << 23)).view(torch.float32)
    steps = magnitude / step
    steps_below = steps.floor()
    fraction = ((steps - steps_below) * 2.0**24).floor()
    up = (numbers * 2.0**24 < fraction).to(torch.float32)
    rounded = ((steps_below + up) * step).copysign(scaled)
    rounded = torch.where(scaled.isnan(), torch.nan, rounded)
    return rounded.to(dtype)


def matches_rounding(plane: Plane, values: Tensor, stochastic: bool, saturates: bool) -> Tensor:
    """Return where a plane's codes are ``values`` after rounding, as a bool for each element.

    Args:
        plane: the codes and their scales.
        values: fp32, in the shape of ``plane.matrix``.
        stochastic: whether codes are rounded stochastically, to either of the two neighboring
            codes, or to nearest.
        saturates: whether scales may be too small for their values, because scales were rounded
            down. The largest code then also stands for larger values below the next power of two.
            Otherwise it also stands for values that exceed it by less than half a step.
    """
    codes = plane.matrix.view(torch.uint8)
    dtype = plane.data.dtype
    largest = FP8_MAX[dtype]
    scaled = values * (1.0 / plane.expand_scale())
    if stochastic:
        down = stochastic_round(plane, values, 1.0).view(torch.uint8)
        up = stochastic_round(plane, values, 0.0).view(torch.uint8)
        matches = (codes == down) | (codes == up)
    else:
        matches = codes == scaled.clamp(-largest, largest).to(dtype).view(torch.uint8)

    bound = FP8_BOUND[dtype]
    if saturates:
        bound = 2.0 ** math.ceil(math.log2(largest))  # the next power of two
    return matches & (scaled.abs() < bound)


def rounds_to_codes(planes: Planes, values: Tensor, stochastic: bool = False) -> Tensor:
    """Return where ``values`` round to the codes of a weight, as a bool for each element.

    Args:
        planes: the planes of the weight. If there are two, the rowwise one is compared.
        values: fp32, in the shape of the weight's matrix (rows, cols) or batch (E, rows, cols).
        stochastic: whether codes are rounded stochastically: see `matches_rounding`.
    """
    row, col = planes
    if row is not None:
        return matches_rounding(row, values, stochastic, row.format.microscaled)
    assert col is not None
    return matches_rounding(col, values.mT, stochastic, col.format.microscaled).mT
