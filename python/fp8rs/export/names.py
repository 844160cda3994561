"""Where files store the tensors of a model.

transformers 5 changes tensors when it loads and saves files. It stacks the weights of experts, of
which files have one matrix each, renames tensors, and joins or divides others. `layout_of` applies
transformers' own conversion to numbers of rows and so learns where each row of a tensor is stored.
Models of other libraries are stored under the names of their state dict.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fp8rs._torch import plain_name
from fp8rs.scaling.histories import BUFFERS

#: Tensors by name.
Tensors = dict[str, Tensor]

_ALL = slice(None)


class StoredRange(NamedTuple):
    """A range of rows of a tensor of the model that one tensor of the files contains.

    Attributes:
        stored_name: the name of the files' tensor.
        rows: the rows, over all dimensions but the last.
        shape: the shape that the numbers of these rows have in the files.
    """

    stored_name: str
    rows: slice
    shape: tuple[int, ...]


class Part(NamedTuple):
    r"""The part of a tensor of the model that one tensor of the files contains.

    Attributes:
        name: the name of the files' tensor.
        matrix: the index of a matrix in a batched parameter (E, \*, K). None for all dimensions.
        rows: rows of that matrix, or a range of the first dimension.
    """

    name: str
    matrix: int | None = None
    rows: slice = _ALL

    @property
    def is_whole(self) -> bool:
        """Whether the files' tensor contains the whole tensor of the model."""
        return self.matrix is None and self.rows == _ALL

    def of(self, values: Tensor) -> Tensor:
        """Return the part of a tensor's values."""
        if self.is_whole:
            return values
        if self.matrix is not None:
            values = values[self.matrix].reshape(-1, values.shape[-1])
        return values[self.rows]

    def shape(self, model_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part, for the shape of the tensor of the model."""
        if self.is_whole:
            return model_shape
        row_shape = model_shape[1:] if self.matrix is None else model_shape[-1:]
        return self.rows.stop - self.rows.start, *row_shape

    @property
    def module(self) -> str:
        """The name of the module that a server builds from the tensor."""
        if self.matrix is None:
            return self.name.rpartition(".")[0]
        return self.name.rpartition(f".{self.matrix}.")[0]


@dataclass(frozen=True, eq=False)
class Fused:
    """Tensors of a model whose rows or elements files store together, or in another order.

    Attributes:
        shapes: the shapes of the model's tensors, by name.
        files: the shapes of the files' tensors, by name.
        keeps_rows: whether each row of the files' tensors is a row of the model's, or zeros.
        to_files: transformers' conversion of the model's tensors to those of the files.
    """

    shapes: dict[str, tuple[int, ...]]
    files: dict[str, tuple[int, ...]]
    keeps_rows: bool
    to_files: Callable[[Tensors], Tensors]

    def from_files(self, tensors: Tensors) -> Tensors:
        """Convert the tensors of the files to those of the model."""
        numbers = _Numbers(self.shapes, self.keeps_rows)
        dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))

        # The first row is for padding, which the model's tensors do not have.
        width = numbers.width
        rows = torch.empty(numbers.stop, width, dtype=dtype)
        for name, stored in self.to_files(numbers.tensors).items():
            rows[numbers.of(stored).long()] = tensors[name].reshape(-1, width).to(dtype)

        return {
            name: rows[numbers.starts[name] :][: numbers.counts[name]].view(shape)
            for name, shape in self.shapes.items()
        }


@dataclass(frozen=True)
class Layout:
    """How files store the tensors of a model.

    Attributes:
        parts: the tensors of the files that contain a tensor of the model, by expert.
        fused: the other tensors of the model, by name.
    """

    parts: dict[str, list[Part]] = field(default_factory=dict)
    fused: dict[str, Fused] = field(default_factory=dict)

    def parts_of(self, name: str) -> list[Part]:
        """Return the tensors of the files for a tensor that is not fused with others."""
        return self.parts.get(name, [Part(name)])

    def files_of(self, name: str) -> list[Part]:
        """Return all tensors of the files that contain elements of a tensor."""
        if name in self.fused:
            return [Part(stored) for stored in self.fused[name].files]
        return self.parts_of(name)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of a module that are in its state dict, by name.

    The buffers of delayed scaling are left out, because the unconverted model does not have them.
    """
    for key, buffer in module._buffers.items():
        if buffer is None or key in BUFFERS:
            continue
        if key not in module._non_persistent_buffers_set:
            yield key, buffer


def layout_of(model: nn.Module) -> Layout:
    """Return how files store the tensors of a model, as transformers' ``save_pretrained`` does.

    Args:
        model: any model. If it is not one of transformers, files have the names of its state dict.

    Raises:
        ValueError: transformers cannot convert the tensors of the model to those of files.
    """
    model = getattr(model, "_orig_mod", model)
    library, loading = map(sys.modules.get, (f"transformers.{name}" for name in _MODULES))
    if library is None or loading is None or not isinstance(model, library.PreTrainedModel):
        return Layout()
    conversions = _conversions(model, loading)
    if not conversions:
        return Layout()

    shapes = _shapes(model)
    to_files = partial(_to_files, loading, conversions, model.config)
    numbers = _Numbers(shapes, keeps_rows=True)
    try:
        stored = to_files(numbers.tensors)
    except Exception as error:
        raise ValueError(
            f"transformers cannot convert the tensors of {type(model).__name__} to those of its "
            f"files: {error}"
        ) from error
    return _layout(shapes, numbers, stored, to_files)


_MODULES = ("modeling_utils", "core_model_loading")


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a model's state dict, by name. Empty ones are omitted."""
    shapes = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for key, tensor in (*module._parameters.items(), *persistent_buffers(module)):
            if tensor is not None and tensor.numel():
                shapes[plain_name(f"{path}.{key}".lstrip("."))] = tuple(tensor.shape)
    return shapes


class _Numbers:
    """Tensors of consecutive numbers, whose conversion shows where files store each number.

    Each row of a tensor has a number, or each element. Row numbers are in the first column. The
    second column has -1, which shows whether a conversion keeps rows. Tensors of one dimension
    have no second column. Numbers begin with 1, because conversions may pad with zeros.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]], keeps_rows: bool) -> None:
        self.shapes = shapes
        self.keeps_rows = keeps_rows
        self.tensors: Tensors = {}
        self.starts: dict[str, int] = {}
        self.counts: dict[str, int] = {}

        #: The length of a row.
        self.width = 1
        self.stop = 1
        for name, shape in shapes.items():
            of_rows = keeps_rows and len(shape) > 1
            self.width = shape[-1] if of_rows else 1
            dims = shape[:-1] if of_rows else shape
            self.starts[name] = self.stop
            self.counts[name] = prod(dims)
            self.stop += self.counts[name]

            # Numbers of elements may exceed 32 bits. Numbers of all rows of a model do not.
            dtype = torch.int32 if keeps_rows else torch.int64
            index = torch.arange(self.starts[name], self.stop, dtype=dtype, device="cpu").view(dims)
            if of_rows:
                index = torch.stack([index, torch.full_like(index, -1)], -1)
            self.tensors[name] = index

        self._names = list(self.starts)
        self._begins = list(self.starts.values())

    def are_rows(self, stored: Tensor) -> bool:
        """Whether the rows of a converted tensor are rows of the model's tensors, or padding."""
        if stored.dim() < 2:
            return bool((stored >= 0).all())
        marks = stored[..., -1]
        return stored.shape[-1] == 2 and bool(((marks == -1) | (stored[..., 0] == 0)).all())

    def of(self, stored: Tensor) -> Tensor:
        """Return the numbers in a converted tensor, flat."""
        if self.keeps_rows and stored.dim() > 1:
            stored = stored[..., 0]
        return stored.flatten()

    def names_in(self, stored: Tensor) -> set[str]:
        """Return the names of the tensors whose numbers a converted tensor contains."""
        begins = torch.tensor(self._begins, dtype=stored.dtype)
        owners = torch.bucketize(stored[stored > 0], begins, right=True) - 1
        return {self._names[owner] for owner in owners.unique().tolist()}

    def range_in(self, stored: Tensor) -> tuple[str, slice] | None:
        """Return the rows of one tensor that a converted tensor has in their order, or None."""
        if not stored.numel() or not self.are_rows(stored):
            return None
        numbers = self.of(stored)
        first = int(numbers[0])
        last = int(numbers[-1])
        name = self._names[bisect_right(self._begins, first) - 1] if first else ""
        start = first - self.starts.get(name, 0)
        stop = start + len(numbers)
        if not name or last - first != len(numbers) - 1 or stop > self.counts[name]:
            return None
        if not torch.equal(numbers, self.of(self.tensors[name])[start:stop]):
            return None
        return name, slice(start, stop)


def _layout(
    shapes: dict[str, tuple[int, ...]],
    numbers: _Numbers,
    files: Tensors,
    to_files: Callable[[Tensors], Tensors],
) -> Layout:
    """Return the layout that a conversion of numbers shows."""
    ranges: dict[str, list[StoredRange]] = {}
    groups: list[set[str]] = []  # names of tensors that files store together
    scattered: set[str] = set()
    for stored_name, tensor in files.items():
        range_in_tensor = numbers.range_in(tensor)
        if range_in_tensor is not None:
            name, rows = range_in_tensor
            stored_range = StoredRange(stored_name, rows, tuple(tensor.shape))
            ranges.setdefault(name, []).append(stored_range)
            continue
        names = numbers.names_in(tensor)
        groups.append(names)
        if not numbers.are_rows(tensor):
            scattered |= names

    layout = Layout()
    grouped_names = set().union(*groups)
    for name, stored_ranges in ranges.items():
        if name in grouped_names:
            continue
        parts = _parts(shapes[name], tuple(numbers.tensors[name].shape), stored_ranges)
        if parts is None:
            groups.append({name})
        else:
            layout.parts[name] = parts

    for group in filter(None, _connected(groups)):
        group_shapes = {name: shape for name, shape in shapes.items() if name in group}
        on_meta = {name: torch.empty(shape, device="meta") for name, shape in group_shapes.items()}
        stored_shapes = {name: tuple(tensor.shape) for name, tensor in to_files(on_meta).items()}
        fused = Fused(group_shapes, stored_shapes, not group & scattered, to_files)
        layout.fused.update(dict.fromkeys(group_shapes, fused))
    return layout


def _parts(
    shape: tuple[int, ...], numbers_shape: tuple[int, ...], ranges: list[StoredRange]
) -> list[Part] | None:
    """Return the parts of a tensor. None if they are not rows of matrices or of dimension 0.

    Args:
        shape: the shape of the tensor.
        numbers_shape: the shape of its numbers.
        ranges: the tensors of the files that contain ranges of its rows.
    """
    if len(ranges) == 1 and ranges[0].shape == numbers_shape:
        return [Part(ranges[0].stored_name)]

    height = prod(shape[1:-1])
    parts = []
    for stored in ranges:
        length = stored.rows.stop - stored.rows.start
        matrix, start = divmod(stored.rows.start, height)
        if len(shape) > 2 and len(stored.shape) == 2 and start + length <= height:
            parts.append(Part(stored.stored_name, matrix, slice(start, start + length)))
        elif stored.shape[1:] == numbers_shape[1:]:
            rows = slice(stored.rows.start // height, stored.rows.stop // height)
            parts.append(Part(stored.stored_name, None, rows))
        else:
            return None

    kinds = {part.matrix is None for part in parts}
    stored_rows = sum(stored.rows.stop - stored.rows.start for stored in ranges)
    is_complete = stored_rows == prod(shape[:1]) * height
    if len(kinds) > 1 or not is_complete:
        return None
    return sorted(parts, key=lambda part: (part.matrix or 0, part.rows.start))


def _connected(groups: list[set[str]]) -> list[set[str]]:
    """Join the groups that have names in common."""
    connected: list[set[str]] = []
    for group in groups:
        separate = [other for other in connected if not other & group]
        overlapping = [other for other in connected if other & group]
        connected = [*separate, group.union(*overlapping)]
    return connected


# --- transformers --------------------------------------------------------------------------------


def _conversions(model: Any, loading: Any) -> list[Any]:
    """Return transformers' conversions of the tensors of files to those of a model."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    with _without_fsdp(model):
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    # transformers also ignores these for models that were not loaded from files. Early releases of
    # version 5 do not have the class.
    prefix = getattr(loading, "PrefixChange", ())
    return [conversion for conversion in conversions if not isinstance(conversion, prefix)]


def _to_files(loading: Any, conversions: list[Any], config: Any, tensors: Tensors) -> Tensors:
    """Convert tensors of a model to those of its files."""
    # Conversions read the shapes of parameters.
    model = SimpleNamespace(
        _weight_conversions=conversions, config=config, get_parameter=tensors.__getitem__
    )
    return cast(Tensors, loading.revert_weight_conversion(model, dict(tensors)))


@contextmanager
def _without_fsdp(model: nn.Module) -> Iterator[None]:
    """Give modules the classes that they had before fully_shard.

    transformers looks up its mapping by class, and ignores classes of other libraries.
    """
    from torch.distributed.fsdp import FSDPModule

    classes = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            classes[module] = type(module)
    try:
        for module, cls in classes.items():
            cast(Any, module).__class__ = cls.__mro__[2]
        yield
    finally:
        for module, cls in classes.items():
            module.__class__ = cls
