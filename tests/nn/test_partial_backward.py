"""A backward that needs only some gradients runs only their GEMMs, as `nn.Linear` does."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8rs
from cases import RECIPES, skip_without_block_gemms
from gemms import counted_gemms, zero_bubble, zero_bubble_works


@pytest.fixture(autouse=True)
def _supported(request, device):
    if request.node.callspec.params.get("recipe") == "block":
        skip_without_block_gemms(device)


class Net(nn.Module):
    """Three layers, of which the middle one is called twice."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        return self.last(self.middle(self.middle(self.first(x).relu()).relu()).relu())


def models(device, recipe="current", **convert):
    """A model with `nn.Linear` and its converted copy."""
    torch.manual_seed(0)
    plain = Net().to(device)
    fp8 = copy.deepcopy(plain)
    fp8rs.convert_to_float8_training(fp8, recipe=RECIPES[recipe], **convert)
    return plain, fp8


def data(device):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(64, 32, generator=generator).to(device)


def full_backward(model, x):
    """Return the gradients of one backward by name; the input is ``x``."""
    x = x.clone().requires_grad_()
    model(x).square().sum().backward()
    grads = {"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}
    model.zero_grad()
    return grads


def grad(model, x, y, names):
    tensors = {"x": x, **dict(model.named_parameters())}
    grads = torch.autograd.grad(y.square().sum(), [tensors[name] for name in names])
    return dict(zip(names, grads, strict=True))


def backward(model, x, y, names):
    tensors = {"x": x, **dict(model.named_parameters())}
    y.square().sum().backward(inputs=[tensors[name] for name in names])
    assert [name for name, t in tensors.items() if t.grad is not None] == names
    return {name: tensors[name].grad for name in names}


#: Names of gradients, and how many of the eight GEMMs of a backward they need.
NEEDED = {
    "input": (["x"], 4),
    "first weight": (["first.weight"], 4),
    "shared weight": (["middle.weight"], 4),
    "last weight": (["last.weight"], 1),
    "last bias": (["last.bias"], 0),
    "input and shared weight": (["x", "middle.weight"], 6),
    "all weights": (["first.weight", "middle.weight", "last.weight"], 7),
}
needed = pytest.mark.parametrize("needed", list(NEEDED))
calls = pytest.mark.parametrize("call", [grad, backward], ids=["grad", "backward"])
each_recipe = pytest.mark.parametrize("recipe", list(RECIPES))
each_weight = pytest.mark.parametrize("fp8_weights", [False, True], ids=["masters", "fp8_weights"])


@each_recipe
@each_weight
@needed
@calls
def test_only_needed_gemms_run(device, recipe, fp8_weights, needed, call):
    names, gemms = NEEDED[needed]
    plain, fp8 = models(device, recipe, fp8_weights=fp8_weights)
    expected = full_backward(fp8, data(device))
    x = data(device).requires_grad_()
    y = plain(x)
    with counted_gemms() as count:
        call(plain, x, y, names)
    assert count.plain == gemms
    x = data(device).requires_grad_()
    y = fp8(x)
    with counted_gemms() as count:
        actual = call(fp8, x, y, names)
    assert count.fp8 == gemms
    for name in names:
        assert torch.equal(actual[name], expected[name]), name


@each_recipe
def test_output_gradient_is_quantized_in_needed_directions(device, recipe):
    _, fp8 = models(device, recipe)
    for names, directions in (
        (["x"], [(True, False)] * 4),
        (["last.weight"], [(False, True)]),
        (["last.weight", "x"], [(True, True)] + [(True, False)] * 3),
        (["last.bias"], []),
    ):
        x = data(device).requires_grad_()
        y = fp8(x)
        with counted_gemms() as count:
            grad(fp8, x, y, names)
        if recipe == "rowwise_with_gw_hp":  # wgrad reads no codes
            directions = [(True, False) for rowwise, _ in directions if rowwise]
        assert count.directions == directions


@each_recipe
def test_backward_without_inputs_runs_all_gemms(device, recipe):
    _, fp8 = models(device, recipe)
    y = fp8(data(device).requires_grad_())
    with counted_gemms() as count:
        y.square().sum().backward()
    assert count.fp8 == 8


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_run_only_needed_gemms(device, reentrant):
    """A reentrant checkpoint runs a backward of all its gradients within the outer one."""
    _, fp8 = models(device)
    expected = full_backward(fp8, data(device))
    x = data(device).requires_grad_()
    y = checkpoint(fp8, x, use_reentrant=reentrant)
    with counted_gemms() as count:
        if reentrant:
            y.square().sum().backward()
        else:
            (dx,) = torch.autograd.grad(y.square().sum(), x)
    recomputed = 4
    gemms = 8 if reentrant else 4
    assert count.fp8 == recomputed + gemms
    assert torch.equal(x.grad if reentrant else dx, expected["x"])


def test_gradient_of_a_tensor_between_layers(device):
    plain, fp8 = models(device)
    for model in (plain, fp8):
        between = model.first(data(device).requires_grad_())
        y = model.last(between)
        with counted_gemms() as count:
            (grad_between,) = torch.autograd.grad(y.square().sum(), between)
        assert (count.plain if model is plain else count.fp8) == 1
        assert grad_between.shape == between.shape


@pytest.mark.parametrize("high", ["forward", "dgrad", "wgrad"])
def test_gemms_in_high_precision_run_only_if_needed(device, high):
    """Layers with one GEMM in high precision prune the others and that one."""
    _, fp8 = models(device)
    fp8rs.high_precision(fp8, "*", gemms=[high])
    expected = full_backward(fp8, data(device))
    for names, gemms in NEEDED.values():
        x = data(device).requires_grad_()
        y = fp8(x)
        with counted_gemms() as count:
            actual = grad(fp8, x, y, names)
        assert count.fp8 == gemms
        if device.type == "cpu":  # an FP8 GEMM is a matrix product of dequantized operands
            assert count.plain == gemms
        for name in names:
            assert torch.equal(actual[name], expected[name]), name


class Stage(Net):
    """Layers that are called once each."""

    def forward(self, x):
        return self.last(self.middle(self.first(x).relu()).relu())


@zero_bubble_works
@each_recipe
@each_weight
def test_zero_bubble_backwards_run_the_gemms_of_one(device, recipe, fp8_weights):
    torch.manual_seed(0)
    plain = Stage().to(device)
    fp8 = copy.deepcopy(plain)
    fp8rs.convert_to_float8_training(fp8, recipe=RECIPES[recipe], fp8_weights=fp8_weights)
    expected = full_backward(fp8, data(device))
    with counted_gemms() as count:
        zero_bubble(plain, data(device).requires_grad_())
    assert count.plain == 9
    with counted_gemms() as count:
        dx = zero_bubble(fp8, data(device).requires_grad_())
    assert count.fp8 == 9
    of_wgrad = [] if recipe == "rowwise_with_gw_hp" else [(False, True)] * 3
    assert count.directions == [(True, False)] * 3 + of_wgrad
    assert torch.equal(dx, expected.pop("x"))
    for name, p in fp8.named_parameters():
        assert torch.equal(p.grad, expected[name]), name
