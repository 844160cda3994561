"""8-bit moments of sharded parameters: equal to those of one rank, and exact in checkpoints."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp8rs
from cases import each_recipe
from checkpoint.layouts import group_of
from distributed import ranks
from distributed.folders import shared_folder
from distributed.models import RECIPES, Stack, batch, same_bytes, shard, train
from fp8rs import checkpoint
from fp8rs.optim import AdamW, moments

WIDTH = 128
#: Rows and columns of whole blocks, rows that shards split unevenly, and columns of no whole block.
HIDDEN = (256, 258)

with_and_without_masters = pytest.mark.parametrize("masters", [True, False])


def make(recipe="current", fp8_weights=True, hidden=HIDDEN, seed=0, device="cpu"):
    torch.manual_seed(seed)
    model = Stack(hidden, WIDTH).to(device)
    if recipe is not None:
        fp8rs.convert_to_float8_training(model, recipe=recipe, fp8_weights=fp8_weights)
    return model


def fp8_adamw(model, masters=True):
    return AdamW(model.parameters(), lr=1e-2, state_dtype="fp8", master_weights=masters)


def full_value(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def state_by_name(model, optimizer):
    """Return the whole tensors of the optimizer's state."""
    state = {}
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            state[f"{name} {key}"] = full_value(value).clone()
    return state


def assert_same_state(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert same_bytes(actual[name].cpu(), value.cpu()), name


def step_on(model, optimizer, seed):
    """Step with gradients that do not depend on how the model is sharded."""
    for i, param in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * seed + i)
        grad = torch.randn(param.shape, generator=generator).to(param.device)
        if isinstance(param, DTensor):
            mesh = param.device_mesh
            placements = param.placements
            grad = distribute_tensor(grad, mesh, placements, src_data_rank=None)
        param.grad = grad
    optimizer.step()
    optimizer.zero_grad()


@ranks(2, 4)
@each_recipe("current", "block", "mxfp8", "rowwise", of=RECIPES)
@pytest.mark.parametrize("fp8_weights", [True, False])
@with_and_without_masters
def test_sharded_moments_equal_those_of_one_rank(rig, recipe, fp8_weights, masters):
    """No split of rows changes a code or a range, whichever parameters have codes."""
    options = {"recipe": RECIPES[recipe], "fp8_weights": fp8_weights, "device": rig.device}
    alone = make(**options)
    sharded = shard(make(**options), rig)
    a = fp8_adamw(alone, masters)
    b = fp8_adamw(sharded, masters)
    for seed in range(3):
        step_on(alone, a, seed)
        step_on(sharded, b, seed)
    expected = state_by_name(alone, a)
    assert_same_state(state_by_name(sharded, b), expected)
    coded = {name.split()[0] for name in expected if name.endswith("_codes")}
    in_codes = {"blocks.0.up.weight", "blocks.0.down.weight", "blocks.1.up.weight", "head.weight"}
    assert coded == in_codes


def model_on(rig, count, masters, seed, hidden=HIDDEN):
    """Return a model on the first ranks, with its optimizer and group. None on other ranks."""
    group = group_of(count)
    if rig.rank >= count:
        return None
    model = make(hidden=hidden, seed=seed, device=rig.device)
    shard(model, mesh=DeviceMesh.from_group(group, rig.device_type))
    return model, fp8_adamw(model, masters), group


@ranks(4)
@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (2, 4), (4, 1), (1, 4)])
@pytest.mark.parametrize("method", ["dcp", "fp8rs.checkpoint"])
@with_and_without_masters
def test_checkpoints_restore_every_bit_on_other_numbers_of_ranks(
    rig, saved, loaded, method, masters
):
    folder = shared_folder(rig)
    expected = [None]
    sharded_model = model_on(rig, saved, masters, 0)
    if sharded_model is not None:
        model, optimizer, group = sharded_model
        train(model, optimizer, [batch(rig, n, width=WIDTH) for n in range(2)])
        if method == "dcp":
            state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.save(state, checkpoint_id=folder, process_group=group)
        else:
            state = {"optimizer": checkpoint.Optimizer(model, optimizer)}
            checkpoint.save(state, folder, process_group=group)
        expected = [state_by_name(model, optimizer)]
    dist.broadcast_object_list(expected)

    sharded_model = model_on(rig, loaded, masters, 1)
    if sharded_model is not None:
        model, optimizer, group = sharded_model
        if method == "dcp":
            state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.load(state, checkpoint_id=folder, process_group=group)
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
        else:
            state = {"optimizer": checkpoint.Optimizer(model, optimizer)}
            checkpoint.load(state, folder, process_group=group)
        assert_same_state(state_by_name(model, optimizer), expected[0])
        assert any("exp_avg_sq_codes" in name for name in expected[0])


@ranks(2)
@pytest.mark.parametrize("method", ["dcp", "fp8rs.checkpoint"])
def test_float32_checkpoints_are_saved_and_loaded(rig, method):
    """Codes go to a float32 optimizer and back."""
    folder = shared_folder(rig)
    model = shard(make(device=rig.device), rig)
    optimizer = fp8_adamw(model)
    train(model, optimizer, [batch(rig, n, width=WIDTH) for n in range(2)])
    with optimizer.float32_state_dict():
        save(model, optimizer, folder, method)
    before = state_by_name(model, optimizer)

    high_precision = AdamW(model.parameters(), lr=1e-2)
    load(model, high_precision, folder, method)
    for name, value in state_by_name(model, high_precision).items():
        if name.endswith("exp_avg_sq") and name + "_codes" in before:
            codes = before[name + "_codes"]
            ranges = before[name + "_range"]
            decoded = moments.decode(codes, ranges, moments.FORMATS["exp_avg_sq"])
            assert torch.equal(value, decoded), name

    resumed = fp8_adamw(model)
    with resumed.float32_state_dict():
        load(model, resumed, folder, method)
    after = state_by_name(model, resumed)
    assert after.keys() == before.keys()
    for name in before:
        if name.endswith("_codes"):
            assert torch.equal(after[name], before[name]), name


def save(model, optimizer, folder, method):
    if method == "dcp":
        dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    else:
        checkpoint.save({"optimizer": checkpoint.Optimizer(model, optimizer)}, folder)


def load(model, optimizer, folder, method):
    if method == "dcp":
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    else:
        checkpoint.load({"optimizer": checkpoint.Optimizer(model, optimizer)}, folder)


@ranks(2)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("saved", "loaded", "remedy"),
    [
        (torch.float32, "fp8", r"exp_avg_codes: not in the .*float32_state_dict"),
        (torch.bfloat16, "fp8", r"exp_avg_codes: not in the .*state_dtype=torch\.bfloat16"),
        ("fp8", torch.float32, r"exp_avg: not in the .*8-bit moments.*float32_state_dict"),
    ],
    ids=str,
)
def test_a_checkpoint_with_other_moments_is_refused_with_a_remedy(
    rig, saved, loaded, remedy, strict
):
    """Without strict too, because steps from moments of 0 with the saved count are too long."""
    folder = shared_folder(rig)
    model = shard(make(device=rig.device), rig)
    optimizer = AdamW(model.parameters(), lr=1e-2, state_dtype=saved)
    train(model, optimizer, [batch(rig, n, width=WIDTH) for n in range(2)])
    save(model, optimizer, folder, "fp8rs.checkpoint")
    other = AdamW(model.parameters(), lr=1e-2, state_dtype=loaded)
    state = {"optimizer": checkpoint.Optimizer(model, other)}
    with pytest.raises(checkpoint.CheckpointError, match=f"(?s){remedy}") as error:
        checkpoint.load(state, folder, strict=strict)
    assert "strict=False" not in str(error.value)
    assert all(state["step"] == 0 for state in other.state.values())


@ranks(2)
def test_bfloat16_moments_of_a_checkpoint_are_loaded_by_another_optimizer(rig):
    """As the error of a checkpoint with other moments recommends."""
    folder = shared_folder(rig)
    model = shard(make(device=rig.device), rig)
    optimizer = AdamW(model.parameters(), lr=1e-2, state_dtype=torch.bfloat16)
    train(model, optimizer, [batch(rig, n, width=WIDTH) for n in range(2)])
    save(model, optimizer, folder, "fp8rs.checkpoint")
    expected = fp8_adamw(model)
    expected.load_state_dict(optimizer.state_dict())

    other = AdamW(model.parameters(), lr=1e-2, state_dtype=torch.bfloat16)
    load(model, other, folder, "fp8rs.checkpoint")
    converted = fp8_adamw(model)
    converted.load_state_dict(other.state_dict())
    assert_same_state(state_by_name(model, converted), state_by_name(model, expected))


@ranks(2)
def test_a_full_state_dict_is_gathered_and_loaded(rig):
    """As FSDP2 recipes save on rank 0: whole tensors on the CPU."""
    model = shard(make(device=rig.device), rig)
    optimizer = fp8_adamw(model)
    train(model, optimizer, [batch(rig, n, width=WIDTH) for n in range(2)])
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_optimizer_state_dict(model, optimizer, options=options)
    expected = state_by_name(model, optimizer)
    if rig.rank == 0:
        codes = full["state"]["blocks.0.up.weight"]["exp_avg_codes"]
        assert (codes.shape, codes.dtype) == ((256, WIDTH), torch.uint8)

    other = fp8_adamw(model)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, other, full, options=options)
    assert_same_state(state_by_name(model, other), expected)


@ranks(2)
@pytest.mark.parametrize("fp8_gather", [True, False])
def test_weights_that_are_gathered_meanwhile_have_codes(rig, fp8_gather):
    """After an evaluation, the root's own unit stays gathered until the next backward."""
    torch.manual_seed(0)
    model = Stack(HIDDEN, WIDTH).to(rig.device)
    fp8rs.convert_to_float8_training(model, enable_fsdp_float8_all_gather=fp8_gather)
    shard(model, rig)
    optimizer = fp8_adamw(model)
    train(model, optimizer, [batch(rig, 0, width=WIDTH)])
    expected = state_by_name(model, optimizer)
    assert "head.weight exp_avg_codes" in expected

    saved = optimizer.state_dict()
    other = fp8_adamw(model)
    with torch.no_grad():
        model(batch(rig, 0, width=WIDTH))
    assert not isinstance(model.head.weight, DTensor)
    other.load_state_dict(saved)
    model.reshard()
    assert_same_state(state_by_name(model, other), expected)


@ranks(4)
def test_tensor_parallelism_that_splits_blocks_keeps_float32_moments(rig):
    """On the last dimension, shards of 128 columns have codes, and shards of 64 columns do not."""
    mesh = rig.mesh(2, 2, names=("data", "tensor"))
    model = make(hidden=(256, 128), device=rig.device)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = fp8_adamw(model)
    train(model, optimizer, [batch(rig, 0, width=WIDTH)])
    has_codes = {
        name: "exp_avg_codes" in optimizer.state[param]
        for name, param in model.named_parameters()
        if name.endswith(("up.weight", "down.weight"))
    }
    assert has_codes == {
        "blocks.0.up.weight": True,
        "blocks.0.down.weight": True,
        "blocks.1.up.weight": True,
        "blocks.1.down.weight": False,
    }
