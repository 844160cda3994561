"""torch's optimizers on FP8 weights: with masters, or without and with a warning."""

import copy
import gc
import warnings
import weakref

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
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fp8rs
from cases import each_kind_of_recipe
from distributed import ranks
from distributed.batched import make_any, shard_any
from distributed.collectives import Collectives
from distributed.folders import shared_folder
from distributed.models import EMPTY, UNEVEN, linears, make, reduces, same_bytes, shard
from distributed.sharded_pairs import (
    WEIGHTS,
    assert_equal,
    batch,
    contents,
    each_weights,
    full,
    loss_of,
    same,
)
from fp8rs.optim import AdamW, MasterWeights
from fp8rs.tensor.quantized import QuantizedTensor
from internals import storage_of
from optim.weights import (
    E4M3,
    QUANTIZERS,
    SHAPES,
    assert_same,
    bytes_of,
    each_format,
    each_quantizer,
    everything,
    mixed,
    normal,
    parameter,
    train,
)
from saving import reloaded

NAMES = ["current", "delayed", "rowwise", "block", "mxfp8"]
each_recipe = pytest.mark.parametrize("recipe", NAMES)

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.0}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Muon": (torch.optim.Muon, {"lr": 1e-2, "weight_decay": 0.0}),
}
each_optimizer = pytest.mark.parametrize("name", list(OPTIMIZERS))


def with_masters(kind, params, **options):
    return MasterWeights(params, kind, **options)


def plain(kind, params, **options):
    return kind(params, **options)


def build(model, name, make=with_masters):
    """Return the constructors of optimizers for all parameters. Muon accepts only matrices."""
    kind, options = OPTIMIZERS[name]
    params = list(model.parameters())
    if name != "Muon":
        return [make(kind, params, **options)]
    matrices, others = ([p for p in params if (p.dim() == 2) == is_2d] for is_2d in (True, False))
    return [make(kind, matrices, **options), torch.optim.SGD(others, lr=0.1, momentum=0.9)]


def step(model, optimizers, x):
    loss = loss_of(model, x)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


# --- the computed step --------------------------------------------------------------------------


def problem(recipe, **options):
    """Return two layers, and random targets for random inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    x, y = torch.randn(2, 128, 64)
    fp8rs.convert_to_float8_training(model, recipe=recipe, **options)
    return model, x, y


def last_loss(problem, name, make):
    model, x, y = problem
    optimizers = build(model, name, make)
    for _ in range(50):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return loss.item()


@each_recipe
@each_optimizer
@pytest.mark.parametrize("keep_values", [True, False])
def test_fp8_weights_with_masters_train_as_weights_in_high_precision(recipe, name, keep_values):
    fp8 = problem(recipe, fp8_weights=True, preserve_high_precision_init_val=keep_values)
    reference = problem(recipe)
    # Without kept values, masters start from the rounded weights.
    if not keep_values:
        with torch.no_grad():
            for p, q in zip(reference[0].parameters(), fp8[0].parameters(), strict=True):
                p.copy_(full(q))
    actual = last_loss(fp8, name, with_masters)
    wanted = last_loss(reference, name, plain)
    # The difference is at most 0.005%. Without masters it is at least 35% (12% after 25 steps).
    assert actual == pytest.approx(wanted, rel=0.01)
    assert all(isinstance(fp8[0][i].weight, QuantizedTensor) for i in (0, 2))


@each_quantizer
@each_format
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_equal_the_quantized_step_of_the_wrapped_optimizer(
    name, fp8_dtype, grad_dtype, shape
):
    weight = parameter(QUANTIZERS[name](fp8_dtype, "cpu")(normal(shape, 1)))
    other = QUANTIZERS[name](fp8_dtype, "cpu")
    values = parameter(weight.detach().dequantize(torch.float32))
    options = {"lr": 3e-2, "momentum": 0.9, "weight_decay": 0.1}
    ours = MasterWeights([weight], torch.optim.SGD, **options)
    theirs = torch.optim.SGD([values], **options)
    for n in range(3):
        train(ours, 1, grad_dtype, n)
        values.grad = weight.grad.float()
        theirs.step()
        want = other(values.detach())
        assert_same(bytes_of(*storage_of(weight).tensors()), bytes_of(*storage_of(want).tensors()))
        state = ours.state[weight]
        assert torch.equal(state["master"], values)
        assert torch.equal(state["momentum_buffer"], theirs.state[values]["momentum_buffer"])


def test_parameters_of_all_kinds_step_together():
    """Each is the rounded float32 step. A float32 parameter is stepped in place."""
    params = mixed()
    values = [parameter(full(p).float().clone()) for p in params]
    pointers = [p.data_ptr() for p in params]
    exact = params[len(QUANTIZERS)]
    ours = MasterWeights(params, torch.optim.RMSprop, lr=1e-2, momentum=0.5)
    theirs = torch.optim.RMSprop(values, lr=1e-2, momentum=0.5)
    for n in range(3):
        train(ours, 1, seed=n)
        train(theirs, 1, seed=n)
        for p, q in zip(params, values, strict=True):
            assert torch.equal(ours.state[p].get("master", p), q)
            if not isinstance(p, QuantizedTensor):
                assert torch.equal(p, q.to(p.dtype))
    assert "master" not in ours.state[exact]
    assert [p.data_ptr() for p in params] == pointers


def test_a_parameter_without_gradients_has_no_master():
    """A frozen base model needs no additional memory."""
    model, x, y = problem("current", fp8_weights=True)
    model[0].weight.requires_grad_(False)
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW)
    for _ in range(2):
        before = contents(model)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    assert model[0].weight not in optimizer.state
    assert "master" in optimizer.state[model[2].weight]
    assert same(before[:2], contents(model)[:2])
    model[0].weight.requires_grad_(True)
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    assert "master" in optimizer.state[model[0].weight]


def test_a_step_without_gradients_changes_nothing():
    params = mixed()
    before = bytes_of(*params)
    optimizer = MasterWeights(params, torch.optim.AdamW)
    optimizer.step()
    assert_same(bytes_of(*params), before)
    assert not optimizer.state


@pytest.mark.parametrize("name", list(QUANTIZERS))
def test_masters_follow_writes_to_the_weight(name):
    weight = parameter(QUANTIZERS[name](E4M3, "cpu")(normal((140, 150), 1)))
    optimizer = MasterWeights([weight], torch.optim.SGD, lr=1e-2)
    train(optimizer, 2)
    with torch.no_grad():
        weight.copy_(torch.full((140, 150), 3.0))
    optimizer.param_groups[0]["lr"] = 0.0
    train(optimizer, 1)
    assert ((optimizer.state[weight]["master"] - 3).abs() <= 3 / 16).all()


def test_gradients_in_high_precision_are_freed_after_the_step():
    params = mixed()
    optimizer = MasterWeights(params, Watched, lr=1e-3)
    train(optimizer, 2, torch.bfloat16)
    gc.collect()
    assert len(Watched.gradients) == 2 * len(params)
    assert not any(reference() is not None for reference in Watched.gradients)
    assert all(p.grad.dtype == torch.bfloat16 for p in params)


class Watched(torch.optim.SGD):
    """Records its gradients, whose dtype must be the parameter's."""

    gradients: list = []  # noqa: RUF012

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                assert type(p) is torch.Tensor and p.grad.dtype == p.dtype
                if p.dtype == torch.float32:
                    self.gradients.append(weakref.ref(p.grad))
        return super().step(closure)


# --- the interface of an optimizer --------------------------------------------------------------


def test_schedulers_and_groups_act_on_the_wrapped_optimizer():
    params = mixed()
    optimizer = MasterWeights(
        [{"params": params[:3], "lr": 0.5}, {"params": params[3:]}], torch.optim.SGD, momentum=0.9
    )
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 1e-3]
    assert optimizer.defaults["momentum"] == 0.9
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.0 if n == 1 else 1.0)
    train(optimizer, 1)
    scheduler.step()
    before = bytes_of(*(optimizer.state[p]["master"] for p in params[:3]))
    train(optimizer, 1, seed=1)
    assert_same(bytes_of(*(optimizer.state[p]["master"] for p in params[:3])), before)
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 1e-3]
    new = parameter(torch.ones(4).bfloat16())
    optimizer.add_param_group({"params": [new], "weight_decay": 0.5})
    assert optimizer.param_groups[-1]["momentum"] == 0.9
    train(optimizer, 1)
    assert "momentum_buffer" in optimizer.state[new] and "master" in optimizer.state[new]
    # Schedulers that change momentum read it from the defaults.
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)


def test_options_changed_by_the_wrapped_optimizer_are_visible():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
            self.state["all"]["calls"] = self.state["all"].get("calls", 0) + 1
            return super().step(closure)

    optimizer = MasterWeights(mixed(), Counting, lr=1e-3)
    train(optimizer, 3)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["k"] == 3 and state["state"]["all"] == {"calls": 3}


def test_a_closure_is_evaluated_before_the_step():
    weight = parameter(QUANTIZERS["current"](E4M3, "cpu")(normal((8, 8), 1)))
    optimizer = MasterWeights([weight], torch.optim.SGD, lr=0.1)

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = (weight.dequantize() * 2).sum()
        weight.grad = torch.full((8, 8), 2.0)
        return loss.detach()

    before = weight.detach().dequantize()
    assert optimizer.step(closure) == 2 * before.sum()
    assert torch.equal(optimizer.state[weight]["master"], before - 0.1 * 2.0)
    optimizer.zero_grad()
    assert weight.grad is None


@pytest.mark.parametrize(
    "kind, message",
    [
        (torch.optim.LBFGS, "LBFGS, which evaluates its closure within a step"),
        ("SGD", "optimizer_class is 'SGD'"),
        (nn.Linear, "must be a subclass of torch.optim.Optimizer"),
    ],
)
def test_optimizers_that_cannot_run_on_masters_are_refused(kind, message):
    with pytest.raises(TypeError, match=message):
        MasterWeights([parameter(torch.ones(2))], kind)


def test_options_are_checked_by_the_wrapped_optimizer():
    with pytest.raises(ValueError, match="Invalid learning rate"):
        MasterWeights(mixed(), torch.optim.SGD, lr=-1.0)
    with pytest.raises(ValueError, match="2D"):
        MasterWeights([parameter(torch.ones(2))], torch.optim.Muon)
    optimizer = MasterWeights(mixed(), torch.optim.SGD)
    params = optimizer.param_groups[0]["params"]
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": params[:1]})


def test_a_step_follows_a_refused_group():
    params = mixed()
    optimizer = MasterWeights(params, torch.optim.SGD, lr=0.5)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": params[:1]})
    before = [p.detach().float().clone() for p in params]
    for p in params:
        p.grad = torch.ones_like(p, dtype=p.dtype)
    optimizer.step()
    assert all(not torch.equal(p.detach().float(), b) for p, b in zip(params, before, strict=True))


def test_a_failed_step_keeps_the_state():
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure=None):
            if self.fails:
                raise RuntimeError("failed")
            return super().step(closure)

    optimizer = MasterWeights(mixed(), Failing, lr=1e-3, momentum=0.9)
    train(optimizer, 1)
    before = everything(optimizer)
    Failing.fails = True
    with pytest.raises(RuntimeError, match="failed"):
        train(optimizer, 1)
    assert_same(everything(optimizer), before)


def test_parameters_may_be_replaced_until_the_first_step_and_the_old_ones_are_freed():
    """accelerate shards a model that the optimizer already has, and frees the old parameters."""
    old = mixed()
    optimizer = MasterWeights(old, torch.optim.AdamW)
    gone = [weakref.ref(p) for p in old]
    for i, p in enumerate(mixed()):
        optimizer.param_groups[0]["params"][i] = p
    del old
    gc.collect()
    assert not any(reference() is not None for reference in gone)
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, 1)
    assert len(optimizer.state) == len(QUANTIZERS) + 3


@pytest.mark.parametrize("method", [copy.deepcopy, lambda x: reloaded(x, weights_only=False)])
def test_copies_step_independently(method):
    optimizer = MasterWeights(mixed(), torch.optim.AdamW, lr=1e-2)
    train(optimizer, 2)
    twin = method(optimizer)
    train(optimizer, 2, seed=1)
    train(twin, 2, seed=1)
    assert_same(everything(twin), everything(optimizer))


@pytest.mark.parametrize(
    "kind, options",
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"amsgrad": True, "foreach": False}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adafactor, {}),
    ],
)
def test_a_resumed_training_equals_an_uninterrupted_one(kind, options):
    first = MasterWeights(mixed(), kind, **options)
    train(first, 2)
    state, params = reloaded((first.state_dict(), first.param_groups[0]["params"]))
    second = MasterWeights(params, kind)
    second.load_state_dict(state)
    for p, q in zip(first.param_groups[0]["params"], params, strict=True):
        assert first.state[p].keys() == second.state[q].keys()
        for name, value in first.state[p].items():
            assert same_bytes(second.state[q][name], value)
    train(first, 2, seed=1)
    train(second, 2, seed=1)
    assert_same(everything(second), everything(first))


def test_a_state_of_the_optimizer_without_masters_can_be_loaded():
    params, values = (
        [parameter(normal((8, 4), 1).to(dtype))] for dtype in (torch.bfloat16, torch.float32)
    )
    theirs = torch.optim.AdamW(values)
    train(theirs, 1)
    ours = MasterWeights(params, torch.optim.AdamW)
    ours.load_state_dict(theirs.state_dict())
    state = ours.state[params[0]]
    assert torch.equal(state["exp_avg"], theirs.state[values[0]]["exp_avg"])
    train(ours, 1)
    assert state is not ours.state[params[0]] or "master" in state


def test_a_state_of_another_shape_is_refused_entirely():
    small, large = (
        MasterWeights([parameter(torch.ones(n, n).bfloat16())], torch.optim.AdamW) for n in (2, 3)
    )
    train(small, 1)
    train(large, 1)
    before = everything(large)
    with pytest.raises(ValueError, match=r"master|exp_avg"):
        large.load_state_dict(small.state_dict())
    assert_same(everything(large), before)


def test_a_compiled_step_equals_an_eager_one():
    torch._dynamo.reset()
    eager, compiled = (MasterWeights(mixed(), torch.optim.AdamW, lr=1e-2) for _ in range(2))
    run = torch.compile(compiled.step, backend="eager")
    for seed in range(3):
        for optimizer in (eager, compiled):
            for i, p in enumerate(optimizer.param_groups[0]["params"]):
                p.grad = normal(p.shape, 10 * seed + i, p.dtype)
        eager.step()
        run()
        assert_same(everything(compiled), everything(eager))
    torch._dynamo.reset()


# --- sharded -------------------------------------------------------------------------------------


def pair(rig, recipe, hidden=UNEVEN, **options):
    """Return a model with FP8 weights that keeps its initial values, and a sharded copy."""
    reference, other = (
        make_any(hidden, recipe=recipe, device=rig.device, fp8_weights=True, keep_init=True)
        for _ in range(2)
    )
    options.setdefault("mesh", rig.mesh())
    return reference, shard_any(other, **options)


def masters(model, optimizers):
    """Return the full master of each weight that has one."""
    values = {}
    for name, p in model.named_parameters():
        for optimizer in optimizers:
            master = optimizer.state[p].get("master") if p in optimizer.state else None
            if master is not None:
                assert getattr(master, "placements", None) == getattr(p, "placements", None)
                full_master = master.full_tensor() if isinstance(master, DTensor) else master
                values[name] = full_master.clone()
    return values


@ranks(2)
@each_kind_of_recipe
@pytest.mark.parametrize("hidden", [UNEVEN, EMPTY], ids=["uneven", "empty"])
@each_optimizer
def test_shards_step_as_the_unsharded_weight_does(rig, recipe, hidden, name):
    reference, model = pair(rig, recipe, hidden)
    reference_optimizers = build(reference, name)
    optimizers = build(model, name)
    for n in range(3):
        losses = [
            step(m, o, batch(rig, n))
            for m, o in ((reference, reference_optimizers), (model, optimizers))
        ]
        wanted = masters(reference, reference_optimizers)
        actual = masters(model, optimizers)
        assert wanted.keys() == actual.keys() == {f"{n}.weight" for n in linears(model)}
        if name != "Muon":
            assert same_bytes(*losses)
            assert all(same_bytes(actual[key], wanted[key]) for key in wanted)
            assert_equal(model, reference)
        # Muon multiplies matrices in bf16 and sums over ranks.
        for key in wanted:
            assert (actual[key] - wanted[key]).abs().max() <= 0.02 * wanted[key].abs().max(), key


@ranks(2)
def test_the_maxima_of_a_step_are_reduced_together(rig):
    _, model = pair(rig, "current")
    optimizer = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for n in range(2):
        loss_of(model, batch(rig, n)).backward()
        with Collectives() as collectives:
            optimizer.step()
        assert reduces(collectives) == [4 * len(linears(model))]
        assert len(collectives.calls) == 1


@ranks(4)
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@each_weights
def test_replicas_of_shards_step_equally(rig, recipe, weights):
    reference, model = pair(rig, recipe, WEIGHTS[weights], mesh=rig.mesh(2, 2))
    reference_optimizers = build(reference, "SGD")
    optimizers = build(model, "SGD")
    for n in range(2):
        for m, o in ((reference, reference_optimizers), (model, optimizers)):
            step(m, o, batch(rig, n))
        assert_equal(model, reference)


@ranks(4)
@each_optimizer
@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_tensor_parallel_shards_step_as_the_unsharded_weight_does(rig, recipe, name):
    """The difference is the rounding of sums over ranks."""
    reference, model = (
        make((64, 64), recipe=recipe, device=rig.device, fp8_weights=True) for _ in range(2)
    )
    mesh = rig.mesh(2, 2, names=("data", "tensor"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], plan)
    shard(model, mesh=mesh["data"])
    reference_optimizers = build(reference, name)
    optimizers = build(model, name)
    for n in range(2):
        for m, o in ((reference, reference_optimizers), (model, optimizers)):
            step(m, o, batch(rig, n))
    wanted = masters(reference, reference_optimizers)
    actual = masters(model, optimizers)
    assert wanted.keys() == actual.keys()
    for key, value in wanted.items():
        assert (actual[key] - value).abs().max() <= 0.05 * value.abs().max(), key


@ranks(2)
@each_optimizer
@each_kind_of_recipe
@pytest.mark.parametrize("full_state", [True, False], ids=["full", "sharded"])
def test_training_resumes_from_a_torch_state_dict(rig, recipe, name, full_state):
    """get_optimizer_state_dict and its counterpart restore a new model and optimizer."""
    options = StateDictOptions(full_state_dict=full_state, cpu_offload=full_state)
    _, model = pair(rig, recipe)
    optimizers = build(model, name)
    for n in range(2):
        step(model, optimizers, batch(rig, n))
    weights = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizers, options=options))
    # torch returns a full state dict on rank 0 only.
    if full_state:
        states = [state]
        dist.broadcast_object_list(states)
        state = states[0]
    _, other = pair(rig, recipe)
    resumed = build(other, name)
    other.load_state_dict(weights)
    set_optimizer_state_dict(other, resumed, state, options=options)
    wanted = masters(model, optimizers)
    actual = masters(other, resumed)
    assert wanted and all(same_bytes(actual[key], wanted[key]) for key in wanted)
    for n in range(2, 4):
        for m, o in ((model, optimizers), (other, resumed)):
            step(m, o, batch(rig, n))
        # The state dict does not contain the histories of delayed scaling.
        if recipe != "delayed":
            assert_equal(other, model)
            assert same(contents(other), contents(model))


@ranks(2)
def test_a_checkpoint_on_disk_contains_the_masters(rig):
    _, model = pair(rig, "current")
    optimizers = build(model, "SGD")
    step(model, optimizers, batch(rig))
    folder = shared_folder(rig)
    wanted = masters(model, optimizers)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizers)}, checkpoint_id=folder)
    _, other = pair(rig, "current")
    resumed = build(other, "SGD")
    state = {"optimizer": get_optimizer_state_dict(other, resumed)}
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(other, resumed, state["optimizer"])
    actual = masters(other, resumed)
    assert wanted and all(same_bytes(actual[key], wanted[key]) for key in wanted)


class Nested(torch.optim.Optimizer):
    """An optimizer whose state has containers of tensors."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["rows"] = [torch.zeros_like(p)]
                state["kept"] = {"sum": torch.zeros_like(p)}
            state["rows"][0].add_(p.grad / 3)
            state["kept"]["sum"].sub_(p.grad / 7)


def test_a_state_in_containers_keeps_its_dtypes():
    weight = parameter(QUANTIZERS["current"](E4M3, "cpu")(normal((8, 8), 0).bfloat16()))
    optimizer = MasterWeights([weight], Nested)
    other = MasterWeights([weight], Nested)
    train(optimizer, 2)
    other.load_state_dict(optimizer.state_dict())
    wanted = optimizer.state[weight]
    actual = other.state[weight]
    for key, part in (("rows", 0), ("kept", "sum")):
        assert same_bytes(actual[key][part], wanted[key][part])
        assert actual[key][part] is not wanted[key][part]


# --- the warning ---------------------------------------------------------------------------------


def stepped(optimizer, model):
    """Return the warnings of two steps."""
    with warnings.catch_warnings(record=True) as recorded_warnings:
        warnings.simplefilter("always")
        for n in range(2):
            model(normal((16, 64), n)).square().mean().backward()
            optimizer.step()
    return recorded_warnings


class Foreign(torch.optim.Optimizer):
    """An optimizer of a third party."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(0.1 * p.grad)


FOREIGN = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Foreign": Foreign,
}


@pytest.mark.parametrize("kind", list(FOREIGN))
@pytest.mark.parametrize("init", [True, False])
def test_the_first_step_of_another_optimizer_warns_once(kind, init):
    if init:
        with fp8rs.quantized_init("current"):
            model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    else:
        model, *_ = problem("current", fp8_weights=True)
    # Each optimizer warns once.
    for _ in range(2):
        optimizer = FOREIGN[kind](model.parameters())
        recorded_warnings = stepped(optimizer, model)
        assert len(recorded_warnings) == 1 and recorded_warnings[0].category is UserWarning
        text = str(recorded_warnings[0].message)
        name = type(optimizer).__name__
        assert text.startswith(f"{name} steps 2 FP8 weights, and keeps no masters")
        assert "fp8rs.optim.AdamW" in text and f"fp8rs.optim.MasterWeights(params, {name}" in text
        assert recorded_warnings[0].filename == __file__


@ranks(2)
def test_the_first_step_of_another_optimizer_warns_for_shards(rig):
    _, model = pair(rig, "current")
    optimizer = torch.optim.AdamW(model.parameters())
    # This makes torch step the optimizer with a learning rate of 0.
    get_optimizer_state_dict(model, optimizer)
    loss_of(model, batch(rig)).backward()
    with pytest.warns(UserWarning, match="AdamW steps 5 FP8 weights, and keeps no masters"):
        optimizer.step()
    optimizer.step()


@pytest.mark.parametrize("make", [AdamW, lambda p: MasterWeights(p, torch.optim.SGD, lr=0.1)])
def test_fp8rs_optimizers_do_not_warn(make):
    model, *_ = problem("current", fp8_weights=True)
    assert not stepped(make(model.parameters()), model)


def test_frozen_and_plain_weights_do_not_warn():
    model, *_ = problem("current", fp8_weights=True)
    for i in (0, 2):
        model[i].weight.requires_grad_(False)
    assert not stepped(torch.optim.SGD(model.parameters(), 0.1), model)
    other, *_ = problem("current")
    assert not stepped(torch.optim.SGD(other.parameters(), 0.1), other)


# --- optimizers from before the model was sharded -------------------------------------------------


@ranks(1)
@pytest.mark.parametrize("divided", ["fully_shard", "parallelize_module"])
@pytest.mark.parametrize("weights", ["FP8", "FP8 gathers", "gathers in high precision"])
@pytest.mark.parametrize("kind", ["AdamW", "MasterWeights"])
def test_the_first_step_of_an_optimizer_from_before_the_sharding_raises(
    rig, kind, weights, divided
):
    model = make(
        UNEVEN,
        device=rig.device,
        fp8_weights=weights == "FP8",
        enable_fsdp_float8_all_gather=weights != "gathers in high precision",
    )

    def build():
        if kind == "AdamW":
            return AdamW(model.parameters(), lr=1e-2)
        # On CUDA torch's SGD steps lists of tensors, and raises if some of them are DTensors.
        return MasterWeights(model.parameters(), torch.optim.SGD, lr=1e-2, foreach=False)

    stale = build()
    if divided == "fully_shard":
        shard(model, rig)
    else:
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        parallelize_module(model, rig.mesh(), plan)
    optimizer = build()
    loss_of(model, batch(rig, 0)).backward()

    message = rf"{kind} holds \d parameters .* blocks.0.up.weight.* after fully_shard"
    with pytest.raises(ValueError, match=message):
        stale.step()
    # accelerate replaces the parameters of an older optimizer.
    stale.param_groups[0]["params"] = optimizer.param_groups[0]["params"]
    before = [full(p).clone() for p in model.parameters()]
    stale.step()
    assert all(not torch.equal(full(p), b) for p, b in zip(model.parameters(), before, strict=True))
    optimizer.step()
