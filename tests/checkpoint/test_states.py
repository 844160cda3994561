"""The contents of a checkpoint: required, optional and refused entries."""

import json
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import fp8rs
from cases import TWO_PLANES, each_kind_of_recipe
from checkpoint.layouts import KEPT, batch, contents, lay_out, size_of, state_of
from distributed import ranks
from distributed.folders import shared_folder
from distributed.models import HIDDEN, RECIPES, UNEVEN, make, same_bytes, train
from fp8rs import checkpoint
from fp8rs.checkpoint import CheckpointError, Model
from fp8rs.optim import AdamW, MasterWeights
from fp8rs.quantize.recipes import resolve_recipe

FP8 = "FP8 weights, AdamW with masters"
#: With --full, every optimizer of each kind of weights.
SOME = [n if n in list(KEPT)[1:3] else pytest.param(n, marks=pytest.mark.long) for n in KEPT]


def same(left, right):
    return left.keys() == right.keys() and all(same_bytes(left[n], right[n]) for n in left)


@ranks(2)
@each_kind_of_recipe
@pytest.mark.parametrize("weight_kind", SOME)
def test_a_resumed_training_has_the_losses_of_an_uninterrupted_one(rig, recipe, weight_kind):
    warnings.filterwarnings("ignore", message=".*FP8 weights, and keeps no masters")
    folder = shared_folder(rig)
    model, optimizer, _ = lay_out(rig, "FSDP of 2", recipe, weight_kind, UNEVEN)
    train(model, optimizer, [batch(rig, n) for n in range(3)])
    checkpoint.save(state_of(model, optimizer), f"{folder}/saved")
    other, resumed, _ = lay_out(rig, "FSDP of 2", recipe, weight_kind, UNEVEN, seed=1)
    checkpoint.load(state_of(other, resumed), f"{folder}/saved")
    batches = [batch(rig, n) for n in range(3, 7)]
    assert train(other, resumed, batches) == train(model, optimizer, batches)
    assert same(contents(other, resumed), contents(model, optimizer))


@ranks(2)
@each_kind_of_recipe
@pytest.mark.parametrize("fp8_weights", [False, True])
def test_a_checkpoint_of_the_unconverted_model_loads(rig, recipe, fp8_weights):
    """DCP saved it without histories and scales. The loaded values are quantized."""
    folder = shared_folder(rig)
    weight_kind = FP8 if fp8_weights else "master weights, torch's AdamW"
    plain, _, _ = lay_out(rig, "FSDP of 2", None, "master weights, torch's AdamW", UNEVEN)
    dcp.save({"model": get_model_state_dict(plain)}, checkpoint_id=f"{folder}/saved")
    model, optimizer, _ = lay_out(rig, "FSDP of 2", recipe, weight_kind, UNEVEN, seed=1)
    train(model, optimizer, [batch(rig, n) for n in range(3)])
    checkpoint.load({"model": Model(model)}, f"{folder}/saved")
    reference = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device, fp8_weights=fp8_weights)
    x = batch(rig, 0)
    assert torch.equal(model(x), reference(x))


@ranks(2)
@each_kind_of_recipe
@pytest.mark.parametrize("weight_kind", SOME[1:])
def test_rank_0_broadcasts_a_full_state_of_model_and_optimizer(rig, recipe, weight_kind):
    model, optimizer, _ = lay_out(rig, "FSDP of 2", recipe, weight_kind, UNEVEN)
    train(model, optimizer, [batch(rig, n) for n in range(2)])
    full_options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=full_options)
    moments = get_optimizer_state_dict(model, optimizer, options=full_options)
    other, resumed, _ = lay_out(rig, "FSDP of 2", recipe, weight_kind, UNEVEN, seed=1)
    around = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, full if rig.rank == 0 else {}, options=around)
    set_optimizer_state_dict(other, resumed, moments if rig.rank == 0 else {}, options=around)
    before = contents(model, optimizer)
    after = contents(other, resumed)
    assert before.keys() == after.keys()
    compared = 0
    for name, value in before.items():
        if name.endswith(("exp_avg", "exp_avg_sq", "momentum_buffer", "master", "step")):
            assert same_bytes(after[name], value), name
            compared += 1
    assert compared >= len(list(model.parameters()))
    train(other, resumed, [batch(rig, 5)])


READ = """
import sys
sys.modules["fp8rs"] = None  # to import it raises
import io, json, pickle, torch
for folder, (rows, columns) in json.loads(sys.argv[1]).items():
    metadata = pickle.load(open(folder + "/.metadata", "rb"))
    found = {}
    for index, info in metadata.storage_data.items():
        with open(f"{folder}/{info.relative_path}", "rb") as file:
            file.seek(info.offset)
            value = torch.load(io.BytesIO(file.read(info.length)), weights_only=True)
        if isinstance(value, torch.Tensor):
            assert type(value) is torch.Tensor
            found[index.fqn] = value
    weight, scale = found["model.0.weight"], found["model.0.weight_scale"]
    assert weight.dtype == torch.float8_e4m3fn and weight.shape == (512, 256), weight.shape
    blocks = weight.float().view(512 // rows, rows, 256 // columns, columns)
    values = blocks * scale.float().view(blocks.shape[0], 1, blocks.shape[2], 1)
    torch.save(values.view(512, 256), folder + "/values")
    print(*sorted(found))
"""


def test_files_contain_plain_one_byte_tensors_that_load_without_fp8rs(tmp_path):
    """One process reads the files of all recipes, because it takes seconds to import torch."""
    folders = {}
    weights = {}
    for recipe in RECIPES:
        height, width = resolve_recipe(RECIPES[recipe]).block_format("weight").block
        block = (512 if height == -1 else height, 256 if width == -1 else width)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(256, 512))
        fp8rs.convert_to_float8_training(model, recipe=RECIPES[recipe], fp8_weights=True)
        folder = tmp_path / recipe
        checkpoint.save({"model": Model(model)}, folder)
        elements = 512 * 256 * (2 if recipe in TWO_PLANES else 1)
        state = Model(model).state_dict()
        others = sum(t.nbytes for t in state.values() if t.dtype != torch.float8_e4m3fn)
        assert elements < size_of(folder) < elements + others + 2000 * len(state), recipe
        folders[str(folder)] = block
        weights[recipe] = model[0].weight.dequantize()
    done = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(folders)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for (recipe, weight), line in zip(weights.items(), lines, strict=True):
        assert torch.equal(torch.load(tmp_path / recipe / "values"), weight), recipe
        names = {"0.bias", "0.weight", "0.weight_scale"}
        if recipe == "delayed":
            names |= {"0.fp8_scale", "0.fp8_amax", "0.fp8_amax_history"}
        if recipe in TWO_PLANES:
            names |= {"0.weight_columnwise", "0.weight_columnwise_scale"}
        assert set(line.split()) == {f"model.{name}" for name in names}, recipe


@ranks(2)
def test_one_error_lists_everything_that_does_not_fit_and_nothing_is_written(rig):
    folder = shared_folder(rig)
    model, optimizer, _ = lay_out(rig, "FSDP of 2", "mxfp8", FP8, UNEVEN)
    checkpoint.save(state_of(model, optimizer), f"{folder}/saved")
    hidden = (*UNEVEN[:1], UNEVEN[1] + 1)
    other, resumed, _ = lay_out(rig, "FSDP of 2", "block", FP8, hidden, seed=1)
    other.extra = torch.nn.Parameter(torch.zeros(3))
    state = {"model": Model(other)}
    before = contents(other, resumed)
    with pytest.raises(CheckpointError) as raised:
        checkpoint.load(state, f"{folder}/saved")
    differences = "\n".join(raised.value.causes[0].differences)
    for line in (
        "model.head.weight_scale: float8_e8m0fnu (1, 1) in the checkpoint, float32 (1, 1) here",
        f"model.blocks.1.up.weight: float8_e4m3fn ({UNEVEN[1]}, 32) in the checkpoint, "
        f"float8_e4m3fn ({hidden[1]}, 32) here",
        "model.extra: not in the checkpoint, float32 (3,) here",
    ):
        assert line in differences, differences
    # The load did not request the optimizer.
    assert "optimizer." not in differences
    assert same(contents(other, resumed), before)
    # The error lists entries that the model does not have as well.
    master, _, _ = lay_out(rig, "FSDP of 2", "delayed", "master weights, torch's AdamW", UNEVEN)
    with pytest.raises(CheckpointError) as raised:
        checkpoint.load({"model": Model(master)}, f"{folder}/saved")
    message = "\n".join(raised.value.causes[0].differences)
    assert "model.head.weight_scale: float8_e8m0fnu (1, 1) in the checkpoint, unknown" in message
    assert "model.head.weight: float8_e4m3fn (32, 32) in the checkpoint, float32" in message


OTHER_RULES = {
    "coupled": (lambda p: torch.optim.Adam(p, weight_decay=0.1), "Adam with weight_decay=0.1"),
    "amsgrad": (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True"),
    "decoupled": (lambda p: torch.optim.AdamW(p, weight_decay=0.1), None),
    "no decay": (torch.optim.Adam, None),
}


@ranks(2)
@pytest.mark.parametrize("rule", list(OTHER_RULES))
def test_a_partial_load_refuses_another_update_rule(rig, rule):
    folder = shared_folder(rig)
    weight_kind = "master weights, torch's AdamW"
    optimizer, message = OTHER_RULES[rule]
    model, _, _ = lay_out(rig, "FSDP of 2", None, weight_kind, UNEVEN)
    saved = optimizer(model.parameters())
    train(model, saved, [batch(rig, 0)])
    checkpoint.save(state_of(model, saved), f"{folder}/saved")
    other, _, _ = lay_out(rig, "FSDP of 2", None, weight_kind, UNEVEN, seed=1)
    resumed = AdamW(other.parameters(), lr=0.5)
    train(other, resumed, [batch(rig, 1)])
    before = contents(other, resumed)
    state = state_of(other, resumed)
    if message is None:
        checkpoint.load(state, f"{folder}/saved", strict=False)
        assert same(contents(other, resumed), contents(model, saved))
        assert resumed.param_groups[0]["weight_decay"] == saved.param_groups[0]["weight_decay"]
        assert "decoupled_weight_decay" not in resumed.param_groups[0]
        return
    with pytest.raises(CheckpointError, match=f"rank 0, 1: ValueError: the state is .*{message}"):
        checkpoint.load(state, f"{folder}/saved", strict=False)
    assert same(contents(other, resumed), before)
    assert resumed.param_groups[0]["lr"] == 0.5


def test_a_quantized_tensor_in_a_state_is_refused(tmp_path):
    model = make(HIDDEN["even"], fp8_weights=True)
    checkpoint.save({"model": Model(model)}, tmp_path / "first")
    for call, name in ((checkpoint.save, "second"), (checkpoint.load, "first")):
        with pytest.raises(CheckpointError, match=r"fp8rs.checkpoint.Model\(model\)"):
            call({"model": model.state_dict()}, tmp_path / name)


@pytest.mark.parametrize("call", [checkpoint.save, checkpoint.async_save, checkpoint.load])
@pytest.mark.parametrize("type_name", ["Model", "str"])
def test_a_state_that_is_not_a_dictionary_is_refused(call, type_name, tmp_path):
    state = checkpoint.Model(torch.nn.Linear(8, 8)) if type_name == "Model" else str(tmp_path)
    with pytest.raises(TypeError, match=f"state must be a dictionary such as .*, not {type_name}"):
        call(state, tmp_path / "saved", process_group=None)
    assert not any(tmp_path.iterdir())


def test_arguments_of_an_optimizers_entry_in_the_wrong_order_are_named():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not AdamW"):
        checkpoint.Optimizer(optimizer, model)
    with pytest.raises(TypeError, match=r"optimizers must be torch.optim.Optimizer, not Linear"):
        checkpoint.Optimizer(model, optimizer, model)


@ranks(1)
def test_an_optimizer_from_before_sharding_is_refused(rig):
    model = make(HIDDEN["even"])
    optimizer = torch.optim.AdamW(model.parameters())
    fully_shard(model)
    with pytest.raises(ValueError, match=r"AdamW steps \d+ tensors .* after fully_shard"):
        checkpoint.Optimizer(model, optimizer).state_dict()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("save", ["save", "async_save"])
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
@pytest.mark.parametrize("fp8_weights", [False, True])
def test_a_converted_module_is_saved_and_loaded_as_a_model(tmp_path, fp8_weights, recipe, save):
    def trained(seed):
        model = make(recipe=RECIPES[recipe], seed=seed, fp8_weights=fp8_weights)
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
        train(model, AdamW(model.parameters(), lr=1e-2), [x] * 3)
        return model

    def write(state, folder):
        if save == "save":
            checkpoint.save(state, folder)
        else:
            checkpoint.async_save(state, folder, process_group=None).result()

    model = trained(0)
    expected = {name: value.clone() for name, value in Model(model).state_dict().items()}
    write({"model": model}, tmp_path / "module")
    write({"model": Model(model)}, tmp_path / "wrapped")
    names = []
    for folder in ("module", "wrapped"):
        metadata = dcp.FileSystemReader(tmp_path / folder).read_metadata()
        names.append(metadata.state_dict_metadata.keys())
    assert names[0] == names[1]
    assert any("amax_history" in name for name in names[0]) == (recipe == "delayed")

    other = trained(1)
    state = {"model": other}
    checkpoint.load(state, tmp_path / "module")
    assert state["model"] is other
    assert same(Model(other).state_dict(), expected)


@pytest.mark.parametrize("fp8_weights", [False, True], ids=["master weights", "FP8 weights"])
def test_a_model_that_is_one_layer_has_histories_without_a_prefix(tmp_path, fp8_weights):
    models = []
    for _ in range(2):
        model = torch.nn.Linear(32, 32)
        fp8rs.convert_to_float8_training(model, recipe="delayed", fp8_weights=fp8_weights)
        models.append(model)
    saved, loaded = models
    saved(torch.ones(16, 32)).sum().backward()
    fp8rs.optimizer_stepped(saved)
    expected = {name: value.clone() for name, value in Model(saved).state_dict().items()}
    histories = [name for name in expected if "fp8_" in name]
    assert sorted(histories) == ["fp8_amax", "fp8_amax_history", "fp8_scale"]

    checkpoint.save({"model": saved}, tmp_path / "saved")
    checkpoint.load({"model": loaded}, tmp_path / "saved")
    assert same(Model(loaded).state_dict(), expected)


@ranks(1)
def test_an_optimizer_is_saved_alone_after_an_evaluation(rig, tmp_path):
    model = make(HIDDEN["even"], device=rig.device)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch(rig, 0)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model(batch(rig, 0))
    state = {"optimizer": checkpoint.Optimizer(model, optimizer)}
    checkpoint.save(state, tmp_path / "saved")
    checkpoint.load(state, tmp_path / "saved")


FRESH = {
    "AdamW": lambda p: AdamW(p, lr=1e-2),
    "AdamW without masters": lambda p: AdamW(p, lr=1e-2, master_weights=False),
    "MasterWeights around Adam": lambda p: MasterWeights(p, torch.optim.Adam, lr=1e-2),
    "torch's NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}
each_fresh = pytest.mark.parametrize("optimizer", list(FRESH))


def fresh(optimizer, recipe="delayed", seed=0):
    model = make(HIDDEN["even"], recipe=recipe, fp8_weights=True, seed=seed)
    return model, FRESH[optimizer](model.parameters())


def losses(model, optimizer, steps=range(3)):
    step_losses = []
    for n in steps:
        loss = model(torch.randn(8, 32, generator=torch.Generator().manual_seed(n))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step_losses.append(loss.item())
    return step_losses


@each_fresh
@pytest.mark.filterwarnings("ignore:.*FP8 weights, and keeps no masters")
def test_a_checkpoint_from_before_the_first_step_changes_no_training(tmp_path, optimizer):
    """torch creates the state of a fresh optimizer by a step, which must not count as one."""
    wanted = losses(*fresh(optimizer))
    saved = fresh(optimizer)
    failed = fresh(optimizer)
    resumed = fresh(optimizer, seed=1)
    checkpoint.save(state_of(*saved), tmp_path / "saved")
    assert losses(*saved) == wanted
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint.load(state_of(*failed), tmp_path / "absent")
    assert losses(*failed) == wanted
    checkpoint.load(state_of(*resumed), tmp_path / "saved")
    assert losses(*resumed) == wanted


@each_fresh
@pytest.mark.filterwarnings("ignore:.*FP8 weights, and keeps no masters")
@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8 of 1x32"])
def test_a_model_and_its_optimizer_load_one_after_the_other(tmp_path, optimizer, recipe):
    recipe = RECIPES[recipe]
    trained = fresh(optimizer, recipe)
    resumed = fresh(optimizer, recipe, seed=1)
    losses(*trained)
    checkpoint.save(state_of(*trained), tmp_path / "saved")
    for key, value in state_of(*resumed).items():
        checkpoint.load({key: value}, tmp_path / "saved")
    assert same(contents(*resumed), contents(*trained))
    assert losses(*resumed, range(3, 6)) == losses(*trained, range(3, 6))


@each_fresh
@pytest.mark.filterwarnings("ignore:.*FP8 weights, and keeps no masters")
def test_gradients_do_not_keep_an_optimizer_from_loading(tmp_path, optimizer):
    trained = fresh(optimizer)
    resumed = fresh(optimizer, seed=1)
    losses(*trained)
    checkpoint.save(state_of(*trained), tmp_path / "saved")
    resumed[0](torch.ones(8, 32)).sum().backward()
    gradients = [p.grad for p in resumed[0].parameters()]
    checkpoint.load(state_of(*resumed), tmp_path / "saved")
    assert all(p.grad is g for p, g in zip(resumed[0].parameters(), gradients, strict=True))
    assert any(g.abs().max() > 0 for g in gradients), "a step of length 0 would write zeros"
    resumed[1].zero_grad()
    assert same(contents(*resumed), contents(*trained))
    assert losses(*resumed, range(3, 6)) == losses(*trained, range(3, 6))


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_parameter_without_a_gradient_before_the_save_has_no_state_after_the_load(
    tmp_path, recipe
):
    """Its master is the loaded weight, and no value of the fresh model."""

    def make_two(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
        fp8rs.convert_to_float8_training(model, recipe=recipe, fp8_weights=True)
        return model, AdamW(model.parameters(), lr=1e-2)

    trained = make_two(0)
    resumed = make_two(1)
    losses(trained[0][0], trained[1])
    checkpoint.save(state_of(*trained), tmp_path / "saved")
    checkpoint.load(state_of(*resumed), tmp_path / "saved", strict=False)
    assert all(not resumed[1].state.get(p) for p in resumed[0][1].parameters())
    assert losses(*resumed, range(3, 6)) == losses(*trained, range(3, 6))
    assert same(contents(*resumed), contents(*trained))
