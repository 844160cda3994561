"""Measure memory: the peak, and how many bytes per parameter a rank stores between steps.

Every storage of the process is counted once, so that a forgotten copy is noticed.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Iterable
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
        numel = 0
        state_tensors: list[Any] = []
        excluded_tensors: list[Any] = list(model.buffers())
        for name, parameter in model.named_parameters():
            state_values = optimizer.state.get(parameter, {}).values()
            excluded_tensors.append(parameter.grad)
            if name in names:
                numel += _local(parameter).numel()
                state_tensors += state_values
            else:
                excluded_tensors.append(parameter)
                excluded_tensors += state_values
        state_storages = _storages_of(state_tensors)
        excluded_storages = _storages_of(excluded_tensors)

        weight_bytes = 0
        state_bytes = 0
        for key, storage in storages().items():
            if key in self._before or key in excluded_storages:
                continue
            if key in state_storages:
                state_bytes += storage.nbytes()
            else:
                weight_bytes += storage.nbytes()
        return AtRest(weights=weight_bytes / numel, optimizer=state_bytes / numel)


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
    result: dict[int, torch.UntypedStorage] = {}
    for python_object in gc.get_objects():
        if issubclass(type(python_object), torch.Tensor):
            storage = _storage(python_object)
            if storage is not None:
                result[storage._cdata] = storage
    return result


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor, or None if it has no memory of its own."""
    # The inner tensors of these are counted.
    if isinstance(tensor, QuantizedTensor) or is_distributed(tensor):
        return None
    try:
        storage = tensor.untyped_storage()
        has_memory = storage.device.type != "meta" and storage.data_ptr() != 0
    except (NotImplementedError, RuntimeError):  # Another wrapper subclass.
        return None
    return storage if has_memory else None


def _storages_of(values: Iterable[Any]) -> set[int]:
    """Return the keys in `storages` of the tensors among some values."""
    keys = set()
    for value in values:
        if isinstance(value, torch.Tensor):
            storage = _storage(_local(value))
            if storage is not None:
                keys.add(storage._cdata)
    return keys


def _local(tensor: Any) -> torch.Tensor:
    part: torch.Tensor = own_part(tensor)
    return part
