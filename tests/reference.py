"""The byte contract in plain torch, written from its words and not from the kernels.

Codes are found by looking for the nearest value in the table of a format's values, so that neither
torch's cast (which differs between versions outside the range) nor ours is its own judge.
"""

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = (E4M3, E5M2)
WIDE = (torch.float32, torch.bfloat16, torch.float16)
#: format -> (mantissa bits, exponent bias, largest finite code)
_PARAMETERS = {E4M3: (3, 7, 0x7E), E5M2: (2, 15, 0x7B)}
MAX = {E4M3: 448.0, E5M2: 57344.0}
NAN_CODE = 0x7F


def values(fp8_dtype: torch.dtype) -> Tensor:
    """The values of the codes from 0 to the largest finite one, in order, as float64."""
    mantissa_bits, bias, last = _PARAMETERS[fp8_dtype]
    codes = torch.arange(last + 1)
    exponent = codes >> mantissa_bits
    fraction = (codes & ((1 << mantissa_bits) - 1)).double() / (1 << mantissa_bits)
    normal = (1 + fraction) * torch.exp2((exponent - bias).double())
    return torch.where(exponent == 0, fraction * 2.0 ** (1 - bias), normal)


def encode(y: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """float32 to codes (uint8): nearest, ties to even codes; saturating; NaN becomes 0x7F."""
    table = values(fp8_dtype)
    magnitude = y.double().abs().nan_to_num(nan=0.0, posinf=float(table[-1]))
    magnitude = magnitude.clamp(max=float(table[-1])).contiguous()
    above = torch.searchsorted(table, magnitude).clamp(1, len(table) - 1)
    below = above - 1
    to_below, to_above = magnitude - table[below], table[above] - magnitude
    even = torch.where(below % 2 == 0, below, above)
    code = torch.where(to_below < to_above, below, torch.where(to_above < to_below, above, even))
    code = code + 128 * torch.signbit(y)
    return torch.where(y.isnan(), NAN_CODE, code).to(torch.uint8)


def quantize(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """Codes (uint8) of ``x`` at a known scale; on the CPU."""
    inverse = torch.ones((), dtype=torch.float32) / scale.cpu()
    return encode(x.cpu().float() * inverse, fp8_dtype)


def amax(x: Tensor) -> Tensor:
    """The largest magnitude by its bits: NaN over infinity over numbers; 0 without elements."""
    bits = x.cpu().float().contiguous().view(torch.int32) & 0x7FFFFFFF
    largest = bits.max() if bits.numel() else torch.zeros((), dtype=torch.int32)
    return canonical(largest.view(torch.float32))


def canonical(x: Tensor) -> Tensor:
    """float32 with one NaN for all."""
    return torch.where(x.isnan(), torch.nan, x)


def scale_from_amax(
    amax: Tensor,
    fp8_dtype: torch.dtype,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
    margin: int = 0,
) -> Tensor:
    """float32 amaxes to float32 scales."""
    epsilon = torch.tensor(amax_epsilon, dtype=torch.float32)
    amax = torch.where(amax < epsilon, epsilon, amax)
    scale = amax / torch.tensor(MAX[fp8_dtype], dtype=torch.float32) * 2.0**margin
    scale = scale.clamp(2.0**-126, 2.0**127)
    if power_2_scale:
        mantissa, exponent = torch.frexp(scale)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale = torch.ldexp(torch.ones_like(scale), exponent)
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where(amax.isfinite(), scale, torch.nan)


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes times a scale that broadcasts to their shape, in float32, then one cast."""
    table = values(codes.dtype).float()
    codes = codes.cpu().view(torch.uint8).int()
    magnitude = codes & 0x7F
    value = table[magnitude.clamp(max=len(table) - 1)]
    value = torch.where(magnitude >= len(table), torch.inf, value)
    nan_from = 0x7D if len(table) == 0x7C else NAN_CODE
    value = torch.where(magnitude >= nan_from, torch.nan, value)
    value = torch.where(codes >= 128, -value, value)
    return (value * scale.cpu()).to(dtype)


def matrix(x: Tensor) -> Tensor:
    """``x`` as (product of the leading dimensions, last dimension)."""
    return x.reshape(-1, x.shape[-1]) if x.dim() and x.numel() else x.reshape(matrix_shape(x))


def matrix_shape(x: Tensor) -> tuple[int, int]:
    """The shape that :func:`matrix` gives."""
    if x.dim() == 0:
        return 1, 1
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return rows, x.shape[-1]


def codes(t: Tensor) -> Tensor:
    """The bytes of FP8 codes, on the CPU."""
    return t.cpu().view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype, shape and every bit (on the CPU)."""
    a, b = a.cpu(), b.cpu()
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)
