"""What the ranks of a sharded FP8 weight agree on: its scale, whoever writes it and when."""

import operator

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import fp8rs
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
    same_bytes,
    shard,
    watch_weights,
)
from fp8rs import precompute_float8_dynamic_scale_for_fsdp
from fp8rs.optim import AdamW
from internals import handle_of_tensor, store_of

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


def gathered(model, rig):
    """The values and scale of each weight as a forward has it, which all ranks must have alike."""
    seen = {}
    watch_weights(
        model, lambda name, w: seen.update({name: (w.dequantize(), w.rowwise.scale.clone())})
    )
    model(batch(rig))
    for name, (values, _) in seen.items():
        assert on_all_ranks(values), name
    return dict(seen)


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
def test_so_is_that_of_the_second_of_two_optimizers(rig):
    """Whose steps are one roll of the histories."""
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
    """And not with the history's, which what was written would saturate."""
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
    found = weight.full_tensor().detach().dequantize()
    assert (found - values).norm() < 0.05 * values.norm()


@ranks(2)
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_step_after_writes_that_ranks_made_by_themselves_begins_with_these(rig, recipe):
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
    found = model.blocks[0].up.weight.to_local().dequantize()
    assert (found - written).norm() < 0.06 * written.norm()


@ranks(2)
def test_one_optimizer_of_a_sharded_and_a_whole_model(rig):
    sharded, whole, alone = (
        make(UNEVEN, fp8_weights=True, device=rig.device, seed=seed) for seed in (0, 1, 0)
    )
    for model in (sharded, alone):
        with torch.no_grad():
            model.blocks[0].up.weight[:1] *= 4  # which one rank has
    shard(sharded, rig)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).to(rig.device)
    for model in (sharded, whole, alone):
        model(x).square().mean().backward()
    AdamW([*sharded.parameters(), *whole.parameters()], lr=0.1).step()
    AdamW(alone.parameters(), lr=0.1).step()
    found, expected = (m.blocks[0].up.weight for m in (sharded, alone))
    assert torch.equal(scale(found).view(()), expected.rowwise.scale.view(()))


@ranks(2)
def test_gathered_values_stay_when_the_shard_is_written(rig):
    """Codes are bytes of the gather's own; their scale has to be, too."""
    model = make(UNEVEN, fp8_weights=True, device=rig.device)
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
def test_a_rank_with_nothing_of_a_weight_has_its_scale(rig):
    model = make(ONE_ROW, fp8_weights=True, device=rig.device)
    shard(model, rig)
    before = gathered(model, rig)
    state = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor()
        state[name] = 16 * whole.dequantize() if hasattr(whole, "dequantize") else whole
    set_model_state_dict(
        model,
        {name: value.detach() for name, value in state.items()},
        options=StateDictOptions(full_state_dict=True),
    )
    after = gathered(model, rig)
    for name, (_, found) in after.items():
        if "blocks" in name:
            torch.testing.assert_close(found, 16 * before[name][1])


@ranks(2)
def test_the_scale_that_an_empty_shard_had_says_nothing(rig):
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
def test_nothing_is_computed_beforehand_of_weights_at_rest(rig):
    model = make(UNEVEN, fp8_weights=True, device=rig.device)
    shard(model, rig)
    with Collectives() as seen:
        precompute_float8_dynamic_scale_for_fsdp(model)
    assert not seen.seen
    model(batch(rig)).sum().backward()


class Padded(nn.Linear):
    """Whose first row on each rank is padding."""

    def reset_parameters(self):
        super().reset_parameters()
        part = self.weight.to_local() if hasattr(self.weight, "to_local") else self.weight
        with torch.no_grad():
            part[:1].zero_()


@ranks(2)
def test_an_initialization_of_ones_own_writes_rows_of_the_shard(rig):
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
    """Before the next forward: a checkpoint may come first."""
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
    begin = -store_of(part).lead % 32  # the first row of a block, on the second rank not the first
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
def test_what_was_quantized_in_blocks_that_begin_elsewhere_is_taken_by_its_values(rig, recipe):
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
def test_what_a_write_leaves_as_it_was_is_gathered_as_it_was(rig, recipe, hidden):
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
            for name, (values, found) in gathered(model, rig).items():
                assert torch.equal(values, before[name][0]), name
                assert torch.equal(found.float(), before[name][1].float()), name


def plane_bytes(model):
    """Copies of the codes and scales of every plane of the blocks' shards."""
    found = {}
    for name, layer in linears(model.blocks).items():
        store = store_of(layer.weight.to_local())
        for side in ("rowwise", "columnwise"):
            plane = getattr(store, side)
            if plane is not None:
                found[f"{name} {side} codes"] = bits(plane.data).clone()
                found[f"{name} {side} scales"] = bits(plane.scale).clone()
    return found


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
            for name, found in plane_bytes(model).items():
                assert torch.equal(found, before[name]), name
            gathered(model, rig)
            for name, found in plane_bytes(model).items():
                assert torch.equal(found, before[name]), f"{name}, after a gather"


@ranks(2)
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_change_on_one_rank_gives_the_scales_of_the_unsharded_weight(rig, recipe):
    """The other ranks change nothing, and their own values would need smaller scales."""
    sharded, whole = (
        make(WITHIN_BLOCKS, recipe=RECIPES[recipe], fp8_weights=True, device=rig.device)
        for _ in range(2)
    )
    rows = torch.ones(160, 1, device=rig.device)
    rows[80:84] = 32.0  # the second rank's first rows have the largest values of the split block
    for model in (sharded, whole):
        weight = model.blocks[0].up.weight
        with torch.no_grad():
            weight.copy_(weight.dequantize() * rows)
    shard(sharded, rig)
    factor = 1 / rows
    expected, weight = whole.blocks[0].up.weight, sharded.blocks[0].up.weight
    with torch.no_grad():
        expected.mul_(factor)
        weight.to_local().mul_(factor[80 * rig.rank :][:80])
    sharded.blocks[0].unshard()
    gathered_weight = sharded.blocks[0].up.weight
    for side in ("rowwise", "columnwise"):
        plane, other = getattr(gathered_weight, side), getattr(expected, side)
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
    kept = ~written & (before.abs() >= 2.0**-6 * scale.float().max())
    assert torch.equal(after[kept], before[kept])
    assert ((after - before).abs() <= least)[~written].all()


@ranks(2)
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_parameter_that_is_written_in_place_has_scales_that_agree_at_once(rig, recipe):
    model = make(WITHIN_BLOCKS, recipe=RECIPES[recipe], fp8_weights=True, device=rig.device)
    shard(model, rig)
    weight = model.blocks[0].up.weight
    with torch.no_grad():
        for write in (torch.Tensor.mul_, operator.imul):
            write(weight, 3.0)
            assert not handle_of_tensor(weight.to_local()).unagreed
            if recipe in ("current", "delayed"):
                assert on_all_ranks(scale(weight).view(1))
        torch._foreach_mul_([weight], 3.0)
        with Collectives() as seen:
            gathered(model, rig)
    assert sum(c.kind == "reduce" for c in seen.seen) == (recipe not in ("rowwise",))
