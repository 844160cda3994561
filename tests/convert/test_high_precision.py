"""convert_to_high_precision: layers and experts are what they were before a conversion."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize

import fp8rs
from convert.contents import contents
from distributed import ranks
from distributed.models import RECIPES, recipes
from language_models import mixture


class Subclass(nn.Linear):
    """A subclass that inherits its forward."""


class Model(nn.Module):
    """Linear layers, one of them of a subclass, with a hook and a norm."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.norm = nn.LayerNorm(64)
        self.down = Subclass(64, 32, bias=False)
        self.up.register_forward_hook(lambda *args: None)
        self.down.weight.of_group = "last"

    def forward(self, x):
        return self.down(self.norm(self.up(x)))


def build(device):
    torch.manual_seed(0)
    return Model().to(device)


def inputs(device):
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).to(device)


def linears(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def train(model, device):
    """Take a step."""
    optimizer = fp8rs.optim.AdamW(model.parameters(), lr=1e-2)
    model(inputs(device)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def without_weights(entries, model):
    """Return `contents` without the values of parameters."""
    names = {name for name, _ in model.named_parameters()}
    return {key: value for key, value in entries.items() if key[0] not in names}


@recipes
def test_master_weights_converted_back_are_those_before(device, recipe):
    """Classes, parameter objects, hooks, buffers and attributes are equal, and so are outputs."""
    model = build(device)
    before = contents(model)
    y = model(inputs(device))
    fp8rs.convert_to_float8_training(model, recipe=RECIPES[recipe])
    assert not torch.equal(model(inputs(device)), y)
    assert fp8rs.convert_to_high_precision(model) is model
    assert contents(model) == before
    assert torch.equal(model(inputs(device)), y)


@recipes
def test_fp8_weights_converted_back_have_their_values(device, recipe):
    model = build(device)
    before = contents(model)
    fp8rs.convert_to_float8_training(model, recipe=RECIPES[recipe], fp8_weights=True)
    train(model, device)
    values = {name: layer.weight.dequantize() for name, layer in linears(model).items()}
    fp8rs.convert_to_high_precision(model)
    assert without_weights(contents(model), model) == without_weights(before, model)
    for name, layer in linears(model).items():
        assert type(layer.weight) is nn.Parameter
        assert torch.equal(layer.weight, values[name])
    assert model.down.weight.of_group == "last"
    assert not hasattr(model.down.weight, "_storage"), "it would keep the codes alive"
    train(model, device)


@pytest.mark.parametrize("fp8_weights", [False, True])
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_the_report_and_a_second_conversion_find_no_first_one(device, recipe, fp8_weights):
    model = build(device)
    planned = fp8rs.report(model, recipe="rowwise")
    options = {"recipe": recipe, "fp8_weights": fp8_weights, "filter_fqns": ["up"]}
    fp8rs.convert_to_float8_training(model, **options)
    fp8rs.convert_to_high_precision(model)
    assert fp8rs.report(model, recipe="rowwise") == planned
    fp8rs.convert_to_float8_training(model, recipe="rowwise")
    assert fp8rs.report(model) == planned
    train(model, device)


@pytest.mark.parametrize("mode", ["fp8", "gather"])
@pytest.mark.parametrize("fp8_weights", [False, True])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_experts_of_transformers_are_converted_back(kind, fp8_weights, mode):
    model = mixture(kind)
    before = contents(model)
    options = {"experts": mode, "fp8_weights": fp8_weights, "filter_fqns": ["lm_head"]}
    fp8rs.convert_to_float8_training(model, **options)
    fp8rs.convert_to_high_precision(model)
    if fp8_weights:
        assert without_weights(contents(model), model) == without_weights(before, model)
    else:
        assert contents(model) == before
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    tokens = torch.arange(64).view(2, 32)
    assert torch.equal(model(tokens).logits, plain(tokens).logits)


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_modules_that_were_built_with_a_recipe_get_plain_layers(device, recipe):
    mlp = fp8rs.nn.LayerNormMLP(32, 64, recipe=recipe)
    model = nn.Sequential(fp8rs.nn.Linear(32, 32, recipe=recipe), mlp).to(device)
    model(inputs(device)).sum().backward()
    fp8rs.convert_to_high_precision(model)
    assert {type(layer) for layer in linears(model).values()} == {nn.Linear}
    assert not list(model.buffers())
    assert not any(m._forward_pre_hooks for m in model.modules())
    model(inputs(device)).sum().backward()


def test_a_grouped_linear_is_converted_back(device):
    model = fp8rs.nn.GroupedLinear(2, 32, 32, device=device)
    before = contents(model)
    fp8rs.convert_to_float8_training(model, experts="gather")
    fp8rs.convert_to_high_precision(model)
    assert contents(model) == before


@recipes
@pytest.mark.parametrize("fp8_weights", [False, True])
def test_tied_weights_stay_tied(device, recipe, fp8_weights):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).to(device)
    fp8rs.convert_to_float8_training(model, recipe=RECIPES[recipe], fp8_weights=fp8_weights)
    weight = model[1].weight = model[0].weight
    values = weight.dequantize() if fp8_weights else weight.detach().clone()
    fp8rs.convert_to_high_precision(model)
    assert model[0].weight is model[1].weight is weight
    assert type(weight) is nn.Parameter
    assert torch.equal(weight, values)


@recipes
def test_the_rest_of_a_model_stays_in_fp8(device, recipe):
    """With delayed scaling, the scales of the other layers are updated as before."""
    losses = []
    for back in (False, True):
        model = nn.ModuleDict({"other": build(device), "fp8": build(device)})
        fp8rs.convert_to_float8_training(model, recipe=RECIPES[recipe])
        train(model["fp8"], device)
        if back:
            fp8rs.convert_to_high_precision(model["other"])
            assert [type(m) for m in linears(model["other"]).values()] == [nn.Linear, Subclass]
            assert fp8rs.report(model).converted == ("fp8.up", "fp8.down")
        for _ in range(2):
            train(model["fp8"], device)
        losses.append(model["fp8"](inputs(device)).square().sum())
    assert torch.equal(*losses)


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_copies_are_converted_back_alone(device, recipe):
    model = build(device)
    fp8rs.convert_to_float8_training(model, recipe=recipe)
    for part in (copy.deepcopy(model), copy.deepcopy(model.up)):
        fp8rs.convert_to_high_precision(part)
        assert not any(isinstance(m, fp8rs.nn.Linear) for m in part.modules())
    assert isinstance(model.up, fp8rs.nn.Linear)
    train(model, device)


# --- refused, and nothing is changed --------------------------------------------------------------


def parametrized(model):
    parametrize.register_parametrization(model.down, "weight", nn.Identity())


def derived(model):
    model.down = type("Mine", (fp8rs.nn.Linear,), {})(64, 32)


def with_a_forward_of_accelerate(model):
    model.down.forward = model.down.forward


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (parametrized, "down is a Parametrized.*remove_parametrizations"),
        (derived, "down is a Mine, a class that was derived"),
        (with_a_forward_of_accelerate, "down has a forward that is an attribute of the instance"),
    ],
)
@pytest.mark.parametrize("fp8_weights", [False, True])
def test_layers_that_were_changed_are_refused(change, message, fp8_weights):
    model = fp8rs.convert_to_float8_training(build("cpu"), fp8_weights=fp8_weights)
    change(model)
    before = contents(model)
    with pytest.raises(ValueError, match=message):
        fp8rs.convert_to_high_precision(model)
    assert contents(model) == before


def test_fp8_weights_with_a_weak_reference_are_refused():
    model = fp8rs.convert_to_float8_training(build("cpu"), fp8_weights=True)
    before = contents(model)
    reference = weakref.ref(model.down.weight)
    with pytest.raises(RuntimeError, match=r"of down cannot be dequantized in place while .* Free"):
        fp8rs.convert_to_high_precision(model)
    assert contents(model) == before
    assert reference() is model.down.weight


@ranks(1)
def test_sharded_models_are_refused(rig):
    """Also while their weights are gathered."""
    for fp8_weights in (False, True):
        for reshard in (False, True):
            model = fp8rs.convert_to_float8_training(build(rig.device), fp8_weights=fp8_weights)
            fully_shard(model, mesh=rig.mesh(), reshard_after_forward=reshard)
            with torch.no_grad():
                y = model(inputs(rig.device))
            with pytest.raises(ValueError, match="the weight of up is sharded or parallelized"):
                fp8rs.convert_to_high_precision(model)
            with torch.no_grad():
                assert torch.equal(model(inputs(rig.device)), y)


def test_arguments_that_are_no_modules_are_refused():
    with pytest.raises(TypeError, match="module must be"):
        fp8rs.convert_to_high_precision("model")
