"""The doctor: its findings with and without a GPU, and a reason for each unsupported recipe."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp8rs import doctor
from fp8rs.__main__ import main
from fp8rs.quantize.recipes import RECIPES
from internals import replace_devices


def run(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "fp8rs", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, **environment},
    )
    return done.stdout


def with_gpu(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> doctor.Findings:
    devices = [
        doctor.Device(f"Card {index}", index, capability, 80 << 30)
        for index, capability in enumerate(capabilities)
    ]
    replace_devices(monkeypatch, devices)
    # Simulated GPUs, of which the third has no peer access.
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: 2 not in pair)
    return doctor.examine()


def test_json_describes_the_machine() -> None:
    output = json.loads(run("--json"))
    assert output["torch"] == torch.__version__
    assert output["python"] == platform.python_version()
    assert output["cpu_simd"] in ("scalar", "avx2", "avx512")
    assert len(output["devices"]) == torch.cuda.device_count()
    assert bool(output["devices"]) == (output["no_gpu_because"] is None)


def test_every_recipe_has_a_path_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    report = with_gpu(monkeypatch, (8, 0), (9, 0))
    pairs = {(path.recipe, path.device) for path in report.recipes}
    assert pairs == {(r, d) for r in RECIPES for d in ("cpu", "cuda:0", "cuda:1")}
    assert all(path.reason for path in report.recipes)


@pytest.mark.parametrize(
    ("recipe", "capability", "path", "reason"),
    [
        ("current", (8, 0), "no", "needs compute capability 8.9, this is 8.0"),
        ("current", (8, 9), "native", "torch._scaled_mm"),
        ("current", (9, 0), "native", "torch._scaled_mm"),
        ("current", (10, 0), "native", "torch._scaled_mm"),
        ("delayed", (8, 0), "no", "needs compute capability 8.9, this is 8.0"),
        ("delayed", (8, 9), "native", "torch._scaled_mm"),
        ("delayed", (9, 0), "native", "torch._scaled_mm"),
        ("delayed", (10, 0), "native", "torch._scaled_mm"),
        ("rowwise", (8, 0), "no", "8.9"),
        ("rowwise", (9, 0), "native", "per-row"),
        ("block", (8, 9), "no", "recipe mxfp8 runs here"),
        ("block", (9, 0), "native", "1x128"),
        ("block", (10, 0), "no", "mxfp8"),
        ("mxfp8", (8, 0), "no", "8.9"),
        ("mxfp8", (9, 0), "rebased", "power-of-two scales per row"),
        ("mxfp8", (10, 0), "native", "untested on hardware"),
    ],
)
def test_recipes_by_capability(
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    capability: tuple[int, int],
    path: str,
    reason: str,
) -> None:
    report = with_gpu(monkeypatch, capability)
    (row,) = [p for p in report.recipes if (p.recipe, p.device) == (recipe, "cuda:0")]
    assert row.path == path
    assert reason in row.reason


@pytest.mark.parametrize(
    ("capability", "way_out"), [((8, 0), "on the CPU"), ((8, 9), "emulate=True")]
)
def test_an_unsupported_recipe_names_an_alternative(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], way_out: str
) -> None:
    """Emulation also needs kernels on the GPU, so it is not an alternative without them."""
    report = with_gpu(monkeypatch, capability)
    (row,) = [p for p in report.recipes if (p.recipe, p.device) == ("block", "cuda:0")]
    assert row.path == "no"
    assert [way for way in ("on the CPU", "emulate=True") if way in row.reason] == [way_out]


def test_text_without_a_gpu_gives_the_reason() -> None:
    text = run(CUDA_VISIBLE_DEVICES="")
    assert "GPU: none (" in text
    assert "current" in text
    assert "dequantized" in text


def test_text_lists_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    text = doctor.as_text(with_gpu(monkeypatch, (9, 0)))
    assert "cuda:0: Card 0, compute capability 9.0, 80 GiB" in text
    assert "GPU: none" not in text


# --- scripts with a model ------------------------------------------------------------------------

SCRIPT = """
from torch import nn

model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8))


def of_width(width):
    return nn.Linear(width, width)


def fails():
    raise RuntimeError("no such weights\\nand more")


def ends():
    raise SystemExit


class Layer(nn.Linear):
    def __init__(self):
        super().__init__(16, 16)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "a_script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("name", ["", ":model", ":Layer"])
def test_a_script_may_give_a_module_or_a_function(
    script: Path, name: str, capsys: pytest.CaptureFixture
) -> None:
    assert all(p.is_meta for p in doctor.load_model(f"{script}{name}").parameters())
    assert main(["report", f"{script}{name}", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["parameters"] == (16 * 16 + 16 if "Layer" in name else 64 * 32 + 32 + 32 * 8 + 8)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("of_width", "'width'"),
        ("fails", "RuntimeError: no such weights (line 12)"),
        ("ends", "SystemExit (line 16)"),
        ("nothing", "AttributeError: module 'a_script' has no attribute 'nothing'"),
    ],
)
def test_a_script_without_a_model_is_an_error_of_one_line(
    script: Path, name: str, reason: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["report", f"{script}:{name}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"a_script.py has no model or function {name!r}" in line
    assert reason in line
    assert "Name a torch.nn.Module" in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import torch\n\nraise ValueError('no data')\n", "ValueError: no data (line 3)"),
        ("def model(:\n", "SyntaxError: "),
        ("import argparse\n\nargparse.ArgumentParser().exit()\n", "SystemExit: 0 (line 3)"),
    ],
)
def test_a_script_that_raises_is_an_error_of_one_line(
    script: Path, text: str, message: str, capsys: pytest.CaptureFixture
) -> None:
    script.write_text(text)
    assert main(["report", f"{script}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert 'Move code that the model does not need under if __name__ == "__main__"' in line


def test_an_unmatched_filter_fqn_warns(script: Path) -> None:
    with pytest.warns(UserWarning, match="filter_fqns has 'heed'"):
        assert main(["report", f"{script}", "--leave-out", "heed", "--leave-out", "2"]) == 0
