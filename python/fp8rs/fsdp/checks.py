"""Checks before FP8 all-gathers: FSDP2's settings, and what the ranks have converted.

Ranks read each other's bytes, so they must agree on formats and layers. They compare once for each
mesh, before the first forward of the converted root or before the first all-gather.

The comparison uses the store of the process group instead of a collective. A rank that converted no
layer does not take part, and a collective could neither name that rank nor avoid being paired with
another one. Ranks first exchange digests, and exchange texts only if the digests differ.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

import fp8rs
from fp8rs._torch import fsdp_groups, fsdp_place, own_store
from fp8rs.nn.model_state import ModelState
from fp8rs.tensor.quantized import QuantizedTensor, is_fp8

from .param import local_of

#: How long a rank waits for others before it warns which ranks are missing.
WARN_AFTER = timedelta(seconds=30)


def compare_conversions(state: ModelState, mesh: Any) -> None:
    """Compare the conversion of a model over the ranks of a mesh.

    Raises:
        ValueError: a rank converted the model in another way.
        TimeoutError: a rank did not take part before the store's time-out.
    """
    if mesh.size() > 1 and mesh.get_coordinate() is not None and (store := own_store()) is not None:
        compare(store, conversion(state, mesh), mesh.mesh.flatten().tolist())


def conversion(state: ModelState, mesh: Any) -> dict[str, Any]:
    """Describe the converted layers that are sharded over a mesh."""
    recipe: Any = state.recipe
    fields = {f.name: repr(getattr(recipe, f.name)) for f in dataclasses.fields(recipe)}
    layers = {}
    for name, layer in zip(state.names, state.layers(), strict=False):
        params: Any = () if layer is None else layer._fp8_params
        for param in params:
            weight: Any = layer._parameters.get(param)  # type: ignore[union-attr]
            if isinstance(weight, DTensor) and weight.device_mesh == mesh:
                local = local_of(weight)
                kind = "quantized before it is gathered"
                if local is None:
                    kind = "gathered in high precision"
                elif isinstance(local, QuantizedTensor):
                    kind = "FP8"
                fields_of_param = {"recipe": type(recipe).__name__, **fields, "weight": kind}
                layers[f"{name}.{param}".removesuffix(".weight")] = fields_of_param
    return {"version": fp8rs.__version__, "layers": layers}


def compare(store: Any, said: dict[str, Any], ranks: Sequence[int]) -> None:
    """Raise if the descriptions of two ranks differ. All ``ranks`` call this function.

    The first rank reads all digests, and the other ranks read its result. Each rank sends a
    constant number of messages.

    Args:
        store: a connection of this call's own to the store of all ranks.
        said: this rank's `conversion`.
        ranks: the ranks of the mesh.

    Raises:
        ValueError: two descriptions differ.
        TimeoutError: a rank did not take part before the store's time-out.
    """
    me, first = dist.get_rank(), ranks[0]
    text = json.dumps(said)
    digest = hashlib.sha256(text.encode()).digest()
    among = f"fp8rs {hashlib.sha256(repr(ranks).encode()).hexdigest()}"
    # The counter is in the store, because it must continue after a process group is created again.
    number = store.add(f"{among} {me}", 1)
    key = f"{among} {number}"
    digests = {rank: f"{key} rank {rank}" for rank in ranks}
    store.set(digests[me], digest)
    try:
        if me == first:
            _wait(store, list(digests.values()), digests)
            others = [rank for rank in ranks if store.get(digests[rank]) != digest]
            store.set(f"{key} found", str(others[0] if others else first))
        _wait(store, [f"{key} found"], digests)
    except dist.DistStoreError as error:
        missing = _missing(store, digests) or [first]
        raise TimeoutError(
            f"fp8rs waited {store.timeout} for all ranks of a mesh to compare their conversion "
            f"before the first all-gather: {name_ranks(missing)} not joined. {_CHECK}"
        ) from error
    other = int(store.get(f"{key} found"))
    if other == first:
        return
    if me in (first, other):
        store.set(f"{key} text {me}", text)
    mine, theirs = (json.loads(store.get(f"{key} text {rank}")) for rank in (first, other))
    what, is_first, is_other = difference(mine, theirs)
    raise ValueError(
        f"{what} is {is_first} on rank {first} and {is_other} on rank {other}: they would misread "
        "each other's bytes. Convert with the same arguments, and the same fp8rs, on all ranks "
        "that a model is sharded over"
    )


_CHECK = "Check that every rank converts the same layers and runs the model's forward"


def _wait(store: Any, keys: list[str], digests: Mapping[int, str]) -> None:
    """Wait for keys, and warn after `WARN_AFTER` which ranks are missing.

    Args:
        store: where the keys are set.
        keys: the keys to wait for, up to the store's time-out.
        digests: the key of each rank's digest.
    """
    left = store.timeout
    if left > WARN_AFTER:
        try:
            store.wait(keys, WARN_AFTER)
            return
        except dist.DistStoreError:
            _warn(store, digests, left)
        left -= WARN_AFTER
    store.wait(keys, left)


def _warn(store: Any, digests: Mapping[int, str], limit: timedelta) -> None:
    """Warn which ranks are missing, on the first of the waiting ranks."""
    waiting = next(rank for rank, key in digests.items() if store.check([key]))
    if waiting == dist.get_rank() and (missing := _missing(store, digests)):
        warnings.warn(
            f"fp8rs has waited {WARN_AFTER.total_seconds():g} s for all ranks of a mesh to compare "
            f"their conversion before the first all-gather: {name_ranks(missing)} not joined. "
            f"{_CHECK}. An error is raised after {limit}",
            stacklevel=2,
        )


def _missing(store: Any, digests: Mapping[int, str]) -> list[int]:
    """Return the ranks that have not sent their digest."""
    return [rank for rank, key in digests.items() if not store.check([key])]


def name_ranks(ranks: Sequence[int]) -> str:
    """Return the subject of a sentence about ranks, with its verb."""
    some = ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")
    return f"rank {some} has" if len(ranks) == 1 else f"ranks {some} have"


def difference(first: dict[str, Any], other: dict[str, Any]) -> tuple[str, str, str]:
    """Return the first field in which two conversions differ, and its two values."""
    if first["version"] != other["version"]:
        return "fp8rs", first["version"], other["version"]
    ours, theirs = first["layers"], other["layers"]
    for name in {**ours, **theirs}:
        mine, their = ours.get(name), theirs.get(name)
        if mine is None or their is None:
            is_there = ["not there" if fields is None else "there" for fields in (mine, their)]
            return f"conversion of {name}", is_there[0], is_there[1]
        for field in {**mine, **their}:
            if mine.get(field) != their.get(field):
                return f"{field} of {name}", str(mine.get(field)), str(their.get(field))
    return "the order of converted layers", ", ".join(ours), ", ".join(theirs)


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
    root = state.root
    for name, group in () if root is None else fsdp_groups(root):
        places = [(p, *fsdp_place(p)) for p in group.fsdp_params]
        smaller = getattr(group, "post_forward_mesh_info", None)
        partial = smaller is not None and smaller != group.mesh_info
        if partial and any(local_of(parameter) is not None for *_, parameter in places):
            size = getattr(smaller, "shard_mesh_size", "a number")
            raise ValueError(
                f"fully_shard(..., reshard_after_forward={size}) on {name or 'the root'} "
                "does not work with FP8 all-gather: use True or False, or convert with "
                "enable_fsdp_float8_all_gather=False"
            )
        for known, owner, own_name, parameter in places:
            begun = getattr(known, "orig_dtype", None)  # with FSDP2's first forward
            # FP8 weights are bytes in any dtype.
            if begun not in (None, parameter.dtype) and not is_fp8(parameter):
                raise RuntimeError(
                    f"{own_name} of {type(owner).__name__} is {parameter.dtype}, and was "
                    f"{begun} when FSDP2 began to gather it: cast a model "
                    "before its first forward"
                )
