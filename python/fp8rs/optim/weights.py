"""What the optimizer asks of FP8 weights: how they are cut, what their scales are agreed with.

Everything that depends on sharding is here; the rest of the package sees local tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8rs._torch import increment_version
from fp8rs.tensor.quantized import QuantizedTensor
from fp8rs.tensor.spec import reduce_amax

#: Where a weight keeps the values that it was initialized with, until its master is made of them.
KEPT_INIT = "_fp8rs_kept_init"


def local(tensor: Any) -> Tensor:
    """This rank's part of a tensor, or the tensor where it is not distributed."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def quantized(param: Tensor) -> QuantizedTensor | None:
    """This rank's part of a weight that is FP8 at rest; None of any other."""
    part = local(param)
    return part if isinstance(part, QuantizedTensor) else None


def kept_init(param: Tensor) -> Tensor | None:
    """The values that the local part was initialized with, on any device; None if not kept."""
    kept: Tensor | None = getattr(local(param), KEPT_INIT, None)
    return kept


def drop_init(param: Tensor) -> None:
    """Forget them."""
    part = local(param)
    if hasattr(part, KEPT_INIT):
        delattr(part, KEPT_INIT)


def global_offset(param: Tensor) -> int:
    """The index, in the whole weight, of the local part's first element."""
    return 0


def is_cut(param: Tensor) -> bool:
    """Whether a block of the weight's format has elements on other ranks too."""
    return False


def reduce_amaxes_(params: Sequence[Tensor], amaxes: Tensor) -> None:
    """Make the amax of each local part that of the whole weight, in place.

    Args:
        params: weights with one scale; the same on all ranks.
        amaxes: fp32, one element for each.
    """
    groups: dict[str, list[int]] = {}
    for i, param in enumerate(params):
        weight = quantized(param)
        if weight is not None and weight.spec.group is not None:
            groups.setdefault(weight.spec.group, []).append(i)
    for name, members in groups.items():
        if len(members) == len(params):
            amaxes.copy_(reduce_amax(amaxes, name))
        else:
            at = torch.tensor(members, device=amaxes.device)
            amaxes[at] = reduce_amax(amaxes[at], name)


def write_(param: Tensor, values: Tensor) -> None:
    """Quantize ``values`` (of the local part, fp32) into a weight of any format."""
    weight = quantized(param)
    assert weight is not None
    weight.quantize_(values.view(weight.shape))


def wrote(params: Sequence[Tensor]) -> None:
    """Codes and scales of these weights were written past their operators."""
    increment_version(params)
