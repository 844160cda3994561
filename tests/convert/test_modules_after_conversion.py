"""Modules that change after conversion: parametrized, pruned, tied, resized, run on two streams."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import fp8rs
from distributed import ranks
from distributed.collectives import Collectives
from distributed.models import RECIPES, batch, recipes, reduces, same_bytes, train, whole_planes
from fp8rs.tensor.quantized import QuantizedTensor
from internals import storage_of
from oracle.compare import relative


class Two(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)

    def forward(self, x):
        return self.b(self.a(x).relu())


def two(device, recipe="current", **options):
    torch.manual_seed(0)
    return fp8rs.convert_to_float8_training(Two().to(device), recipe=RECIPES[recipe], **options)


def shard_all(model, rig):
    for layer in (model.a, model.b):
        fully_shard(layer, mesh=rig.mesh())
    return fully_shard(model, mesh=rig.mesh())


def same_batch(device, rows=16):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 32, generator=generator).to(device)


# --- weights parametrized after the conversion ----------------------------------------------------


def old_weight_norm(layer):
    with pytest.warns(FutureWarning, match="weight_norm"):
        weight_norm(layer)


def old_spectral_norm(layer):
    spectral_norm(layer)


def pruned(layer):
    prune.l1_unstructured(layer, "weight", amount=0.5)


def new_weight_norm(layer):
    parametrizations.weight_norm(layer)


def new_spectral_norm(layer):
    parametrizations.spectral_norm(layer)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def own_parametrization(layer):
    nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())


WAYS = [
    old_weight_norm,
    old_spectral_norm,
    pruned,
    new_weight_norm,
    new_spectral_norm,
    own_parametrization,
]


@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
@pytest.mark.parametrize("way", WAYS)
def test_a_weight_parametrized_after_the_conversion_trains(device, way, recipe):
    model = two(device, recipe)
    way(model.a)
    x = same_batch(device)
    losses = train(model, torch.optim.SGD(model.parameters(), 0.05), [x] * 4)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.filterwarnings("ignore:.* FP8 weights, and keeps no masters")
def test_a_parametrized_fp8_weight_trains(device, way, recipe, ours):
    """The original of the parametrization is a parameter like any other and stays FP8."""
    model = two(device, recipe, fp8_weights=True)
    weight = model.a.weight
    way(model.a)
    quantized = [p for p in model.a.parameters() if isinstance(p, QuantizedTensor)]
    assert len(quantized) == 1 and storage_of(quantized[0]) is storage_of(weight)
    kind = fp8rs.optim.AdamW if ours else torch.optim.AdamW
    x = same_batch(device)
    losses = train(model, kind(model.parameters(), lr=0.01), [x] * 4)
    assert losses[-1] < losses[0]


@ranks(2)
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_sharding_the_original_of_a_parametrized_fp8_weight_is_refused(rig, recipe):
    model = two(rig.device, recipe, fp8_weights=True)
    pruned(model.a)
    with pytest.raises(TypeError, match="not what a layer's weight is computed from"):
        shard_all(model, rig)


@ranks(2)
@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
@pytest.mark.parametrize("way", [w.__name__ for w in WAYS])
def test_a_parametrized_weight_may_be_sharded_afterwards(rig, way, recipe):
    """The losses equal the unsharded model's, because both ranks have the same batch."""
    x = same_batch(rig.device)

    def losses_of(model, sharded):
        globals()[way](model.a)
        if sharded:
            shard_all(model, rig)
        return train(model, torch.optim.SGD(model.parameters(), 0.05), [x] * 4)

    expected = losses_of(two(rig.device, recipe), False)
    losses = losses_of(two(rig.device, recipe), True)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


# --- weights tied after the conversion -----------------------------------------------------------


@recipes
def test_a_weight_tied_after_the_conversion_trains(device, recipe):
    model = two(device, recipe)
    model.b.weight = model.a.weight
    losses = train(model, torch.optim.SGD(model.parameters(), 0.05), [same_batch(device)] * 5)
    assert model.b.weight is model.a.weight
    assert losses[-1] < losses[0]


@ranks(2)
@recipes
def test_a_tied_weight_is_sharded_once(rig, recipe):
    """The weight is quantized once, gathered once, and trains as it does unsharded."""
    x = same_batch(rig.device)
    results = []
    for sharded in (False, True):
        model = two(rig.device, recipe)
        model.b.weight = model.a.weight
        if sharded:
            fully_shard(model, mesh=rig.mesh())
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        if sharded and recipe == "current":
            with Collectives() as collectives:
                y = model(x)
            assert reduces(collectives) == [4], "one amax"
            assert model.b.weight is model.a.weight
            y.sum().backward()
            optimizer.zero_grad()
        results.append(train(model, optimizer, [x] * 5))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@ranks(2)
@recipes
def test_a_tied_weight_has_equal_codes_in_both_layers(rig, recipe):
    model = two(rig.device, recipe)
    model.b.weight = model.a.weight
    weight = model.a.weight.detach().clone()
    fully_shard(model, mesh=rig.mesh())
    model(batch(rig)).sum()
    for layer in (model.a, model.b):
        assert same_bytes(layer.weight.rowwise.data, whole_planes(weight, recipe)[0])


# --- siblings on two streams ---------------------------------------------------------------------


@pytest.mark.gpu
@recipes
def test_siblings_on_two_streams_share_no_planes_without_an_event(recipe):
    torch.manual_seed(0)
    width = 2048
    model = fp8rs.convert_to_float8_training(
        Two(width).to("cuda", torch.bfloat16), recipe=RECIPES[recipe]
    )
    x = torch.randn(4096, width, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model.a(x.clone()), model.b(x.clone())
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(2)]
        for n in range(20):
            copied_x = x.clone()
            torch.cuda.synchronize()
            order = (0, 1) if n % 2 else (1, 0)
            outputs = [None, None]
            for i in order:
                with torch.cuda.stream(streams[i]):
                    if i == order[0]:
                        # Delay the planes that the first stream computes.
                        torch.cuda._sleep(2_000_000)
                    outputs[i] = (model.a, model.b)[i](copied_x)
            torch.cuda.synchronize()
            assert all(torch.equal(y, e) for y, e in zip(outputs, expected, strict=True))


# --- in-place operations on outputs --------------------------------------------------------------


@recipes
@pytest.mark.parametrize("shape", [(32,), (4, 32), (2, 3, 32), (2, 2, 2, 32), (0, 3, 32)])
@pytest.mark.parametrize("change", ["relu", "add", "mul", "index"])
def test_outputs_may_be_changed_in_place(device, change, shape, recipe):
    results = []
    for in_place in (True, False):
        model = two(device, recipe)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(shape, generator=generator).to(device).requires_grad_()
        y = model.a(x)
        if change == "relu":
            y = nn.functional.relu(y, inplace=in_place)
        elif change == "add":
            y = y.add_(x) if in_place else y + x
        elif change == "mul":
            y = y.mul_(3) if in_place else y * 3
        elif in_place:
            y[..., :4] = 0
        else:
            y = y * (torch.arange(32, device=device) >= 4)
        model.b(y).square().sum().backward()
        results.append((y.detach(), x.grad, model.a.weight.grad, model.b.weight.grad))
    for mine, expected in zip(*results, strict=True):
        assert torch.equal(mine, expected)


# --- sizes follow the weight ---------------------------------------------------------------------


@recipes
@pytest.mark.parametrize("shape", [(8, 32), (2, 4, 32)])
def test_a_weight_replaced_by_a_smaller_one_determines_the_sizes(device, shape, recipe):
    model = two(device, recipe)
    layer = model.a
    layer.weight = nn.Parameter(layer.weight[:16].detach().clone())
    layer.bias = nn.Parameter(layer.bias[:16].detach().clone())
    x = torch.randn(shape, device=device, requires_grad=True)
    y = layer(x)
    assert y.shape == (*shape[:-1], 16)
    y.sum().backward()
    assert layer.weight.grad.shape == (16, 32)
    assert x.grad.shape == x.shape
    reference = nn.functional.linear(x, layer.weight, layer.bias)
    assert relative(y, reference) < 0.05


@recipes
def test_a_narrower_weight_takes_narrower_inputs(device, recipe):
    layer = two(device, recipe).a
    layer.weight = nn.Parameter(layer.weight[:, :16].detach().clone())
    x = torch.randn(4, 16, device=device, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad.shape == (32, 16)
    with pytest.raises(ValueError, match="last dim must be 16"):
        layer(torch.randn(4, 32, device=device))
