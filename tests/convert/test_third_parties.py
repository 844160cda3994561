"""Third-party uses of a converted model that need only torch and transformers.

They are rows of docs/clients.md. Those that need a client are in ``tests/clients``. "Plain" refers
to the unconverted model in the same scenario.
"""

import copy
import logging
from importlib.util import find_spec

import pytest
import torch
import torch._dynamo.testing
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import fp8rs
from distributed import ranks
from distributed.models import (
    EVEN,
    RECIPES,
    UNEVEN,
    batch,
    full_weights,
    make,
    on_all_ranks,
    recipes,
    same_bytes,
    shard,
    train,
)
from language_models import llama, mixtral, train_on


def converted(recipe="current", device="cpu", hidden=UNEVEN):
    return make(hidden, recipe=RECIPES[recipe], device=device)


def inputs(device="cpu", rows=16):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 32, generator=generator).to(device)


# --- several ranks, without FSDP -----------------------------------------------------------------


@ranks(2)
@recipes
def test_ddp_keeps_ranks_equal_and_trains(rig, recipe):
    model = converted(recipe, rig.device)
    parallel = DistributedDataParallel(model)
    before = full_weights(model)
    losses = train(parallel, torch.optim.SGD(model.parameters(), 0.1), [batch(rig)] * 4)
    assert losses[-1] < losses[0]
    after = full_weights(model)
    for name, weight in after.items():
        assert not torch.equal(weight, before[name]), name
        assert on_all_ranks(weight), name


@ranks(2)
@recipes
def test_zero_1_steps_as_the_optimizer_that_it_shards(rig, recipe):
    """Each rank steps its share of the parameters and broadcasts it. The weights equal AdamW's."""
    results = []
    for zero in (True, False):
        model = converted(recipe, rig.device)
        if zero:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        before = full_weights(model)
        train(DistributedDataParallel(model), optimizer, [batch(rig)] * 3)
        results.append(full_weights(model))
        assert all(not torch.equal(before[n], w) for n, w in results[-1].items())
    assert all(same_bytes(results[0][n], results[1][n]) for n in results[0])


# --- optimizers ----------------------------------------------------------------------------------


@recipes
def test_muon_moves_every_weight(device, recipe):
    model = converted(recipe, device)
    weights = [p for p in model.parameters() if p.dim() == 2]
    before = full_weights(model)
    losses = train(model, torch.optim.Muon(weights, lr=0.02), [inputs(device)] * 6)
    assert losses[-1] < losses[0]
    assert all(not torch.equal(before[n], w) for n, w in full_weights(model).items())


# --- copies and files ----------------------------------------------------------------------------


@recipes
def test_an_average_by_deepcopy_is_independent_of_the_model(device, recipe):
    model = converted(recipe, device)
    average = copy.deepcopy(model)
    start = full_weights(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer, [inputs(device)] * 2)
    assert all(same_bytes(start[n], w) for n, w in full_weights(average).items())
    with torch.no_grad():
        for mean, p in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(p, 0.5)
    expected = {n: start[n].lerp(w, 0.5) for n, w in full_weights(model).items()}
    assert all(same_bytes(expected[n], w) for n, w in full_weights(average).items())
    # The copy computes with the averages: a model created with them gives the same output.
    other = converted(recipe, device)
    other.load_state_dict(average.state_dict())
    with torch.no_grad():
        assert torch.equal(average.eval()(inputs(device)), other.eval()(inputs(device)))


@recipes
def test_named_parameters_are_saved_as_safetensors(device, recipe, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = converted(recipe, device)
    path = str(tmp_path / "model.safetensors")
    safetensors.save_file(dict(model.named_parameters()), path)
    loaded = safetensors.load_file(path, device=str(device))
    expected = dict(model.named_parameters())
    assert loaded.keys() == expected.keys()
    assert all(same_bytes(loaded[n], p.detach()) for n, p in expected.items())
    plain = make(UNEVEN, recipe=None, device=device, seed=1)
    plain.load_state_dict(loaded)
    assert same_bytes(plain.head.weight.detach(), model.head.weight.detach())


@pytest.mark.skipif(find_spec("safetensors") is None, reason="safetensors is not installed")
@ranks(2, cuda=False)
def test_shards_are_saved_as_safetensors_after_full_tensor(rig):
    """Safetensors refuses a DTensor, also in a plain model, so each parameter is gathered first."""
    import safetensors.torch as safetensors

    results = []
    for recipe in (None, "current"):
        model = shard(make(UNEVEN, recipe=recipe, device=rig.device), rig)
        full_tensors = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
        results.append(safetensors.load(safetensors.save(full_tensors)))
    assert results[0].keys() == results[1].keys()
    assert all(same_bytes(results[0][n], results[1][n]) for n in results[0])


# --- export and the meta device ------------------------------------------------------------------


@recipes
def test_an_exported_model_computes_what_the_model_does(device, recipe):
    model = converted(recipe, device).eval()
    x = inputs(device)
    with torch.no_grad():
        expected = model(x)
        program = torch.export.export(model, (x,))
        assert torch.equal(program.module()(x), expected)
    named = {"fp8rs" in str(node.target) for node in program.graph.nodes}
    assert named == {True, False}


@recipes
@pytest.mark.parametrize("autocast", [False, True])
def test_a_model_on_meta_gives_shapes_dtypes_and_flops(recipe, autocast):
    """Memory estimators and FLOP counters run a model without data."""
    results = []
    for chosen in (None, RECIPES[recipe]):
        model = make(UNEVEN, recipe=chosen).to("meta")
        x = torch.empty(16, 32, device="meta", requires_grad=True)
        with FlopCounterMode(display=False) as flops, torch.autocast("cpu", enabled=autocast):
            y = model(x)
            y.sum().backward()
        gradients = {n: (p.grad.shape, p.grad.device.type) for n, p in model.named_parameters()}
        results.append((y.shape, y.dtype, y.device.type, gradients, flops.get_total_flops()))
    assert results[0] == results[1]
    assert results[0][-1] > 0


# --- transformers --------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
def test_save_pretrained_writes_the_unconverted_model(device, recipe, tmp_path):
    model = llama(device)
    expected = {n: p.detach().clone() for n, p in model.named_parameters()}
    fp8rs.convert_to_float8_training(model, recipe=recipe, filter_fqns=["lm_head"])
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert not any(isinstance(m, fp8rs.nn.Linear) for m in loaded.modules())
    actual = dict(loaded.named_parameters())
    assert actual.keys() == expected.keys()
    assert all(same_bytes(actual[n].cpu(), p.cpu()) for n, p in expected.items())


@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
def test_generate_returns_tokens_of_the_model(device, recipe):
    model = llama(device).eval()
    fp8rs.convert_to_float8_training(model, recipe=recipe, filter_fqns=["lm_head"])
    prompt = torch.arange(8, device=device)[None]
    tokens = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert tokens.shape == (1, 12)
    assert torch.equal(tokens[:, :8], prompt)
    # The first new token is the argmax of the forward.
    with torch.no_grad():
        logits = model(input_ids=prompt).logits
    assert tokens[0, 8] == logits[0, -1].argmax()


def test_experts_that_stay_in_high_precision_are_listed_in_the_log(caplog):
    model = mixtral("cpu", 256, 1024)
    large = [n for n, p in model.named_parameters() if p.dim() == 3]
    assert large
    with caplog.at_level(logging.INFO, "fp8rs"):
        fp8rs.convert_to_float8_training(model, filter_fqns=["lm_head"], experts="off")
    (report,) = [r.message for r in caplog.records if r.name == "fp8rs"]
    assert "left in high precision (experts='off'): " in report
    assert all(name in report for name in large)
    share = sum(m.weight.numel() for m in model.modules() if isinstance(m, fp8rs.nn.Linear))
    assert f"{share / sum(p.numel() for p in model.parameters()):.1%}" in report


def test_a_mixture_of_experts_trains(device):
    model = mixtral(device, 32, 48)
    fp8rs.convert_to_float8_training(model, filter_fqns=["lm_head"])
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    tokens = torch.arange(64, device=device).view(2, 32)
    losses = train_on(tokens, model, 8)
    assert losses[-1] < 0.9 * losses[0]
    assert all(not torch.equal(before[n], p) for n, p in model.named_parameters())


@ranks(2)
def test_muon_moves_every_shard(rig):
    """Muon moves the shards of an unconverted model too."""
    for recipe in (None, "current"):
        model = shard(make(EVEN, recipe=recipe, device=rig.device), rig)
        optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02)
        before = [p.to_local().detach().clone() for p in model.parameters()]
        train(model, optimizer, [batch(rig)] * 2)
        for (name, p), was in zip(model.named_parameters(), before, strict=True):
            assert was.numel() and torch.equal(p.to_local(), was) == (p.dim() == 1), (recipe, name)


def step_of(p, update):
    """A part of an optimizer's step, compiled as torchao compiles it."""
    p.copy_(p.float() - 0.5 * update)


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 cannot trace a subclass that has a storage"
)
@ranks(2, seconds=240)
def test_a_compiled_step_writes_every_shard_with_one_graph(rig):
    """torchao's optimizers compile their step for each parameter. If each shard needed its own
    graph, the first step of a large model would compile for an hour."""
    model = shard(make((64, 64), recipe="current", device=rig.device), rig)
    weights = [block.up.weight for block in model.blocks]
    before = full_weights(model)
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(step_of, backend=graphs, fullgraph=True, dynamic=False)
    with torch.no_grad():
        for p in weights:
            compiled(p.detach(), torch.ones_like(p))
    assert graphs.frame_count == 1
    after = full_weights(model)
    for i in range(2):
        name = f"blocks.{i}.up"
        assert same_bytes(after[name], before[name] - 0.5)
        assert type(weights[i].to_local()).__name__ == "MasterWeight"
    # The next forward uses the written values.
    assert model(batch(rig)).isfinite().all()
