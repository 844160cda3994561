"""The command line, and the names of recipes that type checkers know."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch
from torch import nn

import fp8rs
from fp8rs.__main__ import main
from fp8rs.demo.model import Llama, LlamaConfig
from fp8rs.quantize.recipes import RECIPES, RecipeName

ROOT = Path(__file__).parents[2]


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"fp8rs {fp8rs.__version__}\n"


def test_the_installed_command_is_the_command_line() -> None:
    """`make wheel-test` runs the installed command."""
    project = (ROOT / "pyproject.toml").read_text()
    ((name, value),) = re.findall(r'^\[project\.scripts\]\n(\S+) = "(.+)"$', project, re.M)
    assert name == "fp8rs"
    assert EntryPoint(name, value, "console_scripts").load() is main


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "a_model.py"
    path.write_text("from torch import nn\n\nmodel = nn.Sequential(nn.Linear(64, 32))\n")
    return str(path)


def test_a_report_has_the_requested_options(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", script, "--recipe", "mxfp8", "--ranks", "4"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("recipe mxfp8; 4 ranks")
    assert "converted: 1 linear layer " in output


def test_a_report_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report"])
    assert ended.value.code == 2
    assert "required: MODEL" in capsys.readouterr().err


def test_a_transformers_model_is_reported_from_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    transformers.LlamaConfig(vocab_size=32, num_attention_heads=4, **sizes).save_pretrained(
        tmp_path
    )
    assert main(["report", str(tmp_path), "--leave-out", "lm_head", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert len(output["converted"]) == 2 * 7
    assert output["units"] == ["", "model.layers.0", "model.layers.1"]


def test_an_unusable_model_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fp8rs report: file {tmp_path} does not exist, and ")


def test_type_checkers_know_the_name_of_every_recipe() -> None:
    assert get_args(RecipeName) == tuple(RECIPES)
    for taker in (fp8rs.convert_to_float8_training, fp8rs.quantized_init, fp8rs.report):
        assert RecipeName in get_args(get_type_hints(taker)["recipe"])


def test_an_error_of_shapes_names_the_layer() -> None:
    model = nn.ModuleDict({"block": nn.Sequential(nn.Linear(16, 32))})
    fp8rs.convert_to_float8_training(model, recipe="current")
    with pytest.raises(ValueError, match=re.escape("input of block.0 has shape (2, 8), but its")):
        model["block"](torch.zeros(2, 8))


def test_a_single_layer_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "fp8rs"):
        fp8rs.convert_to_float8_training(nn.Linear(16, 16), recipe="current")
    assert "1 linear layer converted" in caplog.text


def test_a_gpu_benchmark_without_a_gpu_fails_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benches")
    import end_to_end

    monkeypatch.setattr(end_to_end, "launch", lambda *_: pytest.fail("something was trained"))
    monkeypatch.setattr(sys, "argv", ["end_to_end.py", "--device", "cpu"])
    assert end_to_end.main() == 2
    assert "requires a GPU" in capsys.readouterr().err


def test_the_end_to_end_benchmark_sums_communication(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels are recognized by their names in a profile, and each counts once."""
    monkeypatch.syspath_prepend(ROOT / "benches")
    import end_to_end

    names = [f"{name}-compiled+comm" for name in ("bf16", "current", "delayed-fp8", "mxfp8")]
    assert all(end_to_end.parsed(name)[1] == {"comm": True} for name in names)
    times = {
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": 2e3,
        "ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs4K)": 2e3,
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": 6e3,
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": 8e3,
        "sum_rows": 10e3,
        "strided_sum_rows": 2e3,
        "Memcpy PtoP (Device -> Device)": 14e3,
        "sm90_xmma_gemm_e4m3bf16": 16e3,
    }
    kernels = [SimpleNamespace(key=k, self_device_time_total=t) for k, t in times.items()]
    assert end_to_end.communication(kernels, 2) == (
        "communication, ms of a step: gathers 2.00, reductions 3.00, all to all 4.00, "
        "their sums 6.00, all-reduces 0.00, copies by copy engine, between GPUs 7.00, "
        "copies by copy engine, DtoD 0.00"
    )


def test_the_end_to_end_benchmark_skips_libraries_that_are_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benches")
    import end_to_end

    monkeypatch.setattr(end_to_end.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(end_to_end, "launch", lambda *_: pytest.fail("something was trained"))
    for name, library in (("torchao", "torchao"), ("te-delayed", "TransformerEngine")):
        assert f"{library} cannot be imported" in end_to_end._measured(name, Namespace())["error"]
        assert f"{name}: skipped: {library} cannot be imported" in capsys.readouterr().out
    assert "te-current-compiled" not in end_to_end.VARIANTS
    with pytest.raises(ValueError, match="have its blocks"):
        end_to_end.parsed("te-current+modules")


def test_blocks_of_modules_compute_what_plain_blocks_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benches")
    from blocks import replace_blocks

    model = Llama(LlamaConfig(vocabulary=64, dim=64, layers=2, heads=4, kv_heads=2, hidden=96))
    model.init_weights(torch.Generator().manual_seed(0))
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(1))
    expected = model.loss(tokens)
    replace_blocks(model, "modules")
    assert isinstance(model.blocks[0], fp8rs.nn.TransformerLayer)
    torch.testing.assert_close(model.loss(tokens), expected)


def test_the_end_to_end_benchmark_finds_the_time_in_which_a_device_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels that overlap count once, and communication does not count."""
    monkeypatch.syspath_prepend(ROOT / "benches")
    import end_to_end

    def event(key: str, start: float, end: float, user: bool = False) -> SimpleNamespace:
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(key=key, time_range=span, is_user_annotation=user)

    events = [
        event("gemm", 5000, 9000),
        event("copy", 0, 2000),
        event("cast", 1000, 3000),
        event("norm", 1500, 1800),
        event("ncclDevKernel_AllGather_RING_LL", 3000, 5000),
        event("step", 0, 20000, user=True),
    ]
    line = end_to_end.busy(events, 2)
    assert line.startswith("computing, ms of a step: 3.50 of 4.50 ")
    assert "0.00 of 0.00" in end_to_end.busy([], 2)


def test_host_cost_times_the_layers_of_all_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benches")
    import host_cost

    calls = dict(host_cost.linears("cpu", rows=16, features=32))
    for recipe in host_cost.RECIPES:
        calls[f"Linear, {recipe}: forward"]()
        calls[f"Linear, {recipe}: forward + backward"]()


def test_release_notes_are_the_dated_section_of_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    from release_notes import section

    released = "## 0.1.0 - 2026-11-24\n\n- old\n"
    changelog = "# Changelog\n\n## Unreleased\n\n- new\n\n" + released
    assert section(changelog, "0.1.0") == section("# Changelog\n\n" + released, "0.1.0") == released
    assert section(changelog, "0.2.0") == "## Unreleased\n\n- new\n\n"
    titles = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    dated = titles[titles[0] == "Unreleased" :]
    assert dated
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", t) for t in dated)
