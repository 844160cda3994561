"""Checkpoints whose names differ between ranks, or between the model and the checkpoint."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8rs
from cases import each_recipe
from checkpoint.layouts import KEPT, batch, contents, lay_out, state_of
from distributed import ranks
from distributed.folders import shared_folder
from distributed.models import RECIPES, UNEVEN, same_bytes, train
from fp8rs import checkpoint
from fp8rs.checkpoint import CheckpointError, Model, Optimizer
from fp8rs.optim import AdamW

FP8 = "FP8 weights, AdamW with masters"
MASTERS = "master weights, torch's AdamW"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def same(left, right):
    return left.keys() == right.keys() and all(same_bytes(left[n], right[n]) for n in left)


class Stage(nn.Module):
    """Some layers of a model, under their names in the full model."""

    def __init__(self, layers, seed, device):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleDict({str(k): nn.Linear(64, 64, device=device) for k in layers})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def stage(rig, layers, recipe, fp8_weights, seed, mesh, lr=1e-2):
    model = Stage(layers, seed, rig.device)
    if recipe is not None:
        options = {"recipe": RECIPES[recipe], "fp8_weights": fp8_weights}
        fp8rs.convert_to_float8_training(model, **options)
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    optimizer = AdamW if fp8_weights else torch.optim.AdamW
    return model, optimizer(model.parameters(), lr=lr)


def steps(rig, model, optimizer, numbers):
    losses = []
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        loss = model(torch.randn(16, 64, generator=generator).to(rig.device)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@ranks(2, 4)
@each_recipe("current", "delayed", "mxfp8", of=RECIPES)
@pytest.mark.parametrize("fp8_weights", [False, True])
def test_pipeline_stages_save_and_load_one_checkpoint(rig, recipe, fp8_weights):
    folder = shared_folder(rig)
    mesh = init_device_mesh(rig.device_type, (2, rig.world_size // 2), mesh_dim_names=("pp", "dp"))
    sharded = mesh["dp"] if rig.world_size > 2 else None
    layers = [(0, 1), (2, 3)][mesh["pp"].get_local_rank()]
    model, optimizer = stage(rig, layers, recipe, fp8_weights, 0, sharded)
    steps(rig, model, optimizer, range(2))
    checkpoint.save(state_of(model, optimizer), f"{folder}/saved")
    other, resumed = stage(rig, layers, recipe, fp8_weights, 1, sharded, lr=5.0)
    checkpoint.load(state_of(other, resumed), f"{folder}/saved")
    assert resumed.param_groups[0]["lr"] == 1e-2
    assert steps(rig, other, resumed, range(2, 5)) == steps(rig, model, optimizer, range(2, 5))


@ranks(2)
def test_stages_load_as_one_model_and_one_model_loads_as_stages(rig):
    folder = shared_folder(rig)
    layers = [(0, 1), (2, 3)][rig.rank]
    model, optimizer = stage(rig, layers, "current", True, 0, None)
    steps(rig, model, optimizer, range(2))
    checkpoint.save(state_of(model, optimizer), f"{folder}/stages")
    mesh = init_device_mesh(rig.device_type, (2,))
    full_model, full_optimizer = stage(rig, range(4), "current", True, 1, mesh)
    checkpoint.load(state_of(full_model, full_optimizer), f"{folder}/stages")
    checkpoint.save(state_of(full_model, full_optimizer), f"{folder}/whole")
    other, resumed = stage(rig, layers, "current", True, 2, None)
    checkpoint.load(state_of(other, resumed), f"{folder}/whole")
    assert steps(rig, other, resumed, range(2, 4)) == steps(rig, model, optimizer, range(2, 4))


@ranks(2)
def test_a_save_refuses_stages_whose_param_groups_differ(rig):
    """The options of all stages have equal names, and a checkpoint stores one value per name."""
    folder = shared_folder(rig)
    model, optimizer = stage(
        rig, [(0,), (1,)][rig.rank], None, False, 0, None, [1e-2, 1e-3][rig.rank]
    )
    with pytest.raises(CheckpointError) as raised:
        checkpoint.save(state_of(model, optimizer), f"{folder}/saved")
    line = "optimizer.param_groups.0.lr: 0.01 on rank 0, 0.001 (rank 1)"
    assert line in str(raised.value), str(raised.value)


@ranks(2)
def test_learning_rates_in_tensors_are_compared_by_value(rig):
    """Their texts have their devices, which differ between ranks, and four digits."""
    folder = shared_folder(rig)
    model, optimizer = stage(rig, [(0,), (1,)][rig.rank], None, False, 0, None)
    (group,) = optimizer.param_groups
    group["lr"] = torch.tensor(1e-2, device=rig.device)
    checkpoint.save(state_of(model, optimizer), f"{folder}/saved")
    group["lr"] += rig.rank * 1e-7
    with pytest.raises(CheckpointError, match=r"param_groups\.0\.lr: 0\.0[^ ]* on rank 0, 0\.0"):
        checkpoint.save(state_of(model, optimizer), f"{folder}/other")


@ranks(2)
def test_a_name_that_no_rank_has_is_refused(rig):
    folder = shared_folder(rig)
    saved = stage(rig, [(0, 1), (2, 3)][rig.rank], None, False, 0, None)
    checkpoint.save(state_of(*saved), f"{folder}/saved")
    model, optimizer = stage(rig, [(0, 1), (2,)][rig.rank], None, False, 1, None)
    before = contents(model, optimizer)
    with pytest.raises(CheckpointError) as raised:
        checkpoint.load({"model": Model(model)}, f"{folder}/saved")
    differences = raised.value.causes[0].differences
    assert differences == [
        "model.layers.3.bias: float32 (64,) in the checkpoint, unknown here",
        "model.layers.3.weight: float32 (64, 64) in the checkpoint, unknown here",
    ]
    assert same(contents(model, optimizer), before)


def test_a_key_that_the_checkpoint_lacks_is_named_with_its_own(tmp_path):
    saved = nn.Linear(4, 4)
    model = nn.Linear(4, 4)
    checkpoint.save({"model": Model(saved), "step": 1}, tmp_path / "ours")
    dcp.save(saved.state_dict(), checkpoint_id=tmp_path / "torchs")
    with pytest.raises(
        CheckpointError, match=r"has no 'net': its names begin with 'model', 'step'"
    ):
        checkpoint.load({"net": Model(model), "step": 0}, tmp_path / "ours")
    with pytest.raises(CheckpointError, match="has no 'epoch': its names begin with 'model', 'st"):
        checkpoint.load({"model": Model(model), "epoch": 0}, tmp_path / "ours")
    with pytest.raises(CheckpointError, match="no 'model': its names begin with 'bias', 'weight'"):
        checkpoint.load({"model": Model(model)}, tmp_path / "torchs")


def test_a_partial_load_refuses_a_key_without_entries_in_the_checkpoint(tmp_path):
    saved = nn.Linear(4, 4)
    model = nn.Linear(4, 4)
    checkpoint.save({"model": Model(saved), "step": 1}, tmp_path / "saved")
    state = {"wrong": Model(model), "step": 0}
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match="no 'wrong': its names begin with 'model', 'st"):
        checkpoint.load(state, tmp_path / "saved", strict=False)
    assert state["step"] == 0 and torch.equal(model.weight, before)


def test_a_message_without_a_remedy_ends_with_the_differences(tmp_path):
    checkpoint.save({"model": Model(nn.Linear(4, 4))}, tmp_path / "saved")
    with pytest.raises(CheckpointError) as raised:
        checkpoint.load({"model": Model(nn.Linear(8, 8))}, tmp_path / "saved")
    assert str(raised.value).splitlines()[-1] == (
        "  model.bias: float32 (4,) in the checkpoint, float32 (8,) here"
    )
    assert str(raised.value) == str(raised.value).strip()


class WithUnused(nn.Module):
    def __init__(self, seed, unused="unused"):
        super().__init__()
        torch.manual_seed(seed)
        self.used = nn.Linear(64, 64)
        self.add_module(unused, nn.Linear(64, 64))

    def forward(self, x):
        return self.used(x)


OPTIMIZERS = {
    "torch's AdamW": (False, lambda p: torch.optim.AdamW(p, lr=1e-2)),
    "fp8rs's AdamW": (True, lambda p: AdamW(p, lr=1e-2)),
    "torch's SGD": (False, lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9)),
}


def with_unused(weight_kind, seed, unused="unused"):
    fp8_weights, optimizer = OPTIMIZERS[weight_kind]
    model = WithUnused(seed, unused)
    fp8rs.convert_to_float8_training(model, recipe="current", fp8_weights=fp8_weights)
    return model, optimizer(model.parameters())


def go(model, optimizer, numbers):
    losses = []
    for number in numbers:
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(number))
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def local_values(model, optimizer):
    """Return copies of the values and of the optimizer state."""
    values = {}
    for name, p in model.named_parameters():
        local = p.detach()
        exact = isinstance(local, fp8rs.QuantizedTensor)
        values[name] = local.dequantize().clone() if exact else local.clone()
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor):
                values[f"{name} {key}"] = value.clone()
    return values


def without_master(model, optimizer):
    values = local_values(model, optimizer)
    values.pop("unused.weight master", None)
    return values


@pytest.mark.parametrize("weight_kind", list(OPTIMIZERS))
@pytest.mark.parametrize("stepped", [False, True])
def test_a_parameter_without_gradients_resumes_without_a_state(weight_kind, stepped, tmp_path):
    model, optimizer = with_unused(weight_kind, 0)
    go(model, optimizer, range(3))
    checkpoint.save(state_of(model, optimizer), tmp_path / "saved")
    other, resumed = with_unused(weight_kind, 1)
    if stepped:
        go(other, resumed, range(1))
    checkpoint.load(state_of(other, resumed), tmp_path / "saved", strict=False)
    # If the checkpoint lacks a master, it is read from the loaded weight when it is used next.
    # Elements that round to the loaded code keep their value.
    assert same(without_master(other, resumed), without_master(model, optimizer))
    assert go(other, resumed, range(3, 6)) == go(model, optimizer, range(3, 6))
    # The parameter gets its first gradient later.
    for m, o in ((model, optimizer), (other, resumed)):
        m.unused(torch.ones(16, 64)).sum().backward()
        o.step()
        o.zero_grad()
    assert same(without_master(other, resumed), without_master(model, optimizer))


@pytest.mark.parametrize("weight_kind", ["torch's AdamW", "fp8rs's AdamW"])
def test_a_missing_optimizer_state_is_refused_before_the_model_is_written(weight_kind, tmp_path):
    model, optimizer = with_unused(weight_kind, 0)
    go(model, optimizer, range(1))
    checkpoint.save(state_of(model, optimizer), tmp_path / "saved")
    other, resumed = with_unused(weight_kind, 1)
    state = state_of(other, resumed)
    # torch initializes missing states with zeros.
    state["optimizer"].state_dict()
    before = local_values(other, resumed)
    with pytest.raises(CheckpointError, match=r"state.unused.weight.*not in the check") as e:
        checkpoint.load(state, tmp_path / "saved")
    assert "strict=False" in str(e.value)
    assert same(local_values(other, resumed), before)


@pytest.mark.parametrize("weight_kind", list(OPTIMIZERS))
def test_a_partial_load_keeps_what_the_checkpoint_does_not_contain(weight_kind, tmp_path):
    model, optimizer = with_unused(weight_kind, 0, "first")
    go(model, optimizer, range(2))
    checkpoint.save({**state_of(model, optimizer), "extra": {"a": 1}}, tmp_path / "saved")
    other, resumed = with_unused(weight_kind, 1, "second")
    go(other, resumed, range(3))
    other.second(torch.ones(16, 64)).sum().backward()
    resumed.step()
    resumed.zero_grad()
    before = local_values(other, resumed)
    expected = local_values(model, optimizer)
    extra = {"a": 0, "b": [torch.ones(2), 7], "c": torch.ones(2), 5: [{"d": torch.ones(1)}]}
    state = {**state_of(other, resumed), "extra": extra, "more": torch.full((2,), 3.0)}
    checkpoint.load(state, tmp_path / "saved", strict=False)
    # The masters of the other parameters are read from their weights again.
    before = {n: v for n, v in before.items() if n != "second.weight master"}
    after = {n: v for n, v in local_values(other, resumed).items() if n != "second.weight master"}
    assert after.keys() == before.keys()
    for name, value in after.items():
        assert same_bytes(value, (before if name.startswith("second") else expected)[name]), name
    assert extra["a"] == 1 and extra["b"][1] == 7 and set(extra) == {"a", "b", "c", 5}
    for tensor in (extra["b"][0], extra["c"], extra[5][0]["d"]):
        assert torch.equal(tensor, torch.ones_like(tensor))
    assert torch.equal(state["more"], torch.full((2,), 3.0))
    # This raises if a state is missing.
    go(other, resumed, range(3, 5))


@pytest.mark.parametrize("weight_kind", ["torch's AdamW", "fp8rs's AdamW"])
def test_a_partial_load_still_refuses_another_shape_or_dtype(weight_kind, tmp_path):
    model, optimizer = with_unused(weight_kind, 0)
    checkpoint.save({"model": Model(model)}, tmp_path / "saved")
    other, _ = with_unused(weight_kind, 1)
    other.unused.bias = nn.Parameter(torch.zeros(32))
    before = local_values(other, optimizer)
    with pytest.raises(CheckpointError, match=r"unused.bias: float32 \(64,\) in the checkpoint"):
        checkpoint.load({"model": Model(other)}, tmp_path / "saved", strict=False)
    assert same(local_values(other, optimizer), before)


def test_a_model_on_the_meta_device_is_refused(tmp_path):
    checkpoint.save({"model": Model(nn.Linear(8, 8))}, tmp_path / "saved")
    model = nn.Linear(8, 8, device="meta")
    with pytest.raises(CheckpointError, match=r"model\.weight is on the meta device.*to_empty"):
        checkpoint.load({"model": Model(model)}, tmp_path / "saved")


def test_a_partial_load_refuses_codes_without_their_scales(tmp_path):
    model, _ = with_unused("fp8rs's AdamW", 0)
    parts = Model(model).state_dict()
    del parts["used.weight_scale"]
    checkpoint.save({"model": parts}, tmp_path / "saved")
    other, _ = with_unused("fp8rs's AdamW", 1)
    with pytest.raises(CheckpointError, match=r"model.used.weight_scale: not in the checkpoint"):
        checkpoint.load({"model": Model(other)}, tmp_path / "saved", strict=False)


def test_a_master_missing_from_the_checkpoint_is_read_from_the_loaded_weight(tmp_path):
    model, optimizer = with_unused("fp8rs's AdamW", 0)
    go(model, optimizer, range(2))
    state = {"model": Model(model), "optimizer": Optimizer(model, optimizer).state_dict()}
    for values in state["optimizer"]["state"].values():
        values.pop("master", None)
    checkpoint.save(state, tmp_path / "saved")
    other, resumed = with_unused("fp8rs's AdamW", 1)
    go(other, resumed, range(1))
    checkpoint.load(state_of(other, resumed), tmp_path / "saved", strict=False)
    values = other.used.weight.detach().dequantize().clone()
    assert torch.equal(values, model.used.weight.detach().dequantize())
    for group in resumed.param_groups:
        group["lr"] = 0.0
    go(other, resumed, range(1))
    assert torch.equal(other.used.weight.detach().dequantize(), values)


@ranks(2)
@pytest.mark.parametrize("weight_kind", [FP8, MASTERS])
def test_a_checkpoint_of_another_recipe_is_refused_in_one_short_message(rig, weight_kind):
    folder = shared_folder(rig)
    model, optimizer, _ = lay_out(rig, "FSDP of 2", "delayed", weight_kind, UNEVEN)
    train(model, optimizer, [batch(rig, 0)])
    checkpoint.save(state_of(model, optimizer), f"{folder}/saved")
    for recipe in ("current", "block"):
        other, resumed, _ = lay_out(rig, "FSDP of 2", recipe, weight_kind, UNEVEN, seed=1)
        state = state_of(other, resumed)
        with pytest.raises(CheckpointError) as raised:
            checkpoint.load(state, f"{folder}/saved")
        message = str(raised.value)
        saved = Model(model).state_dict()
        # With delayed scaling, the optimizer keeps scales.
        if weight_kind == FP8:
            saved |= Optimizer(model, optimizer).state_dict()["state"]
        unexpected = 3 * sum(name.endswith(".fp8_scale") for name in saved)
        unexpected += sum("scale" in value for value in saved.values() if isinstance(value, dict))
        assert f"In the checkpoint, but not in the state of any rank ({unexpected}):" in message
        assert "histories of delayed scaling" in message
        needs_recipe = recipe == "block" and weight_kind == FP8
        assert ("convert the model with the recipe" in message) == needs_recipe, message
        assert ("strict=False" in message) != needs_recipe, message
        lines = message.splitlines()
        assert len(lines) <= 3 + 5 * (2 if needs_recipe else 1), message
        assert len(set(lines)) == len(lines)
        assert len(raised.value.causes[0].differences) >= unexpected
        # The suggested fix works.
        if not needs_recipe:
            checkpoint.load(state, f"{folder}/saved", strict=False)
            loaded = contents(other, resumed)
            trained = contents(model, optimizer)
            assert len(loaded) > len(list(model.parameters()))
            assert same(loaded, {name: trained[name] for name in loaded})


@ranks(2)
def test_a_difference_is_listed_once_with_the_ranks_that_see_it(rig):
    folder = shared_folder(rig)
    checkpoint.save({"a": torch.ones(3), "b": torch.ones(3)}, f"{folder}/saved")
    state = {"a": torch.ones(2), "b": torch.ones(2 if rig.rank else 3)}
    with pytest.raises(CheckpointError) as raised:
        checkpoint.load(state, f"{folder}/saved")
    assert raised.value.causes[0].differences == [
        "a: float32 (3,) in the checkpoint, float32 (2,) here",
        "b: float32 (3,) in the checkpoint, float32 (2,) here (rank 1)",
    ]


@ranks(2)
@each_recipe("delayed", of=RECIPES)
@pytest.mark.parametrize("weight_kind", list(KEPT))
@pytest.mark.filterwarnings("ignore:.*FP8 weights, and keeps no masters")
def test_a_resumed_training_saves_a_checkpoint_that_resumes(rig, recipe, weight_kind):
    """A load adds no options to the param groups."""
    folder = shared_folder(rig)
    model, optimizer, _ = lay_out(rig, "FSDP of 2", recipe, weight_kind, UNEVEN)
    train(model, optimizer, [batch(rig, 0)])
    for number in range(2):
        checkpoint.save(state_of(model, optimizer), f"{folder}/{number}")
        model, optimizer, _ = lay_out(
            rig, "FSDP of 2", recipe, weight_kind, UNEVEN, seed=1 + number
        )
        checkpoint.load(state_of(model, optimizer), f"{folder}/{number}")


class Scaled(nn.Module):
    """A layer, and a weight of its own with a trained scale."""

    def __init__(self, scale=True):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.weight = nn.Parameter(torch.randn(8))
        if scale:
            self.weight_scale = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("fp8_weights", [False, True])
def test_a_missing_parameter_is_reported_if_its_name_ends_in_scale(tmp_path, fp8_weights):
    saved = Scaled(scale=False)
    loading = Scaled()
    for model in (saved, loading):
        fp8rs.convert_to_float8_training(model, recipe="current", fp8_weights=fp8_weights)
    checkpoint.save({"model": Model(saved)}, tmp_path / "saved")
    before = loading.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"model.weight_scale: not in the checkpoint"):
        checkpoint.load({"model": Model(loading)}, tmp_path / "saved")
    assert torch.equal(loading.weight, before)


class ScaledLinear(nn.Linear):
    """A layer with a parameter that has the name of an FP8 weight's scales."""

    def __init__(self):
        super().__init__(32, 32)
        self.weight_scale = nn.Parameter(torch.ones(3))


def test_a_parameter_with_the_name_of_a_weights_scales_is_refused():
    model = nn.Sequential(ScaledLinear())
    fp8rs.convert_to_float8_training(model, recipe="current", fp8_weights=True)
    with pytest.raises(ValueError, match=r"0.weight_scale, which is also the name of a part"):
        Model(model).state_dict()


@ranks(1)
@pytest.mark.parametrize("stale", ["weights", "biases", "named biases"])
@pytest.mark.parametrize("fp8_weights", [False, True])
def test_an_optimizer_from_before_the_sharding_is_refused_when_it_is_wrapped(
    rig, fp8_weights, stale
):
    model = Stage([0, 1], seed=0, device=rig.device)
    fp8rs.convert_to_float8_training(model, fp8_weights=fp8_weights)
    parameters, first = {
        "weights": (model.parameters(), r"layers\.0\.weight"),
        "biases": ([layer.bias for layer in model.layers.values()], "parameter 0 of param group 0"),
        "named biases": (
            [(n, p) for n, p in model.named_parameters() if n.endswith("bias")],
            r"layers\.0\.bias",
        ),
    }[stale]
    optimizer = torch.optim.AdamW(parameters)
    wrapped = Optimizer(model, optimizer)
    fully_shard(model, mesh=rig.mesh())

    message = rf"AdamW steps \d tensors .* {first}.* after fully_shard"
    with pytest.raises(ValueError, match=message):
        Optimizer(model, optimizer)
    with pytest.raises(ValueError, match=message):
        wrapped.state_dict()

    fresh = AdamW(model.parameters())
    model(torch.randn(2, 64, device=rig.device))  # leaves the root's parameters unsharded
    assert Optimizer(model, fresh).state_dict()["state"]
