"""The last load or write of weights and masters wins, for each parameter."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import fp8rs
from cases import each_kind_of_recipe
from distributed import ranks
from distributed.models import RECIPES, UNEVEN, make, same_bytes, shard
from distributed.sharded_pairs import batch, full, loss_of
from fp8rs.optim import AdamW, MasterWeights
from fp8rs.tensor.quantized import QuantizedTensor
from optim.weights import PARAMETERS, normal, parameter, train

OPTIMIZERS = {
    "AdamW": lambda params: AdamW(params, lr=1e-2),
    "AdamW, stochastic": lambda params: AdamW(params, lr=1e-2, stochastic_rounding=True),
    "MasterWeights": lambda params: MasterWeights(params, torch.optim.AdamW, lr=1e-2),
}
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


class Run:
    """A model and its optimizer after some steps, with copies of both state dicts."""

    def __init__(self, model, optimizer, step):
        self.model = model
        self.optimizer = optimizer
        self.step = step
        for n in range(2):
            step(n)
        self.weights = copy.deepcopy(model.state_dict())
        self.state = copy.deepcopy(optimizer.state_dict())
        self.values, self.masters = self.read_values(), self.read_masters()

    def params(self):
        return dict(self.model.named_parameters())

    def read_values(self):
        return {name: full(p).float().clone() for name, p in self.params().items()}

    def read_masters(self):
        """Return the full master of each parameter that has one."""
        masters = {
            name: self.optimizer.state[p]["master"]
            for name, p in self.params().items()
            if "master" in self.optimizer.state.get(p, {})
        }
        return {
            name: (m.full_tensor() if isinstance(m, DTensor) else m).clone()
            for name, m in masters.items()
        }

    def restore(self):
        """Load the state that the run had at first."""
        self.model.load_state_dict(self.weights)
        self.optimizer.load_state_dict(self.state)

    def stand_still(self):
        """Step with a learning rate of 0, which shows the optimizer's starting values."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.step(9)


def assert_begins_from(run, weights, masters):
    """Assert from which run each parameter of a step starts.

    Args:
        run: The run that is about to step.
        weights: The parameters that start from the weights of another run, by name.
        masters: The parameters that start from the masters of another run, by name.
    """
    run.stand_still()
    values = run.read_values()
    actual = run.read_masters()
    assert masters.keys() | weights.keys() == values.keys()
    for name, other in masters.items():
        if name in actual:
            assert same_bytes(actual[name], other.masters[name]), name
    for name, other in weights.items():
        for got in (values[name], *([actual[name]] if name in actual else [])):
            # A master that rounds to the written code is kept. It is at most one code away.
            want = other.values[name]
            assert ((got - want).abs() <= want.abs() / 4 + 2.0**-8).all(), name
            assert (got - want).norm() <= 0.06 * want.norm(), name


def part_of(state, without):
    """Return a state that lacks one parameter."""
    return {**state, "state": {k: v for k, v in state["state"].items() if k != without}}


def each(run, other):
    return dict.fromkeys(run.params(), other)


def weights_then_optimizer(run, b, c):
    run.model.load_state_dict(b.weights)
    run.optimizer.load_state_dict(c.state)
    return {}, each(run, c)


def optimizer_then_weights(run, b, c):
    run.optimizer.load_state_dict(c.state)
    run.model.load_state_dict(b.weights)
    return each(run, b), {}


def weights_alone(run, b, c):
    run.model.load_state_dict(b.weights)
    return each(run, b), {}


def optimizer_alone(run, b, c):
    run.optimizer.load_state_dict(c.state)
    return {}, each(run, c)


def weights_then_the_optimizers_own_state(run, b, c):
    run.model.load_state_dict(b.weights)
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    return each(run, b), {}


def weights_then_the_optimizers_earlier_state(run, b, c):
    earlier = copy.deepcopy(run.optimizer.state_dict())
    run.model.load_state_dict(b.weights)
    run.optimizer.load_state_dict(earlier)
    return {}, each(run, run)


def weights_then_part_of_an_optimizer(run, b, c):
    first, *others = run.params()
    run.model.load_state_dict(b.weights)
    run.optimizer.load_state_dict(part_of(c.state, 0))
    return {first: b}, dict.fromkeys(others, c)


def part_of_an_optimizer_alone(run, b, c):
    """A parameter that the state does not contain keeps every bit of its master."""
    first, *others = run.params()
    run.optimizer.load_state_dict(part_of(c.state, 0))
    return {}, {first: run, **dict.fromkeys(others, c)}


def an_optimizer_twice_with_weights_between(run, b, c):
    run.optimizer.load_state_dict(c.state)
    run.model.load_state_dict(b.weights)
    run.optimizer.load_state_dict(part_of(run.optimizer.state_dict(), 0))
    return each(run, b), {}


def part_of_the_weights(run, b, c):
    first, *others = run.params()
    run.optimizer.load_state_dict(c.state)
    run.model.load_state_dict(
        {k: v for k, v in b.weights.items() if k.startswith(first)}, strict=False
    )
    return {first: b}, dict.fromkeys(others, c)


def in_place_writes(run, b, c):
    run.optimizer.load_state_dict(c.state)
    with torch.no_grad():
        for name, p in run.params().items():
            p.copy_(dict(b.model.named_parameters())[name])
    return each(run, b), {}


def foreach_writes(run, b, c):
    run.optimizer.load_state_dict(c.state)
    params = list(run.model.parameters())
    # DTensor does not implement _foreach_copy_.
    with torch.no_grad():
        torch._foreach_mul_(params, 0.0)
        torch._foreach_add_(params, [p.detach() for p in b.model.parameters()])
    return each(run, b), {}


def weights_swapped_in_and_out(run, b, c):
    """An evaluation exchanges the weights, during which the optimizer is saved."""
    original = copy.deepcopy(run.model.state_dict())
    run.model.load_state_dict(b.weights)
    run.optimizer.state_dict()
    run.model.load_state_dict(original)
    return {}, each(run, run)


ORDERS = [
    weights_then_optimizer,
    optimizer_then_weights,
    weights_alone,
    optimizer_alone,
    weights_then_the_optimizers_own_state,
    weights_then_the_optimizers_earlier_state,
    weights_then_part_of_an_optimizer,
    part_of_an_optimizer_alone,
    an_optimizer_twice_with_weights_between,
    part_of_the_weights,
    in_place_writes,
    foreach_writes,
    weights_swapped_in_and_out,
]
each_order = pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)


# --- one process ---------------------------------------------------------------------------------


class Holder(nn.Module):
    """A module whose parameters belong to no layer."""

    def __init__(self, params):
        super().__init__()
        self.params = nn.ParameterList(params)


def bare(kind, optimizer, seed):
    """Return a run of two parameters of a kind."""
    values = [normal((70, 36), 10 * seed + i) for i in range(2)]
    model = Holder([parameter(PARAMETERS[kind](x)) for x in values])
    chosen = OPTIMIZERS[optimizer](model.parameters())
    return Run(model, chosen, lambda n: train(chosen, 1, seed=100 * seed + n))


def layers(recipe, optimizer, seed, fp8_weights=True):
    """Return a run of two layers, with FP8 weights and bf16 biases, or with bf16 throughout."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    fp8rs.convert_to_float8_training(model, recipe=recipe, fp8_weights=fp8_weights)
    chosen = OPTIMIZERS[optimizer](model.parameters())

    def step(n):
        model(normal((32, 64), 100 * seed + n, torch.bfloat16)).float().square().mean().backward()
        chosen.step()
        chosen.zero_grad()

    return Run(model, chosen, step)


@each_order
@each_optimizer
@pytest.mark.parametrize("kind", PARAMETERS)
def test_the_last_load_wins_for_parameters_without_a_layer(kind, optimizer, order):
    a, b, c = (bare(kind, optimizer, seed) for seed in range(3))
    assert_begins_from(a, *order(a, b, c))


@each_order
@each_optimizer
@pytest.mark.parametrize("fp8_weights", [True, False])
@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "block", "mxfp8"])
def test_the_last_load_wins_for_layers(recipe, optimizer, order, fp8_weights):
    a, b, c = (layers(recipe, optimizer, seed, fp8_weights) for seed in range(3))
    assert_begins_from(a, *order(a, b, c))


@each_optimizer
@pytest.mark.parametrize("before", [True, False])
def test_writes_through_data_are_detected(optimizer, before):
    """They do not increase the version counter."""
    a, b, c = (bare("bfloat16", optimizer, seed) for seed in range(3))
    # Then the masters do not round to the weights.
    if before:
        a.optimizer.load_state_dict(c.state)
    for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True):
        p.data.copy_(q.data)
    assert_begins_from(a, each(a, b), {})


@each_optimizer
@pytest.mark.parametrize("kind", ["current", "bfloat16"])
def test_a_state_dict_contains_written_weights_and_does_not_change_masters(optimizer, kind):
    a, b = (bare(kind, optimizer, seed) for seed in range(2))
    a.model.load_state_dict(b.weights)
    states = []
    a.optimizer.register_state_dict_post_hook(lambda _, state: states.append(state))
    saved = a.optimizer.state_dict()
    assert states[0] is saved
    for i, (name, value) in enumerate(b.values.items()):
        assert (saved["state"][i]["master"] - value).norm() <= 0.04 * value.norm()
        assert same_bytes(a.read_masters()[name], a.masters[name])
    # A state that is up to date shares memory with the optimizer, as torch's does.
    a.stand_still()
    for i, p in enumerate(a.model.parameters()):
        assert a.optimizer.state_dict()["state"][i]["master"] is a.optimizer.state[p]["master"]


@each_optimizer
def test_a_copied_optimizer_reads_written_weights(optimizer):
    a, b = (layers("current", optimizer, seed) for seed in range(2))
    a.model.load_state_dict(b.weights)
    a.model, a.optimizer = copy.deepcopy((a.model, a.optimizer))

    def step(n):
        a.model(normal((32, 64), n, torch.bfloat16)).float().square().mean().backward()
        a.optimizer.step()

    a.step = step
    assert_begins_from(a, each(a, b), {})


def test_a_skipped_step_keeps_masters_that_were_loaded_last():
    a, b, c = (bare("bfloat16", "AdamW", seed) for seed in range(3))
    a.model.load_state_dict(b.weights)
    a.optimizer.load_state_dict(c.state)
    a.optimizer.found_inf = torch.ones(1)
    train(a.optimizer, 1)
    a.optimizer.found_inf = None
    assert_begins_from(a, {}, each(a, c))


def test_loaded_masters_replace_weights_that_are_nan():
    a, c = (bare("bfloat16", "AdamW", seed) for seed in (0, 2))
    with torch.no_grad():
        for p in a.model.parameters():
            p.fill_(torch.nan)
    a.optimizer.load_state_dict(c.state)
    assert_begins_from(a, {}, each(a, c))


# --- sharded -------------------------------------------------------------------------------------


def sharded(rig, recipe, optimizer, seed, fp8_weights):
    dtype = torch.float32 if fp8_weights else torch.bfloat16
    model = make(
        UNEVEN, recipe=RECIPES[recipe], device=rig.device, seed=seed, dtype=dtype,
        fp8_weights=fp8_weights,
    )  # fmt: skip
    shard(model, rig)
    chosen = OPTIMIZERS[optimizer](model.parameters())

    def step(n):
        loss_of(model, batch(rig, 100 * seed + n).to(dtype)).backward()
        chosen.step()
        chosen.zero_grad()

    return Run(model, chosen, step)


@ranks(1, 2)
@each_optimizer
@each_kind_of_recipe
@pytest.mark.parametrize("fp8_weights", [True, False], ids=["FP8 weights", "bf16"])
def test_the_last_load_wins_for_shards(rig, recipe, optimizer, fp8_weights):
    a, b, c = (sharded(rig, recipe, optimizer, seed, fp8_weights) for seed in range(3))
    for order in ORDERS:
        assert_begins_from(a, *order(a, b, c))
        a.restore()


def written_in_place_by_dcp(run, b, c):
    folder = b.folder
    state = {"model": run.model.state_dict()}
    run.optimizer.load_state_dict(c.state)
    dcp.load(state, checkpoint_id=folder)
    return each(run, b), {}


def own_state_by_torch(run, b, c):
    run.model.load_state_dict(b.weights)
    state = get_optimizer_state_dict(run.model, run.optimizer)
    set_optimizer_state_dict(run.model, run.optimizer, state)
    return each(run, b), {}


def part_of_a_state_by_torch(run, b, c, full=False):
    options = StateDictOptions(full_state_dict=full, cpu_offload=full, strict=False)
    first, *others = run.params()
    run.model.load_state_dict(b.weights)
    state = copy.deepcopy(get_optimizer_state_dict(c.model, c.optimizer, options=options))
    states = [part_of(state, first) if state else {}]
    # torch returns a full state dict on rank 0 only.
    if full:
        dist.broadcast_object_list(states)
    set_optimizer_state_dict(run.model, run.optimizer, states[0], options=options)
    return {first: b}, dict.fromkeys(others, c)


def part_of_a_full_state_by_torch(run, b, c):
    return part_of_a_state_by_torch(run, b, c, full=True)


BY_TORCH = [
    written_in_place_by_dcp,
    own_state_by_torch,
    part_of_a_state_by_torch,
    part_of_a_full_state_by_torch,
]


@ranks(1, 2)
@pytest.mark.parametrize("optimizer", ["AdamW", "MasterWeights"])
@each_kind_of_recipe
@pytest.mark.parametrize("fp8_weights", [True, False], ids=["FP8 weights", "bf16"])
def test_the_last_load_by_torch_checkpoints_wins(rig, recipe, optimizer, fp8_weights, tmp_path):
    a, b, c = (sharded(rig, recipe, optimizer, seed, fp8_weights) for seed in range(3))
    b.folder = str(tmp_path)
    dcp.save({"model": b.model.state_dict()}, checkpoint_id=b.folder)
    for order in BY_TORCH:
        assert_begins_from(a, *order(a, b, c))
        a.restore()


@ranks(2)
@each_optimizer
def test_a_write_to_a_part_of_a_shard_is_detected(rig, optimizer):
    """One rank alone writes through a view of the local tensor."""
    a = sharded(rig, "rowwise", optimizer, 0, True)
    weight = a.model.blocks[0].up.weight
    assert isinstance(weight.to_local(), QuantizedTensor)
    if rig.rank == 0:
        with torch.no_grad():
            weight.to_local()[:4].fill_(0.5)
    a.stand_still()
    assert (full(weight)[:4] == 0.5).all()
