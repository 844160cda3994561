"""How results are compared: by bits, or by the norm of what differs."""

import torch
from torch import Tensor


def canonical(x: Tensor) -> Tensor:
    """float32 with one NaN for all."""
    return torch.where(x.isnan(), torch.nan, x)


def codes(t: Tensor) -> Tensor:
    """The bytes of FP8 codes, on the CPU."""
    return t.cpu().view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype, shape and every bit (on the CPU)."""
    a, b = a.cpu(), b.cpu()
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def relative(a: Tensor, b: Tensor) -> float:
    """The norm of the difference by that of ``b``."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()
