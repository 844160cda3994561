"""Layers reuse the planes of a shared input, but not after a write to it."""

import copy
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fp8rs
from cases import RECIPES, skip_without_block_gemms
from fp8rs.model.input_cache import QuantizedInputCache, input_token
from fp8rs.quantize.recipes import resolve_recipe
from internals import notify_freed
from saving import reloaded

every_recipe = pytest.mark.parametrize(
    "recipe", [recipe for recipe in RECIPES.values() if isinstance(recipe, str)]
)
SAVED = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default]


@pytest.fixture(autouse=True)
def _supported(request, device):
    if request.node.callspec.params.get("recipe") == "block":
        skip_without_block_gemms(device)


def layers(device, recipe, count=2):
    """Build layers of one model."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(32, 32) for _ in range(count)).to(device)
    return fp8rs.convert_to_float8_training(model, recipe=recipe)


def saving_inputs(recipe):
    """Return a recipe whose backward quantizes inputs again, also in eager code."""
    return dataclasses.replace(resolve_recipe(recipe), save_input=True)


def models(device, recipe):
    """Build two models with one layer each."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(32, 32)).to(device) for _ in range(2)]
    return [fp8rs.convert_to_float8_training(part, recipe=recipe) for part in parts]


def data(device, seed=0):
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)).to(device)


@every_recipe
def test_a_copy_of_an_input_is_another_input(device, recipe):
    a, b = layers(device, recipe)
    x = data(device).add_(1).mul_(2)
    a(x)
    y = copy.deepcopy(x)
    y.mul_(5)  # now both have the same version
    assert torch.equal(b(y), b(y.clone()))


def test_an_input_is_saved_as_it_is(device):
    a, _ = layers(device, "current")
    x = data(device)
    a(x)
    assert not x.__dict__
    assert torch.equal(reloaded(x), x)


def by_numpy(x, new):
    x.numpy()[:] = new.numpy()


WRITES = {
    "numpy": by_numpy,
    ".data.copy_": lambda x, new: x.data.copy_(new),
    ".data =": lambda x, new: setattr(x, "data", new),
}


@every_recipe
@pytest.mark.parametrize("write", list(WRITES))
def test_buffer_read_by_two_models(device, recipe, write):
    """A write that bypasses torch, such as a collective's, does not change the version."""
    if write == "numpy" and device.type != "cpu":
        pytest.skip("numpy is of the CPU")
    a, b = models(device, recipe)
    x = data(device)
    new = data(device, 1)
    with torch.no_grad():
        a(x)
        WRITES[write](x, new.clone())
        assert torch.equal(b(x), b(new.clone()))


@every_recipe
@pytest.mark.parametrize("write", list(WRITES))
def test_buffer_read_by_two_backwards(device, recipe, write):
    """The backwards run in another thread than the forwards, as on a GPU."""
    if write == "numpy" and device.type != "cpu":
        pytest.skip("numpy is of the CPU")
    a, b = models(device, saving_inputs(recipe))
    x = data(device)
    new = data(device, 1)
    gradients = []
    with ThreadPoolExecutor(1) as autograd:
        autograd.submit(a(x).sum().backward).result()
        WRITES[write](x, new.clone())
        for values in (x, new.clone()):
            autograd.submit(b(values).sum().backward).result()
            gradients.append(b[0].weight.grad)
            b.zero_grad()
    assert torch.equal(*gradients)


def test_late_free_does_not_drop_the_next_input(device):
    """Another thread may free an input after the cache holds the next one."""
    cache = QuantizedInputCache()
    planes = (None, None)
    x = data(device)
    y = data(device, 1)
    cache.put(x, input_token(x, None), planes, None, user=1)
    first = cache.entry.tensor
    cache.put(y, input_token(y, None), planes, None, user=1)
    notify_freed(cache, first)
    assert cache.get(input_token(y, None), user=2) is cache.entry
    del y
    assert cache.entry is None


@every_recipe
def test_new_memory_is_quantized_again(device, recipe):
    a, b = layers(device, recipe)
    x = data(device)
    with torch.no_grad():
        a(x)
        x.data = data(device, 1)[:5]
        assert torch.equal(b(x), b(x.clone()))


@every_recipe
@pytest.mark.parametrize("geometry", [lambda x: x[:5], lambda x: x.t()], ids=["rows", "transposed"])
def test_same_memory_in_another_geometry_is_quantized_again(device, recipe, geometry):
    a, b = layers(device, recipe)
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        a(x)
        x.data = geometry(x.data)
        assert torch.equal(b(x), b(x.clone()))


@every_recipe
def test_write_through_data_inside_a_compiled_graph(device, recipe):
    a, b = layers(device, recipe)

    def function(x, new):
        y = a(x)
        x.data.copy_(new)
        return y, b(x)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = data(device)
    new = data(device, 1)
    with torch.no_grad():
        first, second = compiled(x.clone(), new)
        assert torch.equal(first, a(x.clone()))
        assert torch.equal(second, b(new.clone()))


@every_recipe
@pytest.mark.parametrize("outside", [False, True])
def test_selective_checkpoints_record_their_own_operators(device, recipe, outside):
    """Each checkpoint records its own operators, even if the input was quantized before."""
    context = partial(create_selective_checkpoint_contexts, SAVED)
    gradients = []
    for checkpointed in (False, True):
        a, b = layers(device, recipe)
        leaf = data(device).requires_grad_()
        h = leaf * 2
        for _ in range(2):  # delayed scaling has scales in the second

            def call(layer, first=False, h=h, checkpointed=checkpointed):
                if not checkpointed or (outside and first):
                    return layer(h)
                return checkpoint(layer, h, use_reentrant=False, context_fn=context)

            y = call(a, first=True) + call(b)
        y.sum().backward()
        gradients.append([leaf.grad, a.weight.grad, b.weight.grad])
    assert all(map(torch.equal, *gradients))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_refused(device):
    (a,) = layers(device, "current", 1)
    xs = torch.stack([data(device), data(device, 1)])
    with torch.no_grad(), pytest.raises(RuntimeError, match="vmap: apply it before the conversion"):
        torch.func.vmap(a)(xs)


@pytest.mark.parametrize("dual", ["input", "weight"])
def test_tangents_are_refused(device, dual):
    """Forward-mode differentiation would return derivatives of 0 for layers without gradients."""
    (a,) = layers(device, "current", 1)
    a.requires_grad_(False)
    operands = {"weight": a.weight.detach(), "input": data(device)}

    def call(x):
        x, weight = (x, operands["weight"]) if dual == "input" else (operands["input"], x)
        return torch.func.functional_call(a, {"weight": weight}, x)

    tangent = torch.ones_like(operands[dual])
    with pytest.raises(RuntimeError, match="apply it before the conversion"):
        torch.func.jvp(call, (operands[dual],), (tangent,))
    _, of_the_rest = torch.func.jvp(
        lambda x: call(operands[dual]) + x.sum(), (operands[dual],), (tangent,)
    )
    assert (of_the_rest == tangent.sum()).all()


def test_evaluation_layers_do_not_share_recorded_amaxes(device):
    torch.manual_seed(0)
    model = nn.ModuleDict({"q": nn.Linear(32, 32), "k": nn.Linear(32, 32)}).to(device)
    fp8rs.convert_to_float8_training(model, recipe="delayed")
    model["q"].eval()
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        model["q"](100 * x)
    model["q"](x)
    model["k"](x)
    assert model["k"].fp8_amax[1, 0] == x.abs().amax()


def test_backward_uses_the_scale_of_each_layers_forward(device):
    """Two layers share an input but not its planes, because another input came between."""
    gradients = []
    for recipe in (saving_inputs("delayed"), resolve_recipe("delayed")):
        first, between, last = model = layers(device, recipe, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        x = data(device)
        (first(x).sum() + last(x * 100).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        y = first(x).sum()
        with torch.no_grad():
            between(x.clone())
        (y + last(x).sum()).backward()
        gradients.append([layer.weight.grad for layer in (first, last)])
    for repeated, saved in zip(*gradients, strict=True):
        assert torch.equal(repeated, saved)
