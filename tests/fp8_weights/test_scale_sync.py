"""All ranks have the same scales of FP8 weights when the weights are gathered."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.overrides import TorchFunctionMode

import fp8rs
import fp8rs.checkpoint
from cases import each_recipe
from distributed import ranks
from distributed.collectives import Collectives
from distributed.models import (
    RECIPES,
    UNEVEN,
    batch,
    bits,
    linears,
    make,
    on_all_ranks,
    reduces,
    same_bytes,
    shard,
    watch_weights,
)
from fp8rs import precompute_float8_dynamic_scale_for_fsdp
from fp8rs.nn.init import reset_linear
from fp8rs.optim import AdamW
from internals import handle_of_tensor, local_of, reshard, storage_of

#: Hidden sizes of which one of two ranks has nothing.
ONE_ROW = (1, 1)


def step(model, rig, *optimizers, seed=0, spoil=None):
    """One step of training; ``spoil`` is a weight whose gradient has a NaN on the last rank."""
    model(batch(rig, seed)).square().mean().backward()
    if spoil is not None and rig.rank == rig.world_size - 1:
        spoil.grad.to_local()[0, 0] = torch.nan
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def scale(weight):
    return weight.to_local().rowwise.scale


def scale_of(weight):
    """A copy of the per-tensor scale that this rank's shard stores, which may be empty."""
    return storage_of(weight).any_plane.scale.view(1).clone()


def gathers(collectives):
    """The all-gathers that were seen."""
    return [c for c in collectives.calls if c.kind == "gather"]


@ranks(2)
@each_recipe("current", "block", of=RECIPES)
def test_a_write_to_a_copy_of_a_shard_while_the_weight_is_gathered_is_not_a_write_to_it(
    rig, recipe
):
    """A moving average of the shards is such a copy. Its values overwrote the weights."""
    model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device, fp8_weights=True)
    shard(model, rig, reshard_after_forward=False)
    model(batch(rig))
    reshard(model)
    weights = [layer.weight for layer in linears(model).values()]
    before = [local_of(weight).dequantize() for weight in weights]
    copies = [local_of(weight).clone() for weight in weights]
    with torch.no_grad():
        model(batch(rig))
        for copied in copies:
            copied.mul_(3.7).copy_(torch.full(copied.shape, 7.0 + rig.rank, device=rig.device))
        reshard(model)
        model(batch(rig))
    reshard(model)
    after = [local_of(layer.weight).dequantize() for layer in linears(model).values()]
    assert all(map(same_bytes, before, after))
    with torch.no_grad():
        model(batch(rig))
        local_of(weights[0]).copy_(torch.ones_like(before[0]))  # a write to the shard counts
        reshard(model)
        model(batch(rig))
    assert (linears(model)["blocks.0.up"].weight.dequantize() == 1).all()


def gathered(model, rig):
    """The values and scale of each weight as a forward has it, which all ranks must have alike."""
    gathered_weights = {}
    watch_weights(
        model,
        lambda name, w: gathered_weights.update({name: (w.dequantize(), w.rowwise.scale.clone())}),
    )
    model(batch(rig))
    for name, (values, _) in gathered_weights.items():
        assert on_all_ranks(values), name
    return dict(gathered_weights)


class NoHostReads(TorchFunctionMode):
    """Raises if a tensor is read on the host."""

    READS = (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__float__)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func not in self.READS
        return func(*args, **(kwargs or {}))


@ranks(2)
@each_recipe(*RECIPES, of=RECIPES)
def test_a_step_reads_nothing_on_the_host(rig, recipe):
    model = make(UNEVEN, recipe=RECIPES[recipe], fp8_weights=True, device=rig.device)
    shard(model, rig)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for n in range(2):
        step(model, rig, optimizer, seed=n)
    with NoHostReads():
        step(model, rig, optimizer, seed=2)
        with torch.no_grad():
            model.blocks[0].up.weight.mul_(1 + rig.rank)  # scales differ between ranks
        model(batch(rig))
    gathered(model, rig)


@ranks(2)
def test_a_nan_of_one_ranks_step_is_in_the_scale_of_all(rig):
    model = make(UNEVEN, recipe="delayed", fp8_weights=True, device=rig.device)
    shard(model, rig)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for n in range(4):
        step(model, rig, optimizer, seed=n, spoil=model.blocks[0].up.weight if n == 3 else None)
    assert scale(model.blocks[0].up.weight).isnan().all()
    assert not scale(model.blocks[1].up.weight).isnan().any()


@ranks(2)
def test_a_nan_in_the_step_of_a_second_optimizer_is_in_the_scale_of_all(rig):
    """Histories roll once for the steps of both."""
    model = make(UNEVEN, recipe="delayed", fp8_weights=True, device=rig.device)
    shard(model, rig)
    first = list(model.blocks[0].parameters())
    others = [p for p in model.parameters() if all(p is not q for q in first)]
    optimizers = AdamW(first, lr=1e-3), AdamW(others, lr=1e-3)
    for n in range(4):
        step(model, rig, *optimizers, seed=n, spoil=model.blocks[1].up.weight if n == 3 else None)
    assert scale(model.blocks[1].up.weight).isnan().all()


@ranks(2)
def test_a_step_after_a_weight_was_written_whole_begins_with_its_scale(rig):
    """The scale of the history would saturate the values."""
    model = make(UNEVEN, recipe="delayed", fp8_weights=True, device=rig.device)
    shard(model, rig)
    optimizer = AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    for n in range(4):
        step(model, rig, optimizer, seed=n)
    weight = model.blocks[0].up.weight
    values = weight.full_tensor().detach().dequantize() * 16
    with torch.no_grad():
        weight.copy_(distribute_tensor(values, weight.device_mesh, weight.placements))
    step(model, rig, optimizer)
    actual = weight.full_tensor().detach().dequantize()
    assert (actual - values).norm() < 0.05 * values.norm()


@ranks(2)
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_step_starts_from_different_writes_of_each_rank(rig, recipe):
    model = make(UNEVEN, recipe=RECIPES[recipe], fp8_weights=True, device=rig.device)
    shard(model, rig)
    optimizer = AdamW(model.parameters(), lr=1e-3, master_weights=False, stochastic_rounding=False)
    for n in range(3):
        step(model, rig, optimizer, seed=n)
    model(batch(rig)).square().mean().backward()
    part = model.blocks[0].up.weight.to_local()
    with torch.no_grad():
        part.mul_(1 + 7 * rig.rank)
    written = part.dequantize()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    actual = model.blocks[0].up.weight.to_local().dequantize()
    assert (actual - written).norm() < 0.06 * written.norm()


@ranks(2)
def test_one_optimizer_of_a_sharded_and_a_whole_model(rig):
    sharded, reference, alone = (
        make(UNEVEN, fp8_weights=True, device=rig.device, seed=seed) for seed in (0, 1, 0)
    )
    for model in (sharded, alone):
        with torch.no_grad():
            model.blocks[0].up.weight[:1] *= 4  # which one rank has
    shard(sharded, rig)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).to(rig.device)
    for model in (sharded, reference, alone):
        model(x).square().mean().backward()
    AdamW([*sharded.parameters(), *reference.parameters()], lr=0.1).step()
    AdamW(alone.parameters(), lr=0.1).step()
    actual, expected = (m.blocks[0].up.weight for m in (sharded, alone))
    assert torch.equal(scale(actual).view(()), expected.rowwise.scale.view(()))


@ranks(1, 2)
@each_recipe(*RECIPES, of=RECIPES)
def test_gathered_values_stay_when_the_shard_is_written(rig, recipe):
    """Codes and scales of a gathered weight are copies."""
    model = make(UNEVEN, recipe=RECIPES[recipe], fp8_weights=True, device=rig.device)
    shard(model, rig)
    model(batch(rig)).sum().backward()
    block = model.blocks[0]
    weight = block.up.weight
    block.unshard()
    before = block.up.weight.dequantize()
    with torch.no_grad():
        weight.mul_(16)
    assert torch.equal(block.up.weight.dequantize(), before)
    block.reshard()


@ranks(2)
def test_a_rank_with_an_empty_shard_has_the_scale(rig):
    model = make(ONE_ROW, fp8_weights=True, device=rig.device)
    shard(model, rig)
    before = gathered(model, rig)
    state = {}
    for name, value in model.state_dict().items():
        full_value = value.full_tensor()
        state[name] = (
            16 * full_value.dequantize() if hasattr(full_value, "dequantize") else full_value
        )
    set_model_state_dict(
        model,
        {name: value.detach() for name, value in state.items()},
        options=StateDictOptions(full_state_dict=True),
    )
    after = gathered(model, rig)
    for name, (_, actual) in after.items():
        if "blocks" in name:
            torch.testing.assert_close(actual, 16 * before[name][1])


@ranks(2)
def test_the_scale_of_an_empty_shard_does_not_count(rig):
    """Weights that shrink get smaller scales, though a rank wrote nothing."""
    model = make(ONE_ROW, fp8_weights=True, device=rig.device)
    shard(model, rig)
    step(model, rig, AdamW(model.parameters(), lr=1e-3))  # which writes all scales
    before = gathered(model, rig)["blocks.0.up"][1]
    model(batch(rig)).sum().backward()
    with torch.no_grad():
        model.blocks[0].up.weight.to_local().mul_(1 / 16)
    assert gathered(model, rig)["blocks.0.up"][1] < before / 4


@ranks(2)
def test_precompute_synchronizes_the_scales_of_the_next_forward(rig):
    model = make(UNEVEN, fp8_weights=True, device=rig.device)
    shard(model, rig)
    for _ in range(2):
        with Collectives() as collectives:
            precompute_float8_dynamic_scale_for_fsdp(model)
        assert len(reduces(collectives)) == 1
        with Collectives() as collectives:
            model(batch(rig)).sum().backward()
        assert not reduces(collectives)


class Padded(nn.Linear):
    """A layer whose first row on each rank is padding."""

    def reset_parameters(self):
        super().reset_parameters()
        part = self.weight.to_local() if hasattr(self.weight, "to_local") else self.weight
        with torch.no_grad():
            part[:1].zero_()


@ranks(2)
def test_a_custom_initialization_writes_rows_of_the_shard(rig):
    model = nn.Sequential(Padded(32, 16, device=rig.device))
    fp8rs.convert_to_float8_training(model, fp8_weights=True)
    fully_shard(model, mesh=rig.mesh())
    model[0].reset_parameters()
    values = model[0].weight.to_local().dequantize()
    assert not values[0].any()
    assert values[1:].any(1).all()
    model(batch(rig)).sum().backward()


@ranks(2)
def test_torchs_foreach_steps_leave_one_scale_to_all_shards(rig):
    """They have it after the step, before the next forward."""
    model = make(UNEVEN, fp8_weights=True, device=rig.device)
    shard(model, rig)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=True)
    model(batch(rig)).square().mean().backward()
    optimizer.step()
    assert on_all_ranks(scale(model.blocks[0].up.weight).view(1))


#: Hidden sizes whose shards begin within a block of 32 rows.
WITHIN_BLOCKS = (160, 50)


@ranks(2)
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8 of 1x32", "rowwise"])
def test_rows_of_a_shard_that_begins_within_a_block_are_written_wherever_they_lie(rig, recipe):
    model = make(WITHIN_BLOCKS, recipe=RECIPES[recipe], fp8_weights=True, device=rig.device)
    shard(model, rig)
    part = model.blocks[0].up.weight.to_local()
    # The first row of a block. On the second rank, it is not the first row.
    begin = -storage_of(part).block_offset % 32
    for rows in (
        slice(begin, None),
        slice(begin + 1, begin + 3),
        slice(0, 2),
        slice(begin - 1, begin + 2),
        slice(40, 43),
    ):
        values = part.dequantize()
        values[rows] *= 2.5
        with torch.no_grad():
            part[rows] = values[rows]
        assert ((part.dequantize() - values).abs() <= values.abs() * 0.07 + 0.01).all()


@ranks(2)
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8 of 1x32", "block"])
def test_copies_from_blocks_that_begin_elsewhere_copy_values(rig, recipe):
    options = {"recipe": RECIPES[recipe], "fp8_weights": True}
    model = make(WITHIN_BLOCKS, device=rig.device, **options)
    shard(model, rig)
    part = model.blocks[0].up.weight.to_local()
    other = nn.Sequential(nn.Linear(32, 80, device=rig.device))
    source = fp8rs.convert_to_float8_training(other, **options)[0].weight.detach()
    magnitudes = 2.0 ** (torch.arange(80, device=rig.device) // 8 - 5)
    source.copy_(source.dequantize() * magnitudes.view(-1, 1))
    with torch.no_grad():
        part.copy_(source)
    values = source.dequantize()
    assert (part.dequantize() - values).norm() <= 0.05 * values.norm()


#: Writes that every rank makes: to parameters, their lists, their local tensors and views of these.
WRITES = {
    "add_(0)": lambda p, part: p.add_(0),
    "foreach": lambda p, part: torch._foreach_mul_([p], 1.0),
    "local": lambda p, part: part.mul_(1),
    "a flat view": lambda p, part: part.view(-1).add_(0),
    "rows": lambda p, part: part[1:].mul_(1),
}


@ranks(2)
@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("hidden", [UNEVEN, WITHIN_BLOCKS, ONE_ROW], ids=["uneven", "cut", "empty"])
def test_elements_that_a_write_leaves_unchanged_are_gathered_unchanged(rig, recipe, hidden):
    model = make(hidden, recipe=RECIPES[recipe], fp8_weights=True, device=rig.device)
    with torch.no_grad():
        model.blocks[0].up.weight[:1] *= 4  # so that the other rank's largest value is smaller
    shard(model, rig)
    weights = [layer.weight for block in model.blocks for layer in (block.up, block.down)]
    before = gathered(model, rig)
    with torch.no_grad():
        for write in WRITES.values():
            for weight in weights:
                write(weight, weight.to_local())
            for name, (values, actual) in gathered(model, rig).items():
                assert torch.equal(values, before[name][0]), name
                assert torch.equal(actual.float(), before[name][1].float()), name


def plane_bytes(model):
    """Copies of the codes and scales of every plane of the blocks' shards."""
    planes = {}
    for name, layer in linears(model.blocks).items():
        storage = storage_of(layer.weight.to_local())
        for side in ("rowwise", "columnwise"):
            plane = getattr(storage, side)
            if plane is not None:
                planes[f"{name} {side} codes"] = bits(plane.data).clone()
                planes[f"{name} {side} scales"] = bits(plane.scale).clone()
    return planes


@ranks(2, 4)
@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("hidden", [UNEVEN, WITHIN_BLOCKS, ONE_ROW], ids=["uneven", "cut", "empty"])
def test_arithmetic_that_changes_no_value_changes_no_byte_of_a_shard(rig, recipe, hidden):
    model = make(hidden, recipe=RECIPES[recipe], fp8_weights=True, device=rig.device)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for block in model.blocks:
            for weight in (block.up.weight, block.down.weight):
                # Rows of one block differ by more than the range in which a scale stays.
                shape = (weight.shape[0], 1)
                exponents = torch.randint(-9, 9, shape, generator=generator)
                rows = (exponents > -6) * 2.0**exponents
                weight.copy_(weight.dequantize() * rows.to(rig.device))
        model.blocks[1].down.weight[3, 0] = torch.nan
    shard(model, rig)
    weights = [layer.weight for block in model.blocks for layer in (block.up, block.down)]
    before = plane_bytes(model)
    with torch.no_grad():
        for write in WRITES.values():
            for weight in weights:
                write(weight.detach(), weight.to_local())
            for name, actual in plane_bytes(model).items():
                assert torch.equal(actual, before[name]), name
            gathered(model, rig)
            for name, actual in plane_bytes(model).items():
                assert torch.equal(actual, before[name]), f"{name}, after a gather"


@ranks(2)
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_change_on_one_rank_gives_the_scales_of_the_unsharded_weight(rig, recipe):
    """The other ranks change nothing, and their own values would need smaller scales."""
    sharded, reference = (
        make(WITHIN_BLOCKS, recipe=RECIPES[recipe], fp8_weights=True, device=rig.device)
        for _ in range(2)
    )
    rows = torch.ones(160, 1, device=rig.device)
    rows[80:84] = 32.0  # the second rank's first rows have the largest values of the split block
    for model in (sharded, reference):
        weight = model.blocks[0].up.weight
        with torch.no_grad():
            weight.copy_(weight.dequantize() * rows)
    shard(sharded, rig)
    factor = 1 / rows
    expected = reference.blocks[0].up.weight
    weight = sharded.blocks[0].up.weight
    with torch.no_grad():
        expected.mul_(factor)
        weight.to_local().mul_(factor[80 * rig.rank :][:80])
    sharded.blocks[0].unshard()
    gathered_weight = sharded.blocks[0].up.weight
    for side in ("rowwise", "columnwise"):
        plane = getattr(gathered_weight, side)
        other = getattr(expected, side)
        if plane is not None and other is not None:
            assert same_bytes(plane.scale.view(other.scale.shape), other.scale), side
            assert same_bytes(plane.dequantize(torch.float32), other.dequantize(torch.float32))


@ranks(2)
@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("value", [0.9, 17.0, 0.001])
def test_an_element_that_one_rank_writes_leaves_the_others_as_they_were(rig, recipe, value):
    model = make(WITHIN_BLOCKS, recipe=RECIPES[recipe], fp8_weights=True, device=rig.device)
    shard(model, rig)
    before = gathered(model, rig)["blocks.0.up"][0]
    weight = model.blocks[0].up.weight
    with torch.no_grad():
        weight.to_local()[37 - rig.rank, 5] = value if rig.rank else 0.25
    after, scale = gathered(model, rig)["blocks.0.up"]
    written = torch.zeros(after.shape, dtype=torch.bool, device=rig.device)
    written[37, 5] = written[80 + 36, 5] = True
    assert abs(after[116, 5] - value) <= 0.07 * value + 2.0**-9 * scale.float().max()
    least = 2.0**-9 * scale.float().max()  # a step of the subnormal numbers
    exact = ~written & (before.abs() >= 2.0**-6 * scale.float().max())
    assert torch.equal(after[exact], before[exact])
    assert ((after - before).abs() <= least)[~written].all()


# --- when ranks synchronize ----------------------------------------------------------------------

#: Writes to a sharded parameter or its local tensor, by the object that is written.
OBJECTS = {
    "parameter": lambda weight: weight.mul_(3.0),
    "list": lambda weight: torch._foreach_mul_([weight], 3.0),
    "parameter, copied": lambda weight: weight.copy_(
        distribute_tensor(torch.full(weight.shape, 3.0), weight.device_mesh, weight.placements)
    ),
    "parameter, drawn": lambda weight: weight.normal_(),
    "local": lambda weight: local_of(weight).mul_(3.0),
    "local, copied": lambda weight: local_of(weight).copy_(torch.ones(local_of(weight).shape)),
    "alias": lambda weight: weight.to_local().mul_(3.0),
    "detached": lambda weight: local_of(weight).detach().mul_(3.0),
    "flat view": lambda weight: local_of(weight).view(-1)[:40].fill_(3.0),
    "rows": lambda weight: local_of(weight)[:1].fill_(3.0),
    "codes": lambda weight: local_of(weight).copy_(local_of(weight).detach().clone()),
}
#: Writes without a collective of DTensor, which one rank may make alone.
LOCAL = [name for name in OBJECTS if not name.startswith(("parameter", "list"))]


@ranks(2)
@each_recipe("current", "mxfp8", of=RECIPES)
@pytest.mark.parametrize("written", [name for name in OBJECTS if "copied" not in name])
def test_a_write_runs_no_collective(rig, recipe, written):
    model = make(WITHIN_BLOCKS, recipe=RECIPES[recipe], fp8_weights=True, device=rig.device)
    shard(model, rig)
    model(batch(rig)).sum().backward()
    with torch.no_grad(), Collectives() as collectives:
        OBJECTS[written](model.blocks[0].up.weight)
    assert not reduces(collectives)
    assert not gathers(collectives)


#: Bound of the relative error of products of codes and scales in fp32, and of their difference.
FP32 = 2.0**-22


def check_synchronized(values, scale, expected, rtol):
    """Assert that a synchronization rounded the codes of a weight to their nearest neighbours.

    Scales that in-place writes moved differ by powers of two. Rounding codes again then changes
    only subnormal numbers, by half a step at most. If a scale changes by another factor, normal
    numbers change by half a step of E4M3 at most, 2**-4.
    """
    half = 2.0**-10 * scale.float().max()
    torch.testing.assert_close(values, expected, rtol=rtol, atol=half.item())


# A synchronization rounds drawn values instead of their codes. See `DRAWS`.
@ranks(2, 4)
@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("written", [name for name in OBJECTS if "drawn" not in name])
def test_a_write_through_any_object_gives_all_ranks_the_same_weight(rig, recipe, written):
    model = make(WITHIN_BLOCKS, recipe=RECIPES[recipe], fp8_weights=True, device=rig.device)
    shard(model, rig)
    gathered(model, rig)
    weight = model.blocks[0].up.weight
    with torch.no_grad():
        OBJECTS[written](weight)
    expected = weight.full_tensor().dequantize()
    values, scale = gathered(model, rig)["blocks.0.up"]
    check_synchronized(values, scale, expected, FP32)


@ranks(2, 3, 4)
@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("hidden", [WITHIN_BLOCKS, ONE_ROW], ids=["cut", "empty"])
@pytest.mark.parametrize("written", LOCAL)
@pytest.mark.parametrize("then", ["forward", "step", "load", "state_dict", "checkpoint"])
def test_one_rank_may_write_alone(rig, recipe, hidden, written, then):
    """All ranks synchronize at the next point, whether they wrote or not."""
    model = make(hidden, recipe=RECIPES[recipe], fp8_weights=True, device=rig.device)
    shard(model, rig)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(batch(rig)).sum().backward()
    weight = model.blocks[0].up.weight
    if rig.rank == 0:
        with torch.no_grad():
            OBJECTS[written](weight)
    expected = weight.full_tensor().dequantize()
    if then == "step":
        optimizer.step()
    elif then == "load":
        plain = {n: v for n, v in model.named_parameters() if "norm" in n}
        model.load_state_dict(plain, strict=False)
    elif then == "state_dict":
        model.state_dict()
    elif then == "checkpoint":
        fp8rs.checkpoint.Model(model).state_dict()
    if then != "forward" and local_of(weight).format.per_tensor:
        assert on_all_ranks(scale_of(weight))
    values, scale = gathered(model, rig)["blocks.0.up"]
    # The shards of the other ranks get the scale of values that replaced the first shard.
    rtol = 2.0**-4 if written == "local, copied" else FP32
    check_synchronized(values, scale, expected, rtol)


@ranks(2)
@each_recipe("current", "block", "mxfp8", "rowwise", of=RECIPES)
@pytest.mark.parametrize("foreach", [True, False])
def test_a_step_of_another_optimizer_synchronizes_all_weights_in_one_all_reduce(
    rig, recipe, foreach
):
    model = make(WITHIN_BLOCKS, recipe=RECIPES[recipe], fp8_weights=True, device=rig.device)
    shard(model, rig)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=foreach)
    for n in range(2):
        model(batch(rig, n)).square().mean().backward()
        with Collectives() as collectives:
            optimizer.step()
        # Delayed scaling also reduces the amaxes of the step.
        assert len(reduces(collectives)) == (not recipe.startswith("rowwise")) + (
            recipe == "delayed"
        )


@ranks(2)
def test_weights_that_are_not_trained_are_not_synchronized_by_a_step(rig):
    model = make(UNEVEN, fp8_weights=True, device=rig.device)
    for module in linears(model).values():
        module.weight.requires_grad_(False)
    shard(model, rig)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model(batch(rig)).square().mean().backward()
    with Collectives() as collectives:
        optimizer.step()
    assert not reduces(collectives)


# --- values that replace a whole weight ----------------------------------------------------------

#: Ways to write values to whole weights, given the model and values by the name of the layer.
WHOLE = {
    "copy_": lambda layer, values: layer.weight.copy_(values),
    "local copy_": lambda layer, values: local_of(layer.weight).copy_(values.to_local()),
    "quantize_": lambda layer, values: local_of(layer.weight).quantize_(values.to_local()),
    "load_state_dict": lambda layer, values: layer.load_state_dict(
        {"weight": values}, strict=False
    ),
}
#: Ways to draw the values of a whole weight: of a converted layer and of a plain one.
DRAWS = {
    "reset_parameters": (lambda layer: layer.reset_parameters(), reset_linear),
    "normal_": (lambda layer: layer.weight.normal_(), lambda layer: layer.weight.normal_()),
}


@ranks(2, 3, 4)
@each_recipe("current", "delayed", "block", "mxfp8", "mxfp8 of 1x32", of=RECIPES)
@pytest.mark.parametrize("hidden", [UNEVEN, WITHIN_BLOCKS, ONE_ROW], ids=["uneven", "cut", "empty"])
@pytest.mark.parametrize("method", [*WHOLE, *DRAWS])
def test_values_of_whole_weights_have_the_bytes_of_unsharded_ones(rig, recipe, hidden, method):
    options = {"recipe": RECIPES[recipe], "fp8_weights": True, "device": rig.device}
    reference = make(hidden, **options)
    model = shard(make(hidden, **options), rig)
    layers = [linears(m) for m in (reference, model)]
    with torch.no_grad():
        for name, layer in layers[1].items():
            if method in DRAWS:
                draw, draw_plain = DRAWS[method]
                # reset_parameters draws with the seed of the first rank. DTensor requires equal
                # seeds: its first draw on CUDA copies the first rank's.
                seed = len(name) + (rig.rank if method == "reset_parameters" else 0)
                torch.manual_seed(seed)
                draw(layer)
                plain = fully_shard(
                    nn.Linear(layer.in_features, layer.out_features, device=rig.device),
                    mesh=rig.mesh(),
                )
                torch.manual_seed(seed)
                draw_plain(plain)
                values = plain.weight
            else:
                generator = torch.Generator().manual_seed(len(name))
                values = torch.randn(layer.weight.shape, generator=generator) * 3.0
                values[-1] *= 16.0  # the largest values are on one rank
                spread = distribute_tensor(values.to(rig.device), rig.mesh(), [Shard(0)])
                WHOLE[method](layer, spread)
                spread.zero_()  # the weight keeps the values
                values = values.to(rig.device)
            values = getattr(values, "full_tensor", lambda values=values: values)()
            layers[0][name].weight.copy_(values)
    checked = []

    def check(name, weight):
        expected = layers[0][name].weight
        for side in ("rowwise", "columnwise"):
            plane = getattr(weight, side)
            other = getattr(expected, side)
            if plane is not None and other is not None:
                assert same_bytes(plane.data, other.data), (name, side)
                assert same_bytes(plane.scale.view(other.scale.shape), other.scale), (name, side)
        checked.append(name)

    watch_weights(model, check)
    model(batch(rig))
    assert len(checked) == len(layers[0])
    if recipe == "delayed":
        for name, layer in layers[1].items():
            for buffer in ("fp8_scale", "fp8_amax"):
                actual, expected = (getattr(m, buffer)[0] for m in (layer, layers[0][name]))
                torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0.0)


@ranks(2)
@each_recipe("current", "mxfp8", of=RECIPES)
def test_values_are_readable_before_the_synchronization(rig, recipe):
    model = make(WITHIN_BLOCKS, recipe=RECIPES[recipe], fp8_weights=True, device=rig.device)
    shard(model, rig)
    weight = model.blocks[0].up.weight
    values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    values[-1] *= 64.0
    spread = distribute_tensor(values.to(rig.device), rig.mesh(), [Shard(0)])
    with torch.no_grad():
        weight.copy_(spread)
    actual = local_of(weight).dequantize()
    local = spread.to_local()
    torch.testing.assert_close(actual, local, rtol=0.07, atol=0.002 * local.abs().max().item())


@ranks(2)
@each_recipe("current", "mxfp8", of=RECIPES)
def test_a_synchronization_frees_the_values(rig, recipe):
    model = make(WITHIN_BLOCKS, recipe=RECIPES[recipe], fp8_weights=True, device=rig.device)
    shard(model, rig)
    handles = [handle_of_tensor(layer.weight) for layer in linears(model).values()]
    with torch.no_grad():
        for layer in linears(model).values():
            local_of(layer.weight).copy_(torch.ones(local_of(layer.weight).shape))
    # A shard has all elements of the scales of its rows, so nothing is synchronized.
    assert any(handle.pending is not None for handle in handles) != recipe.startswith("rowwise")
    model(batch(rig))
    assert all(handle.pending is None for handle in handles)


@ranks(2)
def test_a_later_write_of_rows_is_not_undone(rig):
    model = make(WITHIN_BLOCKS, fp8_weights=True, device=rig.device)
    shard(model, rig)
    weight = model.blocks[0].up.weight
    with torch.no_grad():
        local_of(weight).copy_(torch.full(local_of(weight).shape, 2.0 + rig.rank))
        local_of(weight)[:2].fill_(1.0)
    values, _ = gathered(model, rig)["blocks.0.up"]
    torch.testing.assert_close(values[:2], torch.ones_like(values[:2]), rtol=0.07, atol=0)
    torch.testing.assert_close(values[2:80], torch.full_like(values[2:80], 2.0), rtol=0.07, atol=0)
