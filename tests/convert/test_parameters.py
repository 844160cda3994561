"""Converted parameters keep their identity, have real storage, and behave as plain parameters do.

"Plain" refers to the unconverted model in the same scenario.
"""

import copy
import itertools
import warnings
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim.optimizer import _foreach_supported_types
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8rs
from distributed import ranks
from distributed.models import (
    EMPTY,
    EVEN,
    RECIPES,
    UNEVEN,
    Block,
    Stack,
    batch,
    full_weights,
    linears,
    make,
    recipes,
    same_bytes,
    shard,
    train,
    watch_weights,
    whole_planes,
)
from internals import local_of
from oracle.compare import relative
from saving import reloaded


def plain(device="cpu", hidden=UNEVEN):
    torch.manual_seed(0)
    return Stack(hidden).to(device)


def convert(model, recipe="current", **options):
    return fp8rs.convert_to_float8_training(model, recipe=RECIPES[recipe], **options)


def inputs(device="cpu", rows=16):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 32, generator=generator).to(device)


def local(p):
    p = p.detach()
    return p.to_local() if hasattr(p, "to_local") else p


# --- objects created before the conversion --------------------------------------------------------


@recipes
def test_parameters_keep_their_identity(device, recipe):
    model = plain(device)
    before = dict(model.named_parameters())
    pointers = {n: p.data_ptr() for n, p in before.items()}
    convert(model, recipe)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[n] is before[n] and type(after[n]) is nn.Parameter for n in before)
    assert {n: p.data_ptr() for n, p in after.items()} == pointers
    assert 0 not in pointers.values()
    assert len(set(pointers.values())) == len(pointers)


@recipes
def test_an_optimizer_created_before_the_conversion_trains_the_weights(device, recipe):
    trained = []
    for early in (True, False):
        model = plain(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1) if early else None
        convert(model, recipe)
        if optimizer is None:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
        before = full_weights(model)
        train(model, optimizer, [inputs(device)] * 3)
        trained.append(full_weights(model))
        assert all(not torch.equal(before[n], w) for n, w in trained[-1].items())
    assert all(same_bytes(trained[0][n], trained[1][n]) for n in trained[0])


@ranks(2)
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_optimizers_mapped_by_pointer_train_every_sharded_weight(rig, recipe):
    """accelerate creates the optimizer before fully_shard and then replaces its parameters, which
    it matches by the data pointers of the plain model."""
    model = plain(rig.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    convert(model, recipe)
    pointers = {p.data_ptr(): n for n, p in model.named_parameters()}
    assert len(pointers) == len(list(model.parameters()))
    names = [pointers[p.data_ptr()] for p in optimizer.param_groups[0]["params"]]
    shard(model, rig)
    now = dict(model.named_parameters())
    optimizer.param_groups[0]["params"] = [now[n] for n in names]
    before = full_weights(model)
    train(model, optimizer, [batch(rig, n) for n in range(3)])
    after = full_weights(model)
    assert all(not torch.equal(before[n], after[n]) for n in before)


@ranks(2)
def test_shards_have_real_storage_of_their_own(rig):
    model = shard(make(EVEN, device=rig.device), rig)
    shards = [local(p) for p in model.parameters()]
    assert all(s.data_ptr() for s in shards)
    starts = sorted((s.data_ptr(), s.data_ptr() + s.nbytes) for s in shards)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(starts))
    for s in shards:
        assert s.untyped_storage().nbytes() >= s.nbytes


@recipes
def test_an_average_created_before_or_after_the_conversion_follows_the_weights(device, recipe):
    # Delayed scaling adds buffers, which AveragedModel would pair as well.
    if recipe == "delayed":
        model = plain(device)
        before = AveragedModel(model)
        with pytest.raises(ValueError, match=r"zip\(\) argument 2 is longer"):
            before.update_parameters(convert(model, recipe))
    averages = []
    for early in (True, False) if recipe != "delayed" else (False,):
        model = plain(device)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)) if early else None
        convert(model, recipe)
        if ema is None:
            ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        start = full_weights(model)
        for _ in range(3):
            train(model, optimizer, [inputs(device)])
            ema.update_parameters(model)
        averages.append({n: p.detach().clone() for n, p in ema.module.named_parameters()})
        weight = averages[-1]["head.weight"]
        assert not torch.equal(weight, start["head"])
        assert not torch.equal(weight, model.head.weight)
    assert all(same_bytes(averages[0][n], averages[-1][n]) for n in averages[0])


class TwoViews(nn.Module):
    """A container that refers to the weight outside its layer, as losses and regularizers do."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(32, 32)
        self.b = nn.Linear(32, 32)
        self.penalized = [self.a.weight, self.b.weight]

    def forward(self, x):
        return self.b(self.a(x).relu())


def test_references_created_before_the_conversion_point_to_the_weights(device):
    model = convert(TwoViews().to(device))
    (model(inputs(device)).sum() + sum(p.square().sum() for p in model.penalized)).backward()
    for layer, p in zip((model.a, model.b), model.penalized, strict=True):
        assert layer.weight is p
        assert p.grad is not None


@recipes
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_registered_before_the_conversion_run(device, kind, recipe):
    model = plain(device)
    ran = []
    for name, p in model.named_parameters():
        getattr(p, kind)(lambda grad, name=name: ran.append(name))
    convert(model, recipe)
    model(inputs(device)).sum().backward()
    assert sorted(ran) == sorted(n for n, _ in model.named_parameters())


def test_gradients_computed_before_the_conversion_accumulate(device):
    model = plain(device)
    model(inputs(device)).sum().backward()
    before = {n: p.grad for n, p in model.named_parameters()}
    values = {n: g.clone() for n, g in before.items()}
    convert(model)
    assert all(p.grad is before[n] for n, p in model.named_parameters())
    model(inputs(device)).sum().backward()
    for n, p in model.named_parameters():
        assert p.grad is before[n]
        if p.dim() == 2:
            assert relative(p.grad, 2 * values[n]) < 0.1
            assert not torch.equal(p.grad, values[n])


def test_attributes_and_requires_grad_are_kept(device):
    model = plain(device)
    model.head.weight.requires_grad_(False)
    model.blocks[0].up.weight.of_group = "first"
    convert(model)
    assert not model.head.weight.requires_grad
    assert model.blocks[0].up.weight.of_group == "first"


# --- state that torch keeps outside of __dict__ ---------------------------------------------------

#: What is done to a model, by name.
CALLS = {
    "nothing": lambda model: model,
    "to": lambda model: model.to("cpu"),
    "half": lambda model: model.half(),
    "half and back": lambda model: model.half().bfloat16(),
    "float": lambda model: model.float(),
    "share_memory": lambda model: model.share_memory(),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "to meta": lambda model: model.to("meta"),
    "to meta and to_empty": lambda model: model.to("meta").to_empty(device="cpu"),
    "requires_grad_": lambda model: model.requires_grad_(False),
    "zero_grad": lambda model: model.zero_grad(set_to_none=True) or model,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: reloaded(model, weights_only=False),
}

FP8_RECIPES = ["current", "delayed", "rowwise", "block", "mxfp8 of 1x32"]


def with_state(recipe, when, grad_dtype, gradient, frozen, hooks):
    """Return a bf16 layer in a model, whose weight has state that is not in its __dict__."""

    class Model(nn.Sequential):
        def __init__(self):
            super().__init__()
            layer = nn.Linear(32, 64, bias=False, dtype=torch.bfloat16)
            if when == "before":
                change(layer.weight)
            self.append(layer)

    handles = []

    def change(weight):
        if grad_dtype != "default":
            weight.grad_dtype = grad_dtype
        if gradient:
            dtype = weight.dtype if grad_dtype in ("default", None) else grad_dtype
            weight.grad = torch.ones(weight.shape, dtype=dtype)
        weight.of_group = "first"
        if hooks:
            handles.append(weight.register_hook(print))
            handles.append(weight.register_post_accumulate_grad_hook(print))
        weight.requires_grad_(not frozen)

    torch.manual_seed(0)
    if recipe is None:
        model = nn.Sequential(*Model())
    elif when == "before" and hooks:
        with fp8rs.quantized_init(RECIPES[recipe]):
            model = Model()
        model = nn.Sequential(*model)
    else:
        model = convert(nn.Sequential(*Model()), recipe, fp8_weights=True)
    if when == "after":
        change(model[0].weight)
    return model, handles


def state_outside_of_dict(weight):
    return {
        "grad_dtype": weight.grad_dtype,
        "dtype of the gradient": None if weight.grad is None else weight.grad.dtype,
        "requires_grad": weight.requires_grad,
        "is_leaf": weight.is_leaf,
        "is a parameter": isinstance(weight, nn.Parameter),
        "attribute": getattr(weight, "of_group", None),
        "hooks": len(weight._backward_hooks or ()),
        "hooks after accumulation": len(weight._post_accumulate_grad_hooks or ()),
    }


@pytest.mark.parametrize("call", list(CALLS))
@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("grad_dtype", ["default", torch.float32, None])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("hooks", [False, True])
def test_fp8_weights_keep_the_state_that_plain_parameters_keep(
    recipe, when, grad_dtype, gradient, frozen, hooks, call
):
    if call == "pickle" and hooks:
        pytest.skip("torch does not pickle hooks")
    if call.startswith("to meta") and gradient:
        pytest.skip("torch refuses gradients of another dtype, and fp8rs keeps them")
    results = []
    for of in (None, recipe):
        model, handles = with_state(of, when, grad_dtype, gradient, frozen, hooks)
        weight = model[0].weight
        before = state_outside_of_dict(weight)
        after = CALLS[call](model)[0].weight
        results.append((before, state_outside_of_dict(after), after is weight))
        for handle in handles:
            handle.remove()
        if after is weight:
            assert not weight._backward_hooks
            assert not weight._post_accumulate_grad_hooks

    (before, plain_after, plain_stays), (converted, after, stays) = results
    assert converted == before
    assert stays or not plain_stays
    for name, value in plain_after.items():
        # What torch drops, such as hooks in a copy, an FP8 weight may keep.
        assert after[name] == value or (value != before[name] and after[name] == before[name])


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_gradients_of_fp8_weights_accumulate_in_their_grad_dtype(recipe, when):
    model, _ = with_state(recipe, when, torch.float32, False, False, False)
    x = torch.ones(32, 32, dtype=torch.bfloat16)
    for value in (1.0, *[2.0**-9] * 8):  # bf16 loses the small ones
        model(x).backward(torch.full((32, 64), value / 32, dtype=torch.bfloat16))
    assert relative(model[0].weight.grad, torch.full((64, 32), 1 + 2.0**-6)) < 1e-3


@ranks(1)
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@pytest.mark.parametrize("fp8_weights", [False, True])
def test_fully_shard_treats_the_grad_dtype_of_a_converted_weight_as_a_plain_one(
    rig, fp8_weights, recipe
):
    states = []
    for of in (None, recipe):
        model = plain(rig.device, EVEN).bfloat16()
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
        if of is not None:
            convert(model, of, fp8_weights=fp8_weights)
        shard(model, rig)
        model(batch(rig).bfloat16()).sum().backward()
        model.to("cpu" if rig.device_type == "cpu" else rig.device)
        weight = model.head.weight
        states.append((weight.grad_dtype, weight.grad.dtype, weight.requires_grad))
    assert states[0] == states[1]


# --- third-party uses of a parameter -------------------------------------------------------------


def by_numpy(p):
    return p.detach().cpu().numpy().tolist()


def by_tolist(p):
    return p.detach().tolist()


def by_safetensors(p):
    import safetensors.torch

    saved = safetensors.torch.save({"p": p.detach()})
    return safetensors.torch.load(saved)["p"].tolist()


def by_torch_save(p):
    return reloaded(p.detach()).tolist()


def by_untyped_storage(p):
    p = p.detach()
    return p.new_empty(0).set_(p.untyped_storage(), p.storage_offset(), p.shape).tolist()


def by_deepcopy(p):
    return copy.deepcopy(p).detach().tolist()


#: Uses by name. Each has marks for what it needs, because a skip on a rank counts as a failure.
USES = [
    "by_numpy",
    "by_tolist",
    pytest.param(
        "by_safetensors",
        marks=pytest.mark.skipif(
            find_spec("safetensors") is None, reason="safetensors is not installed"
        ),
    ),
    "by_torch_save",
    "by_untyped_storage",
    "by_deepcopy",
]


@recipes
@pytest.mark.parametrize("use", USES)
def test_a_converted_parameter_behaves_as_a_plain_one(device, use, recipe):
    use = globals()[use]
    weight = plain(device).head.weight
    expected = use(weight)
    assert use(convert(plain(device), recipe).head.weight) == expected


@ranks(2)
@pytest.mark.parametrize("use", USES)
def test_a_converted_shard_behaves_as_a_plain_one(rig, use):
    """accelerate, safetensors and optimizers in C++ use the local tensor."""
    results = []
    for recipe in (None, "current"):
        model = shard(make(UNEVEN, recipe=recipe, device=rig.device), rig)
        results.append([globals()[use](local(layer.weight)) for layer in linears(model).values()])
    assert results[0] == results[1]


def test_a_converted_model_moves_to_shared_memory():
    model = convert(plain(), "delayed").share_memory()
    assert all(p.is_shared() for p in model.parameters())
    y = model(inputs())
    assert y.isfinite().all()
    y.sum().backward()


@ranks(2, cuda=False)
def test_shards_move_to_shared_memory(rig):
    model = shard(make(UNEVEN, device=rig.device), rig)
    weight = local(model.head.weight)
    before = weight.clone()
    weight.share_memory_()
    assert weight.is_shared()
    assert torch.equal(weight, before)


class Lists(TorchDispatchMode):
    """Record the lengths of the lists that in-place foreach operators receive."""

    def __init__(self):
        super().__init__()
        self.lengths = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if "::_foreach" in name and name.endswith("_"):
            self.lengths.setdefault(name, set()).add(len(args[0]))
        return func(*args, **(kwargs or {}))


@recipes
def test_optimizers_use_foreach_for_the_whole_group(device, recipe):
    model = convert(plain(device), recipe)
    # torch.optim checks this type before it chooses foreach on an accelerator.
    assert all(type(p) in _foreach_supported_types for p in model.parameters())
    count = len(list(model.parameters()))
    model(inputs(device)).sum().backward()
    foreach = None if device.type == "cuda" else True
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    with Lists() as lists:
        optimizer.step()
    assert lists.lengths["aten::_foreach_addcdiv_"] == {count}


@ranks(2)
def test_foreach_and_fused_steps_of_shards_equal_those_of_plain_shards(rig):
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        results = []
        for recipe in (None, "current"):
            model = shard(make(UNEVEN, recipe=recipe, device=rig.device), rig)
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.5)
            optimizer = torch.optim.AdamW(model.parameters(), 0.1, **options)
            with Lists() as lists:
                optimizer.step()
            results.append((full_weights(model), lists.lengths))
        (expected, lengths), (weights, own_lengths) = results
        assert all(same_bytes(weights[n], expected[n]) for n in expected), options
        assert own_lengths == lengths, options


@ranks(2)
def test_optimizer_states_of_shards_are_plain(rig):
    model = shard(make(EMPTY, device=rig.device), rig)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, [batch(rig)])
    for state in optimizer.state.values():
        for value in state.values():
            inner = local_of(value)
            assert type(inner) is torch.Tensor


# --- FSDP1 ---------------------------------------------------------------------------------------


def first_fsdp(model, rig, **options):
    """Wrap each block and the root in FSDP1."""
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=rig.device, **options
    )


@ranks(2)
@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "mxfp8 of 1x32"])
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_trains_as_one_rank_does(rig, use_orig_params, recipe):
    """Both ranks have the same batches, so the mean of their gradients equals each rank's own."""
    x = [inputs(rig.device)] * 4
    alone = convert(plain(rig.device), recipe)
    expected = train(alone, torch.optim.SGD(alone.parameters(), 0.1), x)
    model = convert(plain(rig.device), recipe, enable_fsdp_float8_all_gather=False)
    model = first_fsdp(model, rig, use_orig_params=use_orig_params)
    losses = train(model, torch.optim.SGD(model.parameters(), 0.1), x)
    assert losses[0] > losses[-1]
    assert losses == expected


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_warns_once_that_it_gathers_no_fp8(rig, use_orig_params):
    model = first_fsdp(convert(plain(rig.device)), rig, use_orig_params=use_orig_params)
    with pytest.warns(UserWarning, match="FullyShardedDataParallel gathers .* high precision"):
        model(inputs(rig.device)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(inputs(rig.device)).sum().backward()


@ranks(2)
def test_fsdp1_trains_in_mixed_precision(rig):
    model = convert(plain(rig.device), enable_fsdp_float8_all_gather=False)
    model = first_fsdp(
        model, rig, use_orig_params=True, mixed_precision=MixedPrecision(torch.bfloat16)
    )
    losses = train(model, torch.optim.SGD(model.parameters(), 0.1), [inputs(rig.device)] * 4)
    assert losses[-1] < losses[0]


# --- inference_mode ------------------------------------------------------------------------------


@ranks(2)
@recipes
@pytest.mark.parametrize("hidden", [UNEVEN, EMPTY], ids=["uneven", "empty"])
def test_the_first_sharded_forward_may_be_in_inference_mode(rig, hidden, recipe):
    model = shard(make(hidden, recipe=RECIPES[recipe], device=rig.device), rig)
    other = shard(make(hidden, recipe=RECIPES[recipe], device=rig.device), rig)
    weights = full_weights(model)
    with torch.no_grad():
        expected = other(batch(rig))
    gathered_weights = {}
    watch_weights(
        model, lambda name, w: gathered_weights.update({name: w.rowwise.map(torch.clone)})
    )
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(model(batch(rig)), expected)
    for name, weight in weights.items():
        codes, scale, *_ = whole_planes(weight, recipe)
        assert same_bytes(gathered_weights[name].data, codes), name
        assert same_bytes(gathered_weights[name].scale, scale), name


class Linears(nn.Module):
    """A model of converted weights only.

    After an inference forward, FSDP2 cannot train plain weights.
    """

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(2))

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x).relu())


@ranks(2)
@recipes
def test_training_may_follow_a_first_forward_in_inference_mode(rig, recipe):
    losses = []
    for inference_first in (True, False):
        torch.manual_seed(0)
        model = shard(convert(Linears().to(rig.device), recipe), rig)
        if inference_first:
            with torch.inference_mode():
                model.eval()(batch(rig))
        optimizer = torch.optim.SGD(model.train().parameters(), 0.1)
        losses.append(train(model, optimizer, [batch(rig)] * 3))
    assert losses[0] == losses[1]


def outcome(use):
    """Return the result of a use, or the error that it raised."""
    try:
        with torch.inference_mode():
            return use()
    except RuntimeError as error:
        return str(error)


@ranks(2)
@recipes
def test_state_dicts_of_shards_in_inference_mode_behave_as_plain_ones(rig, recipe):
    """torch 2.15 cannot detach a DTensor in inference mode.

    With `keep_vars` it does not need to.
    """
    results = []
    for chosen in (None, RECIPES[recipe]):
        model = shard(make(UNEVEN, recipe=chosen, device=rig.device), rig)
        results.append(
            (
                outcome(lambda: list(model.state_dict())),  # noqa: B023
                outcome(lambda: list(model.state_dict(keep_vars=True))),  # noqa: B023
            )
        )
    assert results[0] == results[1]
    assert results[1][1] == list(model.state_dict())


@ranks(2)
@recipes
def test_state_dicts_load_in_inference_mode(rig, recipe):
    model = shard(make(UNEVEN, recipe=RECIPES[recipe], device=rig.device), rig)
    state = {n: p.clone() * 2 for n, p in model.state_dict().items()}
    with torch.inference_mode():
        model.load_state_dict(state)
    loaded = model.state_dict()
    assert all(torch.equal(local(loaded[n]), local(p)) for n, p in state.items())
    weights = full_weights(model)
    gathered_weights = {}
    watch_weights(model, lambda name, w: gathered_weights.update({name: w.rowwise.data.clone()}))
    model(batch(rig)).sum().backward()
    for name, weight in weights.items():
        assert same_bytes(gathered_weights[name], whole_planes(weight, recipe)[0]), name


@recipes
def test_unsharded_models_run_in_inference_mode(device, recipe):
    model = convert(plain(device), recipe)
    with torch.inference_mode():
        y = model(inputs(device))
        state = model.state_dict()
        model.load_state_dict({n: p.clone() for n, p in state.items()})
        assert torch.equal(model(inputs(device)), y)
    with torch.no_grad():
        assert torch.equal(model(inputs(device)), y)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = train(model, optimizer, [inputs(device)] * 3)
    assert losses[-1] < losses[0]
    with torch.inference_mode():
        after = model(inputs(device))
    assert not torch.equal(after, y)


@ranks(2)
@recipes
@pytest.mark.parametrize("reshard", [True, False])
def test_training_continues_after_an_inference_forward(rig, reshard, recipe):
    """With 1x32 weights, MXFP8 refills planes that the backward needs, and autograd sees it."""
    model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
    shard(model, rig, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = train(model, optimizer, [batch(rig)])
    weights = full_weights(model)
    gathered_weights = {}
    watch_weights(model, lambda name, w: gathered_weights.update({name: w.rowwise.data.clone()}))
    with torch.inference_mode():
        assert model(batch(rig)).isfinite().all()
    if recipe != "delayed":
        for name, weight in weights.items():
            assert same_bytes(gathered_weights[name], whole_planes(weight, recipe)[0]), name
    assert train(model, optimizer, [batch(rig)])[0] != before[0]
