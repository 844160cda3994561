"""Ways to save a model and its optimizer, of fp8rs and of torch, and the values that load.

A table of docs/saving.md has the outcomes, and test_paths.py compares them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from checkpoint.layouts import batch, contents, group_of, model_on, state_dicts_of, state_of
from distributed.folders import shared_folder
from distributed.models import UNEVEN, same_bytes, train
from fp8rs import checkpoint

#: Numbers of ranks that save and that load.
MOVES = {"as many ranks": [(2, 2)], "other ranks": [(2, 1), (1, 2)]}

#: Outcomes for the values, from best to worst.
OUTCOMES = EXACT, ROUNDED, REFUSED, LOST = (
    "exact",
    "within quantization error",
    "refused",
    "**other values**",
)


class Way(NamedTuple):
    """A way to save and load. Both functions take a model, its optimizer, a folder and a group."""

    save: Callable[..., Any]
    load: Callable[..., None]


class Outcome(NamedTuple):
    """The outcome of a save and a load.

    Attributes:
        values: one of `OUTCOMES`.
        histories: whether the histories of delayed scaling are equal.
        error: the error of a refusal.
    """

    values: str
    histories: bool = False
    error: str = ""

    @property
    def rank(self):
        """The place in `OUTCOMES`. Among equal ones, lost histories are worse."""
        return OUTCOMES.index(self.values), not self.histories


def save_ours(call):
    def save(model, optimizer, folder, group):
        return call(state_of(model, optimizer), f"{folder}/saved", process_group=group)

    return save


def load_ours(model, optimizer, folder, group):
    checkpoint.load(state_of(model, optimizer), f"{folder}/saved", process_group=group)


def save_dcp(call, states):
    def save(model, optimizer, folder, group):
        state = states(model, optimizer)
        return call(state, checkpoint_id=f"{folder}/saved", process_group=group)

    return save


def load_stateful(model, optimizer, folder, group):
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=f"{folder}/saved", process_group=group)


def put(model, optimizer, state, options=None):
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def load_state_dicts(model, optimizer, folder, group):
    state = state_dicts_of(model, optimizer)
    dcp.load(state, checkpoint_id=f"{folder}/saved", process_group=group)
    put(model, optimizer, state)


def save_full(model, optimizer, folder, group):
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    if dist.get_rank() == 0:
        torch.save(state, f"{folder}/saved")


def load_full(model, optimizer, folder, group):
    several = dist.get_world_size(group) > 1
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=several)
    state = {"model": {}, "optimizer": {}}
    if dist.get_rank() == 0:
        state = torch.load(f"{folder}/saved", weights_only=True)
    put(model, optimizer, state, options)


def save_by_rank(model, optimizer, folder, group):
    torch.save(state_dicts_of(model, optimizer), f"{folder}/rank{dist.get_rank()}")


def load_by_rank(model, optimizer, folder, group):
    path = f"{folder}/rank{dist.get_rank()}"
    exists = torch.tensor(int(os.path.exists(path)))
    # Without this agreement, ranks with a file wait 30 s for a rank that has raised.
    dist.all_reduce(exists, dist.ReduceOp.MIN, group)
    if not exists:
        raise FileNotFoundError(f"not all ranks have a file, such as {path}")
    put(model, optimizer, torch.load(path, weights_only=False))


WAYS = {
    "`checkpoint.save`": Way(save_ours(checkpoint.save), load_ours),
    "`checkpoint.async_save`": Way(save_ours(checkpoint.async_save), load_ours),
    "`dcp.save` of `Model` and `Optimizer`": Way(save_dcp(dcp.save, state_of), load_stateful),
    "`dcp.async_save` of `Model` and `Optimizer`": Way(
        save_dcp(dcp.async_save, state_of), load_stateful
    ),
    "`dcp.save` of state dicts": Way(save_dcp(dcp.save, state_dicts_of), load_state_dicts),
    "`dcp.async_save` of state dicts": Way(
        save_dcp(dcp.async_save, state_dicts_of), load_state_dicts
    ),
    "`torch.save` of full state dicts": Way(save_full, load_full),
    "`torch.save` of each rank's state dicts": Way(save_by_rank, load_by_rank),
}

CODES = ("codes", "columnwise")


def values_of(tensors):
    """The values of quantized weights in place of codes and scales, and everything else."""
    values = {n: t for n, t in tensors.items() if not n.endswith((*CODES, "scales"))}
    for name in tensors:
        if name.endswith(CODES):
            codes = tensors[name].view(torch.float8_e4m3fn).float()
            values[name] = codes * tensors[f"{name}' scales"]
    return values


def rounded(actual, expected):
    """Whether values differ by half a step of E4M3 at most, which has 3 bits after the point."""
    step = expected.abs().clamp(min=expected.abs().max() / 2**14) / 16
    return bool(((actual - expected).abs() <= step).all())


def compare(actual, expected):
    """The outcome of a load, from the `contents` of what was saved and what was loaded."""
    assert actual.keys() == expected.keys()
    equal = {name: same_bytes(actual[name], t) for name, t in expected.items()}
    histories = [name for name in equal if name.split()[-1].startswith("fp8_")]
    same_histories = {equal.pop(name) for name in histories} <= {True}
    if all(equal.values()):
        return Outcome(EXACT, same_histories)
    before = values_of(expected)
    after = values_of(actual)
    close = (
        rounded(after[n], t) if n.endswith(CODES) else same_bytes(after[n], t)
        for n, t in before.items()
        if n not in histories
    )
    return Outcome(ROUNDED if all(close) else LOST, same_histories)


def attempt(action):
    """The worst outcome of an action on all ranks, which all of them call.

    An exception is a refusal.
    """
    try:
        mine = action()
    except Exception as error:
        if isinstance(error, CheckpointException) and error.failures:  # of DCP, one for each rank
            error = next(iter(error.failures.values()))[0]
        mine = Outcome(REFUSED, error=f"{type(error).__name__}: {error}")
    results = [None] * dist.get_world_size()
    dist.all_gather_object(results, mine)
    outcomes_of_ranks = [result for result in results if result]
    return max(outcomes_of_ranks, key=lambda result: result.rank, default=None)


def outcome(rig, recipe, weight_kind, way, trained, saved, loaded):
    """Save on the first ranks, load on as many others.

    Args:
        trained: the model and optimizer to save, or None on a rank without them.
        saved: the number of ranks that save.
        loaded: the number of ranks that load.
    """
    folder = shared_folder(rig)
    saver = group_of(saved)  # of its own: the thread of an asynchronous save uses it
    target = model_on(rig, loaded, recipe, weight_kind, UNEVEN, seed=1)
    expected = [contents(*trained) if trained else None]
    dist.broadcast_object_list(expected)

    def save():
        if trained is not None:
            saving = way.save(*trained, folder, saver)
            if hasattr(saving, "result"):
                train(*trained, [batch(rig, 9)])  # not part of the checkpoint
                saving.result()

    def load():
        if target is None:
            return None
        way.load(*target[:2], folder, target[2])
        return compare(contents(*target[:2]), expected[0])

    return attempt(save) or attempt(load)


def outcomes(rig, recipe, weight_kind):
    """The worst outcome of each way and each of `MOVES`."""
    warnings.filterwarnings("ignore", message=".*FP8 weights, and keeps no masters")
    trained = {}
    for count in (1, 2):
        sharded_model = model_on(rig, count, recipe, weight_kind, UNEVEN, seed=0)
        trained[count] = sharded_model and sharded_model[:2]
        if sharded_model is not None:
            train(*trained[count], [batch(rig, n) for n in range(3)])
    worst = {}
    for name, way in WAYS.items():
        for move, counts in MOVES.items():
            results = []
            for saved, loaded in counts:
                model = trained[saved]
                results.append(outcome(rig, recipe, weight_kind, way, model, saved, loaded))
            worst[name, move] = max(results, key=lambda result: result.rank)
    return worst
