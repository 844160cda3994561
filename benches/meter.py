"""What a rank keeps between steps, in bytes a parameter, from the storages of its tensors.

Whoever holds a storage, it counts, once: so a copy that nobody meant to keep is seen.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fp8rs._torch import is_distributed, own_part
from fp8rs.tensor.quantized import QuantizedTensor


@dataclass(frozen=True)
class AtRest:
    """Bytes a parameter of the converted weights, each divided by this rank's part of them.

    Attributes:
        weights: everything that is no gradient, buffer, other parameter or optimizer's state:
            the weights in all their forms.
        optimizer: the optimizer's state for them: moments, masters.
    """

    weights: float
    optimizer: float


class Meter:
    """Measures what has come since it was made."""

    def __init__(self) -> None:
        # Held, so that none of their addresses serves again.
        self._before = storages()

    def at_rest(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, names: set[str]
    ) -> AtRest:
        """Between steps, with gradients freed and the model resharded.

        Args:
            model: made since then, sharded.
            optimizer: its optimizer.
            names: of the parameters that are counted; the others are left out.
        """
        counted = {name: p for name, p in model.named_parameters() if name in names}
        others = [p for name, p in model.named_parameters() if name not in names]
        state = [optimizer.state.get(p, {}) for p in counted.values()]
        rest = [optimizer.state.get(p, {}) for p in others]
        grads = [p.grad for p in model.parameters()]
        left_out = _of([*others, *model.buffers(), *_values(rest), *grads])
        of_optimizer = _of(_values(state))
        own = {
            key: storage.nbytes()
            for key, storage in storages().items()
            if key not in self._before and key not in left_out
        }
        elements = sum(_local(p).numel() for p in counted.values())
        kept = sum(own.values())
        moments = sum(size for key, size in own.items() if key in of_optimizer)
        return AtRest((kept - moments) / elements, moments / elements)


def storages() -> dict[int, torch.UntypedStorage]:
    """The storages of all tensors in this process that have memory, by their addresses."""
    gc.collect()
    found: dict[int, torch.UntypedStorage] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            storage = _storage(thing)
            if storage is not None:
                found[storage._cdata] = storage
    return found


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    if isinstance(tensor, QuantizedTensor) or is_distributed(tensor):
        return None  # what they are made of is counted
    try:
        storage = tensor.untyped_storage()
        return storage if storage.device.type != "meta" and storage.data_ptr() else None
    except (NotImplementedError, RuntimeError):  # another wrapper
        return None


def _values(states: Iterable[dict[str, Any]]) -> Iterator[Any]:
    for state in states:
        yield from state.values()


def _of(tensors: Iterable[Any]) -> set[int]:
    locals_ = (_local(t) for t in tensors if isinstance(t, torch.Tensor))
    return {s._cdata for t in locals_ if (s := _storage(t)) is not None}


def _local(tensor: Any) -> torch.Tensor:
    part: torch.Tensor = own_part(tensor)
    return part
