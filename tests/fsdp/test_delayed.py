"""Delayed scaling of sharded weights: scales of the histories, and one scale for all ranks."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fp8rs
from distributed import ranks
from distributed.collectives import Collectives
from distributed.models import (
    EVEN,
    HIDDEN,
    UNEVEN,
    batch,
    expected,
    full_weights,
    linears,
    make,
    on_all_ranks,
    same_bytes,
    shard,
    shardings,
    train_with_histories,
    watch_weights,
)
from fp8rs.fsdp import scale_sync
from fp8rs.scaling import histories
from fp8rs.scaling.delayed import DelayedScalingState
from oracle.tensorwise import scale_from_amax


def check_scaled(plane, weight, amax):
    """A gathered plane is the whole weight under the scale that ``amax`` gives."""
    scale = scale_from_amax(amax, torch.float8_e4m3fn)
    assert same_bytes(plane.scale, scale), (plane.scale, scale)
    codes, _ = torch.ops.fp8rs.quantize(weight, scale, torch.float8_e4m3fn)
    assert same_bytes(plane.data, codes)


@ranks(1, 2, 4)
@shardings
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_of_the_histories_hold_for_gathered_weights(rig, hidden, dtype):
    """Delayed scaling as it is from the third step on: the cast comes before any amax."""
    model = make(HIDDEN[hidden], recipe="delayed", device=rig.device)
    model.blocks[1].to(dtype)
    shard(model, rig, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    amaxes = train_with_histories(model, rig)
    for p in model.parameters():
        p.data.mul_(3)  # so that no weight's own largest value gives the history's scale
    gathered_weights = {}
    watch_weights(
        model, lambda name, w: gathered_weights.update({name: w.rowwise.map(torch.clone)})
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for _ in range(2):
        weights = full_weights(model)
        gathered_weights.clear()
        model(batch(rig)).float().square().mean().backward()
        assert sorted(gathered_weights) == sorted(weights)
        for name, weight in weights.items():
            check_scaled(gathered_weights[name], weight, amaxes[name])
            assert not same_bytes(expected(weight)[1], gathered_weights[name].scale)
            amaxes[name] = weight.float().abs().amax()  # three times as much, for the next one
        optimizer.step()
        for p in model.parameters():
            p.data.mul_(0.5)


@ranks(4)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
def test_scales_of_the_histories_under_hybrid_sharding(rig, shape):
    model = make(UNEVEN, recipe="delayed", device=rig.device)
    shard(model, mesh=rig.mesh(*shape))
    amaxes = train_with_histories(model, rig)
    weights = full_weights(model)
    gathered_weights = {}
    watch_weights(
        model, lambda name, w: gathered_weights.update({name: w.rowwise.map(torch.clone)})
    )
    model(batch(rig)).square().mean().backward()
    for name, weight in weights.items():
        check_scaled(gathered_weights[name], weight, amaxes[name])


@ranks(2, 4)
@pytest.mark.parametrize("recipe", ["current", "delayed", "delayed, from histories"])
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_non_finite_weights_make_one_scale_nan(rig, recipe, value):
    """On all ranks if it is measured. With a history, on the rank that has the value."""
    model = make(UNEVEN, recipe=recipe.split(",")[0], device=rig.device)
    shard(model, rig)
    if recipe.endswith("histories"):
        train_with_histories(model, rig)
    x = batch(rig)
    model(x).sum().backward()
    up = model.blocks[1].up.weight
    before = up.data.to_local().high_precision.clone()
    if rig.rank == 1:
        up.data.to_local()[0, 0] = float(value)
    scales = {}
    watch_weights(model, lambda name, w: scales.update({name: w.rowwise.scale.item()}))
    loss = model(x).sum()
    loss.backward()
    if not recipe.endswith("histories") or rig.rank == 1:
        assert scales["blocks.1.up"] != scales["blocks.1.up"], scales
        assert loss.isnan()
    # The reduction of gradients makes it visible on all ranks.
    assert model.head.weight.grad.to_local().isnan().all()
    assert all(v == v for n, v in scales.items() if n != "blocks.1.up"), scales
    # It is seen once: what replaces it is quantized as if nothing had been.
    up.data.to_local().copy_(before)
    model.zero_grad()
    torch.optim.SGD(model.parameters(), 0.0).step()  # the histories roll
    model(x)
    assert all(v == v for v in scales.values()), scales


@ranks(2)
def test_delayed_margin_holds_for_gathered_weights(rig):
    model = make(UNEVEN, recipe=fp8rs.DelayedScaling(margin=2), device=rig.device)
    shard(model, rig)
    weights = full_weights(model)
    gathered_weights = {}
    watch_weights(model, lambda name, w: gathered_weights.update({name: w.rowwise.scale}))
    model(batch(rig)).sum().backward()
    for name, weight in weights.items():
        assert same_bytes(gathered_weights[name], expected(weight)[1] * 4)


@ranks(2)
@pytest.mark.parametrize("bad", [None, float("inf")])
def test_a_forward_in_a_hook_of_another_models_backward_is_a_forward(rig, bad):
    """Its casts record amaxes and find values that are not finite."""
    student, teacher = (
        shard(make(EVEN, recipe="delayed", seed=seed, device=rig.device), rig) for seed in (0, 1)
    )
    train_with_histories(teacher, rig)
    first = next(iter(linears(teacher).values()))
    with torch.no_grad():
        first.weight.mul_(3)
        if bad is not None and rig.rank == 0:
            first.weight.to_local()[0, 0] = bad
    largest = full_weights(teacher)[next(iter(linears(teacher)))].abs().amax()
    finite = []
    x = batch(rig)

    def teach(gradient):
        with torch.no_grad():
            finite.append(bool(teacher(x).isfinite().all()))

    y = student(x)
    y.register_hook(teach)
    y.square().mean().backward()
    assert finite == [bad is None or rig.rank != 0]
    if bad is None:
        recorded = first.fp8_amax[0, 0].clone()
        dist.all_reduce(recorded, op=dist.ReduceOp.MAX)
        assert recorded == largest


@ranks(4)
def test_histories_are_reduced_over_both_meshes(rig):
    """A reduction group of the user's own takes no shard's ranks out of a weight's history."""
    mesh = rig.mesh(2, 2, names=("data", "tensor"))
    alone = [torch.distributed.new_group([r]) for r in range(4)][rig.rank]

    class Head(torch.nn.Module):
        """Runs the head alone; what tensor parallelism shards is only gathered."""

        def __init__(self):
            super().__init__()
            self.stack = make(EVEN, recipe=None)

        def forward(self, x):
            return self.stack.head(x)

    torch.manual_seed(0)
    model = Head().to(rig.device)
    # The most recent amaxes: those before the histories were filled have other reductions.
    recipe = fp8rs.DelayedScaling(amax_compute_algo="most_recent")
    fp8rs.convert_to_float8_training(model, recipe=recipe, amax_reduction_group=alone)
    weights = full_weights(model)
    block = model.stack.blocks[0]
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(block, mesh["tensor"], plan)
    for module in (*model.stack.blocks, model.stack.head):
        fully_shard(module, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for n in range(5):
        model(batch(rig, n)).sum().backward()
        optimizer.step()
    assert all(layer.fp8_ready[0] for layer in linears(model).values())
    for name, dim in (("up", 0), ("down", 1)):
        weight = weights[f"stack.blocks.0.{name}"]
        amaxes = [part.abs().amax() for part in weight.chunk(2, dim)]
        assert amaxes[0] != amaxes[1]
        block.unshard()
        plane = getattr(block, name).weight.to_local().rowwise
        codes, scale = expected(weight)
        assert same_bytes(plane.scale, scale), (name, plane.scale, scale)
        part = codes.chunk(2, dim)[mesh["tensor"].get_local_rank()]
        assert same_bytes(plane.data, part)
        block.reshard()


@ranks(1, 2)
def test_a_write_while_a_weight_is_gathered_pins_no_scale(rig):
    """FSDP2 leaves its root's weights gathered after an evaluation."""
    outputs = []
    scales = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32)).to(rig.device)
        recipe = fp8rs.DelayedScaling(amax_history_len=1)
        fp8rs.convert_to_float8_training(model, recipe=recipe)
        if sharded:
            fully_shard(model, mesh=rig.mesh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        x = torch.linspace(-1, 1, 512, device=rig.device).view(16, 32)
        forward_scales = []
        parameters = list(model.parameters())  # before FSDP2 puts others in their places
        for n in range(4):
            model(x).sum().backward()
            with torch.no_grad():
                model.eval()(x)
                for p in parameters:
                    p.mul_(100.0 if n == 0 else 0.5)
            optimizer.step(), optimizer.zero_grad()
            if sharded:
                model.reshard()
            outputs.append(model.train()(x).detach())
            forward_scales.append(model[0].fp8_scale[0, 0].clone())
        scales.append(torch.stack(forward_scales))
    assert torch.equal(*scales), scales
    for output, sharded_output in zip(outputs[:4], outputs[4:], strict=True):
        assert torch.equal(output, sharded_output)


@ranks(2)
@pytest.mark.parametrize("fp8_weights", [False, True])
def test_parts_of_a_model_are_notified_of_a_step_in_one_order(rig, fp8_weights):
    """Each part runs its own all-reduces. In different orders, ranks would mix up their scales."""

    def train(sharded):
        parts = []
        for n in range(6):
            torch.manual_seed(n)
            part = nn.Sequential(nn.Linear(32, 32)).to(rig.device)
            with torch.no_grad():
                part[0].weight.mul_(4.0**n)
            # Ranks differ in what they have in memory before it.
            parts.append([torch.empty(8) for _ in range(rig.rank * n)])
            fp8rs.convert_to_float8_training(part, recipe="delayed", fp8_weights=fp8_weights)
            parts[-1] = fully_shard(part, mesh=rig.mesh()) if sharded else part
        model = nn.Sequential(*parts)
        if sharded:
            fully_shard(model, mesh=rig.mesh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(3):
            model(batch(rig, rows=16, width=32)).sum().backward()
            optimizer.step(), optimizer.zero_grad()
        return torch.stack([part[0].fp8_scale[0, 0] for part in parts])

    assert torch.equal(train(sharded=False), train(sharded=True))


@ranks(2)
def test_a_synchronization_waits_for_the_packing_of_the_buffers(rig):
    """The forward packs the buffers on its own stream, and FSDP2 gathers on others."""
    calls = mock.Mock()
    model = shard(make(EVEN, recipe="delayed", device=rig.device, fp8_weights=True), rig)
    with (
        mock.patch.object(DelayedScalingState, "packs_on_current_stream", calls.wait),
        mock.patch.object(scale_sync, "raise_next_scales", calls.raise_scales),
    ):
        model(batch(rig))
    assert [name for name, *_ in calls.method_calls[:2]] == ["wait", "raise_scales"]


@ranks(2)
def test_a_part_that_is_packed_late_keeps_its_scale(rig):
    """FSDP2's streams wait for the forward's stream only when the root's forward begins.

    The buffers of the second part are packed while its scales are synchronized.
    """

    def delay(module, args, output):
        if output.is_cuda:
            # Leave large values in free memory, which the next allocations may reuse.
            unused = [torch.full((16,), 1e6, device=output.device) for _ in range(64)]
            del unused
            torch.cuda._sleep(100_000_000)  # about 50 ms

    differs = histories.differs

    def differs_late(a, b):
        if a.is_cuda:
            # `raise_next_scales` has read the amaxes, and has not written them.
            torch.cuda._sleep(300_000_000)
        return differs(a, b)

    parts = [nn.Sequential(nn.Linear(32, 32)).to(rig.device) for _ in range(2)]
    parts[0].register_forward_hook(delay)
    for part in parts:
        fp8rs.convert_to_float8_training(part, recipe="delayed", fp8_weights=True)
        fully_shard(part, mesh=rig.mesh())
    model = fully_shard(nn.Sequential(*parts), mesh=rig.mesh())
    scales = [part[0].fp8_scale.clone() for part in parts]
    weight_amaxes = [part[0].fp8_amax[:1].clone() for part in parts]
    with mock.patch.object(histories, "differs", differs_late):
        model(batch(rig, rows=16, width=32))
    for part, scale, weight_amax in zip(parts, scales, weight_amaxes, strict=True):
        assert torch.equal(part[0].fp8_scale, scale)
        assert torch.equal(part[0].fp8_amax[:1], weight_amax)


@ranks(2)
def test_blocks_by_themselves_are_trained_where_any_layer_is(rig):
    model = make(UNEVEN, recipe="delayed", device=rig.device)
    shard(model, rig)
    model.blocks[1].down.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        y = batch(rig)
        for block in model.blocks:
            y = block(y)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for block in model.blocks:
        assert (block.up.fp8_amax_history[:2, 0] > 0).all()


@ranks(2)
def test_a_layer_that_begins_anew_among_others_has_a_scale_from_its_data(rig):
    model = make(UNEVEN, recipe="delayed", device=rig.device)
    shard(model, rig)
    train_with_histories(model, rig)
    model.blocks[1].up.reset_parameters()
    planes = {}
    watch_weights(model, lambda name, w: planes.update({name: w.rowwise.map(torch.clone)}))
    codes, scale = expected(full_weights(model)["blocks.1.up"])
    model(batch(rig))
    assert same_bytes(planes["blocks.1.up"].scale, scale)
    assert same_bytes(planes["blocks.1.up"].data, codes)


@ranks(2)
def test_shards_of_a_weight_have_one_scale_whatever_inputs_are_reduced_over(rig):
    groups = [dist.new_group([rank]) for rank in range(rig.world_size)]
    model = make(UNEVEN, recipe="delayed", device=rig.device, amax_reduction_group=groups[rig.rank])
    shard(model, rig)
    train_with_histories(model, rig)
    for name, layer in linears(model).items():
        assert layer.fp8_scale[0, 0] > 0
        assert on_all_ranks(layer.fp8_scale[0, :1].clone()), name


@ranks(2)
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_weight_that_is_not_finite_for_once(rig, value, steps):
    """Its scale is NaN in that step, on all ranks, and its history does not record it."""
    model = make(UNEVEN, recipe="delayed", device=rig.device)
    shard(model, rig)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(steps):
        model(batch(rig)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    up = model.blocks[1].up
    part = up.weight.data.to_local()
    before = part.clone()
    if rig.rank == 1:
        part[0, 0] = value
    scales = []
    watch_weights(
        model,
        lambda name, w: scales.append(float(w.rowwise.scale)) if name == "blocks.1.up" else None,
    )
    model(batch(rig))
    assert scales[-1] != scales[-1]
    part.copy_(before)
    optimizer.step()
    assert up.fp8_amax_history.isfinite().all()
    assert up.fp8_scale.isfinite().all()
    model(batch(rig))
    assert scales[-1] == scales[-1]


@ranks(2)
def test_a_step_is_heard_while_whole_parameters_are_in_the_place_of_the_optimizers(rig):
    """As after an evaluation, when FSDP2 keeps the root's."""
    model = make(UNEVEN, recipe="delayed", device=rig.device)
    fully_shard(model, mesh=rig.mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for n in range(3):
        model(batch(rig, n)).square().mean().backward()
        model.eval()
        with torch.no_grad():
            model(batch(rig, n))
        model.train()
        optimizer.step()
        optimizer.zero_grad()
    assert (model.blocks[0].up.fp8_amax_history[:3, 1:] > 0).all()


@ranks(2)
def test_a_copy_from_before_the_sharding_reduces_over_no_ranks(rig):
    """Whoever has it trains it alone."""
    model = make(UNEVEN, recipe="delayed", device=rig.device)
    copied = copy.deepcopy(model)
    shard(model, rig)
    train_with_histories(model, rig)
    optimizer = torch.optim.SGD(copied.parameters(), lr=1e-3)
    with Collectives() as collectives:
        copied(batch(rig)).sum().backward()
        optimizer.step()
    assert not collectives.calls


@ranks(1, 2)
@pytest.mark.parametrize("sharded", [True, False])
def test_steps_within_a_backward_roll_after_it(rig, sharded):
    """Otherwise the histories would lack the gradients of layers before the last one."""
    buffers = []
    for within in (True, False):
        model = make(EVEN, recipe="delayed", device=rig.device)
        if sharded:
            shard(model, rig)
        steps = []
        for parameter in model.parameters():
            steps.append(torch.optim.SGD([parameter], lr=1e-2).step)
            if within:
                parameter.register_post_accumulate_grad_hook(lambda _, step=steps[-1]: step())
        for n in range(3):
            model.zero_grad()
            model(batch(rig, n)).square().mean().backward()
            for step in () if within else steps:
                step()
        buffers.append([buffer for layer in linears(model).values() for buffer in layer.buffers()])
    assert all(map(torch.equal, *buffers))
