"""The report on a model before it is converted or on the meta device, and its command line."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fp8rs
from distributed.models import ADAMWS, RECIPES, Stack
from fp8rs.__main__ import main
from fp8rs.convert.sizes import usual_units


class Experts(nn.Module):
    """A mixture with all experts in one parameter, a router and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 256)
        self.router = nn.Linear(256, 4, bias=False)
        self.experts = nn.Parameter(torch.empty(4, 1024, 256))
        self.head = nn.Linear(256, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def stack(hidden: tuple[int, ...] = (64, 48)) -> Stack:
    with torch.device("meta"):
        return Stack(hidden)


def shares(report: fp8rs.convert.report.Report) -> dict[str, int]:
    return {group.reason: group.parameters for group in report.left}


def test_a_report_does_not_change_the_model() -> None:
    model = stack()
    before = {n: (type(m), dict(m._parameters)) for n, m in model.named_modules()}
    hooks = [m._forward_pre_hooks for m in model.modules()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fp8rs.report(model, filter_fqns=["head"])
    assert {n: (type(m), dict(m._parameters)) for n, m in model.named_modules()} == before
    assert not any(hooks)


def test_it_warns_of_unmatched_names_as_a_conversion_does() -> None:
    for reader in (fp8rs.report, fp8rs.convert_to_float8_training):
        with pytest.warns(UserWarning, match="filter_fqns has 'no such layer'"):
            reader(stack(), filter_fqns=["no such layer", "head"])


def test_it_lists_the_layers_that_a_conversion_converts() -> None:
    options = {"filter_fqns": ["head"], "module_filter_fn": lambda m, name: "0.up" not in name}
    planned = fp8rs.report(stack(), **options)
    model = stack()
    fp8rs.convert_to_float8_training(model, **options)
    converted = [n for n, m in model.named_modules() if isinstance(m, fp8rs.nn.Linear)]
    assert list(planned.converted) == converted == ["blocks.0.down", "blocks.1.up", "blocks.1.down"]
    assert fp8rs.report(model) == planned
    assert planned.converted_parameters == 32 * (64 + 48 + 48)


def test_every_parameter_is_counted_once_with_a_reason() -> None:
    with torch.device("meta"):
        model = Experts()
    report = fp8rs.report(model)
    assert report.converted == ()
    assert shares(report) == {
        "it is a router: its outputs select experts": 256 * 4,
        "its weight is tied to another module's": 64 * 256,
        "not known as experts, see experts='gather'": 4 * 1024 * 256,
    }
    assert report.converted_parameters + sum(shares(report).values()) == report.parameters
    assert "experts" in str(report)
    total = fp8rs.report(stack(), filter_fqns=["head"])
    assert total.converted_parameters + sum(shares(total).values()) == total.parameters
    assert shares(total)["named by filter_fqns"] == 32 * 32 + 32


def test_a_converted_model_is_reported_with_its_own_recipe() -> None:
    model = fp8rs.convert_to_float8_training(stack(), recipe="mxfp8")
    assert fp8rs.report(model).recipe == fp8rs.MXFP8BlockScaling()


@pytest.mark.parametrize(
    "option",
    [
        {"recipe": "block"},
        {"module_filter_fn": lambda m, name: True},
        {"filter_fqns": ["head"]},
        {"enable_fsdp_float8_all_gather": False},
        {"fp8_weights": True},
        {"experts": "off"},
    ],
)
def test_arguments_of_a_conversion_are_refused_for_a_converted_model(option: dict) -> None:
    model = fp8rs.convert_to_float8_training(stack())
    with pytest.raises(ValueError, match=f"is reported as it is: omit {next(iter(option))}"):
        fp8rs.report(model, **option)


def test_a_model_with_several_recipes_is_refused() -> None:
    model = stack()
    fp8rs.convert_to_float8_training(model.blocks, recipe="block")
    fp8rs.convert_to_float8_training(model, filter_fqns=["blocks"])
    with pytest.raises(ValueError, match=r"different recipes \(block, current\)"):
        fp8rs.report(model)
    assert fp8rs.report(model.blocks).recipe.name == "block"


def test_layers_outside_a_converted_part_are_not_planned() -> None:
    model = stack()
    fp8rs.convert_to_float8_training(model.blocks)
    report = fp8rs.report(model)
    assert len(report.converted) == 4
    assert {n: group.reason for group in report.left for n in group.names}["head"] == (
        "not part of a conversion"
    )


def test_reasons_survive_copies_and_wrappers() -> None:
    model = fp8rs.convert_to_float8_training(stack(), filter_fqns=["0.up", "head"])
    planned = fp8rs.report(model)
    assert fp8rs.report(copy.deepcopy(model)) == planned
    model.blocks[0].up = checkpoint_wrapper(model.blocks[0].up)
    model.head = nn.Sequential(model.head, nn.Linear(32, 32))
    reasons = {name: group.reason for group in fp8rs.report(model).left for name in group.names}
    assert reasons["blocks.0.up._checkpoint_wrapped_module"] == "named by filter_fqns"
    assert reasons["head.0"] == "named by filter_fqns"
    assert reasons["head.1"] == "not part of a conversion"


@pytest.mark.parametrize("way", ["an argument", "converted"])
def test_without_an_fp8_gather_no_bytes_are_saved(way: str) -> None:
    model = stack()
    options = {}
    if way == "converted":
        fp8rs.convert_to_float8_training(model, enable_fsdp_float8_all_gather=False)
    else:
        options = {"enable_fsdp_float8_all_gather": False}
    report = fp8rs.report(model, **options)
    assert len(report.converted) == 5
    assert report.gathered == report.gathered_high_precision > 0
    assert report.memory == report.memory_high_precision


def test_units_are_blocks_and_the_root() -> None:
    assert fp8rs.report(stack()).units == ("", "blocks.0", "blocks.1")
    nested = nn.ModuleList([nn.ModuleList([nn.Linear(32, 32, device="meta")]), nn.ReLU()])
    assert usual_units(nested) == {"0", "1"}
    alone = fp8rs.report(stack(), fsdp_unit_fn=lambda m, name: False)
    assert alone.units == ("",)
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    with torch.device("meta"):
        llama = transformers.LlamaForCausalLM(config)
    assert fp8rs.report(llama).units == ("", "model.layers.0", "model.layers.1")


def test_memory_equals_a_calculation_by_hand() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.LayerNorm(512))
    report = fp8rs.report(model, world_size=4, recipe="block", optimizer="adamw")
    weight = 512 * 256
    norm = 2 * 512
    # One row of two 128x128 blocks per rank, four bytes each.
    blocks = 4
    memory = report.memory
    assert memory.parameters == memory.gradients == (weight + norm) * 4 // 4
    assert memory.optimizer == 2 * memory.parameters
    assert memory.gathered == weight + blocks * 2 * 4 + norm * 2
    assert memory.reduced == (weight + norm) * (2 + 4)
    assert memory.total == sum(
        (memory.parameters, memory.gradients, memory.optimizer, memory.gathered, memory.reduced)
    )
    at_rest = fp8rs.report(model, world_size=4, recipe="block", fp8_weights=True).memory
    assert at_rest.parameters == weight // 4 + 2 * 4 + norm * 4 // 4
    assert at_rest.gradients == memory.gradients
    assert at_rest.optimizer == (weight * 12 + norm * 8) // 4
    assert fp8rs.report(model, world_size=4, optimizer=0.5).memory.optimizer == (
        memory.parameters // 2
    )


@pytest.mark.parametrize("recipe", [*RECIPES])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("way", ["converted", "quantized_init"])
def test_fp8_weights_are_recognized_in_the_model(recipe: str, device: str, way: str) -> None:
    """If other layers have master weights, each parameter is counted as what it is."""
    options = {"recipe": RECIPES[recipe], "filter_fqns": ["head"]}
    with torch.device(device):
        if way == "quantized_init":
            with fp8rs.quantized_init(**options):
                model = Stack()
        else:
            model = fp8rs.convert_to_float8_training(Stack(), fp8_weights=True, **options)
    planned = fp8rs.report(stack((64, 64)), fp8_weights=True, **options)
    report = fp8rs.report(model)
    assert report == planned
    assert report.optimizer == "fp8rs-adamw"
    masters = fp8rs.report(stack((64, 64)), optimizer="fp8rs-adamw", **options)
    scales = 4 * 4 if recipe in ("current", "delayed") else 0
    weights = 4 * 32 * 64 * 4 // 8
    codes = report.memory.parameters - scales - (masters.memory.parameters - weights)
    if scales:
        assert codes == weights // 4
    else:
        assert weights // 4 < codes < weights
    assert report.memory.gradients == masters.memory.gradients
    assert report.memory_high_precision == masters.memory_high_precision

    model.head.to_empty(device=device)
    fp8rs.convert_to_float8_training(model.head, recipe=RECIPES[recipe])
    mixed = fp8rs.report(model)
    assert mixed.memory.parameters == report.memory.parameters

    for block in model.blocks:
        block.requires_grad_(False)
    frozen = fp8rs.report(model)
    assert frozen.optimizer == "adamw"
    assert frozen.memory.gradients == (32 * 32 + 32) * 4 // 8
    assert frozen.memory.parameters == report.memory.parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fp8_weights", [True, False])
@pytest.mark.parametrize("name", [*ADAMWS, "adamw", "momentum"])
@pytest.mark.filterwarnings("ignore:.* FP8 weights, and keeps no masters")
def test_named_optimizers_store_the_planned_bytes(
    name: str, fp8_weights: bool, dtype: torch.dtype
) -> None:
    model = Stack().to(dtype)
    fp8rs.convert_to_float8_training(model, fp8_weights=fp8_weights)
    planned = fp8rs.report(model, world_size=1, optimizer=name)
    if name in ADAMWS:
        optimizer = fp8rs.optim.AdamW(model.parameters(), **ADAMWS[name])
    elif name == "adamw":
        optimizer = torch.optim.AdamW(model.parameters())
    else:
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.randn(16, 32, dtype=dtype)).square().mean().backward()
    optimizer.step()
    assert planned.memory.gradients == sum(p.grad.nbytes for p in model.parameters())
    states = [s for state in optimizer.state.values() for s in state.values()]
    assert planned.memory.optimizer == sum(s.nbytes for s in states if s.dim())


@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"fp8_weights": True}, {"enable_fsdp_float8_all_gather": False}],
    ids=["masters", "FP8 weights", "bf16 gather"],
)
@pytest.mark.filterwarnings("ignore:.* FP8 weights, and keeps no masters")
def test_8_bit_moments_store_the_planned_bytes(options: dict, masters: bool) -> None:
    """Layers of less than 4096 elements, or without whole blocks of columns, have fp32 moments."""
    model = Stack((256, 200, 16), width=128).bfloat16()
    fp8rs.convert_to_float8_training(model, **options)
    name = "fp8rs-adamw-fp8" if masters else "fp8rs-adamw-fp8-no-masters"
    planned = fp8rs.report(model, world_size=1, optimizer=name)
    optimizer = fp8rs.optim.AdamW(model.parameters(), state_dtype="fp8", master_weights=masters)
    model(torch.randn(16, 128, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    states = [s for state in optimizer.state.values() for s in state.values()]
    assert planned.memory.optimizer == sum(s.nbytes for s in states if s.dim())
    codes = sum("exp_avg_codes" in state for state in optimizer.state.values())
    assert codes == 4


def test_the_table_widens_for_long_names() -> None:
    text = str(fp8rs.report(stack(), optimizer="fp8rs-adamw-bf16-no-masters")).splitlines()
    start = next(i for i, line in enumerate(text) if line.startswith("bytes per rank"))
    line_length = len(text[start])
    assert {len(line) for line in text[start:-1]} == {line_length}


def test_frozen_parameters_have_no_gradients() -> None:
    model = stack().requires_grad_(False)
    model.head.requires_grad_(True)
    report = fp8rs.report(model, world_size=2)
    assert report.scattered == (32 * 32 + 32) * 4
    assert report.memory.gradients == (32 * 32 + 32) * 4 // 2
    assert report.memory.reduced == (32 * 32 + 32) * (2 + 4)


def test_one_rank_sends_nothing() -> None:
    report = fp8rs.report(stack(), world_size=1)
    assert report.gathered == report.gathered_high_precision == report.scattered == 0


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"recipe": "fp4"}, ValueError, "recipe 'fp4' is not known"),
        ({"filter_fqns": "head"}, TypeError, "filter_fqns must be a collection"),
        ({"world_size": 0}, ValueError, "world_size must be at least 1, not 0"),
        ({"optimizer": "sophia"}, ValueError, "optimizer 'sophia' is not known"),
        ({"optimizer": -1}, ValueError, "optimizer must be finite and not negative"),
        (
            {"fp8_weights": True, "enable_fsdp_float8_all_gather": False},
            ValueError,
            "cannot be combined with fp8_weights=True",
        ),
    ],
)
def test_errors_name_the_argument(options: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        fp8rs.report(stack(), **options)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not str"):
        fp8rs.report("model")


# --- the command line ----------------------------------------------------------------------------

SCRIPT = """
import torch
from torch import nn
from beside import WIDTH


def model():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8))


def huge():
    return nn.Linear(1 << 20, 1 << 20)


def number():
    return 3


if __name__ == "__main__":
    raise AssertionError("the script's training ran")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("WIDTH = 512\n")
    path = tmp_path / "train_it.py"
    path.write_text(SCRIPT)
    return path


def test_the_command_line_reports_on_a_script(script: Path) -> None:
    command = [sys.executable, "-m", "fp8rs", "report", f"{script}", "--leave-out", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    output = json.loads(done.stdout)
    assert output["converted"] == ["0"]
    assert output["world_size"] == 8
    assert output["param_dtype"] == "bfloat16"
    assert output["gathered"] == (512 * 512) + 2 * (512 + 2 * 512 + 512 * 8 + 8)


def test_a_model_larger_than_memory_is_reported(
    script: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    arguments = [f"{script}:huge", "--recipe", "mxfp8", "--ranks", "64"]
    assert main(["report", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "recipe mxfp8; 64 ranks" in printed
    assert "all-gathers of a step" in printed


def test_the_command_line_reports_on_fp8_weights(
    script: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    arguments = ["report", f"{script}:huge", "--ranks", "64", "--weights", "fp8", "--json"]
    optimizers = {"": 12, "fp8rs-adamw-no-masters": 8, "fp8rs-adamw-bf16-no-masters": 4}
    for name, size in optimizers.items():
        assert main([*arguments, *(["--optimizer", name] if name else [])]) == 0
        memory = json.loads(capsys.readouterr().out)["memory"]
        weight = (1 << 40) // 64
        bias = (1 << 20) // 64
        assert memory["parameters"] == weight + 4 + 4 * bias
        assert memory["optimizer"] == size * weight + min(size, 8) * bias


def test_the_command_line_accepts_a_number_of_states(
    script: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["report", f"{script}:huge", "--optimizer", "0.5", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["optimizer"] == memory["parameters"] // 2


@pytest.mark.parametrize(
    ("script_name", "text"),
    [
        ("{}:nothing", "no model or function 'nothing'"),
        ("{}:number", r"number\(\) returns int, not a torch.nn.Module"),
        ("nowhere.py", "file nowhere.py does not exist"),
    ],
)
def test_an_unusable_script_is_an_error_with_the_reason(
    script: Path,
    script_name: str,
    text: str,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["report", script_name.format(script)]) == 2
    import re

    assert re.search(text, capsys.readouterr().err)


def test_a_layer_that_replaced_a_converted_one_is_reported_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As after ``resize_token_embeddings`` of transformers."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 64))
    fp8rs.convert_to_float8_training(model, recipe="current")
    model[1] = nn.Linear(32, 80)
    reasons = {name: group.reason for group in fp8rs.report(model).left for name in group.names}
    assert reasons["1"] == "it has replaced a converted layer: convert the model after such changes"
    with caplog.at_level("WARNING", logger="fp8rs"):
        for _ in range(2):
            model(torch.randn(16, 32))
    (record,) = caplog.records
    assert record.getMessage().startswith("1 has replaced a converted layer and runs in high")


def wide() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4096, 14336), nn.Linear(14336, 4096), nn.Linear(4096, 256))


def test_the_speed_of_linear_layers_with_a_number_of_tokens() -> None:
    report = fp8rs.report(wide(), tokens=8192)
    assert report.speed.run_in_fp8
    assert list(report.speed.factors) == ["0", "1", "2"]
    assert report.speed.factors["0"] > 1.1 > 1.0 > report.speed.factors["2"]
    assert report.speed.factor is not None and report.speed.factor > 1.1
    table = str(report)
    assert f"from {report.speed.min_tokens:,} tokens per GPU on" in table
    assert "with 8,192 tokens they run in FP8." in table


def test_few_tokens_run_in_high_precision_unless_fp8_is_fixed() -> None:
    assert "with 64 tokens they run in high precision" in str(fp8rs.report(wide(), tokens=64))
    assert "with 64 tokens they run in FP8" in str(fp8rs.report(wide(), tokens=64, gemms="fp8"))
    converted = fp8rs.convert_to_float8_training(wide(), gemms="fp8")
    assert fp8rs.report(converted, tokens=64).speed.run_in_fp8
    emulated = fp8rs.Float8CurrentScaling(emulate=True)
    assert fp8rs.report(wide(), recipe=emulated, tokens=64).speed.run_in_fp8


def test_few_tokens_are_gathered_in_high_precision_unless_an_option_fixes_fp8() -> None:
    few = fp8rs.report(wide(), tokens=64)
    assert few.gathered == few.gathered_high_precision
    assert few.memory == few.memory_high_precision
    assert fp8rs.report(fp8rs.convert_to_float8_training(wide()), tokens=64) == few
    for options in (
        {"tokens": 8192},
        {"tokens": 64, "gemms": "fp8"},
        {"tokens": 64, "enable_fsdp_float8_all_gather": True},
        {"tokens": 64, "fp8_weights": True},
    ):
        report = fp8rs.report(wide(), **options)
        assert report.gathered < report.gathered_high_precision


def test_layers_that_are_never_faster_in_fp8() -> None:
    with torch.device("meta"):
        layers = nn.Sequential(nn.Linear(256, 256))
    assert "FP8 is slower than bf16 with any number of tokens" in str(fp8rs.report(layers))


def test_tokens_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.py"
    file.write_text("from torch import nn\nmodel = nn.Linear(4096, 4096, device='meta')\n")
    assert main(["report", str(file), "--tokens", "8192"]) == 0
    assert "with 8,192 tokens they run in FP8" in capsys.readouterr().out
