"""In-place arithmetic on FP8 weights that changes values by less than the distance of two codes."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fp8rs
from distributed import ranks
from distributed.models import RECIPES, recipes
from fp8rs.optim import AdamW, MasterWeights
from internals import local_of, state_of

OPTIMIZERS = {
    "AdamW": lambda params: AdamW(params, lr=0.0),
    "AdamW, stochastic": lambda params: AdamW(params, lr=0.0, stochastic_rounding=True),
    "MasterWeights": lambda params: MasterWeights(params, torch.optim.SGD, lr=0.0),
}

#: Writes that change each element by a few percent or less. Operands are exact in bf16, because the
#: master gets them in float32.
WRITES = {
    "mul_": lambda w: w.mul_(0.98),
    "of an alias": lambda w: w.detach().mul_(0.98),
    "foreach": lambda w: torch._foreach_mul_([w], 0.98),
    "add_": lambda w: w.add_(torch.full_like(w, 2**-10)),
    "add_ of itself": lambda w: w.add_(w, alpha=-0.02),
    "lerp_": lambda w: w.lerp_(torch.zeros_like(w), 0.02),
    "addcmul_": lambda w: w.addcmul_(torch.full_like(w, 2**-7), torch.full_like(w, 2**-3)),
    "a flat view": lambda w: w.view(-1).mul_(0.98),
    "rows": lambda w: w[8:40].mul_(0.98),
    "clamp_": lambda w: w.clamp_(-0.1, 0.1),
    "masked": lambda w: w.masked_fill_(mask_like(w), 0.01),
}


def mask_like(weight):
    return torch.arange(weight.numel(), device=weight.device).view(weight.shape) % 3 == 0


def model_of(recipe, device="cpu", dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False, device=device, dtype=dtype))
    recipe = RECIPES[recipe]
    return fp8rs.convert_to_float8_training(model, recipe=recipe, fp8_weights=True, **options)


def step(model, optimizer):
    weight = model[0].weight
    model(torch.ones(4, 64, device=weight.device, dtype=weight.dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def master_of(optimizer, weight):
    return local_of(optimizer.state[weight]["master"])


def assert_rounded(weight, master, *, stochastic=False):
    """The codes of a weight are its master, rounded to one of the two nearest codes."""
    error = (local_of(weight).dequantize(torch.float32) - master).abs()
    # E4M3 has three bits behind the point, so neighbours are at most an eighth of a value apart.
    # Rounding to the nearest is off by at most a sixteenth.
    relative = 1 / 8 if stochastic else 1 / 16
    assert (error <= 1.01 * relative * master.abs() + 1e-3 * master.abs().max()).all()


@recipes
@pytest.mark.parametrize("write", list(WRITES))
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arithmetic_on_a_weight_changes_its_master(device, recipe, write, kind, dtype):
    model = model_of(recipe, device, dtype)
    weight = model[0].weight
    optimizer = OPTIMIZERS[kind](model.parameters())
    step(model, optimizer)
    expected = master_of(optimizer, weight).clone()
    with torch.no_grad():
        for _ in range(3):
            WRITES[write](weight)
            WRITES[write](expected)
    assert_rounded(weight, expected)
    step(model, optimizer)
    torch.testing.assert_close(master_of(optimizer, weight), expected, rtol=1e-6, atol=1e-9)
    assert_rounded(weight, expected, stochastic="stochastic" in kind)


@recipes
def test_arithmetic_before_the_first_step_changes_the_initial_values(recipe):
    model = model_of(recipe, preserve_high_precision_init_val=True)
    weight = model[0].weight
    optimizer = AdamW(model.parameters(), lr=0.0)
    expected = weight.get_high_precision_init_val().clone()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        weight.mul_(0.98)
        weight[:32].mul_(1.01)
        expected.mul_(0.98)
        expected[:32].mul_(1.01)
    assert torch.equal(weight.get_high_precision_init_val(), expected)
    assert not torch.equal(copied[0].weight.get_high_precision_init_val(), expected)
    step(model, optimizer)
    assert torch.equal(master_of(optimizer, weight), expected)


@ranks(2)
@recipes
def test_repeated_decay_of_shards_equals_that_of_plain_weights(rig, recipe):
    model = model_of(recipe, rig.device, preserve_high_precision_init_val=True)
    plain_weight = model[0].weight.get_high_precision_init_val().clone()
    fully_shard(model[0], mesh=rig.mesh())
    fully_shard(model, mesh=rig.mesh())
    weight = model[0].weight
    optimizer = AdamW(model.parameters(), lr=0.0)
    for _ in range(20):
        step(model, optimizer)
        with torch.no_grad():
            weight.mul_(0.98)
            plain_weight.mul_(0.98)
    expected = plain_weight.chunk(2)[rig.rank].to(rig.device)
    torch.testing.assert_close(master_of(optimizer, weight), expected, rtol=1e-5, atol=0.0)
    step(model, optimizer)
    assert_rounded(weight, expected)


@recipes
def test_masters_come_back_with_their_codes_after_arithmetic_on_other_values(recipe):
    """An average is swapped in, changed and swapped out."""
    model = model_of(recipe)
    weight = model[0].weight
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        step(model, optimizer)
    before = master_of(optimizer, weight).clone()
    with torch.no_grad():
        codes = weight.detach().clone()
        weight.copy_(0.9 * weight.dequantize())
        weight.mul_(0.5)
        weight.copy_(codes)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[0]["weight_decay"] = 0.0
    step(model, optimizer)
    assert torch.equal(master_of(optimizer, weight), before)


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_arithmetic_changes_masters_that_were_loaded(kind):
    """The optimizer has not stepped since."""
    model = model_of("current")
    weight = model[0].weight
    optimizer = OPTIMIZERS[kind](model.parameters())
    step(model, optimizer)
    saved = optimizer.state_dict()
    other = OPTIMIZERS[kind](model.parameters())
    other.load_state_dict(saved)
    before = master_of(optimizer, weight).clone()
    with torch.no_grad():
        weight.mul_(0.98)
    assert torch.equal(master_of(other, weight), before * 0.98)
    assert torch.equal(master_of(optimizer, weight), before), "of another optimizer"


# --- the warning ---------------------------------------------------------------------------------

lost = pytest.warns(UserWarning, match="arithmetic on the FP8 weight 0.weight had no effect")


@recipes
def test_arithmetic_without_effect_warns_once_for_each_model(device, recipe):
    for _ in range(2):
        model = model_of(recipe, device)
        with torch.no_grad(), lost as recorded_warnings:
            model[0].weight.mul_(0.98)
            if device.type == "cuda":
                torch.cuda.synchronize()
            model(torch.ones(4, 64, device=device))  # on CUDA, a later forward or write warns
        assert len(recorded_warnings) == 1
        if device.type == "cpu":
            assert recorded_warnings[0].filename == __file__
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            model[0].weight.mul_(0.98)


@ranks(2)
def test_arithmetic_without_effect_on_shards_warns(rig):
    model = model_of("rowwise", rig.device)
    fully_shard(model, mesh=rig.mesh())
    with torch.no_grad(), lost:
        model[0].weight.mul_(0.98)
        if rig.device_type == "cuda":
            torch.cuda.synchronize()
        model(torch.ones(4, 64, device=rig.device))


def quiet_writes(weight):
    """Writes that have an effect, or do not change a value."""
    weight.mul_(1.0)
    weight.mul_(0.5)
    weight.clamp_(-100, 100)
    weight.copy_(weight.dequantize())
    weight.copy_(weight.detach().clone())
    weight[:8].zero_()
    weight.normal_()
    weight.copy_(1.001 * weight.dequantize())  # values of another tensor are rounded


@recipes
@pytest.mark.parametrize("keep", [False, True])
def test_other_writes_do_not_warn(recipe, keep):
    model = model_of(recipe, preserve_high_precision_init_val=keep)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet_writes(model[0].weight)
        if keep:
            model[0].weight.mul_(0.98)
    assert state_of(model[0]).lost_writes.detects


@pytest.mark.filterwarnings("ignore:.* FP8 weights, and keeps no masters")
@pytest.mark.parametrize("copied", [False, True], ids=["converted", "copied"])
def test_arithmetic_between_steps_without_masters_warns(copied):
    """Steps have a warning of their own."""
    model = model_of("current")
    if copied:
        model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    for _ in range(2):
        step(model, optimizer)
    with torch.no_grad(), lost:
        model[0].weight.mul_(0.98)


@pytest.mark.filterwarnings("ignore:.*FP8 weights, and keeps no masters")
@pytest.mark.parametrize("kind", ["no masters", *OPTIMIZERS])
def test_a_write_of_nothing_new_keeps_the_state_of_a_trained_weight(kind):
    """As the step of length 0 by which torch creates the state of an optimizer."""
    model = model_of("delayed")
    weight = model[0].weight
    if kind == "no masters":
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    else:
        optimizer = OPTIMIZERS[kind](model.parameters())
    for _ in range(2):
        step(model, optimizer)
    before = {name: buffer.clone() for name, buffer in model[0].named_buffers()}
    with torch.no_grad():
        weight.add_(torch.zeros_like(weight))
        weight.copy_(weight.dequantize())
    for name, buffer in model[0].named_buffers():
        assert torch.equal(buffer, before[name]), name
