"""What is compared before anything is read or written, on all ranks."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan

from fp8rs._torch import own_part
from fp8rs.scaling.histories import BUFFERS
from fp8rs.tensor.formats import INPUT_DTYPES
from fp8rs.tensor.quantized import QuantizedTensor

from .parts import COLUMNWISE, SCALE, like


class SavePlanner(DefaultSavePlanner):
    """DCP's own, for ranks that mean the same."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """See the base."""
        refuse_quantized(state_dict)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Compare the ranks' plans, on one of them.

        Raises:
            ValueError: ranks have a tensor of that name, but of another shape or dtype.
        """
        known: dict[str, tuple[str, int]] = {}
        found: dict[str, None] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                data, name = item.tensor_data, item.index.fqn
                own = "no tensor" if data is None else _text(data.properties.dtype, data.size)
                first, of = known.setdefault(name, (own, rank))
                if own != first:
                    found[f"  {name}: {first} on rank {of}, {own} on rank {rank}"] = None
        if found:
            raise ValueError("ranks disagree on what they save:\n" + "\n".join(found))
        return super().create_global_plan(all_plans)


class LoadPlanner(DefaultLoadPlanner):
    """DCP's own, for a checkpoint that fits: else nothing is read.

    High precision is read for FP8 weights of which the checkpoint has no scales, and histories that
    it has none of are left out.
    """

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """See the base. Entries of ``state_dict`` become what the checkpoint has of them."""
        assert metadata is not None
        refuse_quantized(state_dict)
        for owner, path, key in list(_entries(state_dict)):
            _adapt(owner, path, key, metadata.state_dict_metadata)
        self._asked = tuple(f"{key}." for key in state_dict)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """Compare this rank's state with the checkpoint.

        Raises:
            ValueError: they differ; all that does is listed.
        """
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        problems = []
        for name, value in self.state_dict.items():
            own = _describe(value)
            if name not in saved:
                problems.append(f"  {name}: not in the checkpoint, {own} here")
            elif own != (there := _describe_saved(saved[name])):
                problems.append(f"  {name}: {there} in the checkpoint, {own} here")
            elif isinstance(value, Tensor) and value.is_meta:
                problems.append(f"  {name}: on the meta device here: call to_empty(device=...)")
        problems += [
            f"  {name}: {_describe_saved(saved[name])} in the checkpoint, unknown here"
            for name in saved
            if name.startswith(self._asked) and name not in self.state_dict
        ]
        if problems:
            raise ValueError(
                "the checkpoint does not fit, and nothing was loaded. (FP8 weights and histories "
                "are read by models with the same recipe alone.)\n" + "\n".join(problems)
            )
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read what is no tensor, without running what it says."""
        found = torch.load(value, weights_only=True)
        checked = io.BytesIO()
        torch.save(found, checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)


def refuse_quantized(state: Any) -> None:
    """TypeError where a state dict has quantized tensors, which are no plain ones."""
    for owner, path, key in _entries(state):
        if isinstance(own_part(owner[key]), QuantizedTensor):
            raise TypeError(
                f"{path}{key} is a quantized tensor: put fp8rs.checkpoint.Model(model) in the "
                "place of the model's state dict, which has codes and scales"
            )


def _entries(state: Any, path: str = "") -> Iterator[tuple[dict[str, Any], str, str]]:
    """The dictionaries of a state with their paths, by each of their keys."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _entries(value, f"{path}{key}.")
        else:
            yield state, path, key


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
        if weight in owner and there.properties.dtype in INPUT_DTYPES:
            codes = owner[weight]
            values = torch.empty_like(own_part(codes), dtype=there.properties.dtype)
            owner[weight] = like(codes, values)
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
