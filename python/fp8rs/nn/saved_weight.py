"""Weights that a backward reads again.

Autograd saves plain weights. It does not save a quantized weight, because FSDP2 frees and refills
the planes of a gathered weight.
"""

from __future__ import annotations

from torch import Tensor

from fp8rs.tensor.quantized import QuantizedTensor

#: A quantized weight and its version in the forward. None for a plain weight.
Gathered = tuple[QuantizedTensor, int | None] | None


def gathered_weight(weight: Tensor) -> Gathered:
    """Return a quantized weight with its version, or None for a plain weight."""
    return (weight, _version(weight)) if isinstance(weight, QuantizedTensor) else None


def read_weight(gathered: Gathered, saved: Tensor, owner: str) -> Tensor:
    """Return the weight in the backward.

    Args:
        gathered: the result of `gathered_weight` in the forward.
        saved: the weight that autograd saved, if it is a plain one.
        owner: what the weight belongs to, for the message.

    Raises:
        RuntimeError: a quantized weight was written since the forward.
    """
    if gathered is None:
        return saved
    weight, version = gathered
    if (now := _version(weight)) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: the FP8 weight {tuple(weight.shape)} of {owner} is at version "
            f"{now}; expected version {version} instead. Write weights after the backward"
        )
    return weight


def _version(weight: QuantizedTensor) -> int | None:
    """Return the version counter of a quantized weight. FSDP2's refills do not change it."""
    return None if weight.is_inference() else weight._version
