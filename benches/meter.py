"""Measure memory: the peak, and how many bytes per parameter a rank stores between steps.

Every storage of the process is counted once, so that a forgotten copy is noticed.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fp8rs._torch import is_distributed, own_part
from fp8rs.demo.train import HIGH_PRECISION
from fp8rs.tensor.quantized import QuantizedTensor


@dataclass(frozen=True)
class AtRest:
    """Bytes per parameter of the converted weights on this rank.

    Attributes:
        weights: all storages except gradients, buffers, other parameters and optimizer states.
        optimizer: their optimizer states.
    """

    weights: float
    optimizer: float


class Meter:
    """Measures the storages that were allocated since it was created."""

    def __init__(self) -> None:
        # Keep them alive, so that no address is used again.
        self._before = storages()

    def at_rest(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, names: set[str]
    ) -> AtRest:
        """Measure between steps, after gradients are freed and the model is resharded.

        Args:
            model: the sharded model.
            optimizer: its optimizer.
            names: names of the parameters that are counted.
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


def converted_weights(model: nn.Module) -> set[str]:
    """Return the names of the weights that the demo and the benchmarks convert."""
    names = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in HIGH_PRECISION:
            names.add(f"{name}.weight")
    return names


def peak_memory(device: str) -> int:
    """Return the peak memory: of the GPU's allocator, or of this process on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def storages() -> dict[int, torch.UntypedStorage]:
    """Return the storages of all tensors of this process that have memory."""
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
        return None  # Their inner tensors are counted.
    try:
        storage = tensor.untyped_storage()
        return storage if storage.device.type != "meta" and storage.data_ptr() else None
    except (NotImplementedError, RuntimeError):  # Another wrapper subclass.
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
