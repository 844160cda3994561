"""The report's bytes are those that a step really sends and holds."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fp8rs
from cases import each_kind_of_recipe
from distributed import ranks
from distributed.collectives import Collectives
from distributed.models import (
    ADAMWS,
    EMPTY,
    EVEN,
    RECIPES,
    UNEVEN,
    batch,
    make,
    shard,
)
from internals import local_of, storage_of

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sent(model, rig):
    """Bytes that a step gathers and reduces."""
    with Collectives() as collectives:
        model(batch(rig)).float().square().mean().backward()
    return collectives.nbytes("gather"), collectives.nbytes("scatter")


def storages(tensors):
    """Bytes of what tensors are views of, each once."""
    storage_bytes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storage_bytes.values())


@ranks(2, 4)
@pytest.mark.parametrize("recipe", [*RECIPES, None])
@pytest.mark.parametrize("hidden", [EVEN, UNEVEN, EMPTY])
def test_bytes_are_those_of_the_collectives(rig, recipe, hidden):
    """Reports before and after conversion and sharding count the same bytes."""
    plain = make(hidden, recipe=None)
    planned = fp8rs.report(plain, recipe=RECIPES.get(recipe), world_size=rig.world_size)
    model = make(hidden, recipe=RECIPES.get(recipe), device=rig.device)
    shard(model, rig, mp_policy=BF16)
    gathered, scattered = sent(model, rig)
    expected = planned.gathered if recipe else planned.gathered_high_precision
    assert (expected, planned.scattered) == (gathered, scattered)
    report = fp8rs.report(model)
    assert (report.gathered, report.scattered) == (gathered, scattered)
    assert report.world_size == rig.world_size
    assert len(report.converted) == (5 if recipe else 0)


@ranks(2)
@pytest.mark.parametrize("fp8_weights", [True, False])
def test_parts_of_tensor_parallelism_are_planned_as_fsdp2_shards_them(rig, fp8_weights):
    """Ranks of the tensor-parallel mesh are not shards."""
    model = make(EVEN, device=rig.device, fp8_weights=fp8_weights)
    mesh = init_device_mesh(rig.device.type, (1, 2), mesh_dim_names=("dp", "tp"))
    unsharded = fp8rs.report(model, world_size=1)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    planned = fp8rs.report(model, world_size=1)
    assert planned.memory.parameters < unsharded.memory.parameters
    assert fp8rs.report(model, world_size=4).memory.parameters < planned.memory.parameters
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"], mp_policy=BF16)
    assert fp8rs.report(model) == planned


@ranks(2)
@pytest.mark.parametrize("reshard", [True, False, None])
@pytest.mark.parametrize("policy", ["bf16", "stored", "bf16 alone"])
def test_bytes_follow_policy_and_resharding(rig, reshard, policy):
    """Also where a gather has codes and fp32 in it, and where a group is frozen but for one."""
    param_dtype = None if policy == "stored" else torch.bfloat16
    reduce_dtype = torch.float32 if policy == "bf16" else None
    options = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
    model = make(UNEVEN, device=rig.device)
    model.blocks[1].up.weight.requires_grad_(False)
    planned = fp8rs.report(model, world_size=2, reshard_after_forward=reshard, **options)
    mp_policy = MixedPrecisionPolicy(**options)
    shard(model, rig, mp_policy=mp_policy, reshard_after_forward=reshard)
    assert fp8rs.report(model, **options) == planned
    assert (planned.gathered, planned.scattered) == sent(model, rig)
    assert fp8rs.report(model, **options) == planned


@ranks(2)
def test_groups_that_stay_unsharded_are_gathered_once(rig):
    """As accelerate and transformers shard a model's last norm and head."""
    model = make(EVEN, device=rig.device)
    for part, reshard in ((model.blocks[0], True), (model.blocks[1], False), (model.head, False)):
        fully_shard(part, mp_policy=BF16, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=BF16)
    report = fp8rs.report(model)
    assert (report.gathered, report.scattered) == sent(model, rig)
    model.set_reshard_after_forward(False)
    every = fp8rs.report(model)
    assert (every.gathered, every.scattered) == sent(model, rig)
    # The blocks are equal, and the first one is the only one to be gathered again.
    assert 2 * (report.gathered - every.gathered) < every.gathered
    assert report.memory.gathered == every.memory.gathered == every.gathered


@ranks(4)
def test_bytes_with_replicas_and_other_units(rig):
    def units(module, name):
        return name.endswith((".up", "blocks.0"))

    model = make(EVEN, device=rig.device)
    planned = fp8rs.report(model, world_size=2, fsdp_unit_fn=units)
    assert set(planned.units) == {"", "blocks.0", "blocks.0.up", "blocks.1.up"}
    mesh = rig.mesh(2, 2)
    for part in (*(b.up for b in model.blocks), model.blocks[0], model):
        fully_shard(part, mesh=mesh, mp_policy=BF16)
    gathered, scattered = sent(model, rig)
    assert (planned.gathered, planned.scattered) == (gathered, scattered)
    report = fp8rs.report(model)
    assert (report.gathered, set(report.units)) == (gathered, set(planned.units))
    with pytest.raises(ValueError, match="world_size is 4, but the model is sharded over 2 ranks"):
        fp8rs.report(model, world_size=4)


@ranks(2)
@each_kind_of_recipe
def test_memory_is_what_a_step_leaves(rig, recipe):
    """Shards, gradients and states, from the tensors that are there."""
    model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
    planned = fp8rs.report(model, world_size=2).memory
    shard(model, rig, mp_policy=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(batch(rig)).float().square().mean().backward()
    optimizer.step()
    shards = [local_of(p) for p in model.parameters()]
    assert storages(s.detach() for s in shards) == planned.parameters
    grads = [local_of(p.grad) for p in model.parameters()]
    assert storages(grads) == planned.gradients
    if rig.rank == 0:  # whose shards are the longest; states have no padding
        states = [s for p in model.parameters() for s in optimizer.state[p].values()]
        state_bytes = sum(local_of(s).nbytes for s in states if s.dim())
        assert state_bytes == planned.optimizer


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", [*RECIPES])
def test_memory_of_fp8_weights_is_what_a_step_leaves(rig, recipe, dtype):
    """Codes and scales, gradients and states, with masters and without."""
    plain = make(UNEVEN, recipe=None, dtype=dtype)
    conversion = {"recipe": RECIPES[recipe], "fp8_weights": True}
    for name, options in ADAMWS.items():
        planned = fp8rs.report(plain, world_size=2, optimizer=name, **conversion)
        model = make(UNEVEN, device=rig.device, dtype=dtype, **conversion)
        shard(model, rig, mp_policy=BF16)
        optimizer = fp8rs.optim.AdamW(model.parameters(), **options)
        model(batch(rig)).float().square().mean().backward()
        optimizer.step()
        assert fp8rs.report(model, optimizer=name) == planned
        grads = [local_of(p.grad) for p in model.parameters()]
        assert storages(grads) == planned.memory.gradients
        # Cut blocks have a scale on each rank that has a part: a plan is of the largest shards.
        parameter_bytes = torch.tensor([stored(local_of(p)) for p in model.parameters()])
        dist.all_reduce(parameter_bytes, dist.ReduceOp.MAX)
        assert parameter_bytes.sum() == planned.memory.parameters
        if rig.rank == 0:
            states = [s for p in model.parameters() for s in optimizer.state[p].values()]
            state_bytes = sum(local_of(s).nbytes for s in states if s.dim())
            assert state_bytes == planned.memory.optimizer


def stored(local):
    """Bytes of a shard's storages: of codes and scales where it is an FP8 weight."""
    if not isinstance(local, fp8rs.QuantizedTensor):
        return storages([local.detach()])
    planes = [p for p in (storage_of(local).rowwise, storage_of(local).columnwise) if p is not None]
    return storages(t for p in planes for t in (p.data, p.scale))


@ranks(2)
@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "block"])
def test_gathered_memory_is_that_of_the_whole_weights(rig, recipe):
    """Where scales are read in place: else they are picked out of what was gathered."""
    model = make(EVEN, recipe=RECIPES[recipe], device=rig.device)
    planned = fp8rs.report(model, world_size=2, reshard_after_forward=False).memory
    shard(model, rig, mp_policy=BF16, reshard_after_forward=False)
    model(batch(rig))
    unsharded_tensors = []
    for parameter in model.parameters():
        if hasattr(parameter, "rowwise"):
            planes = [p for p in (parameter.rowwise, parameter.columnwise) if p is not None]
            unsharded_tensors += [t for p in planes for t in (p.data, p.scale) if t.dim()]
        else:
            unsharded_tensors.append(parameter.detach())
    assert storages(unsharded_tensors) == planned.gathered
