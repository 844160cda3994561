"""Torch's operations on FP8 weights: optimizers, state dicts, copies, pickles; sharded or not."""

from __future__ import annotations

import copy
import functools
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh

import fp8rs
from distributed import ranks
from distributed.batched import make_any, shard_any
from distributed.folders import shared_folder
from distributed.models import RECIPES, UNEVEN, linears, make, recipes, same_bytes, shard
from distributed.sharded_pairs import (
    WEIGHTS,
    assert_equal,
    assert_fp8,
    assert_same_training,
    batch,
    contents,
    each_weights,
    full,
    loss_of,
    pair,
    quantized,
    same,
)
from fp8rs.optim import AdamW
from fp8rs.tensor.quantized import QuantizedTensor
from internals import local_of, storage_of
from saving import reloaded

FULL = StateDictOptions(full_state_dict=True)


def fp8_model(recipe="current", device="cpu", **options):
    return make(UNEVEN, recipe=RECIPES[recipe], device=device, fp8_weights=True, **options)


def inputs(device, step=0):
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).to(device)


def assert_still_fp8(model):
    for name, layer in linears(model).items():
        assert isinstance(layer.weight, nn.Parameter), name
        assert quantized(layer.weight), name
        assert storage_of(layer.weight).observer.module is layer, name


# --- optimizers ----------------------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, foreach=False),
    "SGD foreach": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
}


@recipes
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.filterwarnings("ignore:.* FP8 weights, and keeps no masters")
def test_torch_optimizers_train_whole_weights(device, recipe, kind):
    """A step is the optimizer's own, of the dequantized values, rounded."""
    model = fp8_model(recipe, device)
    optimizer = OPTIMIZERS[kind](model.parameters())
    plain = [nn.Parameter(full(p).clone()) for p in model.parameters()]
    reference = OPTIMIZERS[kind](plain)
    losses = []
    for n in range(8):
        loss = loss_of(model, inputs(device, 0))
        loss.backward()
        for mine, other in zip(model.parameters(), plain, strict=True):
            other.grad = mine.grad.clone()
            with torch.no_grad():
                other.copy_(full(mine))
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        for mine, other in zip(model.parameters(), plain, strict=True):
            # AdamW writes a weight twice, for decay and step; a rounding is half a step of 3 bits.
            allowed = 2 * (other.abs() * 2.0**-4 + other.abs().amax() / 448 * 2.0**-10) * 1.07
            assert torch.all((full(mine) - other).abs() <= allowed), n
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert_still_fp8(model)


@recipes
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, AdamW])
@pytest.mark.filterwarnings("ignore:.* FP8 weights, and keeps no masters")
def test_a_layer_that_is_removed_before_the_step_steps(device, recipe, optimizer):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).to(device)
    fp8rs.convert_to_float8_training(model, recipe=RECIPES[recipe], fp8_weights=True)
    removed = model[1].weight
    before = model[1].weight.dequantize()
    steps = optimizer(model.parameters(), lr=0.1)
    model(inputs(device)).square().sum().backward()
    del model[1]
    steps.step()
    assert (removed.dequantize() != before).any()


@recipes
@pytest.mark.parametrize("kind", ["foreach", "fused"])
@pytest.mark.filterwarnings("ignore:.* FP8 weights, and keeps no masters")
def test_lists_are_dequantized_a_member_at_a_time(recipe, kind, monkeypatch):
    model = make((64,) * 6, recipe=RECIPES[recipe], fp8_weights=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, **{kind: True})
    living: list[weakref.ref] = []
    most = 0
    plain = QuantizedTensor.dequantize

    def dequantize(self, dtype=None):
        nonlocal most
        values = plain(self, dtype)
        living[:] = [r for r in living if r() is not None]
        living.append(weakref.ref(values))
        most = max(most, len(living))
        return values

    loss_of(model, inputs("cpu")).backward()
    monkeypatch.setattr(QuantizedTensor, "dequantize", dequantize)
    optimizer.step()
    assert len(linears(model)) == 13
    assert 1 <= most <= 2, most


@recipes
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.filterwarnings("ignore:.* FP8 weights, and keeps no masters")
def test_an_optimizer_from_before_the_weights_were_quantized(device, recipe, ours):
    model = make(UNEVEN, recipe=None, device=device)
    weights = [layer.weight for layer in linears(model).values()]
    kind = AdamW if ours else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-2)
    fp8rs.convert_to_float8_training(model, recipe=RECIPES[recipe], fp8_weights=True)
    assert all(a is b.weight for a, b in zip(weights, linears(model).values(), strict=True))
    losses = []
    for _ in range(8):
        before = contents(model)
        loss = loss_of(model, inputs(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        assert not same(contents(model), before)
    assert losses[-1] < losses[0]


FRESH = {
    "fp8rs": AdamW,
    "torch": torch.optim.AdamW,
    "torch, foreach": functools.partial(torch.optim.AdamW, foreach=True),  # the default on GPUs
}


@ranks(2)
@recipes
@pytest.mark.parametrize("kind", list(FRESH))
def test_the_state_of_a_fresh_optimizer(rig, recipe, kind):
    """torch initializes the state by a step with gradients of 0 and a learning rate of 0."""
    _, model = pair(rig, recipe)
    before = contents(model)
    optimizer = FRESH[kind](model.parameters(), lr=1e-2)
    state = get_optimizer_state_dict(model, optimizer)
    assert len(state["state"]) == len(list(model.parameters()))
    assert same(contents(model), before)
    for values in state["state"].values():
        moment = values["exp_avg"]
        assert not quantized(local_of(moment))


# --- state dicts ---------------------------------------------------------------------------------


@recipes
@pytest.mark.parametrize("assigned", ["plain", "fp8", "pickled"])
@pytest.mark.parametrize("meta", [True, False])
def test_assigned_values_are_quantized(device, recipe, assigned, meta):
    source = fp8_model(recipe, device, seed=1)
    model = fp8_model(recipe, "meta" if meta else device)
    state = source.state_dict()
    if assigned == "plain":
        state = {name: full(p).clone() for name, p in source.named_parameters()}
    elif assigned == "pickled":
        state = reloaded(state)
    model.load_state_dict(state, assign=True)
    assert_still_fp8(model)
    assert_still_fp8(source)
    assert_equal(model, source)
    if not meta:
        before = contents(source)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        loss_of(model, inputs(device)).backward()
        optimizer.step()
        assert not same(contents(model), before)
        # Only plain parameters share memory with what was assigned.
        assert same(contents(source), before)


@ranks(2)
@recipes
@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("broadcast", [True, False])
@each_weights
def test_full_state_dicts(rig, recipe, meta, broadcast, weights):
    reference, model = pair(rig, recipe, WEIGHTS[weights])
    state = get_model_state_dict(model, options=FULL)
    expected = dict(reference.named_parameters()) | dict(reference.named_buffers())
    for name, value in state.items():
        assert type(value) is torch.Tensor, (name, type(value))
        assert same_bytes(value, full(expected[name])), name
    device = torch.device("meta") if meta else rig.device
    other = make_any(WEIGHTS[weights], device=device, recipe=recipe, seed=1, fp8_weights=True)
    shard_any(other, mesh=rig.mesh())
    if meta and broadcast:
        other.to_empty(device=rig.device)
    rank_state = state if not broadcast or rig.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(other, rank_state, options=options)
    assert_fp8(other)
    assert_equal(other, reference)
    assert_same_training(rig, other, reference)


@ranks(2)
@recipes
@each_weights
def test_full_state_dicts_of_one_rank_are_distributed(rig, recipe, weights):
    """One rank gathers nothing, so that its full state dict has FP8 tensors."""
    folder = shared_folder(rig)
    group = dist.new_group([0])
    reference, model = pair(rig, recipe, WEIGHTS[weights])
    if rig.rank == 0:
        alone = shard_any(
            copy.deepcopy(reference), mesh=DeviceMesh.from_group(group, rig.device_type)
        )
        torch.save(get_model_state_dict(alone, options=FULL), f"{folder}/saved")
    dist.barrier()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    state = torch.load(f"{folder}/saved", weights_only=True)
    set_model_state_dict(model, state, options=FULL)
    assert_fp8(model)
    assert_equal(model, reference)


def test_an_initializer_that_writes_columns_raises(device):
    """`nn.init.sparse_` draws the whole weight, and then sets elements of each column to 0."""
    weight = fp8_model("current", device).head.weight
    with pytest.raises(NotImplementedError, match="consecutive elements"):
        nn.init.sparse_(weight, 0.1)


# --- copies and pickles --------------------------------------------------------------------------


INITS = {
    "uniform_": {},
    "normal_": {},
    "trunc_normal_": {},
    "constant_": {"val": 0.5},
    "ones_": {},
    "zeros_": {},
    "eye_": {},
    "xavier_uniform_": {},
    "xavier_normal_": {},
    "kaiming_uniform_": {},
    "kaiming_normal_": {},
    "orthogonal_": {},
}


@recipes
@pytest.mark.parametrize("name", list(INITS))
def test_initializers_of_torch(device, recipe, name):
    """They write what they write into plain weights, quantized."""
    weight = fp8_model(recipe, device).head.weight
    plain = torch.empty(weight.shape, device=device)
    initialize = getattr(nn.init, name)
    for w in (weight, plain):
        torch.manual_seed(0)
        try:
            assert initialize(w, **INITS[name]) is w
        except NotImplementedError:
            assert name == "trunc_normal_"  # torch 2.11's: erfinv_ says how to draw
            return
    assert quantized(weight)
    values = weight.dequantize()
    if name == "trunc_normal_":  # it draws again what it finds beyond the bounds, rounded or not
        assert values.abs().max() <= 2
        values = values.std()
        plain = plain.std()
    assert (values - plain).abs().max() <= 0.1 * plain.abs().max()


@recipes
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("method", ["deepcopy", "pickle", "torch.save"])
def test_copies_train_by_themselves(device, recipe, trained, method):
    model = fp8_model(recipe, device)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    if trained:
        loss_of(model, inputs(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if method == "deepcopy":
        twin = copy.deepcopy(model)
    elif method == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        twin = reloaded(model, weights_only=False)
    assert_still_fp8(twin)
    before = contents(model)
    assert same(contents(twin), before)
    twin_optimizer = AdamW(twin.parameters(), lr=1e-2)
    assert same_bytes(twin(inputs(device)).detach(), model(inputs(device)).detach())
    loss_of(twin, inputs(device)).backward()
    twin_optimizer.step()
    assert not same(contents(twin), before)
    assert same(contents(model), before)


@ranks(2)
@recipes
def test_a_pickled_model_is_sharded(rig, recipe):
    reference = pickle.loads(pickle.dumps(fp8_model(recipe, rig.device)))
    model = shard(pickle.loads(pickle.dumps(reference)), rig)
    assert_fp8(model)
    assert_same_training(rig, model, reference)
    assert loss_of(model, batch(rig)).isfinite()


@ranks(1, 2)
@pytest.mark.parametrize("move", ["cpu", "float", "same"])
@pytest.mark.parametrize("forward_first", [False, True])
def test_moving_a_sharded_model_where_it_is(rig, move, forward_first):
    """``model.to(device)`` of a model that is there already."""
    model = shard(make(UNEVEN, fp8_weights=True, device=rig.device), rig)
    x = batch(rig)
    if forward_first:
        model(x).sum().backward()
        model.zero_grad()
    weight = model.head.weight
    expected = model(x).detach()
    model.reshard()
    if move == "cpu" and rig.device.type == "cpu":
        model.cpu()
    elif move == "float":
        model.float()
    else:
        model.to(rig.device)
    assert model.head.weight is weight
    assert torch.equal(model(x), expected)


@recipes
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_cast_model_has_one_dtype_and_the_same_codes(device, recipe, dtype):
    """Also of a dtype that no layer computes in: what stands in a layer's way is its input."""
    model = fp8_model(recipe, device)
    plain = fp8_model(recipe, device)
    model.to(dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert_still_fp8(model)
    weight = model.head.weight
    assert same_bytes(weight.dequantize(), plain.head.weight.dequantize().to(dtype))
    assert same_bytes(weight.rowwise.data, plain.head.weight.rowwise.data)
    with torch.no_grad():
        (weight * 2).sum()
        weight.copy_(weight.dequantize())
        weight.mul_(2).mul_(0.5)
    if dtype == torch.float64:
        with pytest.raises(TypeError, match="input must be float32, bfloat16 or float16"):
            model(inputs(device).double())
        weights = pickle.loads(pickle.dumps(model)).head.weight
        assert weights.dtype == dtype
    model.float()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model(inputs(device)).sum().backward()


@recipes
def test_pointers_tell_parameters_apart(device, recipe):
    """accelerate and transformers' Trainer map an optimizer's parameters by them."""
    model = make(UNEVEN, recipe=RECIPES[recipe], device=device, fp8_weights=True)
    pointers = [p.data_ptr() for p in model.parameters()]
    assert 0 not in pointers and len(set(pointers)) == len(pointers)
    weight = model.head.weight
    assert weight.data_ptr() == weight.rowwise.data.data_ptr()
    for alias in (weight.detach(), weight[:32], weight.view(-1)):
        with pytest.raises(RuntimeError, match="no single block of memory"):
            alias.data_ptr()
    if weight.columnwise is None and weight.format.square:
        weight.update_usage(columnwise=True)
    if weight.columnwise is not None:
        weight.update_usage(rowwise=False)
        assert weight.data_ptr() == weight.columnwise.data.data_ptr()


def run(code):
    """In a process of its own: what fails here crashes."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])


SHARED = """
import torch, fp8rs
from torch import nn

def write(weight):
    with torch.no_grad():
        weight.fill_(2.0)

if __name__ == "__main__":
    for recipe in ("current", "block", "mxfp8"):
        model = fp8rs.convert_to_float8_training(
            nn.Sequential(nn.Linear(64, 64)), recipe=recipe, fp8_weights=True
        )
        weight = model[0].weight
        assert not weight.is_shared(), recipe
        before = weight.dequantize()
        assert model.share_memory() is model and model[0].weight is weight, recipe
        for part in (weight, weight.detach(), weight[:32]):
            assert part.is_shared(), recipe
        assert weight.share_memory_() is weight, recipe
        assert all(t.is_shared() for p in weight.planes if p for t in (p.data, p.scale)), recipe
        assert torch.equal(weight.dequantize(), before), recipe
        child = torch.multiprocessing.get_context("fork").Process(target=write, args=(weight,))
        child.start()
        child.join(60)
        assert child.exitcode == 0 and torch.all(weight.dequantize() == 2), recipe
        model(torch.randn(16, 64)).sum().backward()
"""


def test_models_go_to_shared_memory():
    """One process tries all recipes, because it takes seconds to import torch."""
    run(SHARED)
