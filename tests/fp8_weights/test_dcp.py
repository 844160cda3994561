"""FP8 weights in torch's own checkpoints: `dcp.save`, `dcp.async_save` and `dcp.load`.

accelerate, torchtitan and Lightning save state dicts this way, without `fp8rs.checkpoint.save`.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import fp8rs
from cases import each_recipe
from checkpoint.layouts import (
    KEPT,
    PLAN,
    batch,
    contents,
    lay_out,
    model_on,
    state_dicts_of,
)
from distributed import ranks
from distributed.batched import SAVED_BATCHES
from distributed.folders import shared_folder
from distributed.models import (
    EMPTY,
    HIDDEN,
    RECIPES,
    UNEVEN,
    linears,
    make,
    recipes,
    same_bytes,
    shard,
    train,
)
from distributed.sharded_pairs import contents as planes_of
from distributed.sharded_pairs import full, pair, same
from fp8rs import checkpoint
from internals import local_of

#: Ranks that save and ranks that load; None is one process without FSDP2.
RESHARDS = [(1, 2), (2, 1), (2, 3), (3, 2), (None, 2), (3, None)]


def saved_state(model, optimizer):
    """The contents without histories of delayed scaling, which torch's state dicts leave out."""
    values = contents(model, optimizer)
    return {name: t for name, t in values.items() if not name.split()[-1].startswith("fp8_")}


@ranks(3)
@pytest.mark.parametrize(("saved", "loaded"), RESHARDS)
@each_recipe("current", "block", "mxfp8 of 1x32", of=RECIPES)
@pytest.mark.parametrize("weight_kind", list(KEPT))
@pytest.mark.parametrize("hidden", [*HIDDEN, *SAVED_BATCHES])
def test_reshards_are_exact(rig, saved, loaded, recipe, weight_kind, hidden):
    """Weights and optimizer states of any number of ranks load into any other, to the bit."""
    warnings.filterwarnings("ignore", message=".*FP8 weights, and keeps no masters")
    folder = shared_folder(rig)
    expected = None
    hidden = (HIDDEN | SAVED_BATCHES)[hidden]
    sharded_model = model_on(rig, saved, recipe, weight_kind, hidden, seed=0)
    if sharded_model is not None:
        model, optimizer, group = sharded_model
        train(model, optimizer, [batch(rig, n) for n in range(3)])
        dcp.save(state_dicts_of(model, optimizer), checkpoint_id=folder, process_group=group)
        expected = saved_state(model, optimizer)
    dist.barrier()
    sharded_model = model_on(rig, loaded, recipe, weight_kind, hidden, seed=1)
    if sharded_model is not None:
        model, optimizer, group = sharded_model
        state = state_dicts_of(model, optimizer)
        dcp.load(state, checkpoint_id=folder, process_group=group)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        actual = saved_state(model, optimizer)
        if expected is not None:
            assert actual.keys() == expected.keys()
            for name, value in expected.items():
                assert same_bytes(actual[name], value), name
        assert torch.tensor(train(model, optimizer, [batch(rig, 3)])).isfinite().all()


@ranks(2)
@each_recipe("current", "block", "mxfp8 of 1x32", of=RECIPES)
def test_shards_written_by_each_rank_are_saved_with_common_scales(rig, recipe):
    """A state dict synchronizes scales that shards share."""
    folder = shared_folder(rig)
    reference, model = pair(rig, recipe)
    with torch.no_grad():
        for layer in linears(model).values():
            local_of(layer.weight).view(-1).mul_(1 + 6.7 * rig.rank)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    if rig.rank == 0:
        state = reference.state_dict()
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    wanted = [full(p) for p in model.parameters()]
    if rig.rank == 0:
        assert all(
            same_bytes(full(p), w) for p, w in zip(reference.parameters(), wanted, strict=True)
        )


@ranks(4)
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@pytest.mark.parametrize("layouts", [(0, 1), (1, 0)])
def test_tensor_parallel_reshards_are_exact(rig, recipe, layouts):
    names = [("FSDP of 2 x TP of 2", "FSDP of 4")[i] for i in layouts]
    folder = shared_folder(rig)
    weight_kind = "FP8 weights, AdamW with masters"
    model, other = (
        lay_out(rig, name, recipe, weight_kind, (64, 128), seed)[0]
        for seed, name in enumerate(names)
    )
    dcp.save(model.state_dict(), checkpoint_id=folder)
    dcp.load(other.state_dict(), checkpoint_id=folder)
    for p, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert same_bytes(full(p), full(wanted))


@ranks(2)
@each_recipe("current", "block", of=RECIPES)
def test_blocks_split_by_tensor_parallelism_are_refused(rig, recipe):
    model = make((50, 27), recipe=RECIPES[recipe], device=rig.device, fp8_weights=True)
    for block in model.blocks:
        parallelize_module(block, rig.mesh(), PLAN)
    with pytest.raises(CheckpointException, match=r"fp8rs.checkpoint.Model\(model\)"):
        dcp.save(model.state_dict(), checkpoint_id=shared_folder(rig))


@ranks(2, 4, seconds=40)
@each_recipe("current", "block", of=RECIPES)
@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("of", ["state_dict", "Model"])
def test_a_load_in_place_reaches_ranks_with_empty_shards(rig, recipe, fp8, of):
    """The next forward sees the loaded weight on all ranks, also on those that loaded nothing."""

    def small(seed, factor, recipe):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(32, rig.world_size - 1, bias=False))
        model.to(rig.device)[0].weight.data.mul_(factor)
        if recipe is not None:
            fp8rs.convert_to_float8_training(model, recipe=RECIPES[recipe], fp8_weights=True)
        return model

    def part_of(model):
        return checkpoint.Model(model) if of == "Model" else model.state_dict()

    folder = shared_folder(rig)
    reference = small(0, 0.01, recipe)
    saved = small(0, 0.01, recipe if fp8 else None)
    dcp.save({"model": part_of(fully_shard(saved, mesh=rig.mesh()))}, checkpoint_id=folder)
    model = fully_shard(small(1, 1.0, recipe), mesh=rig.mesh())
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"model": part_of(model)}, checkpoint_id=folder, planner=planner)
    x = batch(rig, 0)
    with torch.no_grad():
        actual = model(x)
        wanted = reference(x)
    assert (actual - wanted).norm() <= (0 if fp8 else 0.05) * wanted.norm()


# --- asynchronous saves --------------------------------------------------------------------------

#: Arguments of dcp.async_save by what copies the state dict.
STAGERS = {
    "default": lambda folder: {"checkpoint_id": folder},
    "process": lambda folder: {
        "checkpoint_id": folder,
        "async_checkpointer_type": AsyncCheckpointerType.PROCESS,
    },
    "blocking": lambda folder: {"storage_writer": FileSystemWriter(folder)},
}


@ranks(1, 2)
@recipes
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("stager", list(STAGERS))
@pytest.mark.parametrize("of", ["state_dict", "get_model_state_dict"])
def test_asynchronous_saves_of_fp8_weights_are_refused(rig, recipe, sharded, stager, of):
    """torch copies each tensor as the bytes of one storage, which would lose the scales."""
    reference, model = pair(rig, recipe)
    model = model if sharded else reference
    state = model.state_dict() if of == "state_dict" else get_model_state_dict(model)
    options = STAGERS[stager](shared_folder(rig))
    before = planes_of(model)
    with pytest.raises(RuntimeError, match=r"fp8rs\.checkpoint\.async_save"):
        dcp.async_save({"model": state}, process_group=dist.new_group(backend="gloo"), **options)
    assert same(planes_of(model), before)


@ranks(2)
@each_recipe("current", "mxfp8", of=RECIPES)
@pytest.mark.parametrize("sharded", [False, True])
def test_asynchronous_saves_of_fp8_parameters_are_refused(rig, recipe, sharded):
    reference, model = pair(rig, recipe)
    state = dict((model if sharded else reference).named_parameters())
    with pytest.raises(RuntimeError, match="storage"):  # of torch: a parameter has an address
        dcp.async_save(
            {"model": state},
            checkpoint_id=shared_folder(rig),
            process_group=dist.new_group(backend="gloo"),
        )


@ranks(1, 2)
@recipes
@pytest.mark.parametrize("sharded", [False, True])
def test_asynchronous_saves_of_checkpoint_models_are_exact(rig, recipe, sharded):
    """A write after the call does not change what is saved."""
    reference, model = pair(rig, recipe)
    model, other = (
        (model, pair(rig, recipe)[1]) if sharded else (reference, copy.deepcopy(reference))
    )
    before = planes_of(model)
    folder = shared_folder(rig)
    group = dist.new_group(backend="gloo")  # the thread of the save uses it
    for name in ("first", "second"):
        saving = dcp.async_save(
            {"model": checkpoint.Model(model)},
            checkpoint_id=f"{folder}/{name}",
            process_group=group,
        )
        with torch.no_grad():
            for m, factor in ((model, 2), (other, 8)):
                for parameter in m.parameters():
                    parameter.mul_(factor)
        saving.result()
        assert not same(planes_of(other), before)
        dcp.load({"model": checkpoint.Model(other)}, checkpoint_id=f"{folder}/{name}")
        assert same(planes_of(other), before)
        model.state_dict()  # synchronizes the scales of what was written
        before = planes_of(model)


# --- values in high precision, and codes without scales ------------------------------------------


@ranks(1, 2)
@recipes
@pytest.mark.parametrize("of", ["Model", "state_dict"])
@pytest.mark.parametrize("hidden", ["uneven", "empty"])
def test_partial_loads_quantize_high_precision_weights(rig, recipe, of, hidden):
    """A checkpoint of the unconverted model loads into FP8 weights of a model with an adapter."""
    folder = shared_folder(rig)
    hidden = {"uneven": UNEVEN, "empty": EMPTY}[hidden]
    plain = shard(make(hidden, recipe=None, device=rig.device, seed=1), rig)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(0.01)
    dcp.save({"model": get_model_state_dict(plain)}, checkpoint_id=folder)
    model = make(hidden, recipe=RECIPES[recipe], device=rig.device, fp8_weights=True)
    model.adapter = torch.nn.Linear(4, 4, device=rig.device)
    shard(model, rig)
    wrapped = checkpoint.Model(model) if of == "Model" else get_model_state_dict(model)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"model": wrapped}, checkpoint_id=folder, planner=planner)
    model(batch(rig, 0))  # which synchronizes scales
    wanted = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        if not name.startswith("adapter"):
            value = full(wanted[name])
            error = (full(parameter) - value).norm()
            assert error <= (0.04 * value.norm() if value.dim() == 2 else 0), name


@recipes
@pytest.mark.parametrize("fp8_weights", [False, True])
@pytest.mark.parametrize("kind", ["codes and scales", "codes alone", "scales beside integers"])
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_codes_are_not_loaded_as_values(device, recipe, fp8_weights, kind, assign, strict):
    model = make(UNEVEN, recipe=RECIPES[recipe], device=device, fp8_weights=fp8_weights)
    state = dict(make(UNEVEN, recipe=None, device=device, seed=1).state_dict())
    dtype = torch.int8 if "integers" in kind else torch.float8_e4m3fn
    state["head.weight"] = torch.ones_like(state["head.weight"]).to(dtype)
    if "scales" in kind:
        state["head.weight_scale"] = torch.ones(1, device=device)
    before = {n: full(p).clone() for n, p in model.named_parameters()}
    with pytest.raises(TypeError, match=r"1 quantized weights, the first of them head\.weight"):
        model.load_state_dict(state, strict=strict, assign=assign)
    for name, parameter in model.named_parameters():
        assert same_bytes(full(parameter), before[name]), name


@recipes
def test_codes_are_not_copied_as_values(device, recipe):
    weight = make(UNEVEN, recipe=RECIPES[recipe], device=device, fp8_weights=True).head.weight
    before = full(weight).clone()
    for target in (weight, weight[:32], weight.view(-1)):
        codes = torch.ones(target.shape, device=device).to(torch.float8_e4m3fn)
        with torch.no_grad(), pytest.raises(TypeError, match="codes without their scales"):
            target.copy_(codes)
    assert same_bytes(full(weight), before)
