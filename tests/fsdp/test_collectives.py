"""A step runs all-gathers of uint8 and one small all-reduce per forward."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from distributed import ranks
from distributed.collectives import Collectives
from distributed.models import (
    BLOCKS,
    EMPTY,
    EVEN,
    UNEVEN,
    batch,
    expected,
    full_weights,
    linears,
    make,
    reduces,
    same_bytes,
    shard,
    train_with_histories,
    watch_weights,
)
from fp8rs import precompute_float8_dynamic_scale_for_fsdp
from internals import keeps_codes

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def step(model, rig, backward=True):
    with Collectives() as forward:
        y = model(batch(rig))
    with Collectives() as back:
        if backward:
            y.float().square().mean().backward()
    return forward, back


class Operators(TorchDispatchMode):
    """The names of the operators that run inside it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))

    def of(self, namespace):
        return [name for name in self.names if name.startswith(f"{namespace}::")]


@ranks(2, 4)
@pytest.mark.parametrize("hidden", [EVEN, UNEVEN, EMPTY])
def test_one_all_reduce_a_forward_and_uint8_gathers(rig, hidden):
    model = make(hidden, device=rig.device)
    shard(model, rig, mp_policy=BF16)
    weights = len(linears(model))
    for n in range(3):
        forward, back = step(model, rig)
        assert reduces(forward) == [4 * weights], (n, reduces(forward))
        assert forward.counts()[("reduce", torch.int32)] == 1
        assert {c.dtype for c in forward.calls if c.kind == "gather"} == {torch.uint8}
        assert reduces(back) == [], n


@ranks(2, 4)
@pytest.mark.parametrize("hidden", [EVEN, UNEVEN, EMPTY])
def test_delayed_scaling_has_one_all_reduce_a_step(rig, hidden):
    model = make(hidden, recipe="delayed", device=rig.device)
    shard(model, rig)
    train_with_histories(model, rig)
    weights = len(linears(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for n in range(6):
        forward, back = step(model, rig)
        assert reduces(forward) == [], (n, reduces(forward))
        assert {c.dtype for c in forward.calls if c.kind == "gather"} == {torch.uint8}
        assert reduces(back) == [], (n, reduces(back))
        if n % 2:
            # A roll, of weights, inputs and gradients together, ends a step.
            with Collectives() as rolled:
                optimizer.step()
            assert reduces(rolled) == [4 * 3 * weights], (n, reduces(rolled))


def without_a_mesh(rig, recipe):
    """Shard as the first script does: each `fully_shard` call makes its own mesh."""
    model = make(UNEVEN, recipe=recipe, device=rig.device)
    shard(model, mp_policy=BF16)
    if recipe == "delayed":
        train_with_histories(model, rig)
        model(batch(rig, 3)).float().sum().backward()  # and the roll that follows the last step
    for n in range(2):
        forward, back = step(model, rig)
        expected = [] if recipe == "delayed" else [4 * len(linears(model))]
        assert reduces(forward) == expected, (n, forward.calls)
        assert reduces(back) == [], (n, back.calls)


@pytest.mark.skipif(
    torch.cuda.device_count() > 0,
    reason="the mesh that torch makes where there is a GPU is of GPUs",
)
@ranks(2, cuda=False)
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_one_all_reduce_a_forward_without_a_mesh_given(rig, recipe):
    without_a_mesh(rig, recipe)


@ranks(2, cpu=False)
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_one_all_reduce_a_forward_without_a_mesh_given_on_gpus(rig, recipe):
    without_a_mesh(rig, recipe)


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
        head_numel = sum(p.numel() for p in model.head.parameters())
        twice = 2 * (weights + others) - head_numel
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
    assert not [c for c in back.calls if c.kind == "gather"]


@ranks(4)
def test_replicas_take_no_part_in_the_all_reduce(rig):
    weights = len(linears(make(EVEN)))
    for shape, counts in (((2, 2), [4 * weights]), ((4, 1), []), ((1, 4), [4 * weights])):
        model = make(EVEN, device=rig.device)
        shard(model, mesh=rig.mesh(*shape))
        forward, _ = step(model, rig)
        assert reduces(forward) == counts, (shape, forward.calls)


def over_two_meshes(rig, *shape):
    """A model whose first block is sharded over other ranks than the rest."""
    model = make(EVEN, device=rig.device)
    mesh = rig.mesh(*shape, names=("a", "b"))
    fully_shard(model.blocks[0], mesh=mesh["a"])
    fully_shard(model.blocks[1], mesh=mesh["b"])
    fully_shard(model, mesh=mesh["b"])
    return model


@ranks(4)
def test_one_all_reduce_a_mesh(rig):
    model = over_two_meshes(rig, 2, 2)
    forward, _ = step(model, rig)
    assert sorted(reduces(forward)) == [2 * 4, 3 * 4], forward.calls


@ranks(4)
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_later_forward_copies_no_list_to_the_device(rig, recipe):
    """For which the host would wait, at every step: indices of weights are there already."""
    alone = [dist.new_group([r]) for r in range(4)][rig.rank] if recipe == "delayed" else None
    model = make(EVEN, recipe=recipe, device=rig.device, amax_reduction_group=alone)
    mesh = rig.mesh(2, 2, names=("a", "b"))
    fully_shard(model.blocks[0], mesh=mesh["a"])
    fully_shard(model.head, mesh=mesh["b"])  # the block between them is not sharded
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for n in range(5):
        with Operators() as ran:
            model(batch(rig)).sum().backward()
        assert n < 3 or ran.names.count("aten::lift_fresh") == 0, n
        optimizer.step()


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
@pytest.mark.parametrize("hidden", [EVEN, UNEVEN, EMPTY])
def test_writes_to_copies_of_weights_cost_no_all_reduce(rig, hidden):
    """Also if only one rank makes them: it would wait for the others."""
    model = shard(make(hidden, device=rig.device), rig, reshard_after_forward=True)
    averages = [p.detach().clone() for p in model.parameters()]

    def log(module, args, y):
        if rig.rank == 0:
            model.blocks[1].up.weight.detach().to_local().clone().abs_().sum()

    model.blocks[0].register_forward_hook(log)
    for n in range(2):
        with Collectives() as forward:
            y = model(batch(rig, n))
        assert forward.counts()[("reduce", torch.int32)] == 1
        assert keeps_codes(model.blocks[1].up)
        torch._foreach_lerp_(averages, [p.detach() for p in model.parameters()], 0.1)
        assert keeps_codes(model.blocks[1].up)
        y.square().mean().backward()
    precompute_float8_dynamic_scale_for_fsdp(model)
    torch._foreach_lerp_(averages, [p.detach() for p in model.parameters()], 0.1)
    with Collectives() as forward:
        model(batch(rig))
    assert reduces(forward) == []


@ranks(2)
def test_copies_of_weights_outlive_their_model(rig):
    model = shard(make(EVEN, device=rig.device), rig)
    model(batch(rig))
    layer = weakref.ref(model.blocks[1].up)
    copies = [p.detach().clone() for p in model.parameters()]
    del model
    gc.collect()
    assert layer() is None
    for copy in copies:
        copy.copy_(copy.clone())


@ranks(2)
@pytest.mark.parametrize("hidden", [EVEN, UNEVEN, EMPTY])
def test_writes_to_views_of_a_weight_cost_one_all_reduce(rig, hidden):
    model = shard(make(hidden, device=rig.device), rig, reshard_after_forward=True)
    weight = model.blocks[1].up.weight
    views = {
        "parameter": lambda: weight,
        "detached": lambda: weight.detach(),
        "local": lambda: weight.to_local(),
        "data": lambda: weight.data,
        "part": lambda: weight.detach().to_local().view(-1)[:3],
    }
    for name, view in views.items():
        precompute_float8_dynamic_scale_for_fsdp(model)
        with torch.no_grad():
            view().mul_(2)
        with Collectives() as forward:
            model(batch(rig)).square().mean().backward()
        assert reduces(forward) == [4], name


@ranks(2)
def test_precompute_takes_the_all_reduce_of_split_blocks_out_of_one_forward(rig):
    results = []
    for ahead in (True, False):
        model = shard(make(UNEVEN, recipe=BLOCKS["block"], device=rig.device), rig)
        if ahead:
            with Collectives() as before:
                precompute_float8_dynamic_scale_for_fsdp(model)
            assert len(reduces(before)) == 1
        with Collectives() as forward:
            results.append(model(batch(rig)))
        assert len(reduces(forward)) == (0 if ahead else 1)
    assert torch.equal(*results)


@ranks(2)
def test_precompute_leaves_other_models_alone(rig):
    """Unconverted models, and weights that are gathered in high precision."""
    with Collectives() as collectives:
        precompute_float8_dynamic_scale_for_fsdp(nn.Linear(4, 4))
    assert collectives.calls == []
    for recipe in ("current", "delayed", *BLOCKS.values()):
        model = make(UNEVEN, recipe=recipe, device=rig.device, enable_fsdp_float8_all_gather=False)
        for prepare in (lambda: None, partial(shard, model, rig), partial(step, model, rig)):
            prepare()
            with Collectives() as collectives, Operators() as ran:
                precompute_float8_dynamic_scale_for_fsdp(model)
            assert collectives.calls == [], (recipe, collectives.calls)
            assert ran.of("fp8rs") == [], (recipe, ran.names)


@ranks(2)
def test_submodule_forwards_share_scales_until_a_write(rig):
    model = make(EVEN, device=rig.device)
    for block in model.blocks:
        fully_shard(block, mesh=rig.mesh())
    with Collectives() as forward:
        model.blocks[0](batch(rig))
        model.blocks[1](batch(rig))
    assert reduces(forward) == [4 * 4], "one for all that are sharded alike"
    for block in model.blocks:
        block.reshard()  # FSDP2 leaves the weights of its roots gathered
    with Collectives() as forward:
        model.blocks[1](batch(rig))
    assert reduces(forward) == [], "the values have not changed"
    for block in model.blocks:
        block.reshard()
    with torch.no_grad():
        for p in model.blocks[0].parameters():
            p.mul_(2)
    with Collectives() as forward:
        model.blocks[1](batch(rig))
        model.blocks[0](batch(rig))
    assert reduces(forward) == [4 * 2], "of the written weights"


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


@ranks(2)
def test_what_was_precomputed_serves_one_forward(rig):
    """Whatever comes after it."""
    model = make(UNEVEN, device=rig.device)
    shard(model, rig)
    model(batch(rig)).square().mean().backward()
    precompute_float8_dynamic_scale_for_fsdp(model)
    model(batch(rig)).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    scales = {}
    watch_weights(model, lambda name, w: scales.update({name: w.rowwise.scale.clone()}))
    weights = full_weights(model)
    model(batch(rig))
    for name, scale in scales.items():
        assert same_bytes(scale, expected(weights[name])[1]), name


@ranks(2)
def test_what_was_precomputed_for_all_is_nothing_for_a_part_on_its_own_mesh(rig):
    model = over_two_meshes(rig, 2, 1)
    model(batch(rig)).square().mean().backward()
    precompute_float8_dynamic_scale_for_fsdp(model)
    weights = full_weights(model)
    block = model.blocks[1]
    block.unshard()
    assert same_bytes(block.up.weight.rowwise.scale, expected(weights["blocks.1.up"])[1])
    block.reshard()


@ranks(2)
def test_a_part_by_itself_waits_for_the_ranks_that_it_is_sharded_over(rig):
    """And for no others, who may be elsewhere."""
    model = over_two_meshes(rig, 2, 1)
    model(batch(rig)).square().mean().backward()
    block = model.blocks[1]
    with Collectives() as collectives:
        block.unshard()
        block.reshard()
    assert not reduces(collectives)
