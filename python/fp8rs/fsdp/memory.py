"""What a rank needs for a model's parameters, in bytes, before any rank runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from .sizes import Group, ShardedParameter


@dataclass(frozen=True)
class States:
    """What an optimizer keeps for a parameter.

    Attributes:
        alike: how many tensors of its size and dtype; an FP8 weight's is that which it stands for.
        own: bytes an element of tensors whose dtype is the optimizer's choice.
        masters: whether there is an fp32 copy of all that is not plain fp32.
    """

    alike: float = 0
    own: int = 0
    masters: bool = False

    def nbytes(self, p: ShardedParameter) -> float:
        """Bytes for a shard."""
        exact = p.parameter.dtype == torch.float32 and not p.at_rest
        own = self.own + (4 if self.masters and not exact else 0)
        return self.alike * p.plain_bytes + own * p.placement.padded_numel


#: torch's optimizers, and fp8rs.optim.AdamW by its ``state_dtype`` and ``master_weights``.
STATES = {
    "adam": States(2),
    "adamw": States(2),
    "lion": States(1),
    "muon": States(1),
    "momentum": States(1),
    "sgd": States(),
    "fp8rs-adamw": States(own=8, masters=True),
    "fp8rs-adamw-bf16": States(own=4, masters=True),
    "fp8rs-adamw-no-masters": States(own=8),
    "fp8rs-adamw-bf16-no-masters": States(own=4),
}


@dataclass(frozen=True)
class Memory:
    """What a rank needs for a model's parameters, in bytes.

    Attributes:
        parameters: the shards, as they are stored: of FP8 weights codes and scales.
        codes: FP8 codes and scales beside masters, kept from a forward to the next.
        gradients: of the shards, in the dtype of the parameters.
        optimizer: its states.
        gathered: the root's group and the two largest others, of which one computes while the next
            is gathered; all groups where nothing is resharded after the forward.
        reduced: the largest group's gradients, as the backward makes them and as they are reduced.
        symmetric: what ``set_links`` has gathers and reductions go through.
    """

    parameters: int
    codes: int
    gradients: int
    optimizer: int
    gathered: int
    reduced: int
    symmetric: int = 0

    @property
    def total(self) -> int:
        """All of it together."""
        return sum(getattr(self, part.name) for part in fields(self))


def memory_of(
    groups: Sequence[Group],
    *,
    reduce_dtype: torch.dtype | None,
    states: States,
    symmetric: int = 0,
) -> Memory:
    """What a rank needs for groups.

    Args:
        groups: those of the model.
        reduce_dtype: the mixed-precision policy's.
        states: what the optimizer keeps.
        symmetric: bytes of symmetric memory.
    """
    parameters = codes = gradients = 0
    optimizer = 0.0
    for p in (p for group in groups for p in group.parameters):
        parameters += p.shard_bytes
        codes += p.code_bytes
        if p.trained:
            gradients += p.plain_bytes
            optimizer += states.nbytes(p)
    whole = {group.name: 0 for group in groups}
    for group in groups:
        whole[group.name] += group.whole_bytes
    if all(group.gathers == 1 for group in groups):
        gathered = sum(whole.values())
    else:
        gathered = whole.pop("", 0) + sum(sorted(whole.values())[-2:])
    reduced = max(
        (
            sum(p.gradient_bytes for p in group.parameters) + group.reducing_bytes(reduce_dtype)
            for group in groups
        ),
        default=0,
    )
    return Memory(parameters, codes, gradients, round(optimizer), gathered, reduced, symmetric)
