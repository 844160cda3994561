"""What a step sends: uint8 gathers and one small all-reduce a forward."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from distributed import ranks
from distributed.collectives import Collectives
from distributed.models import EMPTY, EVEN, UNEVEN, batch, linears, make, shard
from fp8rs import precompute_float8_dynamic_scale_for_fsdp

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def step(model, rig, backward=True):
    with Collectives() as forward:
        y = model(batch(rig))
    with Collectives() as back:
        if backward:
            y.float().square().mean().backward()
    return forward, back


@ranks(2, 4)
@pytest.mark.parametrize("hidden", [EVEN, UNEVEN, EMPTY])
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_one_all_reduce_a_forward_and_uint8_gathers(rig, hidden, recipe):
    model = make(hidden, recipe=recipe, device=rig.device)
    shard(model, rig, mp_policy=BF16)
    weights = len(linears(model))
    for n in range(3):
        forward, back = step(model, rig)
        reduces = [c for c in forward.seen if c.kind == "reduce"]
        if recipe == "current":
            assert [c.nbytes for c in reduces] == [4 * weights], n
        elif n > 0:
            # The scales of this forward's casts, and nothing else: no optimizer has stepped.
            assert [c.nbytes for c in reduces][:1] == [4 * weights], n
        assert all(c.dtype == torch.int32 for c in reduces)
        assert {c.dtype for c in forward.seen if c.kind == "gather"} == {torch.uint8}
        if recipe == "current":
            assert not [c for c in back.seen if c.kind == "reduce"]


@ranks(2)
def test_gathered_bytes_are_half_of_bf16s(rig):
    sent = {}
    for recipe in ("current", "delayed", None):
        model = make(EVEN, recipe=recipe, device=rig.device)
        shard(model, rig, mp_policy=BF16)
        forward, back = step(model, rig)
        sent[recipe] = forward.nbytes("gather") + back.nbytes("gather")
        others = sum(p.numel() for n, p in model.named_parameters() if p.dim() < 2)
        weights = sum(m.weight.numel() for m in linears(model).values())
        # Forward: everything. Backward: everything but the root's own, which stays.
        kept = sum(p.numel() for p in model.head.parameters())
        twice = 2 * (weights + others) - kept
        if recipe is None:
            assert sent[recipe] == 2 * twice
        else:
            small = 2 * others - model.head.bias.numel()
            assert sent[recipe] == twice + small  # a byte a weight, two a bias


@ranks(2)
def test_an_unsharded_backward_gathers_nothing(rig):
    model = make(EVEN, device=rig.device)
    shard(model, rig, reshard_after_forward=False)
    _, back = step(model, rig)
    assert not [c for c in back.seen if c.kind == "gather"]


@ranks(4)
def test_replicas_take_no_part_in_the_all_reduce(rig):
    model = make(EVEN, device=rig.device)
    shard(model, mesh=rig.mesh(2, 2))
    forward, _ = step(model, rig)
    assert forward.counts()[("reduce", torch.int32)] == 1
    model = make(EVEN, device=rig.device)
    shard(model, mesh=rig.mesh(4, 1))
    forward, _ = step(model, rig)
    assert forward.counts()[("reduce", torch.int32)] == 0


@ranks(4)
def test_one_all_reduce_a_mesh(rig):
    model = make(EVEN, device=rig.device)
    mesh = rig.mesh(2, 2, names=("a", "b"))
    fully_shard(model.blocks[0], mesh=mesh["a"])
    fully_shard(model.blocks[1], mesh=mesh["b"])
    fully_shard(model, mesh=mesh["b"])
    forward, _ = step(model, rig)
    assert sorted(c.nbytes for c in forward.seen if c.kind == "reduce") == [2 * 4, 3 * 4]


@ranks(2)
def test_precompute_takes_the_all_reduce_out_of_one_forward(rig):
    model = make(UNEVEN, device=rig.device)
    shard(model, rig)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reference = make(UNEVEN, device=rig.device)
    shard(reference, rig)
    other = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for n in range(4):
        outputs = []
        with Collectives() as forward:
            for m in (model, reference):
                outputs.append(m(batch(rig, n)))
        # The first forward has nothing precomputed; of the others only the reference reduces.
        assert forward.counts()[("reduce", torch.int32)] == (2 if n == 0 else 1)
        assert torch.equal(*outputs)
        for y in outputs:
            y.square().mean().backward()
        for o in (optimizer, other):
            o.step()
            o.zero_grad()
        with Collectives() as after:
            precompute_float8_dynamic_scale_for_fsdp(model)
        assert after.counts()[("reduce", torch.int32)] == 1
    # It holds for one forward: a second one finds its own.
    model(batch(rig))
    with Collectives() as forward:
        model(batch(rig))
    assert forward.counts()[("reduce", torch.int32)] == 1


@ranks(2)
def test_precompute_leaves_other_models_alone(rig):
    for model in (
        nn.Linear(4, 4),
        make(EVEN, device=rig.device),
        make(EVEN, recipe="delayed", device=rig.device),
        make(EVEN, enable_fsdp_float8_all_gather=False, device=rig.device),
    ):
        precompute_float8_dynamic_scale_for_fsdp(model)


@ranks(2)
def test_a_part_of_the_model_called_by_itself_reduces_for_itself(rig):
    model = make(EVEN, device=rig.device)
    for block in model.blocks:
        fully_shard(block, mesh=rig.mesh())
    with Collectives() as forward:
        model.blocks[0](batch(rig))
    assert [c.nbytes for c in forward.seen if c.kind == "reduce"] == [4, 4]


@ranks(2)
def test_an_explicit_prefetch_changes_nothing(rig):
    model = make(UNEVEN, device=rig.device)
    shard(model, rig)
    reference = make(UNEVEN, device=rig.device)
    shard(reference, rig)
    model.set_modules_to_forward_prefetch([model.blocks[0]])
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
    for n in range(3):
        with Collectives() as forward:
            y = model(batch(rig, n))
        assert forward.counts()[("reduce", torch.int32)] == 1
        assert torch.equal(y, reference(batch(rig, n)))
        y.sum().backward()
