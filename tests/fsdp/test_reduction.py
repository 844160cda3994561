"""Gradients that are sent in bfloat16 and summed in float32: no bit is lost."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from distributed import ranks
from distributed.collectives import Collectives
from distributed.models import EMPTY, EVEN, HIDDEN, RECIPES, batch, make, same_bytes, shard
from fp8rs.fsdp import set_links
from fsdp.gradients import backward, check, grads_of, twice

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ALL_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


@ranks(2, 4)
@pytest.mark.parametrize("recipe", [None, "current", "mxfp8"])
@pytest.mark.parametrize("hidden", list(HIDDEN))
def test_gradients_are_the_sum_of_the_ranks_in_their_order(rig, recipe, hidden):
    def build():
        model = make(HIDDEN[hidden], recipe=RECIPES.get(recipe), device=rig.device)
        return shard(model, rig, mp_policy=BF16)

    links = check(rig, build)
    assert links.reductions == {"bfloat16": 3}


@ranks(2)
def test_a_sum_over_two_ranks_is_torchs_own(rig):
    """Of two numbers there is one order, and a half is exact."""
    models = [shard(make(EVEN, device=rig.device), rig, mp_policy=BF16) for _ in range(2)]
    set_links(models[1])
    for model in models:
        backward(model, rig)
    torchs, ours = map(grads_of, models)
    assert all(same_bytes(ours[name], grad) for name, grad in torchs.items())


@ranks(2)
def test_half_the_bytes_are_sent(rig):
    models = [shard(make(EVEN, device=rig.device), rig, mp_policy=BF16) for _ in range(2)]
    set_links(models[1], gather="torch")
    sent = []
    for model, kind in zip(models, ("scatter", "alltoall_base"), strict=True):
        with Collectives() as seen:
            backward(model, rig)
        sent.append(seen.nbytes(kind))
        assert {c.kind for c in seen.seen} - {"reduce", "gather"} == {kind}
    assert sent[0] == 2 * sent[1] > 0


@ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_what_micro_batches_add_up_is_sent_in_float32(rig, reshard):
    def build():
        model = shard(make(EVEN, device=rig.device), rig, mp_policy=BF16)
        model.set_reshard_after_backward(reshard)
        return model

    links = check(rig, build, lambda model, rig: twice(model, rig, synced=False))
    assert links.reductions == {"float32": 3}
    links = check(rig, build, lambda model, rig: twice(model, rig, synced=True))
    assert links.reductions == {"bfloat16": 6}


@ranks(2)
def test_ranks_that_added_up_different_things_agree_on_the_wire(rig):
    """Only rank 0 runs the middle block in the first micro-batch: there alone it is float32."""

    def build():
        return shard(make((64, 64, 64), device=rig.device), rig, mp_policy=BF16)

    def run(model, rig):
        blocks = list(model.blocks)
        model.set_requires_gradient_sync(False)
        if rig.rank == 0:
            backward(model, rig)
        else:
            skipped = blocks[1]
            # Gathered as on the other rank, and used by nobody.
            x = batch(rig)
            handle = skipped.register_forward_hook(lambda module, args, out: args[0])
            model(x).float().square().mean().backward()
            handle.remove()
        model.set_requires_gradient_sync(True)
        backward(model, rig, 1)

    assert check(rig, build, run).reductions == {"float32": 4}


@ranks(2)
@pytest.mark.newest_torch
def test_what_is_filled_in_for_parameters_that_a_rank_did_not_use_is_reduced_in_float32(rig):
    """FSDP2's zeros may be, there alone."""

    def build():
        model = make(EVEN, device=rig.device)
        block = model.blocks[0]
        block.extra = nn.Parameter(torch.ones(8, device=rig.device))
        if rig.rank == 0:
            block.register_forward_hook(lambda module, args, out: out * block.extra.mean())
        shard(model, rig, mp_policy=BF16)
        model.set_reduce_scatter_unused_params(True)
        return model

    assert check(rig, build).reductions == {"float32": 3}


@ranks(2)
def test_evaluations_between_do_not_count(rig):
    def run(model, rig):
        with torch.no_grad():
            for step in range(3):
                model(batch(rig, step))
        model.reshard()
        backward(model, rig)

    links = check(rig, lambda: shard(make(EVEN, device=rig.device), rig, mp_policy=BF16), run)
    assert links.reductions == {"bfloat16": 3}


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
    from torch.distributed.tensor import Shard

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
    links = check(rig, lambda: SETTINGS[setting](make(EVEN, recipe=recipe, device=rig.device), rig))
    assert links.reductions == {"bfloat16": 2 if setting == "frozen" else 3}
    if setting == "frozen":
        why = {link.unit: link.reduction_because for link in links.units}
        assert why["blocks.0"] == "nothing of it is trained"


@ranks(2)
@pytest.mark.parametrize("reshard", [True, False, None])
def test_resharding(rig, reshard):
    def build():
        model = make(EVEN, device=rig.device)
        return shard(model, rig, mp_policy=BF16, reshard_after_forward=reshard)

    assert check(rig, build).reductions == {"bfloat16": 3}


@ranks(4)
def test_resharding_over_fewer_ranks(rig):
    """Of a plain model: FP8 weights refuse it."""

    def build():
        model = make(EVEN, recipe=None, device=rig.device)
        return shard(model, rig, mp_policy=BF16, reshard_after_forward=2)

    assert check(rig, build).reductions == {"bfloat16": 3}


@ranks(4)
@pytest.mark.parametrize("all_reduce", [True, False])
@pytest.mark.parametrize("policy", [BF16, ALL_BF16], ids=["fp32", "bf16"])
def test_replicas_are_reduced_in_float32(rig, all_reduce, policy):
    """In bfloat16 among the ranks that shard; each micro-batch, or at the end alone."""

    def build():
        return shard(make(EVEN, device=rig.device), mesh=rig.mesh(2, 2), mp_policy=policy)

    def run(model, rig):
        model.set_requires_all_reduce(all_reduce)
        backward(model, rig)
        model.set_requires_all_reduce(True)
        backward(model, rig, 1)

    links = check(rig, build, run)
    assert links.reductions == {"bfloat16": 6}
    assert {link.ranks for link in links.units} == {2}


@ranks(4)
def test_several_meshes(rig):
    """Each module's reduction is over the ranks that shard it; one rank alone has none."""

    def build():
        model = make((64, 48, 32), device=rig.device)
        meshes = rig.mesh(), rig.mesh(2, 2), rig.mesh(4, 1)
        for block, mesh in zip(model.blocks, meshes, strict=True):
            fully_shard(block, mesh=mesh, mp_policy=BF16)
        return fully_shard(model, mesh=rig.mesh(), mp_policy=BF16)

    links = check(rig, build)
    assert [link.ranks for link in links.units] == [4, 4, 2, 1]
    assert links.units[-1].reduction_because == "one rank has all of it"
    assert links.reductions == {"bfloat16": 3}


@ranks(2)
def test_gradients_that_are_float32_are_reduced_as_torch_does(rig):
    model = shard(make(EVEN, device=rig.device), rig)
    links = set_links(model)
    assert {link.reduction for link in links.units} == {"torch"}
    why = {link.reduction_because for link in links.units}
    assert why == {"gradients are computed in float32"}
    backward(model, rig)
    assert not links.reductions


@ranks(2)
@pytest.mark.newest_torch
def test_of_a_mixed_group_each_gradient_travels_as_it_is(rig):
    """Norms and biases in float32 between weights in bfloat16: nothing is rounded."""

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

    links = check(rig, build, run)
    assert links.reductions == {"bfloat16": 3, "float32": 3}
    ones = sum(p.numel() for p in make(EVEN, recipe=None).parameters() if p.dim() == 1)
    assert links.reduced["float32"] == 4 * ones


@ranks(2)
def test_what_is_not_finite_comes_through(rig):
    model = shard(make(EVEN, recipe=None, device=rig.device), rig, mp_policy=BF16)
    set_links(model)
    scale = float("inf") if rig.rank == 0 else 1.0
    (model(batch(rig)).float().square().mean() * scale).backward()
    assert all(not g.isfinite().any() for g in grads_of(model).values() if g.numel())


@ranks(2)
def test_a_reduction_after_an_error_of_all_ranks(rig):
    """A backward that raises in the middle, on all ranks, leaves nothing behind."""
    model = shard(make(EVEN, device=rig.device), rig, mp_policy=BF16)
    links = set_links(model)

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
    again = set_links(fresh)
    backward(fresh, rig)
    assert links.reductions["bfloat16"] < 3
    assert again.reductions == {"bfloat16": 3}


@ranks(2)
def test_empty_shards(rig):
    def build():
        return shard(make(EMPTY, recipe=None, device=rig.device), rig, mp_policy=BF16)

    assert check(rig, build).reductions == {"bfloat16": 3}
