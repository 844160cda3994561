"""Converted layers under torch's tensor-parallel plans compute the results of one rank."""

import copy
import warnings

import pytest
import torch
import torch._dynamo as dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import fp8rs
from cases import BLOCK_RECIPES, RECIPES
from distributed import ranks
from fp8rs.optim import AdamW

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
both_weights = pytest.mark.parametrize("fp8_weights", [False, True], ids=["masters", "fp8"])


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 64)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


@ranks(2)
@pytest.mark.parametrize("recipe", ["current", "rowwise", "mxfp8", "delayed"])
def test_column_and_row_parallel_layers_compute_the_whole(rig, recipe):
    torch.manual_seed(0)
    unsplit = fp8rs.convert_to_float8_training(Pair().to(rig.device), recipe=recipe)
    plain = Pair().to(rig.device)
    split = copy.deepcopy(unsplit)
    plain.load_state_dict(unsplit.state_dict())
    parallelize_module(split, rig.mesh(names=("tp",)), PLAN)
    x = torch.randn(8, 64).to(rig.device)
    results = {}
    for name, model in (("plain", plain), ("whole", unsplit), ("split", split)):
        y = model(x)
        y.square().sum().backward()
        results[name] = [y, *(p.grad for p in model.parameters())]
    for exact, unsplit_result, split_result in zip(*results.values(), strict=True):
        split_result = (
            split_result.full_tensor() if hasattr(split_result, "full_tensor") else split_result
        )
        error = (split_result - exact).norm()
        allowed = (unsplit_result - exact).norm()
        # Local scales are at most as coarse as the scale of the whole tensor.
        assert 0 < error < 1.5 * allowed + 1e-4 * exact.norm()


def split_pair(rig, recipe, **options):
    torch.manual_seed(0)
    model = fp8rs.convert_to_float8_training(Pair().to(rig.device), recipe=recipe, **options)
    return parallelize_module(model, rig.mesh(names=("tp",)), PLAN)


@ranks(2)
@both_weights
def test_compiled_delayed_scaling_equals_eager(rig, fp8_weights):
    """parallelize_module makes DTensors of its buffers, and the layers undo it."""
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
    dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    steps = []
    for compiled in (False, True):
        model = split_pair(rig, "delayed", fp8_weights=fp8_weights)
        if compiled:
            model.compile(backend=backend, fullgraph=True)
        optimizer = AdamW(model.parameters())
        for n in range(4):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(n))
            y = model(x.to(rig.device))
            y.square().sum().backward()
            steps.append([y, *(p.grad.to_local() for p in model.parameters())])
            optimizer.step()
            optimizer.zero_grad()
    for eager, got in zip(steps[:4], steps[4:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(eager, got, strict=True))
    assert backend.frame_count == 2, "one for first scales and one for histories"
    dynamo.reset()


@ranks(2)
@both_weights
def test_a_new_optimizer_has_a_state_dict_under_delayed_scaling(rig, fp8_weights):
    """torch runs a step of a new optimizer before the first forward."""
    model = split_pair(rig, "delayed", fp8_weights=fp8_weights)
    before = [p.full_tensor() for p in model.parameters()]
    state = get_optimizer_state_dict(model, AdamW(model.parameters()))["state"]
    assert {"up.weight", "down.weight"} <= set(state)
    for p, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.full_tensor(), was)


@ranks(2)
def test_placements_without_a_rule_are_an_error(rig):
    torch.manual_seed(0)
    mesh = rig.mesh(names=("tp",))
    layer = fp8rs.convert_to_float8_training(nn.Linear(64, 96, bias=False))
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    x = distribute_tensor(torch.randn(8, 64), mesh, [Shard(0)])
    with pytest.raises(TypeError, match="Supported are input Replicate"):
        layer(x)


@ranks(2)
def test_an_uneven_head_computes_a_parallel_loss(rig):
    """The output has the shape of the whole, not of this rank's part times the number of ranks."""
    torch.manual_seed(0)
    unsplit = fp8rs.convert_to_float8_training(nn.Linear(32, 17).to(rig.device), recipe="rowwise")
    style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    split = parallelize_module(copy.deepcopy(unsplit), rig.mesh(), style)
    x = torch.randn(5, 32).to(rig.device)
    labels = torch.arange(5).to(rig.device)
    expected = torch.nn.functional.cross_entropy(unsplit(x), labels)
    expected.backward()
    with loss_parallel():
        y = split(x)
        loss = torch.nn.functional.cross_entropy(y, labels)
        loss.backward()
    assert y.shape == y.full_tensor().shape == (5, 17)
    torch.testing.assert_close(loss.full_tensor(), expected)
    for p, split_p in zip(unsplit.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(split_p.grad.full_tensor(), p.grad, rtol=0.1, atol=0.01)


@ranks(2)
@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_row_sharded_input_with_replicated_weight(rig, recipe):
    """The gradients of weight and bias are sums over all rows."""
    torch.manual_seed(0)
    plain = nn.Linear(32, 16).to(rig.device)
    model = nn.Sequential(copy.deepcopy(plain))
    fp8rs.convert_to_float8_training(model, recipe=recipe)
    mesh = rig.mesh()
    distribute_module(model, mesh)
    x, factors = (
        torch.randn(8, n, generator=torch.Generator().manual_seed(n)).to(rig.device)
        for n in (32, 16)
    )
    plain(x).mul(factors).sum().backward()
    own_x, own_factors = (distribute_tensor(t, mesh, [Shard(0)]) for t in (x, factors))
    (model(own_x) * own_factors).sum().backward()
    torch.testing.assert_close(model[0].bias.grad.full_tensor(), plain.bias.grad)
    error = (model[0].weight.grad.full_tensor() - plain.weight.grad).norm()
    assert error < 0.1 * plain.weight.grad.norm()


WRITES = {
    "nothing": lambda model: None,
    "load_state_dict": lambda model: model.load_state_dict(
        {n: t.detach().clone() for n, t in model.state_dict().items()}
    ),
    "mul_": lambda model: [layer.weight.detach().mul_(2) for layer in (model.up, model.down)],
    "reset_parameters": lambda model: (model.up.reset_parameters(), model.down.reset_parameters()),
}


@ranks(2)
@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "block", "mxfp8"])
@pytest.mark.parametrize("method", ["split", "replicated"])
def test_optimizer_steps_written_fp8_weights(rig, recipe, method):
    mesh = rig.mesh(names=("tp",))
    for name, write in WRITES.items():
        torch.manual_seed(0)
        model = Pair().to(rig.device)
        fp8rs.convert_to_float8_training(model, recipe=recipe, fp8_weights=True)
        if method == "split":
            parallelize_module(model, mesh, PLAN)
        else:
            distribute_module(model, mesh)
        write(model)
        before = [p.detach().full_tensor().clone() for p in model.parameters()]
        optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        for p in model.parameters():
            p.grad = torch.ones_like(p)  # so that the first step has the length lr
        optimizer.step()
        for p, was in zip(model.parameters(), before, strict=True):
            exact = optimizer.state[p].get("master", p).detach().full_tensor()
            torch.testing.assert_close(exact, was - 1e-3, rtol=0.0, atol=1e-6, msg=name)
            # Half of the largest distance between two codes, with E8M0 scales.
            assert (p.detach().full_tensor() - exact).abs().max() <= exact.abs().max() / 14, name


@ranks(2)
def test_gradient_with_another_placement_is_redistributed(rig):
    """The gradient of an embedding that is sharded by rows has another placement."""
    mesh = rig.mesh(names=("tp",))
    results = []
    for optimizer in (torch.optim.AdamW, AdamW):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 16)).to(rig.device)
        plan = {"0": RowwiseParallel(input_layouts=Replicate()), "1": ColwiseParallel()}
        parallelize_module(model, mesh, plan)
        step = optimizer(model.parameters(), lr=1e-2)
        for _ in range(2):
            model(torch.arange(8).to(rig.device)).square().sum().backward()
            assert model[0].weight.grad.placements != model[0].weight.placements
            step.step()
            step.zero_grad()
        results.append([p.detach().full_tensor() for p in model.parameters()])
    for result, other in zip(*results, strict=True):
        torch.testing.assert_close(result, other)


@ranks(2)
@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("source", [0, None])
@pytest.mark.parametrize("width", [256, 200])
def test_parts_of_fp8_weights_are_parts_of_their_codes(rig, recipe, source, width):
    """A part that starts at a block keeps its codes. Otherwise it is quantized again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, width, bias=False), nn.Linear(width, 256, bias=False))
    with torch.no_grad():  # each rank's part has a different amax
        model[0].weight[: width // 2].mul_(3)
        model[1].weight[:, : width // 2].mul_(3)
    model.to(rig.device)
    fp8rs.convert_to_float8_training(model, recipe=RECIPES[recipe], fp8_weights=True)
    split = copy.deepcopy(model)
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(split, rig.mesh(names=("tp",)), plan, src_data_rank=source)
    blocks = recipe in BLOCK_RECIPES and not recipe.startswith("rowwise")
    for dim, (layer, full_layer) in enumerate(zip(split, model, strict=True)):
        part = layer.weight.to_local()
        values = full_layer.weight.dequantize().chunk(2, dim)[rig.rank]
        assert isinstance(part, fp8rs.QuantizedTensor)
        assert torch.equal(part.dequantize(), values) or (blocks and width == 200)
        assert (part.dequantize() - values).abs().max() <= values.abs().max() / 14
    if not blocks or width == 200:
        return
    for of in (split, model):
        optimizer = AdamW(of.parameters(), lr=1e-2)
        for p in of.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    for dim, (layer, full_layer) in enumerate(zip(split, model, strict=True)):
        part = layer.weight.to_local()
        values = full_layer.weight.dequantize().chunk(2, dim)[rig.rank]
        assert torch.equal(part.dequantize(), values)
