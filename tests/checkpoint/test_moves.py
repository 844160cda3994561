"""A checkpoint that is saved in one layout and loaded in another restores every bit."""

import warnings

import pytest
import torch
import torch.distributed as dist

from cases import each_recipe
from checkpoint.layouts import (
    KEPT,
    batch,
    contents,
    lay_out,
    spoil,
    state_of,
)
from distributed import ranks
from distributed.batched import SAVED_BATCHES
from distributed.folders import shared_folder
from distributed.models import HIDDEN, RECIPES, linears, same_bytes, shardings, train
from fp8rs import checkpoint

#: The layouts of the save and of the load, as listed in the documentation's table.
MOVES = [
    ("FSDP of 4", "FSDP of 2"),
    ("FSDP of 2", "FSDP of 4"),
    ("FSDP of 4", "FSDP of 1"),
    ("FSDP of 4", "HSDP of 2x2"),
    ("FSDP of 2 x TP of 2", "FSDP of 4"),
    ("FSDP of 4", "one process"),
    ("one process", "FSDP of 4"),
]


#: Moves on machines of eight GPUs.
MOVES_OF_8 = [
    ("FSDP of 8", "FSDP of 4"),
    ("FSDP of 8", "FSDP of 2"),
    ("FSDP of 2", "FSDP of 8"),
    ("HSDP of 2x4", "FSDP of 8"),
]

#: Moves of batched weights, which tensor parallelism does not shard.
BATCHED_MOVES = [move for move in MOVES if " x TP" not in move[0]]

each_method = pytest.mark.parametrize("method", ["save", "async_save"])


@ranks(4, seconds=40)
@pytest.mark.parametrize(("saved", "loaded"), MOVES)
@each_recipe("delayed", "block", "mxfp8 of 1x32", of=RECIPES)
@pytest.mark.parametrize("weight_kind", list(KEPT))
@each_method
@shardings
def test_a_checkpoint_restores_every_bit_in_another_layout(
    rig, saved, loaded, recipe, weight_kind, method, hidden
):
    check_move(rig, saved, loaded, recipe, weight_kind, method, HIDDEN[hidden])


@ranks(8, cpu=False)
@pytest.mark.parametrize(("saved", "loaded"), MOVES_OF_8)
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8 of 1x32"])
@pytest.mark.parametrize(
    "weight_kind", ["master weights, torch's AdamW", "FP8 weights, AdamW with masters"]
)
def test_a_checkpoint_of_8_ranks_restores_every_bit_in_another_layout(
    rig, saved, loaded, recipe, weight_kind
):
    check_move(rig, saved, loaded, recipe, weight_kind, "save", HIDDEN["uneven"])


@ranks(4, seconds=40)
@pytest.mark.parametrize(("saved", "loaded"), BATCHED_MOVES)
@each_recipe("current", "block", "mxfp8 of 1x32", of=RECIPES)
@pytest.mark.parametrize("weight_kind", list(KEPT))
@each_method
@pytest.mark.parametrize("batch", list(SAVED_BATCHES))
def test_a_checkpoint_of_batched_weights_restores_every_bit_in_another_layout(
    rig, saved, loaded, recipe, weight_kind, method, batch
):
    check_move(rig, saved, loaded, recipe, weight_kind, method, SAVED_BATCHES[batch])


def check_move(rig, saved, loaded, recipe, weight_kind, method, hidden):
    warnings.filterwarnings("ignore", message=".*FP8 weights, and keeps no masters")
    warnings.filterwarnings("ignore", message=".*tensor parallelism cuts")
    folder = shared_folder(rig)
    model, optimizer, group = lay_out(rig, saved, recipe, weight_kind, hidden)
    train(model, optimizer, [batch(rig, n) for n in range(3)])
    state = state_of(model, optimizer)
    expected = [contents(model, optimizer)]
    names = state["model"].state_dict()
    weights = {f"{name}.weight" for name in linears(model)} if KEPT[weight_kind][0] else set()
    cut = {name for name in weights if name + "_scale" not in names}
    assert not cut or " x TP" in saved
    # If the layout has several copies of the model, the first one is saved.
    dist.broadcast_object_list(expected)
    members = list(range(rig.world_size))
    if group is not None:
        members = dist.get_process_group_ranks(group)
    if method == "save" and 0 in members:
        checkpoint.save(state, f"{folder}/saved", process_group=group)
    elif 0 in members:
        gloo_group = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        saving = checkpoint.async_save(state, f"{folder}/saved", process_group=gloo_group)
        # This training is not part of the checkpoint.
        train(model, optimizer, [batch(rig, 9)])
        saving.result()
    dist.barrier()
    other, resumed, group = lay_out(rig, loaded, recipe, weight_kind, hidden, seed=1)
    spoil(other)
    checkpoint.load(state_of(other, resumed), f"{folder}/saved", process_group=group)
    actual = contents(other, resumed)
    for name, value in expected[0].items():
        if name.split()[0] not in cut or not name.endswith(("codes", "scales", "columnwise")):
            assert same_bytes(actual[name], value), name
    losses = train(other, resumed, [batch(rig, n) for n in range(3, 5)])
    assert torch.tensor(losses).isfinite().all()
