"""Progress, the table, the plot and the JSON file of the demo."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, TextIO

from .train import Result

ON_CPU = (
    "Memory and time on a CPU do not predict those of a GPU: the memory includes libraries, and "
    "GEMMs multiply fp32 copies of the FP8 operands."
)


@dataclass(frozen=True)
class Outcome:
    """The results of rank 0 in both trainings. The JSON file has the same fields."""

    ranks: int
    device: str
    recipe: str
    weights: str
    steps: int
    reference: Result
    fp8: Result
    seconds: float


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
    bf16, fp8 = outcome.reference, outcome.fp8
    first, last = ([result.held_out[i][1] for result in (bf16, fp8)] for i in (0, -1))
    owner = "process" if outcome.device == "cpu" else "rank"
    rows = [
        ("", "bf16", outcome.recipe, ""),
        ("held-out loss, first", f"{first[0]:.4f}", f"{first[1]:.4f}", ""),
        ("held-out loss, last", f"{last[0]:.4f}", f"{last[1]:.4f}", f"{last[1] / last[0]:.3f}"),
        _row("gathered in a step", bf16.allgather_bytes, fp8.allgather_bytes, "MB"),
        _row("  converted weights", bf16.weight_bytes, fp8.weight_bytes, "MB"),
        _row(f"peak memory of a {owner}", bf16.peak_memory, fp8.peak_memory, "MB"),
        ("stored, a parameter", "", "", ""),
        _row("  converted weights", bf16.at_rest["weights"], fp8.at_rest["weights"], "B"),
        _row("  optimizer for them", bf16.at_rest["optimizer"], fp8.at_rest["optimizer"], "B"),
        ("training, seconds", f"{bf16.seconds:.1f}", f"{fp8.seconds:.1f}", ""),
    ]
    title = (
        f"{bf16.params / 1e6:.2f} M parameters, {outcome.steps} steps, "
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
    results = (outcome.reference, outcome.fp8)
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
    memory.bar(names, [result.peak_memory / 1e6 for result in results])
    memory.set(ylabel="MB", title="Peak memory of a rank")
    if outcome.device == "cpu":
        memory.set(title="Peak memory\nof a process", xlabel=fill(ON_CPU, 28))
    figure.savefig(path, dpi=120)


def show(outcome: Outcome, json_path: Path | None, plot_path: Path | None) -> None:
    """Print the table and write the files whose paths are given."""
    print(table(outcome))
    if json_path is not None:
        json_path.write_text(json.dumps(asdict(outcome), indent=2) + "\n")
        print(f"fields: {json_path}")
    if plot_path is not None:
        plot(outcome, plot_path)
        print(f"plot: {plot_path}")


def _row(name: str, reference: float, fp8: float, unit: str) -> tuple[str, str, str, str]:
    ratio = f"{fp8 / reference:.3f}" if reference else ""
    scale = {"MB": 1e6, "B": 1}[unit]
    return name, f"{reference / scale:.2f} {unit}", f"{fp8 / scale:.2f} {unit}", ratio
