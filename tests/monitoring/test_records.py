"""The file that a monitor writes, and the command line that reads it."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from torch import nn

import fp8rs
from fp8rs.__main__ import main
from fp8rs.monitoring.records import Lossy, worst

pytestmark = pytest.mark.newest_torch


def train(path, steps, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    fp8rs.convert_to_float8_training(model, recipe="current")
    monitor = fp8rs.monitor(model, every=2, file=path, **options)
    logged = []
    for _ in range(steps):
        model(torch.randn(32, 64)).square().mean().backward()
        logged.append(monitor.step())
    return monitor, [found for found in logged if found]


def test_a_line_is_written_for_each_step_that_is_logged(tmp_path):
    path = tmp_path / "run.jsonl"
    _, logged = train(path, 4)
    _, more = train(path, 3, first_step=4)  # resumed
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.pop("step") for line in lines] == [0, 2, 4, 6]
    assert lines == logged + more
    assert all(type(value) is float for line in lines for value in line.values())


def test_the_command_names_the_worst_and_draws_all(tmp_path, capsys):
    path, picture = tmp_path / "run.jsonl", tmp_path / "run.png"
    monitor, _ = train(path, 5)
    assert main(["monitor", str(path), "--plot", str(picture), "--worst", "2"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "step 4: SQNR in dB, smallest first"
    assert [line.split() for line in out[1:]] == [
        [one.layer, one.operand, f"{one.sqnr_db:.2f}"] for one in monitor.worst(2)
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_missing_and_non_finite_values_are_drawn(tmp_path):
    path = tmp_path / "run.jsonl"
    values = [math.nan, math.inf, 20.0]
    lines = [{"step": n, f"fp8/a/input/{'sqnr_db'}": v} for n, v in enumerate(values)]
    lines[2]["fp8/b/grad/sqnr_db"] = 10.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["monitor", str(path), "--plot", str(tmp_path / "run.svg")]) == 0
    assert worst(lines[0], 1)[0].layer == "a"
    assert worst(lines[2], 3) == [Lossy("b", "grad", 10.0), Lossy("a", "input", 20.0)]


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "No such file"),
        ("", "is empty: no step has been logged yet"),
        ("epoch 1\n", "line 1, was not written by fp8rs.monitor"),
        ('{"loss": 3}\n', "line 1, was not written by fp8rs.monitor"),
        ('{"step": 0, "fp8/a/input/amax": 1.0}\n', "no line has the statistic 'sqnr_db'"),
    ],
)
def test_other_files_are_refused(tmp_path, capsys, text, message):
    path = tmp_path / "run.jsonl"
    if text is not None:
        path.write_text(text)
    assert main(["monitor", str(path), "--plot", str(tmp_path / "run.png")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("fp8rs monitor: ")
    assert message in err


def test_without_matplotlib_there_is_a_message(tmp_path, capsys, monkeypatch):
    path = tmp_path / "run.jsonl"
    train(path, 1)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["monitor", str(path), "--plot", str(tmp_path / "run.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert main(["monitor", str(path)]) == 0
