"""State dicts and checkpoints hold plain tensors, and lose nothing on the way back."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from distributed import ranks
from distributed.collectives import Collectives
from distributed.folders import shared_folder
from distributed.models import (
    EVEN,
    HIDDEN,
    RECIPES,
    UNEVEN,
    batch,
    full_weights,
    make,
    shard,
    shardings,
    train,
)
from fp8rs.fsdp import MasterWeight
from internals import handle_of_tensor, local_of
from saving import reloaded


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)


def trained(rig, hidden="uneven", recipe="current", steps=2, **options):
    model = make(HIDDEN[hidden], recipe=recipe, device=rig.device)
    shard(model, rig, **options)
    optimizer = adamw(model)
    train(model, optimizer, [batch(rig, n) for n in range(steps)])
    return model, optimizer


def assert_plain(value):
    inner = local_of(value)
    assert type(inner) is torch.Tensor, type(inner)


def full_value(value):
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_equal(model, state):
    got = {n: full_value(v) for n, v in model.state_dict().items()}
    assert list(got) == list(state)
    for name, value in state.items():
        assert torch.equal(got[name].cpu(), full_value(value).cpu()), name


def assert_still_master(model):
    for module in (model.head, model.blocks[0].up, model.blocks[1].down):
        weight = module._parameters["weight"]
        assert isinstance(weight, torch.nn.Parameter)
        assert isinstance(local_of(weight), MasterWeight)
        assert handle_of_tensor(weight).module is module


@ranks(1, 2)
@shardings
def test_a_state_dict_is_plain_and_shares_memory(rig, hidden):
    model, _ = trained(rig, hidden)
    plain = make(HIDDEN[hidden], recipe=None)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in state.items():
        assert_plain(value)
        assert value.shape == plain.state_dict()[name].shape
    # Writes to the state dict's tensors change the weights.
    local = state["head.weight"].to_local()
    local.fill_(0.5)
    assert torch.all(full_weights(model)["head"] == 0.5)
    weight = model.state_dict(keep_vars=True)["head.weight"]
    assert weight is model.head.weight


@ranks(2)
@shardings
def test_a_state_dict_loads_into_the_unconverted_sharded_model(rig, hidden):
    model, _ = trained(rig, hidden)
    plain = make(HIDDEN[hidden], recipe=None, seed=1, device=rig.device)
    shard(plain, rig)
    plain.load_state_dict(model.state_dict())
    assert_equal(plain, model.state_dict())
    # And back, before the first forward too.
    other = make(HIDDEN[hidden], seed=2, device=rig.device)
    shard(other, rig)
    other.load_state_dict(plain.state_dict())
    assert_equal(other, model.state_dict())
    assert_still_master(other)
    torch.testing.assert_close(other(batch(rig)), model(batch(rig)), rtol=0, atol=0)


@ranks(2)
@shardings
@pytest.mark.parametrize("forward_first", [True, False])
def test_assign_does_not_drop_the_masters(rig, hidden, forward_first):
    model, _ = trained(rig, hidden)
    state = {n: v.clone() for n, v in model.state_dict().items()}
    other = make(HIDDEN[hidden], seed=1, device=rig.device)
    shard(other, rig)
    if forward_first:
        other(batch(rig)).sum().backward()
    other.load_state_dict(state, assign=True)
    assert_still_master(other)
    assert_equal(other, state)
    assert torch.equal(other(batch(rig)), model(batch(rig)))
    other(batch(rig)).sum().backward()


@ranks(2)
@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
@pytest.mark.parametrize("fp8_weights", [False, True])
def test_values_are_assigned_to_weights_that_stay_gathered(rig, recipe, fp8_weights):
    """FSDP2 leaves the root's own parameters gathered after an evaluation."""
    options = {"recipe": RECIPES[recipe], "fp8_weights": fp8_weights, "device": rig.device}
    model, other = (shard(make(UNEVEN, seed=seed, **options), rig) for seed in range(2))
    state = {n: v.clone() for n, v in model.state_dict().items()}
    with torch.no_grad():
        other(batch(rig))
    other.load_state_dict(state, assign=True)
    assert torch.equal(other(batch(rig)), model(batch(rig)))


@ranks(1, 2)
@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
def test_assigned_parameters_replace_the_old_shards(rig, recipe):
    model = make(EVEN, recipe=recipe, device=rig.device)
    shard(model, rig)
    for step in range(3):
        model(batch(rig, step)).sum().backward()
        old = weakref.ref(local_of(model.head.weight).high_precision)
        state = {n: v.clone() for n, v in model.state_dict().items()}
        model.zero_grad()
        model.load_state_dict(state, assign=True)
        assert_still_master(model)
        model(batch(rig, step))
        gc.collect()
        assert old() is None


@ranks(2)
@pytest.mark.parametrize("fp8_weights", [False, True])
def test_a_full_state_dict_is_assigned_onto_a_meta_model_with_histories(rig, fp8_weights):
    full = {n: v.clone() for n, v in make(UNEVEN, recipe=None).state_dict().items()}
    with torch.device("meta"):
        model = make(UNEVEN, recipe="delayed", device="meta", fp8_weights=fp8_weights)
    shard(model, rig)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    reference = make(UNEVEN, recipe="delayed", device=rig.device, fp8_weights=fp8_weights)
    x = batch(rig)
    assert torch.equal(model(x), reference(x))


@ranks(2)
@pytest.mark.parametrize("broadcast", [True, False])
def test_a_full_state_dict_loads_onto_a_meta_model(rig, broadcast):
    model, _ = trained(rig)
    options = StateDictOptions(full_state_dict=True)
    full = get_model_state_dict(model, options=options)
    assert all(type(v) is torch.Tensor for v in full.values())
    source = {n: v.clone() for n, v in full.items()}
    with torch.device("meta"):
        other = make(UNEVEN, device="meta")
    shard(other, rig)
    if broadcast:
        other.to_empty(device=rig.device)
        rank_state = source if rig.rank == 0 else {}
    else:
        rank_state = source
    set_model_state_dict(
        other,
        rank_state,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast),
    )
    assert_still_master(other)
    assert_equal(other, full)
    assert torch.equal(other(batch(rig)), model(batch(rig)))


@ranks(2)
@pytest.mark.parametrize("offload", [True, False])
def test_a_full_state_dict_loads_into_the_unconverted_model(rig, offload):
    policy = {}
    if offload:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=rig.device_type == "cuda")
    model, _ = trained(rig, **policy)
    full = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if rig.rank == 0:
        plain = make(UNEVEN, recipe=None, seed=1)
        plain.load_state_dict(reloaded(full))
        assert_equal(plain, full)


@ranks(2)
@shardings
def test_torch_save_of_a_sharded_state_dict(rig, hidden):
    model, _ = trained(rig, hidden)
    loaded = reloaded(model.state_dict())
    for name, value in model.state_dict().items():
        assert_plain(loaded[name])
        assert torch.equal(loaded[name].to_local(), value.to_local())
    # Parameters pickle as plain ones too.
    for value in reloaded(dict(model.named_parameters())).values():
        inner = local_of(value)
        assert type(inner) in (torch.Tensor, torch.nn.Parameter)


@ranks(2)
@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("save", [torch.save, pickle.dump])
def test_a_loaded_model_gathers_as_the_saved_one_would(rig, recipe, save):
    """A pickle of the whole converted model, as `torch.save(model)` and spawned processes make."""
    model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
    outputs = []
    calls = []
    for m in (model, reloaded(model, weights_only=False, save=save)):
        shard(m, rig)
        with Collectives() as collectives:
            outputs.append(m(batch(rig)))
        calls.append(collectives.calls)
        m.reshard()
        assert_still_master(m)
    assert torch.equal(*outputs)
    assert calls[0] == calls[1], calls


@ranks(2)
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_pickle_leaves_process_groups_out_and_says_so(rig, recipe):
    alone = [dist.new_group([r]) for r in range(2)][rig.rank]
    model = make(UNEVEN, recipe=recipe, device=rig.device, amax_reduction_group=alone)
    shard(copy.deepcopy(model), rig)(batch(rig)).sum().backward()  # a copy keeps the group
    with pytest.warns(UserWarning, match="amax_reduction_group"):
        loaded = pickle.loads(pickle.dumps(model))
    shard(loaded, rig)(batch(rig)).sum().backward()


def state_of(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


@ranks(4)
@shardings
@pytest.mark.parametrize("converted", [True, False])
def test_distributed_checkpoints_move_between_world_sizes(rig, hidden, converted):
    """Saved on 4 ranks, loaded on 2 (in a mesh of half the ranks), saved there, loaded on 4."""
    folder = shared_folder(rig)
    model, optimizer = trained(rig, hidden)
    expected = {n: full_value(v).clone() for n, v in model.state_dict().items()}
    moments = {
        n: full_value(v["exp_avg"]).clone()
        for n, v in get_optimizer_state_dict(model, optimizer)["state"].items()
    }
    state = state_of(model, optimizer)
    for value in state["model"].values():
        assert_plain(value)
    for entry in state["optimizer"]["state"].values():
        for value in entry.values():
            if isinstance(value, torch.Tensor):
                assert_plain(value)
    dcp.save(state, checkpoint_id=f"{folder}/four")

    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = halves[rig.rank // 2]
    mesh = dist.device_mesh.DeviceMesh.from_group(group, rig.device_type)
    recipe = "current" if converted else None
    other = make(HIDDEN[hidden], recipe=recipe, seed=1, device=rig.device)
    shard(other, mesh=mesh)
    other_optimizer = adamw(other)
    state = state_of(other, other_optimizer)
    dcp.load(state, checkpoint_id=f"{folder}/four", process_group=group)
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    assert_equal(other, expected)
    if converted:
        assert_still_master(other)
    for n, v in get_optimizer_state_dict(other, other_optimizer)["state"].items():
        assert torch.equal(full_value(v["exp_avg"]), moments[n]), n
    if rig.rank < 2:
        state = state_of(other, other_optimizer)
        dcp.save(state, checkpoint_id=f"{folder}/two", process_group=group)
    dist.barrier()

    last = make(HIDDEN[hidden], seed=2, device=rig.device)
    shard(last, rig)
    last_optimizer = adamw(last)
    state = state_of(last, last_optimizer)
    dcp.load(state, checkpoint_id=f"{folder}/two")
    # Without set_state_dict: the state dict's tensors are the weights' own memory.
    assert_equal(last, expected)
    assert torch.equal(last(batch(rig)), model(batch(rig)))


@ranks(2)
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_training_goes_on_after_a_resume(rig, recipe):
    model, optimizer = trained(rig, recipe=recipe)
    options = StateDictOptions(full_state_dict=True, cpu_offload=False)
    model_state = get_model_state_dict(model, options=options)
    # A copy: the optimizers' step counts would be shared.
    optimizer_state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    other = make(UNEVEN, recipe=recipe, seed=5, device=rig.device)
    shard(other, rig)
    other_optimizer = adamw(other)
    set_model_state_dict(other, model_state, options=options)
    set_optimizer_state_dict(other, other_optimizer, optimizer_state, options=options)
    moments = [
        {
            (n, kind): full_value(v[kind])
            for n, v in get_optimizer_state_dict(m, o)["state"].items()
            for kind in ("exp_avg", "exp_avg_sq")
        }
        for m, o in ((model, optimizer), (other, other_optimizer))
    ]
    assert moments[0].keys() == moments[1].keys()
    assert len(moments[0]) == 2 * len(list(model.parameters()))
    for n, moment in moments[0].items():
        assert moment.any() and torch.equal(moments[1][n], moment), n
    batches = [batch(rig, n) for n in range(2, 5)]
    resumed = train(other, other_optimizer, batches)
    went_on = train(model, optimizer, batches)
    if recipe == "current":
        assert resumed == went_on
    else:  # histories were reset
        torch.testing.assert_close(torch.tensor(resumed), torch.tensor(went_on), rtol=0.02, atol=0)


@ranks(2)
def test_a_fresh_optimizers_state_dict_leaves_the_weights_alone(rig):
    model = make(UNEVEN, device=rig.device)
    shard(model, rig)
    before = full_weights(model)
    state = get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters(), lr=1.0))
    for entry in state["state"].values():
        assert_plain(entry["exp_avg"])
    for name, weight in full_weights(model).items():
        assert torch.equal(weight, before[name])
