"""convert_to_float8_training: layers, arguments, and a model of transformers."""

import copy
import dataclasses
import logging
import warnings
import weakref
from typing import get_type_hints

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import Shard, distribute_tensor

import fp8rs
from convert.contents import Foreign, contents
from convert.torchao_configs import (
    NAMED,
    CastConfig,
    Float8LinearConfig,
    GemmConfig,
    ScalingGranularity,
    ScalingType,
)
from distributed import ranks
from distributed.models import Stack, batch, shard
from fp8rs import nn as fp8nn
from fp8rs.convert import fp8_weights
from fp8rs.convert.convert import convert_to_float8_training
from fp8rs.quantize.recipes import (
    DelayedScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    resolve_recipe,
)
from internals import replace_notice_logger, state_of
from language_models import llama, train_on
from saving import reloaded


class Model(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)
        )
        self.head = nn.Linear(16, 24, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def convert(module, **kwargs):
    kwargs.setdefault("enable_fsdp_float8_all_gather", False)
    return convert_to_float8_training(module, **kwargs)


def converted(module):
    return [name for name, m in module.named_modules() if isinstance(m, fp8nn.Linear)]


ALL = ["blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2", "head"]


def test_every_linear_is_swapped_in_place(device):
    model = Model().to(device)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    parameters = dict(model.named_parameters())
    assert convert(model, recipe="current") is model
    assert converted(model) == ALL
    for name, layer in layers.items():
        assert model.get_submodule(name) is layer, "the same object, of another class"
    for name, parameter in model.named_parameters():
        assert parameters[name] is parameter
    state = state_of(model.head)
    assert state.names == ALL
    assert [ref() for ref in state.layer_refs] == list(layers.values())
    assert all(state_of(layer) is state for layer in layers.values())
    model(torch.arange(5, device=device)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_default_recipe_is_current():
    assert convert(Model()).head.recipe == Float8CurrentScaling()


def test_recipes_by_object_and_name():
    recipe = DelayedScaling(margin=1)
    assert convert(Model(), recipe=recipe).head.recipe is recipe
    assert convert(Model(), recipe="delayed").head.recipe == DelayedScaling()


def test_hooks_and_training_mode_are_kept(device):
    model = Model().to(device).eval()
    calls = []
    model.head.register_forward_hook(lambda *_: calls.append("head"))
    convert(model)
    model(torch.arange(3, device=device))
    assert calls == ["head"]
    assert not model.head.training


def test_filter_fqns_match_parts_of_names():
    assert converted(convert(Model(), filter_fqns=["head", "blocks.1"])) == ALL[:2]
    with pytest.raises(TypeError, match="filter_fqns must be a collection of names"):
        convert(Model(), filter_fqns="head")


def test_classes_and_configs_are_not_recipes():
    with pytest.raises(TypeError, match=r"give Float8CurrentScaling\(\)"):
        convert(Model(), recipe=Float8CurrentScaling)
    with pytest.raises(TypeError, match=r"Float8LinearConfig\. Pass it as config"):
        convert(Model(), recipe=Float8LinearConfig())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fp8_weights": "yes"}, "fp8_weights must be a bool, not 'yes'"),
        (
            {"enable_fsdp_float8_all_gather": "no"},
            "enable_fsdp_float8_all_gather must be a bool, not 'no'",
        ),
        (
            {
                "fp8_weights": True,
                "enable_fsdp_float8_all_gather": True,
                "preserve_high_precision_init_val": 1,
            },
            "preserve_high_precision_init_val must be a bool, not 1",
        ),
        ({"filter_fqns": [3]}, "filter_fqns must have names, not 3"),
        ({"module_filter_fn": 3}, "module_filter_fn must be callable, not 3"),
    ],
)
def test_arguments_of_other_types_are_refused(arguments, message):
    model = Model()
    with pytest.raises(TypeError, match=message):
        convert(model, **arguments)
    assert converted(model) == []


def test_lazy_layers_are_not_converted():
    model = nn.Sequential(nn.LazyLinear(48), nn.Linear(48, 16))
    assert converted(convert(model)) == ["1"]
    assert model(torch.randn(2, 8)).shape == (2, 16)


def test_a_filter_that_matches_nothing_warns():
    with pytest.warns(UserWarning, match=r"has 'haed', 'blocks\.7', but no linear layer"):
        assert converted(convert(Model(), filter_fqns=["haed", "blocks.7"])) == ALL


def test_module_filter_fn_receives_module_and_name():
    names = []

    def keep(module, fqn):
        names.append(fqn)
        return module.out_features == 32

    assert converted(convert(Model(), module_filter_fn=keep)) == ["blocks.0.0", "blocks.1.0"]
    assert names == ALL


def layers_of(**shapes):
    with torch.device("meta"):
        return nn.ModuleDict({name: nn.Linear(*shape) for name, shape in shapes.items()})


@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "block", "mxfp8"])
def test_min_speedup_keeps_small_layers_in_high_precision(recipe):
    shapes = {"k": (4096, 1024), "small": (2048, 2048), "q": (4096, 4096), "up": (4096, 14336)}
    for tokens, expected in ((16384, ["q", "up"]), (8192, ["q", "up"]), (512, []), (1, [])):
        model = layers_of(**shapes)
        keep = fp8rs.min_speedup(tokens, 1.02, recipe=recipe)
        assert [name for name, layer in model.items() if keep(layer, name)] == expected
        with warnings.catch_warnings(record=True) as recorded_warnings:
            warnings.simplefilter("always")
            assert converted(convert(model, recipe=recipe, module_filter_fn=keep)) == expected
        assert bool(recorded_warnings) == (not expected)
    squares = layers_of(**{f"of {n}": (n, n) for n in (1024, 2048, 3072, 4096, 8192)})
    fast = [
        name
        for name, layer in squares.items()
        if fp8rs.min_speedup(layer.in_features, 1.02, recipe=recipe)(layer, name)
    ]
    assert fast == ["of 4096", "of 8192"]


def test_min_speedup_is_a_bound_and_combines_with_another_filter():
    model = layers_of(q=(4096, 4096), up=(4096, 14336), huge=(16384, 16384))
    counts = [
        sum(map(fp8rs.min_speedup(8192, bound), model.values(), model))
        for bound in (1.02, 1.3, 1.45, 2.0)
    ]
    assert counts == [3, 2, 1, 0]
    fast = fp8rs.min_speedup(8192)
    convert(model, module_filter_fn=lambda m, fqn: "up" not in fqn and fast(m, fqn))
    assert converted(model) == ["q", "huge"]


@pytest.mark.parametrize(
    "arguments, message",
    [({"tokens": 0}, "tokens must be at least 1, not 0"), ({"tokens": 1, "recipe": "fp8"}, "fp8")],
)
def test_wrong_arguments_of_min_speedup_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        fp8rs.min_speedup(**arguments)


def test_min_speedup_refuses_modules_that_are_not_linear_layers():
    with pytest.raises(TypeError, match=r"estimates nn\.Linear layers, not 'experts', a Gro"):
        fp8rs.min_speedup(8192)(fp8rs.nn.GroupedLinear(2, 16, 16), "experts")


def test_a_linear_root_is_converted_too(device):
    root = nn.Linear(16, 32, device=device)
    out = convert(root, recipe="delayed")
    assert isinstance(out, fp8nn.Linear)
    out(torch.ones(4, 16, device=device)).sum().backward()
    assert state_of(out).names == [""]


def test_tied_weights_stay_in_high_precision():
    model = Model(tied=True)
    with pytest.warns(UserWarning, match=r"head .*tied to embed\.weight"):
        convert(model)
    assert type(model.head) is nn.Linear
    assert model.head.weight is model.embed.weight
    assert converted(model) == ALL[:-1]


def test_two_tied_linears_name_each_other():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    model[2].weight = model[0].weight
    with pytest.warns(UserWarning, match="tied") as caught:
        convert(model)
    assert [str(w.message).split(":")[1] for w in caught] == [
        " the weight is tied to 2.weight",
        " the weight is tied to 0.weight",
    ]
    assert converted(model) == ["1"]


def test_a_module_under_two_names_is_not_tied():
    shared = nn.Linear(16, 16)
    model = nn.Sequential(shared, nn.GELU(), shared)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(model)
    assert isinstance(shared, fp8nn.Linear)
    assert state_of(shared).names == ["0"]


class Titan(nn.Linear):
    """A subclass with an additional attribute that inherits its forward."""

    def extra(self):
        return self.in_features


class Odd(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


def test_subclasses_that_inherit_their_forward_are_converted(device):

    torch.manual_seed(0)
    model = nn.Sequential(Titan(16, 16), nn.Linear(16, 16)).to(device)
    reference = copy.deepcopy(model)
    convert(model, recipe="current")
    assert isinstance(model[0], Titan)
    assert isinstance(model[0], fp8nn.linear.Float8Linear)
    assert model[0].extra() == 16
    reference[0] = nn.Linear(16, 16).to(device)
    reference[0].load_state_dict(model[0].state_dict())
    convert(reference, recipe="current")
    x = torch.ones(4, 16, device=device)
    assert torch.equal(model(x), reference(x))
    for copied in (copy.deepcopy(model), reloaded(model, weights_only=False)):
        assert type(copied[0]) is type(model[0])
        assert torch.equal(copied(x), model(x))


def test_subclasses_with_their_own_forward_are_not_converted(device):
    model = nn.Module()
    model.attention = nn.MultiheadAttention(16, 2, device=device)
    model.odd = Odd(16, 16, device=device)
    model.plain = nn.Linear(16, 16, device=device)
    convert(model)
    assert not isinstance(model.attention.out_proj, fp8nn.linear.Float8Linear)
    assert type(model.odd) is Odd
    x = torch.ones(3, 1, 16, device=device)
    model.attention(x, x, x)


def test_layers_whose_instance_has_a_forward_are_not_converted_and_warn():
    """The class's forward would not run."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[0].forward = model[0].forward
    with pytest.warns(UserWarning, match=r"^0 is not converted: an attribute of the instance"):
        convert(model)
    assert converted(model) == ["1"]


def test_converted_layers_are_logged(caplog):
    model = Model()
    model.experts = nn.Parameter(torch.zeros(4, 512, 512))
    model.odd = Odd(16, 16)
    with caplog.at_level("INFO", logger="fp8rs"):
        convert(model, recipe="current", filter_fqns=["head"])
    text = caplog.text
    assert "recipe 'current': 4 linear layers converted" in text
    assert "left in high precision (named by filter_fqns): head" in text
    assert "left in high precision (its class Odd overrides forward): odd" in text
    assert "left in high precision (not known as experts, see experts='gather'): experts" in text


def test_weights_of_other_dtypes_are_not_converted_and_warn():
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4))
    with pytest.warns(UserWarning, match=r"^0 is not converted: the weight is torch.float64"):
        convert(model)
    assert converted(model) == ["1"]


def test_one_warning_lists_the_layers_of_a_dtype():
    layers = (nn.Linear(4, 4, dtype=d) for d in [torch.float64] * 5 + [torch.float32])
    says = "^0, 1, 2 and 2 more are not converted: the weight is torch.float64"
    with pytest.warns(UserWarning, match=says) as caught:
        convert(nn.Sequential(*layers))
    assert len(caught) == 1


@pytest.mark.parametrize("earlier", [None, True, False])
@pytest.mark.parametrize("requested", [None, True, False])
def test_a_second_conversion_with_another_gather_is_refused(earlier, requested):
    model = nn.Sequential(nn.Linear(32, 32))
    fp8rs.convert_to_float8_training(model, enable_fsdp_float8_all_gather=earlier)
    if requested == earlier:
        fp8rs.convert_to_float8_training(model, enable_fsdp_float8_all_gather=requested)
        return
    says = f"enable_fsdp_float8_all_gather={earlier}, not {requested}"
    with pytest.raises(ValueError, match=says):
        fp8rs.convert_to_float8_training(model, enable_fsdp_float8_all_gather=requested)


def test_converting_twice_changes_nothing():
    model = convert(Model(), recipe="current")
    state = state_of(model.head)
    hooks = len(model._forward_pre_hooks)
    convert(model, recipe="current")
    assert state_of(model.head) is state
    assert len(model._forward_pre_hooks) == hooks


def test_converting_to_another_recipe_is_an_error():
    model = convert(Model(), recipe="current")
    says = r"blocks\.0\.0 is already in FP8, with recipe='current', not 'delayed'\. .*state dict"
    with pytest.raises(ValueError, match=says):
        convert(model, recipe="delayed")


def test_parts_of_a_model_may_have_different_recipes(device):
    model = Model().to(device)
    convert(model.blocks, recipe="delayed")
    convert(model, recipe="current", filter_fqns=["blocks"])
    assert [model.get_submodule(name).recipe.name for name in ALL] == ["delayed"] * 4 + ["current"]
    model(torch.arange(3, device=device)).sum().backward()


def test_manually_created_layers_join_the_model(device):
    model = nn.Sequential(fp8nn.Linear(16, 16), nn.Linear(16, 16)).to(device)
    convert(model)
    assert state_of(model[0]) is state_of(model[1])
    assert not model[0]._forward_pre_hooks
    model(torch.ones(2, 16, device=device))
    with pytest.raises(ValueError, match="0 is already in FP8, with recipe="):
        convert(nn.Sequential(fp8nn.Linear(16, 16, recipe="delayed")))


def test_a_model_without_linears_is_returned_unchanged_with_a_warning():
    model = nn.Sequential(nn.GELU())
    with pytest.warns(UserWarning, match="no layer was converted"):
        assert convert(model) is model
    assert not model._forward_pre_hooks
    with pytest.warns(UserWarning, match=r"no layer was converted.*filter_fqns"):
        convert(Model(), filter_fqns=["blocks", "head"])


class Delegating(nn.Module):
    """Passes unknown attributes on to a layer, as PEFT's ModulesToSaveWrapper does."""

    def __init__(self, layer):
        super().__init__()
        self.copies = nn.ModuleDict({"default": layer})

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("copies")["default"], name)

    def forward(self, x):
        return self.copies["default"](x)


WRAPPERS = {
    "delegating": Delegating,
    "checkpoint_wrapper": checkpoint_wrapper,
    "torch.compile": lambda layer: torch.compile(layer, backend="eager"),
}
wrappers = pytest.mark.parametrize("wrapper", list(WRAPPERS))
wrapped = pytest.mark.parametrize("wrapped", ["before the conversion", "after the conversion"])
both_weights = pytest.mark.parametrize("fp8_weights", [False, True], ids=["masters", "FP8 weights"])


def outputs_of_steps(model, batches):
    """Train for a step per batch. Return the outputs and the gradients of the last step."""
    optimizer = fp8rs.optim.AdamW(model.parameters(), lr=1e-2)
    outputs = []
    for x in batches:
        optimizer.zero_grad()
        y = model(x)
        y.square().mean().backward()
        outputs.append(y.detach())
        optimizer.step()
    return outputs, [p.grad for p in model.parameters()]


# Dynamo reads the gradient of the layer's input, which is not a leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@wrappers
@wrapped
@both_weights
@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "block", "mxfp8"])
def test_a_wrapper_that_passes_attributes_on_is_not_taken_for_a_layer(
    device, wrapper, wrapped, fp8_weights, recipe
):
    reference, model = (
        nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(device)
        for _ in range(2)
    )
    model.load_state_dict(reference.state_dict())
    options = {"recipe": recipe, "fp8_weights": fp8_weights}
    convert_to_float8_training(reference, **options)
    layer = model[2]
    if wrapped == "before the conversion":
        model[2] = WRAPPERS[wrapper](layer)
    convert_to_float8_training(model, **options)
    if wrapped == "after the conversion":
        model[2] = WRAPPERS[wrapper](layer)
    assert isinstance(layer, fp8nn.Linear)

    batches = [torch.randn(32, 64, device=device) for _ in range(3)]
    for steps in zip(*(outputs_of_steps(m, batches) for m in (model, reference)), strict=True):
        for result, expected in zip(*steps, strict=True):
            assert torch.equal(result, expected)

    assert fp8rs.report(model).summary == "2 linear layers"
    monitor = fp8rs.monitor(model, every=1)
    model(batches[0]).sum().backward()
    assert len({name.rpartition("/")[0] for name in monitor.step()}) >= 2
    monitor.close()
    assert len(fp8rs.high_precision(model, "*")) == 2
    model(batches[0])
    fp8rs.convert_to_high_precision(model)
    assert type(layer) is nn.Linear
    assert not isinstance(layer.weight, fp8rs.QuantizedTensor)


@ranks(2)
@wrappers
@wrapped
@both_weights
@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
def test_wrapped_layers_are_sharded_as_layers_are(rig, wrapper, wrapped, fp8_weights, recipe):
    outputs = []
    for wrap in (WRAPPERS[wrapper], lambda layer: layer):
        torch.manual_seed(0)
        model = Stack().to(rig.device)
        if wrapped == "before the conversion":
            for block in model.blocks:
                block.up = wrap(block.up)
        convert_to_float8_training(model, recipe=recipe, fp8_weights=fp8_weights)
        if wrapped == "after the conversion":
            for block in model.blocks:
                block.up = wrap(block.up)
        shard(model, rig)
        outputs.append(outputs_of_steps(model, [batch(rig, n) for n in range(4)])[0])
    for result, expected in zip(*outputs, strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("experts", ["fp8", "gather"])
def test_experts_of_a_model_without_experts_have_no_effect(device, experts):
    model = nn.Sequential(nn.Linear(16, 16)).to(device)
    with pytest.warns(UserWarning, match=f"experts='{experts}' has no effect.*no weights of exp"):
        convert(model, experts=experts)
    assert state_of(model[0]) is not None


def test_warnings_about_a_float64_model_name_its_dtype():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert(model)
    assert [str(warning.message) for warning in caught] == [
        "0, 1 are not converted: the weight is torch.float64, not float32, bfloat16 or float16",
        "no layer was converted: 0, 1 (its weight is torch.float64)",
    ]


def test_layers_converted_by_torchao_stay_with_a_warning():
    """The layers are recognized by their module's name, since torchao need not be installed."""
    namespace = {"forward": lambda self, x: x, "__module__": "torchao.float8.float8_linear"}
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    for layer in model:
        layer.__class__ = type("Float8Linear", (nn.Linear,), namespace)
    says = r"2 layers are not converted \(the first is 0\).* Remove torchao's conversion"
    with (
        pytest.warns(UserWarning, match=says),
        pytest.warns(UserWarning, match="no layer was converted"),
    ):
        convert(model)


def weights_under_another_recipe(device, before, **options):
    """Return an unconverted model whose FP8 weights have the format of the recipe ``before``."""
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)).to(device)
    convert(source, recipe=before, fp8_weights=True, enable_fsdp_float8_all_gather=None)
    model = nn.Sequential(*(nn.Linear(128, 128, device="meta") for _ in range(2)))
    for layer, old in zip(model, source, strict=True):
        layer.weight = old.weight
        layer.bias = old.bias
    return model


@pytest.mark.parametrize("before", ["rowwise", "current", "mxfp8"])
@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "block", "mxfp8"])
def test_fp8_weights_of_another_recipe_are_quantized_again(before, recipe):
    model = weights_under_another_recipe("cpu", before)
    values = [layer.weight.dequantize() for layer in model]
    weights = [layer.weight for layer in model]
    convert(model, recipe=recipe, fp8_weights=True, enable_fsdp_float8_all_gather=None)
    wanted = resolve_recipe(recipe).block_format("weight")
    for layer, weight, value in zip(model, weights, values, strict=True):
        assert layer.weight is weight and weight.format is wanted
        assert (weight.dequantize() - value).abs().max() < 0.05 * value.abs().max()
    x = torch.randn(64, 128).requires_grad_()
    model(x).sum().backward()
    plain = torch.ones(64, 128) @ values[1] @ values[0]
    assert (x.grad - plain).norm() < 0.15 * plain.norm()


def test_fp8_weights_of_another_recipe_are_refused_as_master_weights():
    model = weights_under_another_recipe("cpu", "rowwise")
    with pytest.raises(
        ValueError, match=r"the weight of 0 is already FP8, in format 'row'.*fp8_weights=True"
    ):
        convert(model, recipe="current")
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "prune", "parametrized"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_parametrized_weights_are_not_converted_and_warn(kind):
    model = Model()
    if kind == "prune":
        from torch.nn.utils import prune

        prune.l1_unstructured(model.head, "weight", 0.5)
    elif kind == "parametrized":
        nn.utils.parametrizations.weight_norm(model.head)
    else:
        getattr(nn.utils, kind)(model.head)
    tokens = torch.arange(3)
    with pytest.warns(UserWarning, match="head is not converted: the weight is not a param"):
        convert(model)
    assert converted(model) == ALL[:-1]
    model(tokens).sum().backward()


def test_meta_device_modules(device):
    with torch.device("meta"):
        model = Model()
    convert(model, recipe="delayed")
    model.to_empty(device=device)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    model(torch.arange(3, device=device)).sum().backward()
    assert model.head.weight.grad.isfinite().all()
    assert model.head.fp8_amax.device.type == device.type


@pytest.mark.parametrize("gather", [False, True])
def test_state_dicts_are_plain_and_load_into_the_unconverted_model(device, gather):
    reference = Model().to(device)
    model = convert(copy.deepcopy(reference), enable_fsdp_float8_all_gather=gather)
    state = model.state_dict()
    assert list(state) == list(reference.state_dict())
    for name, value in state.items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, reference.state_dict()[name])
    reference.load_state_dict(state)
    model.load_state_dict(reference.state_dict())


def test_the_gather_option_does_not_change_results_on_one_device(device):
    torch.manual_seed(0)
    plain = Model().to(device)
    tokens = torch.arange(20, device=device)
    outputs = []
    for gather in (False, True):
        model = convert(copy.deepcopy(plain), enable_fsdp_float8_all_gather=gather)
        y = model(tokens)
        y.square().sum().backward()
        outputs.append([y, *(p.grad for p in model.parameters())])
    for a, b in zip(*outputs, strict=True):
        assert type(b) is torch.Tensor
        assert torch.equal(a, b)


def test_weights_for_the_gather_are_plain_until_sharded(device):
    model = convert(Model().to(device), enable_fsdp_float8_all_gather=True)
    for name in ALL:
        assert type(model.get_submodule(name).weight) is nn.Parameter
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tokens = torch.arange(20, device=device)
    losses = []
    for _ in range(10):
        loss = nn.functional.cross_entropy(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"module": "model"}, TypeError, "module"),
        ({"recipe": "fp7"}, ValueError, "recipe"),
        ({"recipe": 8}, TypeError, "recipe"),
        (
            {"amax_reduction_group": "world"},
            TypeError,
            "amax_reduction_group must be a .*ProcessGroup, not str",
        ),
        ({"recipe": "current", "config": object()}, ValueError, "recipe and config"),
        ({"config": object()}, TypeError, "config"),
    ],
)
def test_errors_name_the_argument(arguments, error, match):
    arguments = {"module": Model(), **arguments}
    with pytest.raises(error, match=match):
        convert(arguments.pop("module"), **arguments)


@pytest.mark.parametrize("part", ["model", "block", "layer"])
@ranks(1, cuda=False)
def test_converting_a_sharded_model_is_an_error(rig, part):
    from torch.distributed.fsdp import fully_shard

    model = Model()
    fully_shard({"model": model, "block": model.blocks[0], "layer": model.blocks[0][0]}[part])
    with pytest.raises(ValueError, match=r"blocks\.0\.0 is sharded already"):
        convert(model)


# --- torchao's configuration, recognized by its fields --------------------------------------------


@pytest.mark.parametrize(
    ("config", "recipe"),
    [
        (Float8LinearConfig(), Float8CurrentScaling(fp8_format="hybrid")),
        (
            Float8LinearConfig(
                cast_config_grad_output=CastConfig(target_dtype=torch.float8_e4m3fn),
                gemm_config_grad_weight=GemmConfig(True),
                round_scales_to_power_of_2=True,
                emulate=True,
                pad_inner_dim=True,
            ),
            Float8CurrentScaling(
                fast_accumulation=(True, False, True), power_2_scale=True, emulate=True
            ),
        ),
    ],
)
def test_torchao_configs_map_to_recipes(config, recipe):
    model = convert_to_float8_training(Model(), config=config)
    assert model.head.recipe == recipe
    assert type(model.head.weight) is nn.Parameter, "enable_fsdp_float8_all_gather is theirs"


def test_a_torchao_config_sets_the_gather():
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    model = convert_to_float8_training(Model(), config=config)
    assert state_of(model.head).fp8_gather


@pytest.mark.parametrize("theirs", [True, False])
def test_arguments_that_contradict_a_torchao_config_are_refused(theirs):
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=theirs)
    with pytest.raises(ValueError, match=f"enable_fsdp_float8_all_gather={not theirs} contradicts"):
        convert(Model(), config=config, enable_fsdp_float8_all_gather=not theirs)
    model = convert(Model(), config=config, enable_fsdp_float8_all_gather=theirs)
    assert state_of(model.head).fp8_gather == theirs


def test_the_gather_is_on_by_default():
    assert state_of(convert_to_float8_training(Model()).head).fp8_gather


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (
            Float8LinearConfig(cast_config_input=CastConfig(ScalingType.DELAYED)),
            "cast_config_input.scaling_type",
        ),
        (
            Float8LinearConfig(cast_config_weight=CastConfig(ScalingType.DISABLED)),
            "cast_config_weight",
        ),
        (
            Float8LinearConfig(
                cast_config_weight=CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)
            ),
            "scaling_granularity",
        ),
        (
            Float8LinearConfig(cast_config_input_for_grad_weight=CastConfig(ScalingType.DISABLED)),
            "cast_config_input_for_grad_weight",
        ),
        (
            Float8LinearConfig(cast_config_input=CastConfig(target_dtype=torch.float8_e5m2)),
            "cast_config_input.target_dtype",
        ),
        (
            Float8LinearConfig(cast_config_grad_output=CastConfig(target_dtype=torch.float16)),
            "cast_config_grad_output.target_dtype",
        ),
    ],
)
def test_torchao_configs_that_no_recipe_implements_are_refused(config, field):
    with pytest.raises(ValueError, match=field):
        convert_to_float8_training(Model(), config=config)


def test_named_torchao_configs_map_to_recipes():
    model = convert_to_float8_training(Model(), config=NAMED["tensorwise"])
    assert model.head.recipe == Float8CurrentScaling(fp8_format="hybrid")
    model = convert_to_float8_training(Model(), config=NAMED["rowwise"])
    assert model.head.recipe == Float8RowwiseScaling(power_2_scale=True)
    model = convert_to_float8_training(Model(), config=NAMED["rowwise_with_gw_hp"])
    assert model.head.recipe == Float8RowwiseScaling(
        power_2_scale=True, high_precision_gemms=("wgrad",)
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"cast_config_input_for_grad_weight": CastConfig()},
        {"cast_config_grad_output_for_grad_weight": None},
        {"cast_config_weight_for_grad_input": CastConfig(ScalingType.DISABLED)},
        {"cast_config_weight_for_grad_input": CastConfig(target_dtype=torch.float8_e5m2)},
    ],
    ids=["input", "gradient", "disabled weight", "weight of e5m2"],
)
def test_other_gemms_of_torchao_configs_in_high_precision_are_refused(changed):
    config = dataclasses.replace(NAMED["rowwise_with_gw_hp"], **changed)
    with pytest.raises(ValueError, match=r"config\.cast_config_\w+_for_grad_\w+ "):
        convert_to_float8_training(Model(), config=config)


def test_torchao_recipe_names_map_to_recipes():
    model = convert_to_float8_training(Model(), recipe="tensorwise")
    assert model.head.recipe == Float8CurrentScaling()
    model = convert_to_float8_training(Model(), recipe="rowwise")
    assert model.head.recipe == Float8RowwiseScaling()
    model = convert_to_float8_training(Model(), recipe="rowwise_with_gw_hp")
    assert model.head.recipe == Float8RowwiseScaling(high_precision_gemms=("wgrad",))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MXFP8", "mxfp8"),
        ("row_wise", "rowwise"),
        ("DelayedScaling", "delayed"),
        ("blocks", "block"),
    ],
)
def test_an_unknown_recipe_name_suggests_the_closest(name, meant):
    with pytest.raises(ValueError, match=rf"the names are .*\. Did you mean '{meant}'\?$"):
        convert_to_float8_training(Model(), recipe=name)


def test_an_unrelated_recipe_name_has_no_suggestion():
    with pytest.raises(ValueError, match=r"'fp4' is not known; the names are .*'mxfp8'$"):
        convert_to_float8_training(Model(), recipe="fp4")


@pytest.mark.parametrize("name", NAMED)
def test_a_recipe_name_is_not_a_config(name):
    with pytest.raises(TypeError, match=f"recipe='{name}', or Float8LinearConfig.from_recipe_name"):
        convert_to_float8_training(Model(), config=name)


# --- a model from transformers ---------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_transformers_llama_trains(device, recipe):
    model = convert(llama(device), recipe=recipe, filter_fqns=["lm_head"])
    assert len(converted(model)) == 2 * 7
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0)).to(device)
    losses = train_on(tokens, model, 15)
    assert losses[-1] < 0.7 * losses[0]


def test_a_transformers_llama_quantizes_shared_inputs_once(device):
    from calls import Calls

    model = convert(llama(device), recipe="current", filter_fqns=["lm_head"])
    tokens = torch.zeros(1, 8, dtype=torch.long, device=device)
    with torch.no_grad(), Calls() as calls:
        model(input_ids=tokens)
    # A decoder layer has seven weights. Its layers have four inputs: of q, k and v; of o; of gate
    # and up; of down.
    assert calls.quantizations == 2 * (7 + 4)


def test_a_transformers_llama_with_gradient_checkpointing(device):
    grads = []
    for checkpointing in (False, True):
        model = convert(llama(device), recipe="current").train()
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)()
        tokens = torch.arange(16, device=device)[None]
        model(input_ids=tokens, labels=tokens).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_transformers_llama_with_tied_embeddings(device):
    with pytest.warns(UserWarning, match=r"lm_head.*model\.embed_tokens"):
        model = convert(llama(device, tie_word_embeddings=True))
    assert len(converted(model)) == 2 * 7


# --- a refused conversion leaves the model unchanged ----------------------------------------------


class Final(nn.Linear):
    def __init_subclass__(cls, **kwargs):
        raise TypeError("Final cannot be subclassed")


def with_head(head):
    model = Model()
    model.head = head
    return model


def graph_holds_a_weight():
    model = Model()
    return model, {"fp8_weights": True}, model(torch.arange(3)).sum()


def weak_reference_to_a_weight():
    model = Model()
    return model, {"fp8_weights": True}, weakref.ref(model.head.weight)


def weight_without_a_kernel():
    model = Model()
    model.head.weight = nn.Parameter(Foreign(model.head.weight.detach()))
    return model, {"fp8_weights": True}, None


def fp8_weights_of_another_format():
    donor = convert_to_float8_training(nn.Linear(16, 24), recipe="rowwise", fp8_weights=True)
    model = Model()
    model.head.weight = donor.weight
    return model, {}, donor


def converted_with_another_recipe():
    return with_head(convert(nn.Linear(16, 24), recipe="rowwise")), {}, None


def part_of_a_module_with_a_recipe():
    model = with_head(fp8nn.LayerNormMLP(16, 32, recipe="current"))
    return model, {"filter_fqns": ["down_proj"]}, None


def experts_of_another_recipe():
    return with_head(fp8nn.GroupedLinear(2, 16, 16, recipe="rowwise")), {}, None


def class_without_subclasses():
    return with_head(Final(16, 24)), {}, None


def filter_that_raises():
    def keep(module, fqn):
        if fqn == "head":
            raise ValueError("the filter does not know head")
        return True

    return Model(), {"module_filter_fn": keep}, None


def warning_that_is_an_error():
    return Model(), {"filter_fqns": ["haed"]}, None


#: How a conversion can fail, and the message. Each returns a model, arguments, and what to hold.
FAILURES = {
    graph_holds_a_weight: "something holds its tensor",
    weak_reference_to_a_weight: "something holds its tensor",
    weight_without_a_kernel: "the weight of head, a Foreign on cpu, cannot be quantized",
    fp8_weights_of_another_format: "already FP8, in format 'row'",
    converted_with_another_recipe: "head is already in FP8, with recipe='rowwise'",
    part_of_a_module_with_a_recipe: "another layer of that module is excluded",
    experts_of_another_recipe: "head is a GroupedLinear with recipe 'rowwise'",
    class_without_subclasses: "Final cannot be subclassed",
    filter_that_raises: "the filter does not know head",
    warning_that_is_an_error: "filter_fqns has 'haed'",
}


def assert_converts(model):
    convert_to_float8_training(model, fp8_weights=True)
    assert converted(model) == ALL
    model(torch.arange(3)).sum().backward()


@pytest.mark.parametrize("holder", ["loss", "weak reference"])
def test_weights_that_cannot_be_replaced_are_refused(holder):
    model = Model()
    handle = model.head.register_forward_pre_hook(lambda module, args: None)
    before = contents(model)
    reference = model(torch.arange(3)).sum() if holder == "loss" else weakref.ref(model.head.weight)
    with pytest.raises(
        RuntimeError, match="cannot become FP8 in place while something holds its tensor"
    ):
        convert_to_float8_training(model, fp8_weights=True)
    assert contents(model) == before
    if holder == "loss":
        # The refused conversion does not break the graph.
        reference.backward()
        assert all(p.grad is not None for p in model.parameters())
    handle.remove()
    assert not model.head._forward_pre_hooks
    del reference
    assert_converts(model)


@pytest.mark.filterwarnings("error:filter_fqns has")
@pytest.mark.parametrize("way", FAILURES, ids=lambda way: way.__name__)
def test_a_conversion_that_fails_changes_nothing(way):
    model, arguments, references = way()
    before = contents(model)
    state = list(model.state_dict())
    with pytest.raises((ValueError, TypeError, RuntimeError, UserWarning), match=FAILURES[way]):
        convert_to_float8_training(model, **arguments)
    assert contents(model) == before
    assert list(model.state_dict()) == state
    del references


@ranks(2, cuda=False)
def test_a_conversion_of_distributed_weights_that_fails_changes_nothing(rig):
    """Quantizing a part of a matrix needs scales that ranks share."""
    refused = "the weight of head is a DTensor with placements .* quantizes whole matrices"
    models = []
    for dim in (0, 1):
        model = Model()
        weight = distribute_tensor(model.head.weight.detach(), rig.mesh(), [Shard(dim)])
        model.head.weight = nn.Parameter(weight)
        models.append((model, {"fp8_weights": True}, refused))
    group = torch.distributed.group.WORLD
    arguments = {"recipe": "rowwise", "amax_reduction_group": group}
    models.append((Model(), arguments, "amax_reduction_group is for recipes with one scale"))
    for model, arguments, message in models:
        before = contents(model)
        with pytest.raises(ValueError, match=message):
            convert_to_float8_training(model, **arguments)
        assert contents(model) == before


def test_quantized_init_that_fails_converts_nothing():
    """The first model could be converted, the second one not."""
    models = []

    def build():
        with fp8rs.quantized_init("current"):
            models.append(nn.Sequential(nn.Linear(16, 16)))
            models.append(nn.Sequential(nn.Linear(16, 16), Final(16, 16)))

    with pytest.raises(TypeError, match="Final cannot be subclassed"):
        build()
    for model in models:
        assert converted(model) == []
        for layer in model:
            assert type(layer.weight) is nn.Parameter and not list(layer.weight.__dict__)


def test_models_of_quantized_init_may_share_a_layer():
    with fp8rs.quantized_init("current"):
        shared = nn.Linear(16, 16)
        models = [nn.Sequential(shared), nn.Sequential(shared, nn.Linear(16, 16))]
    assert all(isinstance(layer, fp8nn.Linear) for model in models for layer in model)
    assert state_of(shared).root is models[0]


def test_a_weight_that_a_device_cannot_quantize_leaves_the_model_unchanged(monkeypatch):
    def refuse(values, recipe):
        raise fp8rs.UnsupportedError("no kernel for this GPU")

    model = Model()
    before = contents(model)
    with monkeypatch.context() as patched:
        patched.setattr(fp8_weights, "new_weight", refuse)
        with pytest.raises(fp8rs.UnsupportedError, match="no kernel"):
            convert_to_float8_training(model, fp8_weights=True)
    assert contents(model) == before
    assert_converts(model)


# --- the summary that a conversion prints ---------------------------------------------------------


@pytest.fixture
def unconfigured(monkeypatch):
    """Replace the logger by one without handlers. pytest adds handlers to the root logger."""
    logger = logging.Logger("fp8rs", logging.NOTSET)
    replace_notice_logger(monkeypatch, logger)
    return logger


@pytest.mark.usefixtures("unconfigured")
def test_a_conversion_prints_one_line_by_default(capsys):
    convert(Model(), recipe="current", filter_fqns=["head"])
    printed = capsys.readouterr()
    assert not printed.out
    (line,) = printed.err.splitlines()
    assert line.startswith("fp8rs: recipe 'current': 4 linear layers converted, whose weights are ")
    assert line.endswith("; 1 left in high precision")


@pytest.mark.usefixtures("unconfigured")
def test_other_ranks_print_nothing(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    convert(Model(), recipe="current")
    assert capsys.readouterr().err == ""


def test_the_loggers_level_silences_the_line(unconfigured, capsys):
    unconfigured.setLevel(logging.WARNING)
    convert(Model(), recipe="current")
    assert capsys.readouterr().err == ""


def test_configured_logging_gets_the_line_and_nothing_is_printed(caplog, capsys):
    with caplog.at_level("INFO", logger="fp8rs"):
        convert(Model(), recipe="current")
    assert "5 linear layers converted" in caplog.text
    assert capsys.readouterr().err == ""


def test_type_checkers_see_the_class_of_the_model():
    hints = get_type_hints(convert_to_float8_training)
    assert hints["return"] is hints["module"]
    assert hints["return"].__bound__ is nn.Module
