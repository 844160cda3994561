"""Names of a model's parameters in files.

transformers 5 stacks the weights of experts in memory, but its files contain a matrix for each
expert, as inference servers read them. `stored_parts` takes these names from transformers' own
conversion mapping. Other models are stored under the names of their state dict.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fp8rs._torch import plain_name


class Part(NamedTuple):
    r"""The part of a parameter that one tensor of the files contains.

    Attributes:
        name: the tensor's name.
        matrix: the index of a matrix in a batched parameter (E, \*, K). None for the whole
            parameter.
        rows: rows of that matrix.
    """

    name: str
    matrix: int | None = None
    rows: slice = slice(None)

    def of(self, values: Tensor) -> Tensor:
        """Return the part of a parameter's values."""
        if self.matrix is None:
            return values
        return values[self.matrix].reshape(-1, values.shape[-1])[self.rows]

    @property
    def module(self) -> str:
        """The name of the module that a server builds from the parameter."""
        if self.matrix is None:
            return self.name.rpartition(".")[0]
        return self.name.rpartition(f".{self.matrix}.")[0]


def stored_parts(model: nn.Module) -> dict[str, list[Part]]:
    """Return how files store the parameters and buffers of a model of transformers with experts.

    Args:
        model: any model.

    Returns:
        For each name in the state dict, the tensors of the files, by expert. An empty dict if the
        files that transformers writes have the names of the state dict, if they store experts in
        another way than a range of rows for each tensor, or if the model is not one of
        transformers.
    """
    model = getattr(model, "_orig_mod", model)
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers())
    tensors = {plain_name(name): tensor for name, tensor in named}
    library, loading = map(sys.modules.get, (f"transformers.{name}" for name in _MODULES))
    if library is None or loading is None or not isinstance(model, library.PreTrainedModel):
        return {}
    if not any(tensor.dim() > 2 for tensor in tensors.values()):
        return {}
    host = _host(model, loading)
    found: dict[str, list[Part]] = {}
    for name, tensor in tensors.items():
        parts = _parts(host, loading, name, tuple(tensor.shape))
        if parts is None:
            return {}
        found[name] = parts
    names = [part.name for parts in found.values() for part in parts]
    divided = any(part.matrix is not None for parts in found.values() for part in parts)
    return found if divided and len(set(names)) == len(names) else {}


_MODULES = ("modeling_utils", "core_model_loading")


def _host(model: Any, loading: Any) -> Any:
    """Return what transformers needs of a model to convert its tensors for files."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    with _without_fsdp(model):
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    # transformers also ignores these for models that were not loaded from files. Early releases of
    # version 5 do not have the class.
    prefix = getattr(loading, "PrefixChange", ())
    conversions = [c for c in conversions if not isinstance(c, prefix)]
    return SimpleNamespace(
        _weight_conversions=conversions, config=model.config, get_parameter=model.get_parameter
    )


@contextmanager
def _without_fsdp(model: nn.Module) -> Iterator[None]:
    """Give modules the classes that they had before fully_shard.

    transformers looks up its mapping by class, and ignores classes of other libraries.
    """
    from torch.distributed.fsdp import FSDPModule

    classes = {m: type(m) for m in model.modules() if isinstance(m, FSDPModule)}
    try:
        for module, kind in classes.items():
            cast(Any, module).__class__ = kind.__mro__[2]
        yield
    finally:
        for module, kind in classes.items():
            module.__class__ = kind


def _parts(host: Any, loading: Any, name: str, shape: tuple[int, ...]) -> list[Part] | None:
    """Return the tensors that files store a parameter as. None if they are not ranges of rows.

    transformers converts a tensor that has the index of each row in the first column, and -1 in the
    second one. Early releases of version 5 remove dimensions of one element.
    """
    if len(shape) < 2:
        rows = torch.zeros(shape)
    else:
        index = torch.arange(prod(shape[:-1])).view(*shape[:-1], 1)
        rows = torch.cat([index, torch.full_like(index, -1)], -1)
    found: dict[str, Tensor] = loading.revert_weight_conversion(host, {name: rows})
    if len(found) == 1:
        ((stored, same),) = found.items()
        if torch.equal(same, rows):
            return [Part(stored)]
    if len(shape) < 3:
        return None
    height, parts = prod(shape[1:-1]), []
    for stored, part in found.items():
        first = int(part.flatten()[0]) if part.numel() else 0
        start, stop = first % height, first % height + len(part)
        is_range = torch.equal(part, rows.view(-1, 2)[first : first + len(part)])
        if not is_range or not start < stop <= height:
            return None
        parts.append(Part(stored, first // height, slice(start, stop)))
    return sorted(parts, key=lambda part: (part.matrix, part.rows.start))
