"""Helpers for the backwards of layers: reading weights again, and refusing double backward.

Autograd saves plain weights. It does not save a quantized weight, because FSDP2 frees and refills
the planes of a gathered weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8rs.tensor.quantized import QuantizedTensor


class GatheredWeight(NamedTuple):
    """A quantized weight of a forward.

    Attributes:
        weight: the weight.
        version: its version in the forward. FSDP2's refills do not change it. None for an inference
            tensor, which has no version.
    """

    weight: QuantizedTensor
    version: int | None


def refuse_double_backward(owner: str) -> None:
    """Raise RuntimeError in a backward with ``create_graph=True``.

    The operators have no gradients, so that second derivatives would be wrong without an error.

    Args:
        owner: what the backward belongs to, for the message.
    """
    # A compiler traces a backward with gradients enabled.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{owner} do not support double backward: "
            "call backward or torch.autograd.grad without create_graph=True"
        )


def check_has_memory(weight: QuantizedTensor, owner: str) -> None:
    """Raise RuntimeError if FSDP2 has freed a gathered weight. A traced weight has no memory."""
    plane = weight._storage.any_plane
    if not torch.compiler.is_compiling() and not plane.has_memory:
        plane.check_has_memory(f"the gathered weight of {owner}, {tuple(weight.shape)},")


def gathered_weight(weight: Tensor) -> GatheredWeight | None:
    """Return a quantized weight with its version, or None for a plain weight."""
    if not isinstance(weight, QuantizedTensor):
        return None
    return GatheredWeight(weight, None if weight.is_inference() else weight._version)


def read_weight(gathered: GatheredWeight | None, saved: Tensor, owner: str) -> Tensor:
    """Return the weight in the backward.

    Args:
        gathered: the result of `gathered_weight` in the forward.
        saved: the weight that autograd saved, if it is a plain one.
        owner: what the weight belongs to, for the message.

    Raises:
        RuntimeError: a quantized weight was written since the forward, or its storage is freed.
    """
    if gathered is None:
        return saved
    weight, version = gathered
    if version is not None and weight._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: the FP8 weight {tuple(weight.shape)} of {owner} is at version "
            f"{weight._version}; expected version {version} instead. Write weights after the "
            "backward"
        )
    check_has_memory(weight, owner)
    return weight
