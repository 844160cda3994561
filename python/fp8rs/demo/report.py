"""Progress, the table, the plot and the JSON file of the demo."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, TextIO

from .train import MASTER, Result, Weights

ON_CPU = (
    "Memory and time on a CPU do not predict those of a GPU: the memory includes libraries, and "
    "GEMMs multiply fp32 copies of the FP8 operands."
)


@dataclass(frozen=True)
class Outcome:
    """The results of both trainings, one `Result` for each rank."""

    ranks: int
    device: str
    recipe: str
    steps: int
    reference: list[Result]
    fp8: list[Result]
    seconds: float
    weights: Weights = MASTER

    def fields(self) -> dict[str, Any]:
        """Return the fields of the JSON file.

        Bytes are those of one rank in one training step. A curve has pairs of a step and the
        held-out loss before it. Peak memory is that of the GPU's allocator, or of the process on a
        CPU. With FP8 weights there are also the bytes a parameter that rank 0 stores.
        """
        reference, fp8 = self.reference[0], self.fp8[0]
        at_rest = {
            "weights": self.weights.kind,
            "masters": self.weights.masters,
            "state_dtype": self.weights.state_dtype,
            "at_rest_reference": reference.at_rest,
            "at_rest_fp8": fp8.at_rest,
        }
        return {
            "ranks": self.ranks,
            "device": self.device,
            "recipe": self.recipe,
            "steps": self.steps,
            "params": reference.params,
            "loss_reference": _ends(reference),
            "loss_fp8": _ends(fp8),
            "allgather_bytes_reference": reference.allgather_bytes,
            "allgather_bytes_fp8": fp8.allgather_bytes,
            "weight_bytes_reference": reference.weight_bytes,
            "weight_bytes_fp8": fp8.weight_bytes,
            "curve_reference": reference.held_out,
            "curve_fp8": fp8.held_out,
            "peak_memory_reference": max(result.peak_memory for result in self.reference),
            "peak_memory_fp8": max(result.peak_memory for result in self.fp8),
            "training_seconds_reference": round(reference.seconds, 2),
            "training_seconds_fp8": round(fp8.seconds, 2),
            "seconds": round(self.seconds, 2),
            **(at_rest if self.weights.fp8 else {}),
        }


class Progress:
    """Prints the progress of a training: one line on a terminal, else a line every 10 seconds."""

    def __init__(self, title: str, steps: int, out: TextIO) -> None:
        self._title, self._steps, self._out = title, steps, out
        self._start = time.perf_counter()
        self._live = out.isatty()
        self._last_printed = float("-inf")

    def __call__(self, event: dict[str, Any]) -> None:
        """Print an event of `train_under_fsdp`."""
        seconds = time.perf_counter() - self._start
        line = (
            f"{self._title}: step {event['step']:>4}/{self._steps}  "
            f"held-out loss at {event['measured']:>4}: {event['loss']:.3f}  {seconds:5.1f} s"
        )
        done = event["step"] == self._steps
        if self._live:
            self._out.write(f"\r{line}" + ("\n" if done else ""))
        elif done or seconds - self._last_printed > 10:
            self._out.write(line + "\n")
            self._last_printed = seconds
        self._out.flush()


def table(outcome: Outcome) -> str:
    """Return the comparison as text."""
    f = outcome.fields()
    reference, fp8 = outcome.reference[0], outcome.fp8[0]
    (first, last), (first_fp8, last_fp8) = f["loss_reference"], f["loss_fp8"]
    owner = "process" if outcome.device == "cpu" else "rank"
    rows = [
        ("", "bf16", outcome.recipe, ""),
        ("held-out loss, first", f"{first:.4f}", f"{first_fp8:.4f}", ""),
        ("held-out loss, last", f"{last:.4f}", f"{last_fp8:.4f}", f"{last_fp8 / last:.3f}"),
        _row("gathered in a step", reference.allgather_bytes, fp8.allgather_bytes, "MB"),
        _row("  converted weights", reference.weight_bytes, fp8.weight_bytes, "MB"),
        _row(f"peak memory of a {owner}", f["peak_memory_reference"], f["peak_memory_fp8"], "MB"),
        ("stored, a parameter", "", "", ""),
        _row("  converted weights", reference.at_rest["weights"], fp8.at_rest["weights"], "B"),
        _row("  optimizer for them", reference.at_rest["optimizer"], fp8.at_rest["optimizer"], "B"),
        ("training, seconds", f"{reference.seconds:.1f}", f"{fp8.seconds:.1f}", ""),
    ]
    title = (
        f"{reference.params / 1e6:.2f} M parameters, {outcome.steps} steps, "
        f"{outcome.ranks} {'rank' if outcome.ranks == 1 else 'ranks'} on {outcome.device}"
    )
    lines = [f"{a:<24}{b:>12}{c:>12}{d:>8}".rstrip() for a, b, c, d in rows]
    return "\n".join([title, *lines, *([ON_CPU] if outcome.device == "cpu" else [])])


def plot(outcome: Outcome, path: Path) -> None:
    """Draw both held-out loss curves, the gathered bytes and the memory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    losses, traffic, memory = figure.subplots(1, 3, width_ratios=(3, 1, 1))
    names = ("bf16", outcome.recipe)
    results = (outcome.reference[0], outcome.fp8[0])
    for name, result in zip(names, results, strict=True):
        losses.plot(*zip(*result.held_out, strict=True), marker="o", markersize=3, label=name)
    losses.set(xlabel="step", ylabel="held-out loss (nats a byte)", title="The same training")
    losses.legend()
    losses.grid(alpha=0.3)
    weights = [result.weight_bytes / 1e6 for result in results]
    rest = [(result.allgather_bytes - result.weight_bytes) / 1e6 for result in results]
    traffic.bar(names, weights, label="converted weights")
    traffic.bar(names, rest, bottom=weights, label="the rest")
    traffic.set(ylabel="MB a rank", title="All-gathered in a step")
    traffic.margins(y=0.25)
    traffic.legend(loc="upper center")
    f = outcome.fields()
    memory.bar(names, [f[f"peak_memory_{kind}"] / 1e6 for kind in ("reference", "fp8")])
    memory.set(ylabel="MB", title="Peak memory of a rank")
    if outcome.device == "cpu":
        memory.set(title="Peak memory\nof a process", xlabel=fill(ON_CPU, 28))
    figure.savefig(path, dpi=120)


def show(outcome: Outcome, json_path: Path | None, plot_path: Path | None) -> None:
    """Print the table and write the files whose paths are given."""
    print(table(outcome))
    if json_path is not None:
        json_path.write_text(json.dumps(outcome.fields(), indent=2) + "\n")
        print(f"fields: {json_path}")
    if plot_path is not None:
        plot(outcome, plot_path)
        print(f"plot: {plot_path}")


def _ends(result: Result) -> list[float]:
    return [result.held_out[0][1], result.held_out[-1][1]]


def _row(name: str, reference: float, fp8: float, unit: str) -> tuple[str, str, str, str]:
    ratio = f"{fp8 / reference:.3f}" if reference else ""
    scale = {"MB": 1e6, "B": 1}[unit]
    return name, f"{reference / scale:.2f} {unit}", f"{fp8 / scale:.2f} {unit}", ratio
