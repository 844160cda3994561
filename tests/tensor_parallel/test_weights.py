"""FP8 weights as DTensors: parts are FP8, and collectives send values."""

import warnings

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fp8rs
from distributed import ranks
from distributed.collectives import Collectives
from distributed.models import EMPTY, RECIPES, UNEVEN, batch, make, shard

every_recipe = pytest.mark.parametrize("recipe", list(RECIPES))
_c10d = torch.ops._c10d_functional


def weight(recipe, *shape):
    torch.manual_seed(0)
    with fp8rs.quantized_init(RECIPES[recipe]):
        layer = nn.Linear(*reversed(shape))
    return layer.weight.detach()


def ready():
    warnings.filterwarnings("ignore", message=".*is deprecated", category=FutureWarning)
    return dist.group.WORLD


#: Functional collectives of a tensor on two ranks, which return plain tensors.
FUNCTIONAL = {
    "all_gather": lambda x, group: funcol.all_gather_tensor(x, 0, group),
    "all_gather coalesced": lambda x, group: funcol.all_gather_into_tensor_coalesced([x], group)[0],
    "all_reduce": lambda x, group: funcol.all_reduce(x, "sum", group),
    "all_reduce coalesced": lambda x, group: funcol.all_reduce_coalesced([x], "sum", group)[0],
    "reduce_scatter": lambda x, group: funcol.reduce_scatter_tensor(x, "sum", 0, group),
    "all_to_all": lambda x, group: funcol.all_to_all_single(x, None, None, group),
    "broadcast": lambda x, group: funcol.broadcast(x, 0, group),
}
#: Functional collectives that write their argument.
FUNCTIONAL_IN_PLACE = {
    "all_reduce_": lambda x, group: _c10d.all_reduce_(x, "sum", group),
    "all_reduce_coalesced_": lambda x, group: _c10d.all_reduce_coalesced_([x], "sum", group)[0],
    "broadcast_": lambda x, group: _c10d.broadcast_(x, 0, group),
}
#: The ranks whose tensor is quantized. Others have the same values in a plain tensor.
QUANTIZED = {"rank 0": (0,), "rank 1": (1,), "both": (0, 1)}
quantized_on = pytest.mark.parametrize("quantized", list(QUANTIZED))


@ranks(2, cuda=False)
@every_recipe
@quantized_on
@pytest.mark.parametrize("collective", list(FUNCTIONAL))
def test_functional_collectives_send_values_whichever_ranks_have_fp8_weights(
    rig, recipe, quantized, collective
):
    group = ready()
    fp8_view = weight(recipe, 256, 96)[8:][:128]  # a view that splits blocks
    values = fp8_view.dequantize() * 1.0
    with Collectives() as expected:
        expected_result = FUNCTIONAL[collective](values, group).clone()
    with Collectives() as sent:
        sender = fp8_view if rig.rank in QUANTIZED[quantized] else values
        result = FUNCTIONAL[collective](sender, group).clone()
    assert torch.equal(result, expected_result)
    assert sent.calls == expected.calls


@ranks(2, cuda=False)
@every_recipe
@quantized_on
@pytest.mark.parametrize("collective", list(FUNCTIONAL_IN_PLACE))
def test_functional_collectives_write_quantized_tensors(rig, recipe, quantized, collective):
    name = ready().group_name
    tensor = weight(recipe, 64, 96).clone()
    tensor.mul_(2.0**rig.rank)
    values = tensor.dequantize()
    expected = FUNCTIONAL_IN_PLACE[collective](values.clone(), name)
    expected = _c10d.wait_tensor(expected).clone()

    sender = tensor if rig.rank in QUANTIZED[quantized] else values
    result = _c10d.wait_tensor(FUNCTIONAL_IN_PLACE[collective](sender, name))
    assert result is sender
    if isinstance(sender, fp8rs.QuantizedTensor):
        tolerance = expected.abs() / 8 + expected.abs().max() / 2**8
        assert ((sender.dequantize() - expected).abs() <= tolerance).all()
    else:
        assert torch.equal(sender, expected)


@pytest.mark.skipif(not hasattr(_c10d, "irecv"), reason="torch 2.11 has no functional receives")
@ranks(2, cuda=False)
def test_a_functional_receive_into_a_quantized_tensor_raises(rig):
    tensor = weight("current", 64, 96)
    name = ready().group_name
    with pytest.raises(NotImplementedError, match=r"irecv into a quantized tensor.*copy_\(\)"):
        _c10d.irecv(tensor, 1 - rig.rank, 0, name)


@ranks(2, 4, cuda=False)
@every_recipe
@pytest.mark.parametrize("shape", [(64, 128), (50, 27), (3, 64)], ids=["even", "uneven", "empty"])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
def test_a_dtensor_that_is_quantized_on_rank_0_alone_is_redistributed(
    rig, recipe, shape, placement
):
    """As a DTensor is between `distribute_tensor` of rank 0's values and the load of a weight."""
    values = weight(recipe, *shape)
    source = values if rig.rank == 0 else torch.empty(shape)
    parameter = distribute_tensor(source, rig.mesh(), [placement])
    assert isinstance(parameter.to_local(), fp8rs.QuantizedTensor) == (rig.rank == 0)
    local = parameter.to_local()
    plain = local.dequantize() if rig.rank == 0 else local
    layout = {"shape": parameter.shape, "stride": parameter.stride()}
    expected = DTensor.from_local(plain, rig.mesh(), [placement], run_check=False, **layout)

    assert torch.equal(parameter.full_tensor(), expected.full_tensor())
    other = [Shard(1 - placement.dim)]
    part, expected_part = (
        x.redistribute(placements=other).to_local() for x in (parameter, expected)
    )
    assert torch.equal(part, expected_part)


@ranks(2, 4)
@every_recipe
@pytest.mark.parametrize("shape", [(64, 128), (50, 27), (3, 64)], ids=["even", "uneven", "empty"])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_distribute_and_gather_round_trip(rig, recipe, shape, placement):
    """Only a part that starts inside a block is rounded again, to other scales."""
    full_weight = weight(recipe, *shape).to(rig.device)
    parameter = distribute_tensor(full_weight, rig.mesh(), [placement])
    assert isinstance(parameter.to_local(), fp8rs.QuantizedTensor)
    got = parameter.full_tensor()
    values = full_weight.dequantize()
    block = full_weight.format.block
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
    full_weight = weight(recipe, 64, 128)
    values = full_weight.dequantize()
    for placement in (Shard(0), Shard(1), Replicate()):
        source = full_weight.clone() if rig.rank == 0 else torch.empty(64, 128)
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
def test_a_full_state_dict_of_shards_has_their_values(rig, recipe, hidden):
    model = make(hidden, recipe=RECIPES[recipe], fp8_weights=True)
    values = {n: p.dequantize() for n, p in model.named_parameters() if p.dim() == 2}
    shard(model, rig)
    got = {n: p.detach().full_tensor() for n, p in model.named_parameters() if n in values}
    for name, value in values.items():
        assert torch.equal(got[name], value), name
