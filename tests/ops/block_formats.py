"""Block formats, and inputs for them."""

import pytest
import torch

from fp8rs.quantize import formats

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E8M0, F32 = torch.float8_e8m0fnu, torch.float32
ops = torch.ops.fp8rs
#: Every format, as (block, dtype of its scales).
FORMATS = [(f.block, f.scale_dtype) for f in formats.FORMATS.values() if not f.per_tensor]
every_format = pytest.mark.parametrize("block, scale_dtype", FORMATS)
every_dtype = pytest.mark.parametrize("dtype", [F32, torch.bfloat16, torch.float16])
every_type = pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2])


def bits(t):
    return t.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def data(device, *shape, dtype=F32, seed=0):
    """Return Gaussian values whose magnitude varies between blocks."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    spread = torch.randn(*shape[:-1], -(-shape[-1] // 8), generator=generator)
    return (x * spread.repeat_interleave(8, -1)[..., : shape[-1]].exp()).to(device, dtype)
