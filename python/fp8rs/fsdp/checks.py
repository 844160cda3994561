"""Checks before FP8 all-gathers: FSDP2's settings, and what the ranks have converted.

Ranks read each other's bytes, so they must agree on formats and layers. They compare once for each
mesh, before the first forward of the converted root, or when FSDP2 initializes.

The comparison uses the store of the process group instead of a collective. A rank that converted no
layer does not take part. A collective would be paired with an unrelated one of that rank, and no
error could name the rank.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fp8rs._core import __version__
from fp8rs._torch import fsdp_groups, fsdp_place, own_store
from fp8rs.model.handle import local_of
from fp8rs.model.state import ModelState
from fp8rs.quantize.recipes import describe
from fp8rs.scaling.reductions import mesh_groups
from fp8rs.tensor.quantized import is_fp8

from .float8_shard import Float8Shard
from .master_weight import MasterWeight

#: How a weight is gathered, by the class of its local tensor.
GATHERED_AS: dict[type, str] = {
    MasterWeight: "quantized before it is gathered",
    Float8Shard: "FP8",
}
HIGH_PRECISION = "gathered in high precision"
#: How long a rank waits for others before it warns which ranks are missing.
WARN_AFTER = timedelta(seconds=30)


def compare_conversions(state: ModelState, mesh: DeviceMesh) -> None:
    """Compare the conversion of a model over the ranks of a mesh.

    Raises:
        ValueError: a rank converted the model in another way.
        TimeoutError: a rank did not take part before the store's time-out.
    """
    if mesh.size() == 1 or mesh.get_coordinate() is None:
        return
    store = own_store()
    if store is not None:
        compare(store, conversion(state, mesh), mesh.mesh.flatten().tolist())


def conversion(state: ModelState, mesh: DeviceMesh) -> dict[str, str]:
    """Describe the version, the recipe and the converted weights that are sharded over a mesh."""
    description = {"fp8rs": __version__, "recipe": describe(state.recipe)}
    for layer_name, layer in zip(state.names, state.layers(), strict=False):
        if layer is None:
            continue
        parameter_names: Any = layer._fp8_params
        for name in parameter_names:
            weight: Any = layer._parameters.get(name)
            if isinstance(weight, DTensor) and weight.device_mesh == mesh:
                kind = type(local_of(weight))
                description[f"{name} of {layer_name}"] = GATHERED_AS.get(kind, HIGH_PRECISION)
    return description


def compare(store: Any, description: dict[str, str], ranks: Sequence[int]) -> None:
    """Raise if the descriptions of two ranks differ. All ``ranks`` call this function.

    The first rank reads all descriptions. The other ranks read its result.

    Args:
        store: a connection of this call's own to the store of all ranks.
        description: this rank's `conversion`.
        ranks: the ranks of the mesh.

    Raises:
        ValueError: two descriptions differ.
        TimeoutError: a rank did not take part before the store's time-out.
    """
    this_rank = dist.get_rank()
    mesh_key = f"fp8rs {hashlib.sha256(repr(ranks).encode()).hexdigest()}"
    # The counter is in the store, because it must continue after a process group is created again.
    comparison = store.add(f"{mesh_key} {this_rank}", 1)
    key = f"{mesh_key} {comparison}"
    result_key = f"{key} result"
    key_of_rank = {rank: f"{key} rank {rank}" for rank in ranks}

    store.set(key_of_rank[this_rank], json.dumps(description))
    if this_rank == ranks[0]:
        _wait(store, list(key_of_rank.values()), key_of_rank)
        result = ""
        for rank in ranks:
            other_description = json.loads(store.get(key_of_rank[rank]))
            result = difference(description, other_description, this_rank, rank)
            if result:
                break
        store.set(result_key, result)

    _wait(store, [result_key], key_of_rank)
    result = store.get(result_key).decode()
    if result:
        raise ValueError(
            f"{result}: they would misread each other's bytes. Convert with the same "
            "arguments, and the same fp8rs, on all ranks that a model is sharded over"
        )


def difference(
    description: dict[str, str], other_description: dict[str, str], rank: int, other_rank: int
) -> str:
    """Return the first difference of two ranks' conversions as a sentence, or an empty string."""
    for name in {**description, **other_description}:
        value = description.get(name, "not converted")
        other_value = other_description.get(name, "not converted")
        if value != other_value:
            return f"{name} is {value} on rank {rank} and {other_value} on rank {other_rank}"
    # Scales are packed for the all-reduce in the order of the layers.
    if list(description) != list(other_description):
        return f"the order of converted layers differs on ranks {rank} and {other_rank}"
    return ""


def _wait(store: Any, keys: list[str], key_of_rank: Mapping[int, str]) -> None:
    """Wait for keys. After `WARN_AFTER`, the first of the waiting ranks warns which are missing.

    Args:
        store: where the keys are set.
        keys: the keys to wait for, up to the store's time-out.
        key_of_rank: the key that each rank sets when it joins.

    Raises:
        TimeoutError: the time-out passed.
    """
    limit = store.timeout
    remaining = limit
    if limit > WARN_AFTER:
        try:
            store.wait(keys, WARN_AFTER)
            return
        except dist.DistStoreError:
            first_waiting = next(rank for rank, key in key_of_rank.items() if store.check([key]))
            if first_waiting == dist.get_rank():
                problem = _describe_missing(store, key_of_rank, WARN_AFTER)
                warnings.warn(f"{problem}. An error is raised after {limit}", stacklevel=2)
            remaining = limit - WARN_AFTER

    try:
        store.wait(keys, remaining)
    except dist.DistStoreError as error:
        raise TimeoutError(_describe_missing(store, key_of_rank, limit)) from error


def _describe_missing(store: Any, key_of_rank: Mapping[int, str], waited: timedelta) -> str:
    """Return a sentence that names the ranks that have not joined a comparison."""
    missing = [rank for rank, key in key_of_rank.items() if not store.check([key])]
    if not missing:
        missing = list(key_of_rank)[:1]  # the first rank has not set the result
    return (
        f"fp8rs has waited {waited} to compare conversions before the first all-gather: ranks "
        f"{missing[:8]} have not joined. Check that every rank converts the same layers and runs "
        "the model's forward"
    )


def most_tokens(tokens: int | None, mesh: DeviceMesh) -> float:
    """Return the largest number of tokens of the ranks of a mesh.

    All ranks of the mesh call this function, after they have compared their conversions.

    Args:
        tokens: this rank's number, or None if it is not known, which counts as the largest.
        mesh: the mesh.
    """
    number = inf if tokens is None else float(tokens)
    most = torch.tensor(number, dtype=torch.float64, device=mesh.device_type)
    for group in mesh_groups(mesh):
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return most.item()


# --- settings of FSDP2 ----------------------------------------------------------------------------


def check_settings(state: ModelState) -> None:
    """Check that FSDP2 can gather the model's parameters in FP8.

    If ``reshard_after_forward`` is a number below the world size, FSDP2 would keep a part of the
    gathered bytes as a parameter, which requires high precision.

    In a group with FP8 weights, FSDP2 gathers bytes and computes their number in its first forward.
    It would misread parameters that were cast since. For other groups, it raises an error itself.

    Raises:
        ValueError: ``reshard_after_forward`` is such a number.
        RuntimeError: a parameter was cast after FSDP2 gathered it for the first time.
    """
    for unit_name, group in fsdp_groups(state.root):
        _check_reshard_after_forward(unit_name, group)
        for fsdp_param in group.fsdp_params:
            module, name, parameter = fsdp_place(fsdp_param)
            # FSDP2 sets this attribute in its first forward.
            first_dtype = getattr(fsdp_param, "orig_dtype", None)
            was_cast = first_dtype not in (None, parameter.dtype)
            # FP8 weights are bytes in any dtype.
            if was_cast and not is_fp8(parameter):
                raise RuntimeError(
                    f"{name} of {type(module).__name__} is {parameter.dtype}, and was "
                    f"{first_dtype} when FSDP2 began to gather it: cast a model "
                    "before its first forward"
                )


def _check_reshard_after_forward(unit_name: str, group: Any) -> None:
    """Raise ValueError if FSDP2 keeps a part of FP8 parameters after the forward of a group."""
    post_forward_mesh = getattr(group, "post_forward_mesh_info", None)
    if post_forward_mesh is None or post_forward_mesh == group.mesh_info:
        return
    for fsdp_param in group.fsdp_params:
        _, _, parameter = fsdp_place(fsdp_param)
        if local_of(parameter) is not None:
            size = getattr(post_forward_mesh, "shard_mesh_size", "a number")
            raise ValueError(
                f"fully_shard(..., reshard_after_forward={size}) on {unit_name or 'the root'} "
                "does not work with FP8 all-gather: use True or False, or convert with "
                "enable_fsdp_float8_all_gather=False"
            )
