"""The demo from its options to its report."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from . import report
from .launch import Job, RankFailed, launch
from .model import LlamaConfig
from .train import MASTER, Progress, Settings, Weights, train_under_fsdp


class DemoError(Exception):
    """The demo cannot run or has failed; ``code`` is the exit code."""

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
    weights: Weights = MASTER,
) -> report.Outcome:
    """Trains both models, prints the comparison and writes the files.

    Raises:
        DemoError: an option that cannot work here (code 2), or a rank that failed (code 1).
    """
    start = time.perf_counter()
    device, ranks = _place(device, ranks)
    _check(recipe, device, ranks, json_path, plot_path)
    _check_weights(weights)
    settings = Settings.choose(device, ranks, steps)
    results = {}
    for title, chosen, kept in (("bf16", None, MASTER), (recipe, recipe, weights)):
        job = job_of(settings, chosen, kept)
        progress = report.Progress(f"{title:>9}", settings.steps, sys.stdout)
        try:
            results[chosen] = launch(job, ranks, progress)
        except RankFailed as error:
            raise DemoError(str(error), code=1) from error
    outcome = report.Outcome(
        ranks,
        device,
        recipe,
        settings.steps,
        results[None],
        results[recipe],
        time.perf_counter() - start,
        weights,
    )
    report.show(outcome, json_path, plot_path)
    return outcome


def job_of(settings: Settings, recipe: str | None, weights: Weights = MASTER) -> Job:
    """One training run; a rank's result is `train.Result` as a dictionary."""
    arguments = {"settings": asdict(settings), "recipe": recipe, "weights": asdict(weights)}
    return Job("fp8rs.demo.run:rank", arguments, settings.device)


def rank(arguments: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """What each rank runs."""
    settings = dict(arguments["settings"])
    settings["model"] = LlamaConfig(**settings["model"])
    weights = Weights(**arguments["weights"])
    return asdict(train_under_fsdp(Settings(**settings), arguments["recipe"], progress, weights))


def _place(device: str | None, ranks: int | None) -> tuple[str, int]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = device or ("cuda" if gpus else "cpu")
    if device == "cpu":
        return device, ranks or 2
    if not gpus:
        raise DemoError("--device cuda: torch sees no GPU here; --device cpu works", code=2)
    if ranks is not None and ranks > gpus:
        raise DemoError(
            f"--ranks {ranks}: {gpus} {'GPU is' if gpus == 1 else 'GPUs are'} here, and a rank "
            "needs one of its own; "
            "take fewer, or --device cpu",
            code=2,
        )
    return device, ranks or gpus


def _check(
    recipe: str, device: str, ranks: int, json_path: Path | None, plot_path: Path | None
) -> None:
    """What would fail only after the reference was trained."""
    from fp8rs import UnsupportedError
    from fp8rs.gemm.devices import check_cuda
    from fp8rs.quantize.recipes import resolve_recipe

    try:
        name = resolve_recipe(recipe).name
        for index in range(ranks if device == "cuda" else 0):
            check_cuda(index, name)
    except (TypeError, ValueError, UnsupportedError) as error:
        raise DemoError(f"--recipe {recipe}: {error}", code=2) from error
    for option, path in (("--json", json_path), ("--plot", plot_path)):
        if path is None:
            continue
        folder = path.resolve().parent
        if not folder.is_dir():
            raise DemoError(f"{option} {path}: there is no folder {folder}", code=2)
        if path.is_dir():
            raise DemoError(f"{option} {path}: this is a folder: name a file", code=2)
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise DemoError(f"{option} {path}: it cannot be written", code=2)
    if plot_path is not None and find_spec("matplotlib") is None:
        raise DemoError(
            f"--plot {plot_path}: matplotlib is not installed (pip install matplotlib)", code=2
        )
    if plot_path is not None and plot_path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise DemoError(f"--plot {plot_path}: its name must end in .png, .svg or .pdf", code=2)


def _check_weights(weights: Weights) -> None:
    if weights.fp8:
        return
    for option, given in (
        ("--no-masters", not weights.masters),
        ("--state-dtype bf16", weights.state_dtype != MASTER.state_dtype),
    ):
        if given:
            raise DemoError(
                f"{option} is for --weights fp8: master weights are the optimizer's masters, and "
                "torch's AdamW trains them",
                code=2,
            )
