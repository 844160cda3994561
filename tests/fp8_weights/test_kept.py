"""FP8 weights keep what they are given: first values, copies of them, codes that come back."""

from __future__ import annotations

import copy
import itertools
import weakref

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

import fp8rs
from distributed import ranks
from distributed.models import HIDDEN, RECIPES, batch, linears, make, recipes, shard, shardings
from fp8rs.convert.fp8_weights import dequantize_weight
from fp8rs.model.shard_spec import ShardSpec
from fp8rs.optim import AdamW, MasterWeights
from internals import gathered_bytes, handle_of, local_of, storage_of


def make_fp8(hidden, recipe, rig, **options):
    return make(
        HIDDEN[hidden], recipe=RECIPES[recipe], device=rig.device, fp8_weights=True, **options
    )


def layer_of(recipe):
    with fp8rs.quantized_init(RECIPES[recipe], preserve_high_precision_init_val=True):
        return torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))


def assert_step_of_nothing_changes_nothing(model, weight):
    """Masters that are seeded are the weight's own values."""
    before = weight.dequantize()
    optimizer = AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for p in model.parameters():
        p.grad = torch.zeros(p.shape)
    optimizer.step()
    assert torch.equal(weight.dequantize(), before)


@recipes
def test_an_initialization_after_construction_is_what_masters_begin_with(recipe):
    model = layer_of(recipe)
    weight = model[0].weight
    torch.nn.init.normal_(weight, std=5.0)
    assert 4 < weight.get_high_precision_init_val().std() < 6
    assert_step_of_nothing_changes_nothing(model, weight)
    assert weight.get_high_precision_init_val() is None


@recipes
def test_loaded_values_are_what_masters_begin_with(recipe):
    model = layer_of(recipe)
    model.load_state_dict({"0.weight": torch.full((64, 64), 0.3)})
    assert torch.all(model[0].weight.get_high_precision_init_val() == 0.3)
    assert_step_of_nothing_changes_nothing(model, model[0].weight)


@recipes
def test_values_written_in_part_are_not_forgotten_for_the_kept_ones(recipe):
    model = layer_of(recipe)
    weight = model[0].weight
    expected = weight.get_high_precision_init_val().clone()
    expected[:32] = 7.1
    with torch.no_grad():
        weight[:32] = 7.1
    assert torch.equal(weight.get_high_precision_init_val(), expected)
    optimizer = AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    weight.grad = torch.zeros(weight.shape)
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["master"], expected)


#: Ways to write the values that a weight already has, rounded.
OWN_VALUES = {
    "copy_": lambda model, weight: weight.copy_(weight.dequantize()),
    "codes": lambda model, weight: weight.copy_(weight.detach().clone()),
    "rows": lambda model, weight: weight[:32].copy_(weight[:32].dequantize()),
    "mul_": lambda model, weight: weight.mul_(1.0),
    "load": lambda model, weight: model.load_state_dict(model.state_dict()),
    "load of a copy": lambda model, weight: model.load_state_dict(
        copy.deepcopy(model.state_dict())
    ),
    "load of values": lambda model, weight: model.load_state_dict(
        {"0.weight": weight.dequantize()}
    ),
}


@recipes
@pytest.mark.parametrize("write", list(OWN_VALUES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_of_a_weights_own_values_leave_the_initial_ones(recipe, write, dtype):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96, bias=False, dtype=dtype))
    before = model[0].weight.detach().clone()
    fp8rs.convert_to_float8_training(
        model, recipe=RECIPES[recipe], fp8_weights=True, preserve_high_precision_init_val=True
    )
    weight = model[0].weight
    codes = weight.detach().clone()
    with torch.no_grad():
        OWN_VALUES[write](model, weight)
    assert torch.equal(weight.get_high_precision_init_val(), before)
    assert torch.equal(weight.dequantize(), codes.dequantize())


@recipes
def test_elements_that_a_write_changes_replace_the_initial_ones(recipe):
    model = layer_of(recipe)
    weight = model[0].weight
    expected = weight.get_high_precision_init_val().clone()
    values = weight.dequantize()
    values[:, 0] = 0.0123
    expected[:, 0] = 0.0123
    with torch.no_grad():
        weight.copy_(values)
    assert torch.equal(weight.get_high_precision_init_val(), expected)


@recipes
@pytest.mark.parametrize("assign", [False, True])
def test_a_move_to_the_meta_device_loses_the_initial_values(recipe, assign):
    """Zeros that are loaded afterwards are not taken for elements that did not change."""
    model = layer_of(recipe)
    model.to("meta")
    assert model[0].weight.get_high_precision_init_val() is None
    if not assign:
        model.to_empty(device="cpu")

    values = torch.randn(64, 64)
    values[:, ::2] = 0
    model.load_state_dict({"0.weight": values}, assign=assign)
    assert torch.equal(model[0].weight.get_high_precision_init_val(), values)


@ranks(2)
def test_ddps_first_broadcast_leaves_the_initial_values(rig):
    for recipe, dtype in itertools.product(RECIPES, (torch.float32, torch.bfloat16)):
        model = make(recipe=RECIPES[recipe], device=rig.device, dtype=dtype)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        model = make(
            recipe=RECIPES[recipe],
            device=rig.device,
            dtype=dtype,
            fp8_weights=True,
            preserve_high_precision_init_val=True,
        )
        DistributedDataParallel(model)
        for name, p in model.named_parameters():
            if isinstance(p, fp8rs.QuantizedTensor):
                actual = p.get_high_precision_init_val()
                assert torch.equal(actual, before[name].cpu()), (recipe, name)


@ranks(2)
def test_ddps_first_broadcast_replaces_the_initial_values_of_other_ranks(rig):
    """Ranks are initialized with different seeds."""
    model = make(
        device=rig.device, seed=rig.rank, fp8_weights=True, preserve_high_precision_init_val=True
    )
    DistributedDataParallel(model)
    for layer in linears(model).values():
        weight = layer.weight
        error = (weight.get_high_precision_init_val().to(rig.device) - weight.dequantize()).abs()
        assert (error <= 0.07 * weight.dequantize().abs() + 1e-3).all()


@recipes
def test_kept_values_can_be_freed(recipe):
    model = layer_of(recipe)
    weight = model[0].weight
    before = weight.dequantize()
    init_val = weakref.ref(weight.get_high_precision_init_val())
    assert init_val() is not None
    weight.clear_high_precision_init_val()
    assert weight.get_high_precision_init_val() is None
    assert init_val() is None, "its memory too"
    assert torch.equal(weight.dequantize(), before)
    assert_step_of_nothing_changes_nothing(model, weight)
    weight.clear_high_precision_init_val()  # again, and where nothing was kept
    with fp8rs.quantized_init(RECIPES[recipe]):
        other = torch.nn.Linear(64, 64)
    other.weight.clear_high_precision_init_val()


@recipes
def test_writing_a_copy_leaves_the_layer_as_it_is(recipe):
    layer = layer_of(recipe)[0]
    init_val = layer.weight.get_high_precision_init_val().clone()
    slots = [t.clone() for t in layer._buffers.values()]
    with torch.no_grad():
        layer.weight.detach().clone().copy_(100 * torch.randn(64, 64))
        copy.deepcopy(layer.weight).data.fill_(3.0)
    assert torch.equal(layer.weight.get_high_precision_init_val(), init_val)
    assert all(torch.equal(a, b) for a, b in zip(layer._buffers.values(), slots, strict=True))


@recipes
@pytest.mark.parametrize(
    "optimizer", [AdamW, lambda p: MasterWeights(p, torch.optim.SGD, lr=0.1)], ids=["adamw", "sgd"]
)
def test_a_step_of_a_copy_leaves_the_layer_as_it_is(recipe, optimizer):
    layer = layer_of(recipe)[0]
    init_val = layer.weight.get_high_precision_init_val().clone()
    slots = [t.clone() for t in layer._buffers.values()]
    writes = handle_of(layer).writes
    copies = [torch.nn.Parameter(layer.weight.detach().clone()), copy.deepcopy(layer.weight)]
    for c in copies:
        c.grad = torch.full(c.shape, 100.0)
    optimizer(copies).step()
    assert not any(torch.equal(c.dequantize(), layer.weight.dequantize()) for c in copies)
    assert torch.equal(layer.weight.get_high_precision_init_val(), init_val)
    assert all(torch.equal(a, b) for a, b in zip(layer._buffers.values(), slots, strict=True))
    assert handle_of(layer).writes == writes


def test_a_state_dict_outlives_its_model():
    state = layer_of("current").state_dict()
    state["0.weight"].copy_(torch.ones(64, 64))
    assert torch.all(state["0.weight"].dequantize() == 1)


@recipes
def test_rows_written_after_to_empty_are_what_they_are(recipe):
    layer = layer_of(recipe)[0]
    layer.to_empty(device="cpu")
    with torch.no_grad():
        layer.weight.narrow(0, 0, 32).copy_(torch.ones(32, 64))
        layer.weight.narrow(0, 32, 32).copy_(torch.ones(32, 64))
    assert torch.all(layer.weight.dequantize() == 1)


@ranks(2, 4)
@shardings
@recipes
def test_codes_that_come_back_are_as_they_were(rig, hidden, recipe):
    """As a checkpoint of the shards is read: to the bit, padded shards too."""
    model = shard(make_fp8(hidden, recipe, rig), rig)
    for layer in linears(model).values():
        local = local_of(layer.weight)
        before = [t.clone() for t in local.planes[0].data.view(torch.uint8).unbind(0)]
        if not local.numel():
            continue
        saved = local.detach().clone()
        with torch.no_grad():
            local.narrow(0, 0, local.shape[0]).detach().copy_(saved)
        after = local.planes[0].data.view(torch.uint8).unbind(0)
        assert all(map(torch.equal, before, after))


@ranks(2)
@shardings
def test_one_rank_alone_writes_a_copy(rig, hidden):
    model = shard(make_fp8(hidden, "current", rig), rig)
    x = batch(rig)
    model(x).sum().backward()
    assert model.state_dict()
    if rig.rank == 0:
        with torch.no_grad():
            for layer in linears(model).values():
                local_of(layer.weight).detach().clone().mul_(0.9)
    assert model(x).isfinite().all()


@ranks(2)
@recipes
def test_full_shard_is_gathered_without_copy(rig, recipe):
    model = shard(make_fp8("even", recipe, rig), rig)
    model(batch(rig))
    model.reshard()
    count = 0
    for layer in linears(model).values():
        stored = storage_of(layer.weight).rowwise
        if stored is not None and stored.data.numel():
            codes = gathered_bytes(layer)[0]
            assert codes.data_ptr() == stored.data.data_ptr()
            assert codes.numel() == stored.data.numel()
            count += 1
    assert count == len(linears(model))


@ranks(2)
@shardings
def test_optimizer_states_are_gathered(rig, hidden):
    model = shard(make_fp8(hidden, "current", rig), rig)
    optimizer = AdamW(model.parameters(), state_dtype=torch.bfloat16)
    model(batch(rig)).square().mean().backward()
    optimizer.step()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
    if rig.rank == 0:
        state = optimizer_state["state"]["blocks.0.up.weight"]
        assert state["master"].shape == model.blocks[0].up.weight.shape
        assert state["exp_avg"].dtype == torch.bfloat16
    assert ShardSpec.from_dtensor(model.blocks[0].up.weight).num_shards == 2


@recipes
@pytest.mark.parametrize("back", [False, True])
def test_hooks_of_a_weights_gradient_run_on(recipe, back):
    layer = torch.nn.Linear(64, 64)
    weight = layer.weight
    calls = []
    first = weight.register_hook(lambda grad: calls.append("hook"))
    after = weight.register_post_accumulate_grad_hook(lambda p: calls.append(p))
    fp8rs.convert_to_float8_training(layer, recipe=RECIPES[recipe], fp8_weights=True)
    if back:
        dequantize_weight(layer)
    second = weight.register_hook(lambda grad: 0 * grad)
    layer(torch.randn(16, 64)).sum().backward()
    assert calls[0] == "hook" and calls[1] is weight and len(calls) == 2
    assert weight.grad.count_nonzero() == 0
    for handle in (first, after, second):
        handle.remove()
    weight.grad = None
    layer(torch.randn(16, 64)).sum().backward()
    assert len(calls) == 2 and weight.grad.count_nonzero() > 0


@recipes
def test_hooks_that_are_removed_or_registered_afterwards(recipe):
    layer = torch.nn.Linear(64, 64)
    calls = []
    handle = layer.weight.register_hook(lambda grad: calls.append("removed"))
    fp8rs.convert_to_float8_training(layer, recipe=RECIPES[recipe], fp8_weights=True)
    handle.remove()
    layer.weight.register_hook(lambda grad: calls.append("after"))
    layer(torch.randn(16, 64)).sum().backward()
    assert calls == ["after"]


@pytest.mark.parametrize(
    "cast", [lambda m: m.to(torch.bfloat16), lambda m: m.float()], ids=["to", "float"]
)
def test_hooks_run_on_after_a_cast(cast):
    """Torch swaps parameters of its own accord there."""
    calls = []
    layer = fp8rs.convert_to_float8_training(
        torch.nn.Sequential(torch.nn.Linear(16, 16, dtype=torch.bfloat16)), fp8_weights=True
    )
    layer[0].weight.register_hook(lambda grad: calls.append("hook"))
    layer[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append("after"))
    cast(layer)
    layer(torch.ones(2, 16, dtype=layer[0].bias.dtype)).sum().backward()
    assert calls == ["hook", "after"]


def initialized():
    torch.manual_seed(0)
    return fp8rs.convert_to_float8_training(
        torch.nn.ModuleList([torch.nn.Linear(32, 32)]),
        fp8_weights=True,
        preserve_high_precision_init_val=True,
    )


def test_a_copy_of_a_model_has_values_of_its_own_from_before_the_rounding():
    model = initialized()
    copied = copy.deepcopy(model)
    init_val = model[0].weight.get_high_precision_init_val().clone()
    assert torch.equal(copied[0].weight.get_high_precision_init_val(), init_val)
    with torch.no_grad():
        copied[0].weight.mul_(2)
    assert torch.equal(model[0].weight.get_high_precision_init_val(), init_val)


def test_they_are_freed_where_masters_come_from_a_checkpoint():
    x = torch.randn(8, 32)
    first = initialized()
    second = initialized()
    optimizers = [AdamW(model.parameters()) for model in (first, second)]
    first[0](x).sum().backward()
    optimizers[0].step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    second[0](x).sum().backward()
    optimizers[1].step()
    assert second[0].weight.get_high_precision_init_val() is None


class Tied(torch.nn.Module):
    """Two layers have one weight, which a third has not."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.alone = (torch.nn.Linear(32, 32) for _ in range(3))
        self.second.weight = self.first.weight


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the tie
def test_layers_that_are_tied_while_they_are_made_stay_in_high_precision():
    with fp8rs.quantized_init():
        model = Tied()
    assert isinstance(model.alone.weight, fp8rs.QuantizedTensor)
    assert model.first.weight is model.second.weight
    for layer in (model.first, model.second):
        assert type(layer) is torch.nn.Linear
        assert type(layer.weight) is torch.nn.Parameter


def test_a_layer_that_was_built_before_stays_in_high_precision():
    layer = torch.nn.Linear(32, 32)
    before = layer.weight.detach().clone()
    with fp8rs.quantized_init():
        layer.adapter = torch.nn.Linear(32, 32)
    assert isinstance(layer.adapter.weight, fp8rs.QuantizedTensor)
    assert type(layer) is torch.nn.Linear
    assert torch.equal(layer.weight, before)
