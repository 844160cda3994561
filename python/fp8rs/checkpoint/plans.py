"""Planners that compare the states of all ranks with the checkpoint before any read or write."""

from __future__ import annotations

import codecs
import io
import pickle
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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


#: How many differences of a kind a message lists.
SHOWN = 3


class Differences:
    """The ranks that see a difference, by its kind and its line."""

    def __init__(self) -> None:
        self.by_kind: dict[str, dict[str, list[int]]] = {}

    def add(self, kind: str, line: str, rank: int) -> None:
        """Note that a rank sees a difference."""
        ranks = self.by_kind.setdefault(kind, {}).setdefault(line, [])
        if rank not in ranks:
            ranks.append(rank)

    def lines(self, *kinds: str) -> list[str]:
        """Return the lines of some kinds of differences."""
        lines: list[str] = []
        for kind in kinds:
            lines += self.by_kind.get(kind, ())
        return lines

    def error(self, text: str, world_size: int, remedies: Sequence[str]) -> MismatchError:
        """Return an error that counts the differences of each kind and lists the first of them."""
        message = [text]
        differences: list[str] = []
        for kind, ranks_by_line in self.by_kind.items():
            lines = []
            for line, ranks in ranks_by_line.items():
                if len(ranks) < world_size:
                    line = f"{line} (rank {', '.join(map(str, ranks))})"
                lines.append(line)
            differences += lines

            message.append(f"{kind} ({len(lines)}):")
            message += [f"  {line}" for line in lines[:SHOWN]]
            if len(lines) > SHOWN:
                message.append(f"  and {len(lines) - SHOWN} more")
        if remedies:
            message.append(" ".join(remedies))
        return MismatchError("\n".join(message), differences)


@dataclass(frozen=True)
class SavedOptions:
    """What one rank sends to the coordinator of a save, besides its plan.

    Attributes:
        dcp_data: the ``planner_data`` of DCP's planner.
        options: the options of its param groups, as text, by name.
    """

    dcp_data: Any
    options: dict[str, str]


@dataclass(frozen=True)
class LocalState:
    """What one rank sends to the coordinator of a load.

    Attributes:
        differences: lines of what differs between its state and the checkpoint, by their kind.
        prefixes: the keys at the top level of its state, each as "KEY.".
        names: the names of its entries.
    """

    differences: dict[str, list[str]]
    prefixes: tuple[str, ...]
    names: set[str]


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
        options: dict[str, str] = {}
        for name, value in self.state_dict.items():
            if GROUP_OPTION.search(name) is None:
                continue
            if isinstance(value, Tensor):
                # The text of a tensor has its device, which differs between ranks, and few digits.
                value = value.tolist()
            options[name] = repr(value)
        return replace(plan, planner_data=SavedOptions(plan.planner_data, options))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Compare the ranks' plans.

        Raises:
            MismatchError: a shape, a dtype or an option of a param group differs between ranks.
        """
        # What the first rank that saves a name saves under it, and that rank.
        first_texts: dict[str, str] = {}
        first_ranks: dict[str, int] = {}
        differences = Differences()
        for rank, plan in enumerate(all_plans):
            options = plan.planner_data.options
            for item in plan.items:
                name = item.index.fqn
                text = options.get(name)
                if text is None:
                    data = item.tensor_data
                    text = NO_TENSOR if data is None else _text(data.properties.dtype, data.size)

                if name not in first_texts:
                    first_texts[name] = text
                    first_ranks[name] = rank
                if text != first_texts[name]:
                    line = f"{name}: {first_texts[name]} on rank {first_ranks[name]}, {text}"
                    differences.add(DIFFER, line, rank)
        if differences.by_kind:
            raise differences.error(
                "ranks save different tensors or options under one name",
                len(all_plans),
                ["Save equal shapes, dtypes and options on all ranks."],
            )

        dcp_plans = []
        for plan in all_plans:
            dcp_plans.append(replace(plan, planner_data=plan.planner_data.dcp_data))
        return super().create_global_plan(dcp_plans)


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
        for owner, path, key in list(_entries(state_dict)):  # which `_adapt` changes
            _adapt(owner, path, key, saved)
        self._prefixes = tuple(f"{key}." for key in state_dict)
        super().set_up_planner(state_dict, metadata, is_coordinator)
        refuse_quantized(self.state_dict)
        if not self.strict:
            self._skip_entries(state_dict, saved)
            self._read_other_options(state_dict, saved)

    def _skip_entries(self, state_dict: dict[str, Any], saved: dict[str, Any]) -> None:
        """Remove the entries of a state that the checkpoint does not have."""
        absent_keys = {key for key in state_dict if not _begin_with(f"{key}.", saved)}
        for name in list(self.state_dict):
            # Moments that start from 0 with the saved number of steps would take steps that are too
            # long, so moments in another format are an error too.
            if name in saved or _is_part(name, saved) or _is_other_moment(name, saved):
                continue
            path = self.mappings[name]
            is_top_level = len(path) == 1
            if not is_top_level and path[0] in absent_keys:
                continue  # probably a misspelt key: create_global_plan raises

            del self.state_dict[name]
            # Lists keep the positions of their other members, and the top level its keys.
            owner = _member(state_dict, path[:-1])
            if is_top_level or isinstance(owner, list):
                owner[path[-1]] = ABSENT
            else:
                del owner[path[-1]]

    def _read_other_options(self, state_dict: dict[str, Any], saved: dict[str, Any]) -> None:
        """Add the saved options of param groups that an optimizer does not have.

        They are read for `Optimizer.check`, and are not loaded.
        """
        for name, metadata in saved.items():
            match = GROUP_OPTION.search(name)
            if match is None or name in self.mappings:
                continue
            params_path = self.mappings.get(f"{name[: match.end()]}params")
            if params_path is None or isinstance(metadata, TensorStorageMetadata):
                continue
            group_path = params_path[:-1]
            option = name[match.end() :]
            _member(state_dict, group_path)[option] = None
            self.state_dict[name] = None
            self.mappings[name] = (*group_path, option)

    def create_local_plan(self) -> LoadPlan:
        """Compare this rank's state with the checkpoint, and plan reads if they match."""
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        differences: dict[str, list[str]] = {}
        for name, value in self.state_dict.items():
            text = _describe(value)
            if name not in saved:
                line = f"{name}: not in the checkpoint, {text} here"
                differences.setdefault(MISSING, []).append(line)
                continue
            saved_text = _describe_saved(saved[name])
            if text != saved_text:
                line = f"{name}: {saved_text} in the checkpoint, {text} here"
                differences.setdefault(OTHER, []).append(line)

        plan = LoadPlan([]) if differences else super().create_local_plan()
        local_state = LocalState(differences, self._prefixes, set(self.state_dict))
        return replace(plan, planner_data=local_state)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Compare the states of all ranks with the checkpoint. Ranks may have different names.

        Raises:
            MismatchError: they differ.
        """
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        local_states: list[LocalState] = [plan.planner_data for plan in global_plan]
        names: set[str] = set()
        differences = Differences()
        for rank, local_state in enumerate(local_states):
            names |= local_state.names
            for kind, lines in local_state.differences.items():
                for line in lines:
                    differences.add(kind, line, rank)
        for name in sorted(saved.keys() - names):
            if not self.strict and not _is_other_moment(name, names):
                continue
            line = f"{name}: {_describe_saved(saved[name])} in the checkpoint, unknown here"
            for rank, local_state in enumerate(local_states):
                if name.startswith(local_state.prefixes):
                    differences.add(UNKNOWN, line, rank)

        if differences.by_kind:
            prefixes: dict[str, None] = {}
            for local_state in local_states:
                prefixes.update(dict.fromkeys(local_state.prefixes))
            raise differences.error(
                "the checkpoint does not match the state, and nothing was loaded",
                len(global_plan),
                self._remedies(differences, list(prefixes), saved),
            )
        return super().create_global_plan(global_plan)

    def _remedies(
        self, differences: Differences, prefixes: list[str], saved: dict[str, Any]
    ) -> list[str]:
        """Return sentences that say what to do about differences."""
        lines = differences.lines(*differences.by_kind)
        remedies = []
        for pattern, remedy in REMEDIES:
            if any(pattern.search(line) for line in lines):
                remedies.append(remedy)

        missing = [line.partition(":")[0] for line in differences.lines(MISSING)]
        absent_keys = []
        for prefix in prefixes:
            if _begin_with(prefix, missing) and not _begin_with(prefix, saved):
                absent_keys.append(repr(prefix[:-1]))
        if absent_keys:
            saved_keys = dict.fromkeys(name.partition(".")[0] for name in sorted(saved))
            remedies.append(
                f"The checkpoint has no {', '.join(absent_keys)}: its names begin with "
                f"{', '.join(map(repr, list(saved_keys)[:10]))}."
            )
        # Entries of other shapes or dtypes and moments in another format are an error in any case.
        is_error = OTHER in differences.by_kind
        is_error |= any(_is_other_moment(name, saved) for name in missing)
        if self.strict and not is_error:
            remedies.append(
                "load(..., strict=False) loads the entries that both have, and does not change "
                "the others."
            )
        return remedies

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read a value that is not a tensor, without running code from the file.

        Raises:
            TypeError: values of its type cannot be loaded safely.
        """
        name = read_item.dest_index.fqn
        try:
            loaded = load_safely(value)
        except pickle.UnpicklingError as error:
            raise TypeError(f"{name} cannot be loaded safely: {_reason(error)}. {SAFE}") from None
        # DCP's planner runs code from the file, so it gets a new file of the loaded value.
        safe_file = io.BytesIO()
        torch.save(loaded, safe_file)
        safe_file.seek(0)
        super().load_bytes(read_item, safe_file)


#: Replaces an entry of a list or of the top level that the checkpoint does not have.
ABSENT = object()

#: The description of a value that is not a tensor.
NO_TENSOR = "no tensor"

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
    (
        re.compile(r"\.exp_avg(_sq)?_codes: not in the checkpoint"),
        "To load float32 moments into an optimizer with 8-bit moments, load in the context of its "
        "float32_state_dict(). Load bfloat16 moments into an optimizer with "
        "state_dtype=torch.bfloat16, and pass its state_dict() to load_state_dict().",
    ),
    (
        re.compile(r"\.exp_avg(_sq)?_codes: .* unknown here"),
        'The checkpoint has 8-bit moments: load it with state_dtype="fp8", or save it again in '
        "the context of float32_state_dict().",
    ),
]


def _begin_with(key: str, names: Iterable[str]) -> bool:
    """Return whether any of ``names`` is in the part of a state under ``key``, "KEY."."""
    return any(f"{name}.".startswith(key) for name in names)


def _is_part(name: str, saved: dict[str, Any]) -> bool:
    """Return whether a name is a part of an FP8 weight whose codes are in the checkpoint."""
    weight = name.removesuffix(SCALE).removesuffix(COLUMNWISE)
    return weight != name and _describe_saved(saved.get(weight)).startswith("float8")


#: Matches a moment of `fp8rs.optim.AdamW`, or a part of an 8-bit moment.
MOMENT = re.compile(r"(?P<moment>.*\.exp_avg(_sq)?)(?P<part>_codes|_range)?")


def _is_other_moment(name: str, others: Collection[str]) -> bool:
    """Return whether a name is a moment that ``others`` have in another format."""
    match = MOMENT.fullmatch(name)
    if match is None:
        return False
    moment = match["moment"]
    return (moment if match["part"] else f"{moment}_codes") in others


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
    refused = []
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
            refused.append(f"  {name}: {kind.__module__}.{kind.__qualname__} ({_reason(error)})")
    if refused:
        raise TypeError("\n".join(["values could not be loaded again", *refused, SAFE]))


def _reason(error: Exception) -> str:
    """Return the line of a ``torch.load`` error that names the refused type."""
    text = type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines:
        text = lines[0]
    for line in lines:
        if line.startswith(UNPICKLER_ERROR):
            text = line.removeprefix(UNPICKLER_ERROR)
            break
    return text.split(". ")[0].rstrip(".")


#: How the line of a ``torch.load`` error begins that names the refused type.
UNPICKLER_ERROR = "WeightsUnpickler error: "

_LOADING = threading.Lock()


def load_safely(file: io.BytesIO) -> Any:
    """Call ``torch.load(weights_only=True)``, and allow numpy's scalars, arrays and dtypes.

    Raises:
        pickle.UnpicklingError: the type of a value is not allowed.
    """
    with _LOADING:  # an asynchronous save has a thread, and the safe globals are per process
        allowed = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([type_ for type_ in NUMPY if type_ not in allowed]):
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


def _member(state: Any, path: Iterable[Any]) -> Any:
    """Return a member of nested dictionaries and lists."""
    for key in path:
        state = state[key]
    return state


def _check_memory(state: Any) -> None:
    """Raise ValueError if a tensor of a state is on the meta device."""
    for owner, path, key in _entries(state):
        if isinstance(owner[key], Tensor) and owner[key].is_meta:
            raise ValueError(
                f"{path}{key} is on the meta device, without memory to load into: call "
                "model.to_empty(device=...) first"
            )


def _adapt(owner: dict[str, Any], path: str, key: Any, saved: dict[str, Any]) -> None:
    """Adapt an entry that the checkpoint does not have, if it belongs to an FP8 layer.

    Histories are removed. If the checkpoint has high-precision values in place of codes and scales,
    the codes are replaced by a tensor for the values, and the other parts are removed.

    Args:
        owner: the dictionary with the entry.
        path: the path of the dictionary in the state.
        key: the key of the entry.
        saved: the entries of the checkpoint.
    """
    name = f"{path}{key}"
    if name in saved or not isinstance(key, str):
        return
    if key.rpartition(".")[2] in BUFFERS:
        del owner[key]
        return
    if not key.endswith(SCALE):
        return

    weight = key.removesuffix(SCALE)
    metadata = saved.get(path + weight)
    if not isinstance(metadata, TensorStorageMetadata):
        return
    saved_dtype = metadata.properties.dtype
    codes: Any = owner.get(weight)
    if getattr(codes, "dtype", None) in FP8_MAX and saved_dtype in INPUT_DTYPES:
        values = torch.empty_like(own_part(codes), dtype=saved_dtype)
        owner[weight] = distribute_like(codes, values)
        for suffix in (SCALE, COLUMNWISE, COLUMNWISE + SCALE):
            owner.pop(weight + suffix, None)


def _describe(value: Any) -> str:
    return _text(value.dtype, value.shape) if isinstance(value, Tensor) else NO_TENSOR


def _describe_saved(value: Any) -> str:
    if isinstance(value, TensorStorageMetadata):
        return _text(value.properties.dtype, value.size)
    return NO_TENSOR


def _text(dtype: torch.dtype, shape: Any) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"
