"""The ranks that a model is sharded over have converted it alike: each reads the others' bytes.

They compare what they converted, and how, once: where the first forward of the converted root
begins, or else at the first gather. They do it through the store of the process group. A collective
would meet another one of a rank that has nothing to say, and could not tell which rank that is. A
digest goes first; only where those differ are the texts sent.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

import fp8rs
from fp8rs._torch import own_store
from fp8rs.nn.registry import ModelState
from fp8rs.tensor.quantized import QuantizedTensor

from .weight import local_of


def compare_conversions(state: ModelState, mesh: Any) -> None:
    """All ranks of a mesh are about to gather weights of the model.

    Raises:
        ValueError: one has converted it in another way.
        TimeoutError: one does not say how.
    """
    if mesh.size() > 1 and mesh.get_coordinate() is not None and own_store() is not None:
        compare(conversion(state, mesh), mesh.mesh.flatten().tolist())


def conversion(state: ModelState, mesh: Any) -> dict[str, Any]:
    """What was converted of what is sharded over a mesh, and how."""
    recipe: Any = state.recipe
    fields = {f.name: repr(getattr(recipe, f.name)) for f in dataclasses.fields(recipe)}
    layers = {}
    for name, layer in zip(state.names, state.layers(), strict=False):
        weight: Any = None if layer is None else layer._parameters.get("weight")
        if isinstance(weight, DTensor) and weight.device_mesh == mesh:
            local = local_of(weight)
            kind = "quantized before it is gathered"
            if local is None:
                kind = "gathered in high precision"
            elif isinstance(local, QuantizedTensor):
                kind = "FP8"
            layers[name] = {"recipe": type(recipe).__name__, **fields, "weight": kind}
    return {"version": fp8rs.__version__, "layers": layers}


def compare(said: dict[str, Any], ranks: Sequence[int]) -> None:
    """Raise where a rank says something else than this one; all of ``ranks`` call it.

    The first rank reads what all say, the others what it found: a few messages a rank.
    """
    store = own_store()
    if store is None:
        return
    me, first = dist.get_rank(), ranks[0]
    text = json.dumps(said)
    digest = hashlib.sha256(text.encode()).digest()
    among = f"fp8rs {hashlib.sha256(repr(ranks).encode()).hexdigest()}"
    # Counted there, so that it goes on where a process group is made again.
    number = store.add(f"{among} {me}", 1)
    key = f"{among} {number}"
    told = {rank: f"{key} rank {rank}" for rank in ranks}
    store.set(told[me], digest)
    try:
        if me == first:
            store.wait(list(told.values()))
            others = [rank for rank in ranks if store.get(told[rank]) != digest]
            store.set(f"{key} found", str(others[0] if others else first))
        store.wait([f"{key} found"])
    except dist.DistStoreError as error:
        missing = [rank for rank in ranks if not store.check([told[rank]])] or [first]
        raise TimeoutError(
            f"fp8rs waited {store.timeout} for all ranks that a model is sharded over to say what "
            f"they converted, before its first gather: {name_ranks(missing)} not said so. Were no "
            "layers converted there, or others, or did it come to no forward of the model?"
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


def name_ranks(ranks: Sequence[int]) -> str:
    """Who has not done something, for messages."""
    some = ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")
    return f"rank {some} has" if len(ranks) == 1 else f"ranks {some} have"


def difference(first: dict[str, Any], other: dict[str, Any]) -> tuple[str, str, str]:
    """The first thing in which two conversions differ, and what that is in each."""
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
