"""Statistics of a quantized matrix in float64, as `fp8rs.monitor` reports them."""

import torch
from torch import Tensor

from oracle.blocks import expand
from oracle.blocks import quantize as quantize_blocks
from oracle.elements import MAX, cast

#: Half a step above the largest value. Larger magnitudes would round to the next value of an
#: unbounded format, so they saturate.
BEYOND = {torch.float8_e4m3fn: 464.0, torch.float8_e5m2: 61440.0}


def of_blocks(x: Tensor, dtype: torch.dtype, block: tuple[int, int], **options) -> dict[str, float]:
    """Return the statistics of a matrix quantized with options of `oracle.blocks.quantize`."""
    codes, scale = quantize_blocks(x, dtype, block, **options)
    return of_codes(x, codes, expand(scale, block, tuple(x.shape)))


def of_scale(x: Tensor, dtype: torch.dtype, scale: Tensor) -> dict[str, float]:
    """Return the statistics of a matrix quantized with one known scale."""
    return of_codes(x, cast(x.float() * (1 / scale), dtype), scale.expand(x.shape))


def of_codes(x: Tensor, codes: Tensor, scale: Tensor) -> dict[str, float]:
    """Return the statistics of codes with a scale for each element."""
    dtype = codes.dtype
    x = x.double()
    codes = codes.double()
    scale = scale.double()
    used = scale[codes != 0]
    noise = (x - codes * scale).square().sum()
    saturated = (codes.abs() == MAX[dtype]) & (x.abs() / scale > BEYOND[dtype])
    return {
        "amax": x.abs().max().item(),
        "scale": used.max().item(),
        "scale_min": used.min().item(),
        "saturated": saturated.double().mean().item(),
        "underflow": ((codes == 0) & (x != 0)).double().mean().item(),
        "sqnr_db": 10 * torch.log10(x.square().sum() / noise).item(),
    }
