"""The values of FP8 codes, and encoding by searching the nearest value."""

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = (E4M3, E5M2)
WIDE = (torch.float32, torch.bfloat16, torch.float16)
#: For each format: mantissa bits, exponent bias, largest finite code.
_PARAMETERS = {E4M3: (3, 7, 0x7E), E5M2: (2, 15, 0x7B)}
MAX = {E4M3: 448.0, E5M2: 57344.0}
#: The exponent of the largest power of two.
EMAX = {E4M3: 8, E5M2: 15}
NAN_CODE = 0x7F


def power_of_2(exponent: Tensor) -> Tensor:
    """Return 2^exponent as float64, assembled from bits because pow is not exact on CUDA."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def values(fp8_dtype: torch.dtype) -> Tensor:
    """Return the values of the codes from 0 to the largest finite one as float64."""
    mantissa_bits, bias, last = _PARAMETERS[fp8_dtype]
    codes = torch.arange(last + 1)
    exponent = codes >> mantissa_bits
    fraction = (codes & ((1 << mantissa_bits) - 1)).double() / (1 << mantissa_bits)
    normal = (1 + fraction) * power_of_2(exponent - bias)
    return torch.where(exponent == 0, fraction * 2.0 ** (1 - bias), normal)


def encode(y: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """Encode as codes (uint8): to nearest, ties to even, saturating, NaN as 0x7F."""
    table = values(fp8_dtype)
    halfway = ((table[1:] + table[:-1]) / 2).to(y.device, y.dtype)
    magnitude = y.abs().contiguous()
    # If two codes are equally near, one search ends at the lower one and one at the upper one.
    lower = torch.searchsorted(halfway, magnitude, out_int32=True)
    upper = torch.searchsorted(halfway, magnitude, out_int32=True, right=True)
    code = torch.where(lower % 2 == 0, lower, upper) + 128 * torch.signbit(y)
    return torch.where(y.isnan(), NAN_CODE, code).to(torch.uint8)


def cast(y: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """Encode finite numbers with torch, which is faster than the search of `encode`."""
    return y.float().clamp(-MAX[fp8_dtype], MAX[fp8_dtype]).to(fp8_dtype)


def decode(codes: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """Decode codes (uint8) to float32."""
    table = values(fp8_dtype).float().to(codes.device)
    magnitude = codes.int() & 0x7F
    value = table[magnitude.clamp(max=len(table) - 1)]
    if fp8_dtype is E5M2:
        value = torch.where(magnitude == len(table), torch.inf, value)
        value = torch.where(magnitude > len(table), torch.nan, value)
    else:
        value = torch.where(magnitude == NAN_CODE, torch.nan, value)
    return torch.where(codes >= 128, -value, value)
