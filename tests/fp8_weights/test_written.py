"""FP8 weights written between a forward and its backward: an error, as of plain weights."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8rs
from distributed import ranks
from distributed.models import EVEN, RECIPES, batch, make, recipes, same_bytes, shard
from internals import storage_of

pytestmark = pytest.mark.filterwarnings("ignore:.* FP8 weights, and keeps no masters")
modified = pytest.raises(RuntimeError, match="modified by an inplace operation")


def model_of(device, recipe="current", fp8_weights=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).to(device)
    if recipe is not None:
        fp8rs.convert_to_float8_training(model, recipe=RECIPES[recipe], fp8_weights=fp8_weights)
    return model


def inputs(device):
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).to(device)


def step(optimizer, **options):
    def write(model):
        for p in model.parameters():
            p.grad = torch.ones(p.shape, device=p.device)
        optimizer(model.parameters(), lr=0.1, **options).step()

    return write


def on_weight(write):
    return lambda model: write(model[2].weight)


WRITES = {
    "mul_": on_weight(lambda w: w.mul_(2)),
    "copy_": on_weight(lambda w: w.copy_(torch.ones_like(w))),
    "quantize_": on_weight(lambda w: w.quantize_(torch.ones_like(w))),
    "a row": on_weight(lambda w: w[1].zero_()),
    "an element of a view": on_weight(lambda w: w.view(-1)[3:4].fill_(1)),
    "detached": on_weight(lambda w: w.detach().mul_(2)),
    "foreach": on_weight(lambda w: torch._foreach_mul_([w], 2.0)),
    "SGD": step(torch.optim.SGD, foreach=False),
    "AdamW foreach": step(torch.optim.AdamW, foreach=True),
    "AdamW fused": step(torch.optim.AdamW, fused=True),
    "fp8rs.optim.AdamW": step(fp8rs.optim.AdamW),
    "load_state_dict": lambda model: model.load_state_dict(
        model_of(model[0].weight.device, recipe=None).state_dict()
    ),
}


@recipes
@pytest.mark.parametrize("write", list(WRITES))
def test_a_write_before_the_backward_is_an_error(device, recipe, write):
    model = model_of(device, recipe)
    y = model(inputs(device).requires_grad_())
    with torch.no_grad():
        WRITES[write](model)
    with modified:
        y.sum().backward()


@pytest.mark.parametrize("write", ["mul_", "a row", "AdamW foreach", "load_state_dict"])
def test_a_write_before_a_compiled_backward_is_an_error(device, write):
    torch._dynamo.reset()
    model = model_of(device)
    y = torch.compile(model)(inputs(device).requires_grad_())
    with torch.no_grad():
        WRITES[write](model)
    with modified:
        y.sum().backward()


@recipes
@pytest.mark.parametrize("write", list(WRITES))
def test_a_write_moves_the_version_of_the_codes(device, recipe, write):
    """By which compiled graphs, which save the codes, know of it."""
    model = model_of(device, recipe)
    codes = storage_of(model[2].weight).rowwise.data
    before = codes._version
    with torch.no_grad():
        WRITES[write](model)
    assert codes._version > before


def test_a_write_of_a_weight_whose_gradient_is_not_propagated_is_none():
    """Only dx = dy @ w reads the weight: the first layer of plain ones may be written too."""
    model = model_of("cpu")
    y = model(inputs("cpu"))
    with torch.no_grad():
        model[0].weight.mul_(2)
    y.sum().backward()


def read(weight):
    weight.dequantize()
    weight.detach().clone()
    weight.cpu()
    weight.view(-1)[3:7].float()


def planes(weight):
    if weight.format.square:
        weight.update_usage(columnwise=True)
        weight.update_usage(columnwise=False)


@recipes
@pytest.mark.parametrize("use", [read, planes, lambda w: w.requires_grad_(True)])
def test_what_leaves_the_values_is_no_write(device, recipe, use):
    model = model_of(device, recipe)
    plain = model_of(device, recipe)
    for module in (model, plain):
        y = module(inputs(device).requires_grad_())
        if module is model:
            use(model[2].weight)
        y.sum().backward()
    assert same_bytes(model[0].weight.grad, plain[0].weight.grad)


@recipes
@pytest.mark.parametrize("reentrant", [False, True])
def test_micro_batches_and_checkpoints_write_nothing(device, recipe, reentrant):
    model = model_of(device, recipe)
    optimizer = fp8rs.optim.AdamW(model.parameters(), lr=0.1)
    x = inputs(device).requires_grad_()
    for _ in range(2):
        outputs = [checkpoint(model, x, use_reentrant=reentrant), model(x)]
        for y in outputs:
            y.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@ranks(2)
@recipes
def test_a_write_before_the_backwards_gather_is_an_error(rig, recipe):
    """The codes of the forward are overwritten. Master weights are cast again."""
    model = shard(make(EVEN, recipe=RECIPES[recipe], device=rig.device, fp8_weights=True), rig)
    loss = model(batch(rig)).sum()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .*blocks\.\d"):
        loss.backward()
