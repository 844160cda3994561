"""Gradients that are sent in bfloat16 and summed in float32."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from comm.gradients import backward, check, check_same_gradients, grads_of, two_micro_batches
from distributed import ranks
from distributed.collectives import Collectives
from distributed.models import EMPTY, EVEN, HIDDEN, RECIPES, batch, make, shard
from distributed.versions import needs
from fp8rs.comm import set_fsdp_comm

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ALL_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


@ranks(2, 4)
@pytest.mark.parametrize("recipe", [None, "current", "mxfp8"])
@pytest.mark.parametrize("hidden", list(HIDDEN))
def test_gradients_are_the_sum_in_the_order_of_ranks(rig, recipe, hidden):
    def build():
        model = make(HIDDEN[hidden], recipe=RECIPES.get(recipe), device=rig.device)
        return shard(model, rig, mp_policy=BF16)

    comm = check(rig, build)
    assert comm.reduce_scatters == {"bfloat16": 3}


@ranks(2)
def test_gradients_of_two_ranks_equal_those_of_fsdp2(rig):
    """A sum of two numbers has one order, and half of it is exact."""
    fsdp2, model = (shard(make(EVEN, device=rig.device), rig, mp_policy=BF16) for _ in range(2))
    set_fsdp_comm(model)
    backward(fsdp2, rig)
    backward(model, rig)
    check_same_gradients(model, fsdp2)


@ranks(2)
def test_bf16_gradients_are_sent_as_half_the_bytes(rig):
    """The other collectives, of weights and their scales, send as much as before."""
    fsdp2, model = (shard(make(EVEN, device=rig.device), rig, mp_policy=BF16) for _ in range(2))
    set_fsdp_comm(model)
    sent = []
    for module in (fsdp2, model):
        with Collectives() as collectives:
            backward(module, rig)
        sent.append(sum(c.nbytes for c in collectives.calls))
    elements = sum(p.numel() for p in model.parameters())
    assert sent[0] - sent[1] == 2 * elements


@ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_accumulated_gradients_are_sent_in_float32(rig, reshard):
    def build():
        model = shard(make(EVEN, device=rig.device), rig, mp_policy=BF16)
        model.set_reshard_after_backward(reshard)
        return model

    comm = check(rig, build, lambda model, rig: two_micro_batches(model, rig, synced=False))
    assert comm.reduce_scatters == {"float32": 3}
    comm = check(rig, build, lambda model, rig: two_micro_batches(model, rig, synced=True))
    assert comm.reduce_scatters == {"bfloat16": 6}


@ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_ranks_that_accumulated_different_gradients_send_the_same_dtype(rig, reentrant):
    """Only rank 0 runs the middle block in the first micro-batch. Only its gradient is float32.

    A reentrant checkpoint runs the first forward of the model without gradients.
    """

    def backward(model, rig, step=0):
        x = batch(rig, step).requires_grad_(reentrant)
        y = checkpoint(model, x, use_reentrant=True) if reentrant else model(x)
        y.float().square().mean().backward()

    def build():
        return shard(make((64, 64, 64), device=rig.device), rig, mp_policy=BF16)

    def run(model, rig):
        blocks = list(model.blocks)
        model.set_requires_gradient_sync(False)
        if rig.rank == 0:
            backward(model, rig)
        else:
            skipped = blocks[1]
            # The block is gathered, as on rank 0, but its output is not used.
            handle = skipped.register_forward_hook(lambda module, args, out: args[0])
            backward(model, rig)
            handle.remove()
        model.set_requires_gradient_sync(True)
        backward(model, rig, 1)

    assert check(rig, build, run).reduce_scatters == {"float32": 4}


@ranks(2)
@needs(FSDPModule, "set_reduce_scatter_unused_params")
def test_zeros_of_unused_parameters_are_reduced_in_float32(rig):
    """The zeros that FSDP2 reduces may be float32, on the ranks that did not use the parameter."""

    def build():
        model = make(EVEN, device=rig.device)
        block = model.blocks[0]
        block.extra = nn.Parameter(torch.ones(8, device=rig.device))
        if rig.rank == 0:
            block.register_forward_hook(lambda module, args, out: out * block.extra.mean())
        shard(model, rig, mp_policy=BF16)
        model.set_reduce_scatter_unused_params(True)
        return model

    assert check(rig, build).reduce_scatters == {"float32": 3}


@ranks(2)
def test_forwards_of_an_evaluation_do_not_count(rig):
    def run(model, rig):
        with torch.no_grad():
            for step in range(3):
                model(batch(rig, step))
        model.reshard()
        backward(model, rig)

    comm = check(rig, lambda: shard(make(EVEN, device=rig.device), rig, mp_policy=BF16), run)
    assert comm.reduce_scatters == {"bfloat16": 3}


def frozen(model, rig):
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.weight.requires_grad_(False)
    return shard(model, rig, mp_policy=BF16)


def compiled(model, rig):
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return shard(model, rig, mp_policy=BF16)


def checkpointed(model, rig):
    for block in model.blocks:
        plain = block.forward
        block.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)
    return shard(model, rig, mp_policy=BF16)


def divided(model, rig):
    shard(model, rig, mp_policy=BF16)
    for part in (*model.blocks, model):
        part.set_gradient_divide_factor(3.0)
    return model


def summed(model, rig):
    divided(model, rig)
    for part in (*model.blocks, model):
        part.set_force_sum_reduction_for_comms(True)
    return model


def offloaded(model, rig):
    pinned = CPUOffloadPolicy(pin_memory=rig.device_type == "cuda")
    return shard(model.cpu(), rig, mp_policy=BF16, offload_policy=pinned)


def in_bf16(model, rig):
    return shard(model, rig, mp_policy=ALL_BF16)


def stored_in_bf16(model, rig):
    return shard(model.bfloat16(), rig, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def by_columns(model, rig):
    def along(p):
        return Shard(1) if p.dim() == 2 and p.shape[1] % rig.world_size == 0 else Shard(0)

    return shard(model, rig, mp_policy=BF16, shard_placement_fn=along)


SETTINGS = {
    f.__name__.replace("_", " "): f
    for f in (
        frozen,
        compiled,
        checkpointed,
        divided,
        summed,
        offloaded,
        in_bf16,
        stored_in_bf16,
        by_columns,
    )
}


@ranks(2)
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_settings_of_fsdp2(rig, setting):
    recipe = None if setting in ("by columns", "stored in bf16") else "current"
    comm = check(rig, lambda: SETTINGS[setting](make(EVEN, recipe=recipe, device=rig.device), rig))
    assert comm.reduce_scatters == {"bfloat16": 2 if setting == "frozen" else 3}
    if setting == "frozen":
        assert comm.unchanged == {"blocks.0": "none of its parameters is trained"}


@ranks(2)
@pytest.mark.parametrize("reshard", [True, False, None])
def test_resharding(rig, reshard):
    def build():
        model = make(EVEN, device=rig.device)
        return shard(model, rig, mp_policy=BF16, reshard_after_forward=reshard)

    assert check(rig, build).reduce_scatters == {"bfloat16": 3}


@ranks(4)
def test_resharding_over_fewer_ranks(rig):
    """FP8 all-gathers do not support it, so the model is plain."""

    def build():
        model = make(EVEN, recipe=None, device=rig.device)
        return shard(model, rig, mp_policy=BF16, reshard_after_forward=2)

    assert check(rig, build).reduce_scatters == {"bfloat16": 3}


@ranks(4)
@pytest.mark.parametrize("all_reduce", [True, False])
@pytest.mark.parametrize("policy", [BF16, ALL_BF16], ids=["fp32", "bf16"])
def test_gradients_of_replicas_are_reduced_in_float32(rig, all_reduce, policy):
    """They are reduced for each micro-batch, or after the last one."""

    def build():
        return shard(make(EVEN, device=rig.device), mesh=rig.mesh(2, 2), mp_policy=policy)

    def run(model, rig):
        model.set_requires_all_reduce(all_reduce)
        backward(model, rig)
        model.set_requires_all_reduce(True)
        backward(model, rig, 1)

    comm = check(rig, build, run)
    assert comm.reduce_scatters == {"bfloat16": 6}
    assert not comm.unchanged


@ranks(4)
def test_several_meshes(rig):
    """Each module is reduced over the ranks that shard it, and not at all with one rank."""

    def build():
        model = make((64, 48, 32), device=rig.device)
        meshes = rig.mesh(), rig.mesh(2, 2), rig.mesh(4, 1)
        for block, mesh in zip(model.blocks, meshes, strict=True):
            fully_shard(block, mesh=mesh, mp_policy=BF16)
        return fully_shard(model, mesh=rig.mesh(), mp_policy=BF16)

    comm = check(rig, build)
    assert comm.unchanged == {"blocks.2": "one rank holds all of it"}
    assert comm.reduce_scatters == {"bfloat16": 3}


@ranks(2)
def test_float32_gradients_are_reduced_by_torch(rig):
    model = shard(make(EVEN, device=rig.device), rig)
    comm = set_fsdp_comm(model)
    assert comm.unchanged == dict.fromkeys(
        ("", "blocks.0", "blocks.1"), "gradients are computed in float32"
    )
    backward(model, rig)
    assert not comm.reduce_scatters


@ranks(2)
@needs(MixedPrecisionPolicy, "param_dtype_override_fn")
def test_gradients_of_a_group_with_both_dtypes_are_not_rounded(rig):
    """Norms and biases are float32, weights are bfloat16."""

    def build():
        def override(p):
            return torch.float32 if p.dim() == 1 else None

        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            param_dtype_override_fn=override,
            cast_forward_inputs=False,
        )
        return shard(make(EVEN, recipe=None, device=rig.device), rig, mp_policy=policy)

    def run(model, rig):
        with torch.autocast(rig.device_type, torch.bfloat16):
            backward(model, rig)

    comm = check(rig, build, run)
    assert comm.reduce_scatters == {"bfloat16": 3, "float32": 3}
    ones = sum(p.numel() for p in make(EVEN, recipe=None).parameters() if p.dim() == 1)
    assert comm.reduce_scatter_bytes["float32"] == 4 * ones


@ranks(2)
def test_nonfinite_gradients_stay_nonfinite(rig):
    model = shard(make(EVEN, recipe=None, device=rig.device), rig, mp_policy=BF16)
    set_fsdp_comm(model)
    scale = float("inf") if rig.rank == 0 else 1.0
    (model(batch(rig)).float().square().mean() * scale).backward()
    assert all(not g.isfinite().any() for g in grads_of(model).values() if g.numel())


@ranks(2)
def test_a_model_trains_after_a_backward_that_raised_on_all_ranks(rig):
    model = shard(make(EVEN, device=rig.device), rig, mp_policy=BF16)
    comm = set_fsdp_comm(model)

    def refuse(grad):
        raise ArithmeticError("not today")

    x = batch(rig).requires_grad_()
    hidden = model.blocks[1].register_forward_pre_hook(
        lambda module, args: args[0].register_hook(refuse) and None
    )
    with pytest.raises(ArithmeticError):
        model(x).float().square().mean().backward()
    hidden.remove()
    del x
    fresh = shard(make(EVEN, device=rig.device), rig, mp_policy=BF16)
    fresh_comm = set_fsdp_comm(fresh)
    backward(fresh, rig)
    assert comm.reduce_scatters["bfloat16"] < 3
    assert fresh_comm.reduce_scatters == {"bfloat16": 3}


@ranks(2)
def test_empty_shards(rig):
    def build():
        return shard(make(EMPTY, recipe=None, device=rig.device), rig, mp_policy=BF16)

    assert check(rig, build).reduce_scatters == {"bfloat16": 3}
