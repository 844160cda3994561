"""Estimate the memory of a rank for a model's parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from fp8rs.optim.moments import BYTES_PER_ELEMENT as MOMENTS_BYTES
from fp8rs.optim.moments import stores_8bit_moments_by_default

from .sizes import Group, ShardedParameter


@dataclass(frozen=True)
class States:
    """The state that an optimizer keeps for a parameter.

    Attributes:
        parameter_copies: number of tensors with the parameter's size and dtype. For an FP8 weight,
            this is its logical dtype.
        element_bytes: bytes per element of tensors whose dtype the optimizer chooses.
        masters: whether it keeps fp32 copies of parameters that are not plain fp32.
        fp8_moments: whether the moments of FP8 layers are 8-bit codes. Those of other parameters
            take ``element_bytes``.
    """

    parameter_copies: float = 0
    element_bytes: int = 0
    masters: bool = False
    fp8_moments: bool = False

    def nbytes(self, sharded: ShardedParameter) -> float:
        """Return the bytes of the state for a shard."""
        is_plain_fp32 = sharded.parameter.dtype == torch.float32 and not sharded.is_fp8_weight
        element_bytes: float = self.element_bytes
        can_be_8bit = sharded.is_in_fp8_layer and stores_8bit_moments_by_default(sharded.parameter)
        if self.fp8_moments and can_be_8bit:
            element_bytes = MOMENTS_BYTES
        if self.masters and not is_plain_fp32:
            element_bytes += 4
        return (
            self.parameter_copies * sharded.plain_bytes + element_bytes * sharded.spec.padded_numel
        )


#: torch's optimizers, and `fp8rs.optim.AdamW` with its ``state_dtype`` and ``master_weights``.
STATES = {
    "adam": States(2),
    "adamw": States(2),
    "lion": States(1),
    "muon": States(1),
    "momentum": States(1),
    "sgd": States(),
    "fp8rs-adamw": States(element_bytes=8, masters=True),
    "fp8rs-adamw-bf16": States(element_bytes=4, masters=True),
    "fp8rs-adamw-no-masters": States(element_bytes=8),
    "fp8rs-adamw-bf16-no-masters": States(element_bytes=4),
    "fp8rs-adamw-fp8": States(element_bytes=8, masters=True, fp8_moments=True),
    "fp8rs-adamw-fp8-no-masters": States(element_bytes=8, fp8_moments=True),
}


@dataclass(frozen=True)
class Memory:
    """Memory of a rank for a model's parameters, in bytes.

    Attributes:
        parameters: shards as they are stored. FP8 weights are codes and scales.
        gradients: gradients of the shards, in the dtype of the parameters.
        optimizer: states of the optimizer.
        gathered: unsharded parameters of the root's group, of all groups that are not resharded
            after the forward, and of the two largest others, because FSDP2 gathers a group while
            the previous one computes.
        reduced: gradients of the largest group, before and during their reduction.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    reduced: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(getattr(self, part.name) for part in fields(self))


def memory_of(groups: Sequence[Group], reduce_dtype: torch.dtype | None, states: States) -> Memory:
    """Return the memory of a rank.

    Args:
        groups: the FSDP2 groups of the model.
        reduce_dtype: ``reduce_dtype`` of the mixed-precision policy.
        states: the state that the optimizer keeps for a parameter.
    """
    parameters = 0
    gradients = 0
    optimizer = 0.0
    for group in groups:
        for sharded in group.parameters:
            parameters += sharded.shard_bytes
            if sharded.trained:
                gradients += sharded.plain_bytes
                optimizer += states.nbytes(sharded)

    gathered = 0
    resharded_units = Counter[str]()
    for group in groups:
        if group.gathers == 1 or not group.name:
            gathered += group.gathered_bytes
        else:
            resharded_units[group.name] += group.gathered_bytes
    gathered += sum(sorted(resharded_units.values())[-2:])

    reduced = 0
    for group in groups:
        gradient_bytes = sum(sharded.gradient_bytes for sharded in group.parameters)
        reduced = max(reduced, gradient_bytes + group.reduced_bytes(reduce_dtype))
    return Memory(parameters, gradients, round(optimizer), gathered, reduced)
