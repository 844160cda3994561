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
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fp8rs._core import __version__
from fp8rs._torch import fsdp_groups, fsdp_place, own_store
from fp8rs.model.handle import local_of
from fp8rs.model.state import ModelState
from fp8rs.quantize.recipes import describe
from fp8rs.tensor.quantized import is_fp8

from .float8_shard import Float8Shard
from .master_weight import MasterWeight

#: How a weight is gathered, by the class of its local tensor.
GATHERED: dict[type, str] = {MasterWeight: "quantized before it is gathered", Float8Shard: "FP8"}
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


def conversion(state: ModelState, mesh: Any) -> dict[str, str]:
    """Describe the version, the recipe and the converted weights that are sharded over a mesh."""
    described = {"fp8rs": __version__, "recipe": describe(state.recipe)}
    for name, layer in zip(state.names, state.layers(), strict=False):
        params: Any = () if layer is None else layer._fp8_params
        for param in params:
            weight: Any = layer._parameters.get(param)  # type: ignore[union-attr]
            if isinstance(weight, DTensor) and weight.device_mesh == mesh:
                kind = GATHERED.get(type(local_of(weight)), "gathered in high precision")
                described[f"{param} of {name}"] = kind
    return described


def compare(store: Any, said: dict[str, str], ranks: Sequence[int]) -> None:
    """Raise if the descriptions of two ranks differ. All ``ranks`` call this function.

    The first rank reads all descriptions. The other ranks read its result.

    Args:
        store: a connection of this call's own to the store of all ranks.
        said: this rank's `conversion`.
        ranks: the ranks of the mesh.

    Raises:
        ValueError: two descriptions differ.
        TimeoutError: a rank did not take part before the store's time-out.
    """
    me = dist.get_rank()
    among = f"fp8rs {hashlib.sha256(repr(ranks).encode()).hexdigest()}"
    # The counter is in the store, because it must continue after a process group is created again.
    key = f"{among} {store.add(f'{among} {me}', 1)}"
    texts = {rank: f"{key} rank {rank}" for rank in ranks}
    store.set(texts[me], json.dumps(said))
    if me == ranks[0]:
        _wait(store, list(texts.values()), texts)
        found = (difference(said, json.loads(store.get(texts[rank])), me, rank) for rank in ranks)
        store.set(f"{key} result", next(filter(None, found), ""))
    _wait(store, [f"{key} result"], texts)
    if differing := store.get(f"{key} result").decode():
        raise ValueError(
            f"{differing}: they would misread each other's bytes. Convert with the same "
            "arguments, and the same fp8rs, on all ranks that a model is sharded over"
        )


def difference(ours: dict[str, str], theirs: dict[str, str], me: int, rank: int) -> str:
    """Return the first difference of two ranks' conversions as a sentence, or an empty string."""
    for what in {**ours, **theirs}:
        mine, other = ours.get(what, "not converted"), theirs.get(what, "not converted")
        if mine != other:
            return f"{what} is {mine} on rank {me} and {other} on rank {rank}"
    # Scales are packed for the all-reduce in the order of the layers.
    if list(ours) != list(theirs):
        return f"the order of converted layers differs on ranks {me} and {rank}"
    return ""


def _wait(store: Any, keys: list[str], texts: Mapping[int, str]) -> None:
    """Wait for keys. After `WARN_AFTER`, the first of the waiting ranks warns which are missing.

    Args:
        store: where the keys are set.
        keys: the keys to wait for, up to the store's time-out.
        texts: the key that each rank sets when it joins.

    Raises:
        TimeoutError: the time-out passed.
    """
    limit = store.timeout
    timeouts = [WARN_AFTER, limit - WARN_AFTER] if limit > WARN_AFTER else [limit]
    for timeout in timeouts:
        try:
            store.wait(keys, timeout)
            return
        except dist.DistStoreError as error:
            joined = [rank for rank, key in texts.items() if store.check([key])]
            missing = [rank for rank in texts if rank not in joined] or list(texts)[:1]
            last = timeout is timeouts[-1]
            problem = (
                f"fp8rs has waited {limit if last else timeout} to compare conversions before the "
                f"first all-gather: ranks {missing[:8]} have not joined. Check that every rank "
                "converts the same layers and runs the model's forward"
            )
            if last:
                raise TimeoutError(problem) from error
            if joined[0] == dist.get_rank():
                warnings.warn(f"{problem}. An error is raised after {limit}", stacklevel=2)


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
    for name, group in fsdp_groups(state.root):
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
