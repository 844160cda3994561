"""The file that a monitor writes, and its plot."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from torch import nn

import fp8rs
from fp8rs.monitoring import plot
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
    return monitor, [statistics for statistics in logged if statistics]


def test_a_line_is_written_for_each_step_that_is_logged(tmp_path):
    path = tmp_path / "run.jsonl"
    _, logged = train(path, 4)
    _, more = train(path, 3, first_step=4)  # resumed
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.pop("step") for line in lines] == [0, 2, 4, 6]
    assert lines == logged + more
    assert all(type(value) is float for line in lines for value in line.values())


def test_a_plot_is_an_image(tmp_path):
    path = tmp_path / "run.jsonl"
    picture = tmp_path / "run.png"
    train(path, 5)
    plot(path, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_missing_and_non_finite_values_are_drawn(tmp_path):
    path = tmp_path / "run.jsonl"
    values = [math.nan, math.inf, 20.0]
    lines = [{"step": n, "fp8/a/input/sqnr_db": v} for n, v in enumerate(values)]
    lines[2]["fp8/b/grad/sqnr_db"] = 10.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    plot(path, tmp_path / "run.svg")
    assert (tmp_path / "run.svg").exists()
    assert worst(lines[0], 1)[0].layer == "a"
    assert worst(lines[2], 3) == [Lossy("b", "grad", 10.0), Lossy("a", "input", 20.0)]


@pytest.mark.parametrize(
    "text, error, message",
    [
        (None, OSError, "No such file"),
        ("", ValueError, "is empty: no step has been logged yet"),
        ("epoch 1\n", ValueError, r"line 1, was not written by fp8rs\.monitor"),
        ('{"loss": 3}\n', ValueError, r"line 1, was not written by fp8rs\.monitor"),
        ('{"step": 0, "fp8/a/input/amax": 1.0}\n', ValueError, "has the statistic 'sqnr_db'"),
    ],
)
def test_other_files_are_refused(tmp_path, text, error, message):
    path = tmp_path / "run.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(error, match=message):
        plot(path, tmp_path / "run.png")


def test_an_unknown_statistic_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"statistic must be 'sqnr_db' or .*, not 'scale_min'"):
        plot(tmp_path / "run.jsonl", tmp_path / "run.png", "scale_min")


def test_without_matplotlib_there_is_a_message(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot(tmp_path / "run.jsonl", tmp_path / "run.png")
