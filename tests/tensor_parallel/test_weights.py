"""FP8 weights as DTensors: they are sharded and gathered as codes, not as values."""

import warnings

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fp8rs
from distributed import ranks
from distributed.collectives import Collectives
from distributed.models import EMPTY, RECIPES, UNEVEN, batch, make, shard

every_recipe = pytest.mark.parametrize("recipe", list(RECIPES))
SCALE_BYTES = {  # of one rank's (rows, 96) part
    "current": lambda rows: 4,
    "delayed": lambda rows: 4,
    "rowwise": lambda rows: 4 * rows,
    "block": lambda rows: 4 * rows,
    "mxfp8": lambda rows: 3 * rows,
    "mxfp8 of 1x32": lambda rows: 3 * rows,
}


def weight(recipe, *shape):
    torch.manual_seed(0)
    with fp8rs.quantized_init(RECIPES[recipe]):
        layer = nn.Linear(*reversed(shape))
    return layer.weight.detach()


def ready():
    warnings.filterwarnings("ignore", message=".*is deprecated", category=FutureWarning)
    return dist.group.WORLD


@ranks(2, cuda=False)
@every_recipe
def test_a_functional_gather_sends_codes_and_scales(rig, recipe):
    group = ready()
    whole = weight(recipe, 160, 96)
    start = 128 * rig.rank  # the start of a block
    own = whole.narrow(0, start, 32)
    values = torch.cat([whole.narrow(0, 128 * r, 32).dequantize() for r in range(2)])
    with Collectives() as seen:
        got = funcol.all_gather_tensor(own, 0, group)
    assert torch.equal(got, values)
    assert [c.nbytes for c in seen.seen] == [2 * 32 * 96, 2 * SCALE_BYTES[recipe](32)]
    assert {c.dtype for c in seen.seen} == {torch.uint8}
    if whole.format.block[0] > 1:
        with pytest.raises(ValueError, match=r"not made of whole blocks.*dequantize\(\)"):
            funcol.all_gather_tensor(whole.narrow(0, 8, 32), 0, group)


@ranks(2, cuda=False)
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_other_functional_collectives_raise(rig, recipe):
    group, own = ready(), weight(recipe, 64, 96)
    calls = {
        "all_reduce": lambda: funcol.all_reduce(own, "sum", group),
        "reduce_scatter_tensor": lambda: funcol.reduce_scatter_tensor(own, "sum", 0, group),
        "all_to_all_single": lambda: funcol.all_to_all_single(own, None, None, group),
        "broadcast": lambda: funcol.broadcast(own, 0, group),
    }
    for name, call in calls.items():
        with pytest.raises(NotImplementedError, match=rf"{name} .*high precision.*dequantize"):
            call()


@ranks(2, 4)
@every_recipe
@pytest.mark.parametrize("shape", [(64, 128), (50, 27), (3, 64)], ids=["even", "uneven", "empty"])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_distribute_and_gather_round_trip(rig, recipe, shape, placement):
    """Only a part that starts inside a block is rounded again, to other scales."""
    whole = weight(recipe, *shape).to(rig.device)
    parameter = distribute_tensor(whole, rig.mesh(), [placement])
    assert isinstance(parameter.to_local(), fp8rs.QuantizedTensor)
    got, values = parameter.full_tensor(), whole.dequantize()
    block = whole.format.block
    cuts_blocks = placement.is_shard() and any(
        block[placement.dim] > 1 and edge % block[placement.dim]
        for edge in range(0, shape[placement.dim], -(-shape[placement.dim] // rig.world_size))
    )
    if cuts_blocks:
        assert ((got - values).abs() <= values.abs() / 8 + values.abs().max() / 2**8).all()
    else:
        assert torch.equal(got, values)


@ranks(2, cuda=False)
@every_recipe
def test_rank_0_distributes_an_fp8_weight_to_ranks_with_plain_tensors(rig, recipe):
    whole = weight(recipe, 64, 128)
    values = whole.dequantize()
    for placement in (Shard(0), Shard(1), Replicate()):
        source = whole.clone() if rig.rank == 0 else torch.empty(64, 128)
        part = distribute_tensor(source, rig.mesh(), [placement]).to_local()
        if isinstance(part, fp8rs.QuantizedTensor):
            part = part.dequantize()
        expected = distribute_tensor(values, rig.mesh(), [placement]).to_local()
        assert torch.equal(part, expected), placement


@ranks(2, cuda=False)
@every_recipe
@pytest.mark.parametrize("fp8_weights", [False, True], ids=["masters", "FP8 weights"])
def test_ranks_on_the_meta_device_load_from_rank_0(rig, recipe, fp8_weights):
    """As with accelerate's `cpu_ram_efficient_loading`."""
    options = {"recipe": RECIPES[recipe], "fp8_weights": fp8_weights}
    reference = make(UNEVEN, **options)
    model = make(UNEVEN, device="cpu" if rig.rank == 0 else "meta", **options)
    values = model.state_dict() if rig.rank == 0 else {}
    shard(model.to("meta"), rig)

    parts = {}
    for name, target in model.state_dict().items():
        value = torch.empty(target.size(), dtype=target.dtype)
        if rig.rank == 0:
            value = values[name].detach()
        dist.broadcast(value, 0)
        parts[name] = distribute_tensor(value, target.device_mesh, target.placements)
    model.load_state_dict(parts, assign=True)

    for name, parameter in reference.named_parameters():
        loaded = model.get_parameter(name).detach().full_tensor()
        if isinstance(parameter, fp8rs.QuantizedTensor):
            # A part is rounded again if a shard boundary splits a block.
            expected = parameter.dequantize()
            tolerance = expected.abs() / 8 + expected.abs().max() / 2**8
            assert ((loaded - expected).abs() <= tolerance).all(), name
        else:
            assert torch.equal(loaded, parameter), name
    x = batch(rig)
    torch.testing.assert_close(model(x), reference(x), rtol=0.1, atol=0.1)


@ranks(2, 4, cuda=False)
@every_recipe
@pytest.mark.parametrize("hidden", [UNEVEN, EMPTY], ids=["uneven", "empty"])
def test_a_full_state_dict_of_shards_is_gathered_as_codes(rig, recipe, hidden):
    model = make(hidden, recipe=RECIPES[recipe], fp8_weights=True)
    values = {n: p.dequantize() for n, p in model.named_parameters() if p.dim() == 2}
    shard(model, rig)
    with Collectives() as seen:
        got = {n: p.detach().full_tensor() for n, p in model.named_parameters() if n in values}
    for name, value in values.items():
        assert torch.equal(got[name], value), name
    assert {c.dtype for c in seen.seen} == {torch.uint8}
