"""Comparisons of results by bits, and by the norm of their difference."""

import torch
from torch import Tensor


def canonical(x: Tensor) -> Tensor:
    """Return float32 values in which every NaN has the same bits."""
    return torch.where(x.isnan(), torch.nan, x)


def codes(t: Tensor) -> Tensor:
    """Return the bytes of FP8 codes on the CPU."""
    return t.cpu().view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bits. Devices may differ."""
    a = a.cpu()
    b = b.cpu()
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def relative(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference relative to the norm of ``b``."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()
