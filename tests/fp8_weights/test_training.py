"""Training FP8 weights with fp8rs.optim.AdamW: the same bytes for any number of ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import fp8rs
from distributed import ranks
from distributed.batched import BATCHES, make_any, shard_any
from distributed.collectives import Collectives
from distributed.models import (
    BLOCKS,
    EVEN,
    HIDDEN,
    RECIPES,
    WIDTH,
    batch,
    linears,
    make,
    recipes,
    reduces,
    same_bytes,
    shard,
    shardings,
    train,
)
from fp8rs.optim import AdamW, MasterWeights
from fp8rs.optim.optim_param import OptimParam
from fp8rs.tensor.quantized import QuantizedTensor
from internals import local_of, storage_of

kinds = pytest.mark.parametrize("masters", [True, False], ids=["masters", "no masters"])


def make_fp8(hidden, recipe, rig, **options):
    return make(
        HIDDEN[hidden], recipe=RECIPES[recipe], device=rig.device, fp8_weights=True, **options
    )


def set_gradients(model, rig, step):
    """Gradients that are the same whole ones for any number of ranks, whatever computes them."""
    generator = torch.Generator().manual_seed(100 + step)
    for _, parameter in sorted(model.named_parameters()):
        grad = torch.randn(parameter.shape, generator=generator).to(rig.device)
        if isinstance(parameter, DTensor):
            from torch.distributed.tensor import distribute_tensor

            grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
        parameter.grad = grad.to(parameter.dtype)


def whole_values(model):
    """The dequantized whole weights and the plain parameters, by name."""
    values = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
            plain = local.dequantize() if isinstance(local, QuantizedTensor) else local
            parameter = DTensor.from_local(
                plain,
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            ).full_tensor()
        elif isinstance(parameter, QuantizedTensor):
            parameter = parameter.dequantize()
        values[name] = parameter.detach().clone()
    return values


def masters_of(model, optimizer):
    """The whole masters, by the names of their parameters."""
    masters = {}
    for name, parameter in model.named_parameters():
        master = optimizer.state[parameter].get("master")
        if master is not None:
            full_master = master.full_tensor() if isinstance(master, DTensor) else master
            masters[f"master of {name}"] = full_master.clone()
    return masters


def step(model, optimizer, rig, n):
    set_gradients(model, rig, n)
    optimizer.step()
    optimizer.zero_grad()


@ranks(1, 2, 4)
@pytest.mark.parametrize("hidden", [*HIDDEN, *BATCHES])
@recipes
@kinds
def test_steps_are_those_of_the_whole_model(rig, hidden, recipe, masters):
    """With masters and without: random numbers go by the place in the whole weight."""
    hidden = (HIDDEN | BATCHES)[hidden]
    reference = make_any(hidden, recipe=recipe, device=rig.device, fp8_weights=True)
    model = shard_any(copy.deepcopy(reference), mesh=rig.mesh())
    options = {"lr": 1e-2, "master_weights": masters, "seed": 3}
    optimizers = AdamW(reference.parameters(), **options), AdamW(model.parameters(), **options)
    for n in range(3):
        for m, optimizer in zip((reference, model), optimizers, strict=True):
            if recipe == "delayed":
                m(batch(rig, n)).sum().backward()  # histories roll after a forward
                optimizer.zero_grad()
            step(m, optimizer, rig, n)
        wanted = whole_values(reference)
        actual = whole_values(model)
        for name, value in wanted.items():
            assert same_bytes(actual[name], value), (name, n)


@ranks(2)
@shardings
@recipes
@kinds
def test_a_step_while_weights_are_gathered_is_as_any_other(rig, hidden, recipe, masters):
    """After an evaluation between backward and step: FSDP2 leaves the root's weights whole."""
    results = []
    for evaluates in (False, True):
        model = shard(make_fp8(hidden, recipe, rig), rig)
        optimizer = AdamW(model.parameters(), lr=1e-2, master_weights=masters)
        for n in range(3):
            model(batch(rig, n)).square().mean().backward()
            if evaluates:
                with torch.no_grad():
                    model.eval()(batch(rig, 9))
                model.train()
                assert not isinstance(model.head.weight, DTensor)
            optimizer.step()
            optimizer.zero_grad()
        results.append([whole_values(model), model(batch(rig, 9)).detach()])
    (wanted, output), (got, other_output) = results
    assert same_bytes(other_output, output)
    for name, value in wanted.items():
        assert same_bytes(got[name], value), name


WRITES = {
    "parameter": lambda p, name, model: p.fill_(3.0),
    "local tensor": lambda p, name, model: p.to_local().fill_(3.0),
    "data": lambda p, name, model: p.data.fill_(3.0),
    "state dict": lambda p, name, model: model.state_dict()[name].fill_(3.0),
}


@ranks(2)
@pytest.mark.parametrize("way", list(WRITES))
@pytest.mark.parametrize("fp8_weights", [True, False], ids=["FP8 weights", "bf16"])
def test_masters_follow_what_is_written_to_shards(rig, way, fp8_weights):
    model = make(EVEN, device=rig.device, dtype=torch.bfloat16, fp8_weights=fp8_weights)
    shard(model, rig)
    optimizer = AdamW(model.parameters(), lr=0.0)
    step(model, optimizer, rig, 0)
    names = [f"{name}.weight" for name in linears(model)]
    for name, parameter in model.named_parameters():
        if name in names:
            with torch.no_grad():
                WRITES[way](parameter, name, model)
    step(model, optimizer, rig, 1)
    for name in names:
        master = optimizer.state[model.get_parameter(name)]["master"].full_tensor()
        assert ((master - 3).abs() <= 3 / 16).all(), name


@ranks(2)
@kinds
def test_larger_weights_that_are_loaded_are_not_cut_to_the_scales_before(rig, masters):
    """By delayed scaling: also where a step of the optimizer comes before the next forward."""
    model, other = (shard(make_fp8("even", "delayed", rig), rig) for _ in range(2))
    with torch.no_grad():
        for layer in linears(model).values():
            layer.weight.mul_(4)
    optimizer = AdamW(other.parameters(), lr=0.0, master_weights=masters)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    set_gradients(other, rig, 0)
    optimizer.step()
    for name, value in whole_values(model).items():
        assert torch.allclose(whole_values(other)[name], value, rtol=2**-3, atol=1e-3), name


@ranks(2)
@shardings
@recipes
@pytest.mark.parametrize("first", ["weights", "masters"])
def test_a_checkpoint_is_loaded_in_either_order(rig, hidden, recipe, first):
    """Masters are read from weights unless they round to them, as a checkpoint's masters do."""

    def begin(seed):
        model = shard(make_fp8(hidden, recipe, rig, seed=seed), rig)
        return model, AdamW(model.parameters(), lr=1e-2)

    def train(model, optimizer, start):
        for n in (start, start + 1):
            model(batch(rig, n)).sum().backward()
            step(model, optimizer, rig, n)

    model, optimizer = begin(0)
    train(model, optimizer, 0)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, resumed = begin(1)
    train(other, resumed, 4)
    loads = [lambda: other.load_state_dict(saved[0]), lambda: resumed.load_state_dict(saved[1])]
    for load in loads if first == "weights" else reversed(loads):
        load()
    for m, o in ((model, optimizer), (other, resumed)):
        m(batch(rig, 0)).sum()
        step(m, o, rig, 8)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        if "master" in optimizer.state[p]:
            masters = (o.state[x]["master"] for o, x in ((optimizer, p), (resumed, q)))
            assert same_bytes(*(local_of(m) for m in masters))
    wanted = whole_values(model)
    actual = whole_values(other)
    assert wanted.keys() == actual.keys()
    for name, value in wanted.items():
        # Histories, of which delayed scales come, are in no state dict.
        if recipe != "delayed" or value.dim() == 1:
            assert same_bytes(actual[name], value), name


@ranks(2)
@shardings
@pytest.mark.parametrize("full", [True, False], ids=["full", "sharded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_masters_beyond_their_scale_stay_where_a_state_dict_comes_back(rig, hidden, full, dtype):
    """By delayed scaling, whose codes are the largest one there: they say nothing of the master."""
    keep = {"preserve_high_precision_init_val": True, "dtype": dtype}
    model = shard(make_fp8(hidden, "delayed", rig, **keep), rig)
    optimizer = AdamW(model.parameters(), lr=0.1)
    step(model, optimizer, rig, 0)
    options = StateDictOptions(full_state_dict=full)
    states = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    before = masters_of(model, optimizer)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states[0],
        optim_state_dict=states[1],
        options=options,
    )
    optimizer.param_groups[0]["lr"] = 0.0
    step(model, optimizer, rig, 1)
    for name, master in masters_of(model, optimizer).items():
        assert same_bytes(master, before[name]), name


@ranks(2, 4)
@shardings
@recipes
def test_steps_before_the_first_forward_are_those_of_the_whole_model(rig, hidden, recipe):
    """FSDP2 pads short shards at that forward. Masters do not count it as a write."""
    reference = make_fp8(hidden, recipe, rig)
    model = shard(copy.deepcopy(reference), rig)
    optimizers = tuple(AdamW(m.parameters(), lr=0.1) for m in (reference, model))
    for n in range(5):
        for m, optimizer in zip((reference, model), optimizers, strict=True):
            if n >= 3:
                m(batch(rig, n)).sum().backward()
            step(m, optimizer, rig, n)
        wanted, actual = (
            {**whole_values(m), **masters_of(m, o)}
            for m, o in zip((reference, model), optimizers, strict=True)
        )
        for name, value in wanted.items():
            assert same_bytes(actual[name], value), (name, n)


@ranks(2)
@shardings
@recipes
def test_masters_are_read_from_fp8_weights_only_after_foreign_writes(rig, hidden, recipe):
    """Training alone writes nothing that masters would have to follow; a loaded model does."""
    model = make_fp8(hidden, recipe, rig)
    shard(model, rig)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    followed = []
    read_codes = OptimParam.read_codes

    def counting_read_codes(*args):
        followed.append(args)
        return read_codes(*args)

    OptimParam.read_codes = counting_read_codes
    try:
        for n in range(3):
            if n:  # a step before the first forward, at which FSDP2 pads
                model(batch(rig, n).to(model.head.bias.dtype)).sum().backward()
            else:
                set_gradients(model, rig, n)
            optimizer.step()
            optimizer.zero_grad()
        assert not followed
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        set_gradients(model, rig, 3)
        optimizer.step()
    finally:
        OptimParam.read_codes = read_codes
    assert len(followed) == sum("master" in state for state in optimizer.state.values()) > 3


@ranks(2)
@recipes
@kinds
def test_all_reduces_of_a_step(rig, recipe, masters):
    """One all-reduce of the amaxes of all weights, or none if no scale is shared.

    With delayed scaling, one of all scales and one of the histories. The forward compares the
    scales in one all-reduce, since a rank may have written alone.
    """
    model = shard(make_fp8("even", recipe, rig), rig)
    optimizer = AdamW(model.parameters(), lr=1e-2, master_weights=masters)
    for n in range(3):
        model(batch(rig, n)).square().mean().backward()
        with Collectives() as collectives:
            optimizer.step()
        optimizer.zero_grad()
        with Collectives() as forward:
            loss = model(batch(rig, n)).square().mean()
        with Collectives() as backward:
            loss.backward()
        assert not reduces(backward)
        optimizer.zero_grad()
        count = len(reduces(collectives))
        cut = recipe in BLOCKS and not recipe.startswith("rowwise")  # 48 rows on 2 ranks
        assert len(reduces(forward)) == (not recipe.startswith("rowwise"))
        assert count == {"current": 1, "delayed": 2}.get(recipe, int(cut)), (count, n)


@ranks(2, 4)
@recipes
def test_bytes_gathered(rig, recipe):
    """A byte a parameter, and scales; in the backward the same again, but for the root's."""
    model = shard(make_fp8("even", recipe, rig), rig)
    with Collectives() as forward:
        loss = model(batch(rig)).square().mean()
    with Collectives() as backward:
        loss.backward()
    gathered = [
        sum(c.nbytes for c in collectives.calls if c.kind == "gather")
        for collectives in (forward, backward)
    ]
    weights = sum(layer.weight.numel() for layer in linears(model).values())
    plain = 4 * sum(
        p.numel() for n, p in model.named_parameters() if p.dim() == 1 or "weight" not in n
    )
    of_weights = gathered[0] - plain
    if recipe in ("current", "delayed"):
        assert of_weights == weights
    elif recipe.startswith("rowwise"):
        assert of_weights == weights + 4 * sum(m.weight.shape[0] for m in linears(model).values())
    elif recipe == "mxfp8 of 1x32":
        assert 2 * weights < of_weights <= 2 * weights * (1 + 4 / 32)
    else:
        assert weights < of_weights <= weights * 1.1
    # The root's own, which are not resharded: each rank's part, and a bias of fp32.
    local = model.head.weight.to_local()
    part = sum(p.data.numel() for p in local.planes if p is not None)
    if not local.format.per_tensor:
        part += sum(p.scale.nbytes for p in local.planes if p is not None)
    assert gathered[0] - gathered[1] == rig.world_size * part + 4 * WIDTH


@ranks(1, 2)
@shardings
@recipes
def test_masters_begin_with_the_values_before_rounding(rig, hidden, recipe):
    plain = make(HIDDEN[hidden], recipe=None, device=rig.device)
    model = make_fp8(hidden, recipe, rig, preserve_high_precision_init_val=True)
    shard(model, rig)
    optimizer = AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    set_gradients(model, rig, 0)
    optimizer.step()
    for name, layer in linears(model).items():
        wanted = linears(plain)[name].weight
        master = optimizer.state[layer.weight]["master"].full_tensor()
        assert same_bytes(master, wanted.detach())
        assert layer.weight.to_local().get_high_precision_init_val() is None


@ranks(1, 2, 4)
@shardings
@recipes
@pytest.mark.parametrize("weights", ["fp8", "master"])
def test_deferred_init_is_the_same_for_any_number_of_ranks(rig, hidden, recipe, weights):
    torch.manual_seed(5)
    with torch.device("meta"):
        model = make(
            HIDDEN[hidden],
            recipe=RECIPES[recipe],
            device="meta",
            seed=5,
            fp8_weights=weights == "fp8",
        )
    shard(model, rig)
    model.to_empty(device=rig.device)
    torch.manual_seed(11)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    actual = whole_values(model)
    # The numbers of one process, by the definition: counted over the whole parameter.
    torch.manual_seed(11)
    for name, layer in linears(model).items():
        bound = layer.weight.shape[1] ** -0.5
        for kind in ("weight", "bias"):
            seed = int(torch.empty((), dtype=torch.int64).random_())
            wanted = torch.empty(getattr(layer, kind).shape, device=rig.device)
            torch.ops.fp8rs.random_uniform_(wanted, seed, 0, -bound, bound)
            if kind == "weight" and weights == "fp8":
                wanted = requantized(wanted, layer.weight.to_local().spec)
            assert same_bytes(actual[f"{name}.{kind}"], wanted), (name, kind)
    assert model(batch(rig)).isfinite().all()


def requantized(values, spec):
    from fp8rs.quantize.cast import quantize_planes

    row, _ = quantize_planes(spec, values, True, False)
    return row.dequantize(torch.float32)


@ranks(2)
@pytest.mark.parametrize("masters", [True, False])
def test_a_nan_on_one_rank_reaches_all(rig, masters):
    for recipe in ("current", "delayed"):
        model = shard(make_fp8("even", recipe, rig), rig)
        optimizer = AdamW(model.parameters(), master_weights=masters)
        model(batch(rig)).sum().backward()
        if rig.rank == 1:
            model.blocks[0].up.weight.grad.to_local()[0, 0] = float("nan")
        optimizer.step()
        scale = storage_of(model.blocks[0].up.weight).any_plane.scale
        assert scale.isnan()
        other = storage_of(model.blocks[1].up.weight).any_plane.scale
        assert other.isfinite()


@ranks(2)
def test_training_lowers_the_loss(rig):
    from distributed.models import train

    for recipe in RECIPES:
        model = make_fp8("even", recipe, rig, preserve_high_precision_init_val=True)
        reference = make(EVEN, recipe=RECIPES[recipe], device=rig.device)
        losses = []
        for m in (shard(model, rig), shard(reference, rig)):
            optimizer = AdamW(m.parameters(), lr=1e-2)
            losses.append(train(m, optimizer, [batch(rig, n % 7) for n in range(8)]))
        # Losses of the first batch, before any step and after seven.
        assert losses[0][-1] < 0.85 * losses[0][0], losses
        for a, b in zip(*losses, strict=True):
            assert abs(a - b) <= 1e-3 * b, losses


def test_it_is_a_module_like_any_other():
    torch.manual_seed(0)
    with fp8rs.quantized_init("current"):
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(torch.randn(4, 32)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    twin = copy.deepcopy(model)
    x = torch.randn(4, 32)
    assert torch.equal(twin(x), model(x))
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(x), model(x))


@ranks(1, 2)
@recipes
def test_a_step_with_a_learning_rate_of_0_keeps_codes_and_scales(rig, recipe):
    """torch takes such a step to create the state of a fresh optimizer."""
    model = shard(make_fp8("uneven", recipe, rig), rig)
    optimizer = AdamW(model.parameters(), lr=0.5, master_weights=False)
    step(model, optimizer, rig, 0)
    # Smaller values, whose scales the step would compute again.
    with torch.no_grad():
        for layer in linears(model).values():
            local_of(layer.weight).mul_(0.6)
    model.state_dict()  # synchronizes scales
    before = [[t.clone() for t in storage_of(p).tensors()] for p in fp8_of(model)]
    optimizer.param_groups[0]["lr"] = 0.0
    moments = [optimizer.state[p]["exp_avg"].to_local().clone() for p in fp8_of(model)]
    step(model, optimizer, rig, 1)
    for p, tensors, moment in zip(fp8_of(model), before, moments, strict=True):
        assert all(same_bytes(a, b) for a, b in zip(storage_of(p).tensors(), tensors, strict=True))
        assert not torch.equal(optimizer.state[p]["exp_avg"].to_local(), moment)


@ranks(2)
@recipes
@pytest.mark.parametrize("kind", ["AdamW", "MasterWeights"])
def test_the_step_that_creates_masters_keeps_codes_and_scales_if_its_learning_rate_is_0(
    rig, recipe, kind
):
    """torch takes such a step before it loads a state into a fresh optimizer."""
    model = shard(make_fp8("uneven", recipe, rig), rig)
    train(model, AdamW(model.parameters(), lr=1e-2), [batch(rig, n) for n in range(3)])
    before = [[t.clone() for t in storage_of(p).tensors()] for p in fp8_of(model)]
    params = list(model.parameters())
    fresh = AdamW(params) if kind == "AdamW" else MasterWeights(params, torch.optim.Adam)
    get_optimizer_state_dict(model, fresh)
    for p, tensors in zip(fp8_of(model), before, strict=True):
        assert all(same_bytes(a, b) for a, b in zip(storage_of(p).tensors(), tensors, strict=True))
        values = local_of(p).dequantize(torch.float32)
        assert same_bytes(local_of(fresh.state[p]["master"]), values)


def fp8_of(model):
    return [layer.weight for layer in linears(model).values()]
