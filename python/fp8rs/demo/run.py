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
from .train import Result, Settings, faster_dtype, train_under_fsdp


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
    device, ranks = _choose_device(device, ranks)
    _check_recipe(recipe, device, ranks)
    if json_path is not None:
        _check_writable("--json", json_path)
    if plot_path is not None:
        _check_writable("--plot", plot_path)
        _check_plot(plot_path)

    dtype = faster_dtype() if device == "cpu" else "bf16"
    settings = Settings.choose(device, ranks, steps, dtype)
    print(f"training {settings.steps} steps in {dtype}, then the same steps with {recipe}")
    if dtype == "fp32":
        print(
            "This CPU multiplies bf16 matrices slower than fp32 matrices. What is not in FP8 is "
            "therefore fp32,\nand the demo takes fewer steps than on other CPUs (--steps)."
        )

    adamw: dict[str, Any] | None = {} if fp8_weights else None
    try:
        reference = _train(settings, ranks, None, None)
        fp8 = _train(settings, ranks, recipe, adamw)
    except RankFailed as error:
        raise DemoError(str(error), code=1) from error

    outcome = report.Outcome(
        ranks=ranks,
        device=device,
        dtype=dtype,
        recipe=recipe,
        weights="fp8" if fp8_weights else "master",
        steps=settings.steps,
        reference=reference,
        fp8=fp8,
        seconds=round(time.perf_counter() - start, 2),
    )
    report.show(outcome, json_path, plot_path)
    return outcome


def _train(
    settings: Settings, ranks: int, recipe: str | None, adamw: dict[str, Any] | None
) -> Result:
    """Train on all ranks and return the result of rank 0."""
    title = recipe or settings.dtype
    results: list[Result] = launch(
        train_under_fsdp,
        settings,
        recipe,
        adamw,
        ranks=ranks,
        device=settings.device,
        on_event=report.Progress(f"{title:>9}", settings.steps, sys.stdout),
    )
    return results[0]


def _choose_device(device: str | None, ranks: int | None) -> tuple[str, int]:
    """Return the device and the number of ranks, by default one rank for each GPU."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        device = "cuda" if gpus else "cpu"
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
        if device == "cuda":
            for index in range(ranks):
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
