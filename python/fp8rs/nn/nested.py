"""A linear layer whose input is a nested tensor, as torch's own transformer encoder makes them.

In an evaluation with a padding mask ``nn.TransformerEncoder`` gives its layers the tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def on_nested(
    compute: Callable[[Tensor, Tensor, Any], Tensor], x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """The layer's function of all rows at once: what they share as a batch, scales say, they have.

    Args:
        compute: of (rows, in), weight and bias.
        x: nested, strided, of tensors (..., in).
        weight: (out, in).
        bias: (out,) or None.

    Returns:
        Nested, of tensors (..., out).
    """
    parts = x.unbind()
    rows = [part.flatten(0, -2) for part in parts]
    y = compute(torch.cat(rows), weight, bias)
    found = zip(parts, y.split([len(part) for part in rows]), strict=True)
    return torch.nested.as_nested_tensor(
        [out.view(*part.shape[:-1], y.shape[-1]) for part, out in found]
    )
