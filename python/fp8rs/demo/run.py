"""Check the options of the demo, and run both trainings."""

from __future__ import annotations

import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from . import report
from .launch import RankFailed, launch
from .train import Result, Settings, train_under_fsdp


class DemoError(Exception):
    """The demo cannot run or has failed. ``code`` is the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def run(
    ranks: int | None,
    recipe: str,
    steps: int | None,
    device: str | None,
    json_path: Path | None,
    plot_path: Path | None,
    fp8_weights: bool = False,
) -> report.Outcome:
    """Train both models, print the comparison and write the files.

    Raises:
        DemoError: an option cannot work here (code 2), or a rank failed (code 1).
    """
    start = time.perf_counter()
    device, ranks = _place(device, ranks)
    _check_recipe(recipe, device, ranks)
    for option, path in (("--json", json_path), ("--plot", plot_path)):
        if path is not None:
            _check_writable(option, path)
    if plot_path is not None:
        _check_plot(plot_path)
    settings = Settings.choose(device, ranks, steps)
    adamw: dict[str, Any] | None = {} if fp8_weights else None

    def train(name: str, *arguments: Any) -> Result:
        progress = report.Progress(f"{name:>9}", settings.steps, sys.stdout)
        options: Any = {"ranks": ranks, "device": device, "on_event": progress}
        result: Result = launch(train_under_fsdp, settings, *arguments, **options)[0]
        return result

    try:
        results = train("bf16", None, None), train(recipe, recipe, adamw)
    except RankFailed as error:
        raise DemoError(str(error), code=1) from error
    seconds = round(time.perf_counter() - start, 2)
    weights = "fp8" if fp8_weights else "master"
    outcome = report.Outcome(ranks, device, recipe, weights, settings.steps, *results, seconds)
    report.show(outcome, json_path, plot_path)
    return outcome


def _place(device: str | None, ranks: int | None) -> tuple[str, int]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = device or ("cuda" if gpus else "cpu")
    if device == "cpu":
        return device, ranks or 2
    if not gpus:
        raise DemoError("--device cuda: torch finds no GPU; --device cpu works", code=2)
    if ranks is not None and ranks > gpus:
        raise DemoError(
            f"--ranks {ranks}: each rank needs a GPU, and this machine has {gpus}; give fewer "
            "ranks, or --device cpu",
            code=2,
        )
    return device, ranks or gpus


def _check_recipe(recipe: str, device: str, ranks: int) -> None:
    from fp8rs import UnsupportedError
    from fp8rs.gemm.devices import check_cuda
    from fp8rs.quantize.recipes import resolve_recipe

    try:
        name = resolve_recipe(recipe).name
        for index in range(ranks if device == "cuda" else 0):
            check_cuda(index, name)
    except (TypeError, ValueError, UnsupportedError) as error:
        raise DemoError(f"--recipe {recipe}: {error}", code=2) from error


def _check_writable(option: str, path: Path) -> None:
    folder = path.resolve().parent
    if not folder.is_dir():
        raise DemoError(f"{option} {path}: the folder {folder} does not exist", code=2)
    if path.is_dir():
        raise DemoError(f"{option} {path}: this is a folder: name a file", code=2)
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise DemoError(f"{option} {path}: it cannot be written", code=2)


def _check_plot(path: Path) -> None:
    if find_spec("matplotlib") is None:
        message = "matplotlib is not installed (pip install matplotlib)"
        raise DemoError(f"--plot {path}: {message}", code=2)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise DemoError(f"--plot {path}: its name must end in .png, .svg or .pdf", code=2)
