"""Planners that compare the states of all ranks with the checkpoint before any read or write."""

from __future__ import annotations

import codecs
import io
import pickle
import re
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import reduce
from itertools import chain
from operator import getitem
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan

from fp8rs._torch import own_part
from fp8rs.quantize.formats import FP8_MAX, INPUT_DTYPES
from fp8rs.scaling.histories import BUFFERS
from fp8rs.tensor.quantized import is_fp8

from .parts import COLUMNWISE, SCALE, distribute_like

#: Matches options of param groups. Pipeline stages save these under the same names.
GROUP_OPTION = re.compile(r"\.param_groups\.\d+\.(?!params$)")


class MismatchError(ValueError):
    """The state does not match the checkpoint, or ranks disagree. All ranks raise it.

    Attributes:
        differences: a line for each difference.
    """

    def __init__(self, text: str, differences: list[str]) -> None:
        super().__init__(text, differences)
        self.differences = differences

    def __str__(self) -> str:
        return str(self.args[0])


#: The ranks that see a difference, by its kind and its line.
Differences = dict[str, dict[str, list[int]]]
#: How many differences of a kind a message lists.
SHOWN = 3


def mismatch(text: str, found: Differences, world_size: int, remedies: str) -> MismatchError:
    """Return an error that counts the differences of each kind and lists the first of them."""
    lines, differences = [text], []
    for kind, ranks_of in found.items():
        each = [
            line if len(ranks) == world_size else f"{line} (rank {', '.join(map(str, ranks))})"
            for line, ranks in ranks_of.items()
        ]
        differences += each
        lines += [f"{kind} ({len(each)}):", *(f"  {line}" for line in each[:SHOWN])]
        lines += [f"  and {len(each) - SHOWN} more"] if len(each) > SHOWN else []
    return MismatchError("\n".join(filter(None, [*lines, remedies])), differences)


class SavePlanner(DefaultSavePlanner):
    """DCP's planner, which also refuses values that cannot be loaded and ranks that disagree."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Flatten the state.

        Raises:
            TypeError: the state has quantized tensors, or values that cannot be loaded safely.
        """
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        refuse_quantized(self.state_dict)
        refuse_unloadable(self.state_dict)

    def create_local_plan(self) -> SavePlan:
        """Plan this rank's writes, with the options of its param groups for the comparison."""
        plan = super().create_local_plan()
        options = {
            # The text of a tensor has its device, which differs between ranks, and few digits.
            name: repr(value.tolist() if isinstance(value, Tensor) else value)
            for name, value in self.state_dict.items()
            if GROUP_OPTION.search(name)
        }
        return replace(plan, planner_data=(plan.planner_data, options))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Compare the ranks' plans.

        Raises:
            MismatchError: a shape, a dtype or an option of a param group differs between ranks.
        """
        known: dict[str, tuple[str, int]] = {}
        found: Differences = {}
        for rank, plan in enumerate(all_plans):
            _, options = plan.planner_data
            for item in plan.items:
                data, name = item.tensor_data, item.index.fqn
                own = "no tensor" if data is None else _text(data.properties.dtype, data.size)
                own = options.get(name, own)
                first, of = known.setdefault(name, (own, rank))
                if own != first:
                    line = f"{name}: {first} on rank {of}, {own}"
                    ranks = found.setdefault(DIFFER, {}).setdefault(line, [])
                    ranks += [] if rank in ranks else [rank]
        if found:
            text = "ranks save different tensors or options under one name"
            raise mismatch(
                text, found, len(all_plans), "Save equal shapes, dtypes and options on all ranks."
            )
        return super().create_global_plan(
            [replace(plan, planner_data=plan.planner_data[0]) for plan in all_plans]
        )


class LoadPlanner(DefaultLoadPlanner):
    """DCP's planner, which reads nothing unless the checkpoint matches the states of all ranks.

    If the checkpoint has no scales for an FP8 weight, it reads high-precision values. If the
    checkpoint has no histories, it skips them.

    Args:
        strict: whether the checkpoint and the states must have the same names.
    """

    def __init__(self, strict: bool) -> None:
        super().__init__()
        self.strict = strict

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Adapt the entries of the state to the checkpoint, and flatten it.

        Raises:
            TypeError: the state has quantized tensors.
            ValueError: a tensor is on the meta device.
        """
        assert metadata is not None
        saved = metadata.state_dict_metadata
        _check_memory(state_dict)
        for entry in list(_entries(state_dict)):
            _adapt(*entry, saved)
        self._keys = tuple(f"{key}." for key in state_dict)
        super().set_up_planner(state_dict, metadata, is_coordinator)
        refuse_quantized(self.state_dict)
        if self.strict:
            return
        absent = {key for key in state_dict if not _begin_with(f"{key}.", saved)}
        for name in [n for n in self.state_dict if n not in saved and not _is_part(n, saved)]:
            path = self.mappings[name]
            if len(path) > 1 and path[0] in absent:
                continue  # probably a misspelt key: create_global_plan raises
            owner: Any = reduce(getitem, path[:-1], state_dict)
            if isinstance(owner, list) or len(path) == 1:
                owner[path[-1]] = ABSENT
            else:
                del owner[path[-1]]
            del self.state_dict[name]
        # Options that an optimizer lacks are read for `Optimizer.check`, and are not loaded.
        for name, there in saved.items():
            if (option := GROUP_OPTION.search(name)) is None or name in self.mappings:
                continue
            params = self.mappings.get(f"{name[: option.end()]}params")
            if params is not None and not isinstance(there, TensorStorageMetadata):
                group, key = params[:-1], name[option.end() :]
                reduce(getitem, group, state_dict)[key] = self.state_dict[name] = None
                self.mappings[name] = (*group, key)

    def create_local_plan(self) -> LoadPlan:
        """Compare this rank's state with the checkpoint, and plan reads if they match."""
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        found: dict[str, list[str]] = {}
        for name, value in self.state_dict.items():
            own = _describe(value)
            if name not in saved:
                found.setdefault(MISSING, []).append(f"{name}: not in the checkpoint, {own} here")
            elif own != (there := _describe_saved(saved[name])):
                line = f"{name}: {there} in the checkpoint, {own} here"
                found.setdefault(OTHER, []).append(line)
        plan = LoadPlan([]) if found else super().create_local_plan()
        return replace(plan, planner_data=(found, self._keys, set(self.state_dict)))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Compare the states of all ranks with the checkpoint. Ranks may have different names.

        Raises:
            MismatchError: they differ.
        """
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        found: Differences = {}
        each_keys: list[tuple[str, ...]] = []
        known: set[str] = set()
        for rank, plan in enumerate(global_plan):
            local, keys, names = plan.planner_data
            known |= names
            each_keys.append(keys)
            for kind, lines in local.items():
                for line in lines:
                    found.setdefault(kind, {}).setdefault(line, []).append(rank)
        for name in sorted(saved.keys() - known) if self.strict else ():
            ranks = [rank for rank, keys in enumerate(each_keys) if name.startswith(keys)]
            if ranks:
                line = f"{name}: {_describe_saved(saved[name])} in the checkpoint, unknown here"
                found.setdefault(UNKNOWN, {})[line] = ranks
        if found:
            lines = list(chain.from_iterable(found.values()))
            remedies = [remedy for names, remedy in REMEDIES if any(map(names.search, lines))]
            missing = [line.partition(":")[0] for line in found.get(MISSING, ())]
            absent = [
                repr(key[:-1])
                for key in dict.fromkeys(chain.from_iterable(each_keys))
                if _begin_with(key, missing) and not _begin_with(key, saved)
            ]
            if absent:
                begin = dict.fromkeys(name.partition(".")[0] for name in sorted(saved))
                remedies.append(
                    f"The checkpoint has no {', '.join(absent)}: its names begin with "
                    f"{', '.join(map(repr, list(begin)[:10]))}."
                )
            if self.strict and OTHER not in found and (MISSING in found or UNKNOWN in found):
                remedies.append(
                    "load(..., strict=False) loads the entries that both have, and does not change "
                    "the others."
                )
            text = "the checkpoint does not match the state, and nothing was loaded"
            raise mismatch(text, found, len(global_plan), " ".join(remedies))
        return super().create_global_plan(global_plan)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read a value that is not a tensor, without running code from the file.

        Raises:
            TypeError: values of its type cannot be loaded safely.
        """
        name = read_item.dest_index.fqn
        try:
            found = load_safely(value)
        except pickle.UnpicklingError as error:
            raise TypeError(f"{name} cannot be loaded safely: {_reason(error)}. {SAFE}") from None
        checked = io.BytesIO()
        torch.save(found, checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)


#: Replaces an entry of a list or of the top level that the checkpoint does not have.
ABSENT = object()

#: Kinds of differences.
DIFFER = "Different between ranks"
MISSING = "Not in the checkpoint"
UNKNOWN = "In the checkpoint, but not in the state of any rank"
OTHER = "Different shape or dtype"
#: Remedies, with patterns of the lines that they apply to.
REMEDIES = [
    (
        re.compile(rf"\.({'|'.join(BUFFERS)}): .* unknown here"),
        "The checkpoint has histories of delayed scaling, but the model has another recipe.",
    ),
    (
        re.compile(rf"(?<!fp8)({SCALE}|{COLUMNWISE}): |float8\w+ [^:]*, (?!float8)"),
        "To load FP8 weights, convert the model with the recipe that they were saved with and "
        "fp8_weights=True.",
    ),
]


def _begin_with(key: str, names: Iterable[str]) -> bool:
    """Return whether any of ``names`` is in the part of a state under ``key``, "KEY."."""
    return any(f"{name}.".startswith(key) for name in names)


def _is_part(name: str, saved: dict[str, Any]) -> bool:
    """Return whether a name is a part of an FP8 weight whose codes are in the checkpoint."""
    weight = name.removesuffix(SCALE).removesuffix(COLUMNWISE)
    return weight != name and _describe_saved(saved.get(weight)).startswith("float8")


def refuse_quantized(flat: dict[str, Any]) -> None:
    """Raise TypeError if a flat state has quantized tensors."""
    for name, value in flat.items():
        if is_fp8(value):
            raise TypeError(
                f"{name} is a quantized tensor. Instead of the model's state dict, pass "
                "fp8rs.checkpoint.Model(model), which has codes and scales"
            )


SAFE = (
    "Checkpoints can contain tensors, numpy arrays, and values that torch.load(weights_only=True) "
    "reads: numbers, str, bytes, None, list, tuple, dict, set. Convert the value to these types, "
    "or call torch.serialization.add_safe_globals with its type before saving and before loading"
)


def refuse_unloadable(flat: dict[str, Any]) -> None:
    """Raise TypeError if a flat state has values that `load_safely` would refuse."""
    found = []
    for name, value in flat.items():
        if isinstance(value, Tensor):
            continue
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            buffer.seek(0)
            load_safely(buffer)
        except Exception as error:  # pickling a type can raise any error
            kind = type(value)
            found.append(f"  {name}: {kind.__module__}.{kind.__qualname__} ({_reason(error)})")
    if found:
        raise TypeError("\n".join(["values could not be loaded again", *found, SAFE]))


def _reason(error: Exception) -> str:
    """Return the line of a ``torch.load`` error that names the refused type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if line.startswith("WeightsUnpickler error: ")]
    text = (named or lines or [type(error).__name__])[0]
    return text.removeprefix("WeightsUnpickler error: ").split(". ")[0].rstrip(".")


_LOADING = threading.Lock()


def load_safely(file: io.BytesIO) -> Any:
    """Call ``torch.load(weights_only=True)``, and allow numpy's scalars, arrays and dtypes.

    Raises:
        pickle.UnpicklingError: the type of a value is not allowed.
    """
    with _LOADING:  # an asynchronous save has a thread, and the safe globals are per process
        ours = [g for g in NUMPY if g not in torch.serialization.get_safe_globals()]
        with torch.serialization.safe_globals(ours):
            return torch.load(file, weights_only=True)


#: Globals in pickles of numpy's scalars, arrays and dtypes.
NUMPY: list[Any] = [
    np.ndarray,
    np.dtype,
    codecs.encode,
    np.empty(0).__reduce__()[0],
    np.float32(0).__reduce__()[0],
    *{type(np.dtype(code)) for code in np.typecodes["All"]},
]


def _entries(state: Any, path: str = "") -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield the dictionary, the path and the key of each entry of nested dictionaries."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _entries(value, f"{path}{key}.")
        else:
            yield state, path, key


def _check_memory(state: Any) -> None:
    """Raise ValueError if a tensor of a state is on the meta device."""
    for owner, path, key in _entries(state):
        if isinstance(owner[key], Tensor) and owner[key].is_meta:
            raise ValueError(
                f"{path}{key} is on the meta device, without memory to load into: call "
                "model.to_empty(device=...) first"
            )


def _adapt(owner: dict[str, Any], path: str, key: Any, saved: dict[str, Any]) -> None:
    name = f"{path}{key}"
    if name in saved or not isinstance(key, str):
        return
    if key.rpartition(".")[2] in BUFFERS:
        del owner[key]
    elif key.endswith(SCALE):
        weight = key.removesuffix(SCALE)
        there = saved.get(path + weight)
        if not isinstance(there, TensorStorageMetadata):
            return
        codes: Any = owner.get(weight)
        if getattr(codes, "dtype", None) in FP8_MAX and there.properties.dtype in INPUT_DTYPES:
            values = torch.empty_like(own_part(codes), dtype=there.properties.dtype)
            owner[weight] = distribute_like(codes, values)
            for suffix in (SCALE, COLUMNWISE, COLUMNWISE + SCALE):
                owner.pop(weight + suffix, None)


def _describe(value: Any) -> str:
    return _text(value.dtype, value.shape) if isinstance(value, Tensor) else "no tensor"


def _describe_saved(value: Any) -> str:
    if isinstance(value, TensorStorageMetadata):
        return _text(value.properties.dtype, value.size)
    return "no tensor"


def _text(dtype: torch.dtype, shape: Any) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"
