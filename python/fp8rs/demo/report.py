"""Progress, the table, the plot and the JSON file of the demo."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from fp8rs.storage import replace_atomically

from .train import Result

#: Seconds between lines of progress that are not written to a terminal.
PROGRESS_INTERVAL = 10

ON_CPU = "Times on a CPU do not predict those of a GPU: GEMMs multiply fp32 copies of FP8 operands."


@dataclass(frozen=True)
class Outcome:
    """The results of rank 0 in both trainings. The JSON file has the same fields.

    ``dtype`` is the dtype of the reference, and of what is not FP8 in the FP8 training.
    """

    ranks: int
    device: str
    dtype: str
    recipe: str
    weights: str
    steps: int
    reference: Result
    fp8: Result
    seconds: float


class Progress:
    """Prints the progress of a training: one line on a terminal, else a line every 10 seconds."""

    def __init__(self, title: str, steps: int, out: TextIO) -> None:
        self._title = title
        self._steps = steps
        self._out = out
        self._start = time.perf_counter()
        self._last_printed = float("-inf")

    def __call__(self, event: dict[str, Any]) -> None:
        """Print an event of `train_under_fsdp`."""
        step = event["step"]
        is_last = step == self._steps
        seconds = time.perf_counter() - self._start
        line = (
            f"{self._title}: step {step:>4}/{self._steps}  "
            f"training loss {event['loss']:.3f}  {seconds:5.1f} s"
        )

        if self._out.isatty():
            self._out.write(f"\r{line}")
            if is_last:
                self._out.write("\n")
        elif is_last or seconds - self._last_printed > PROGRESS_INTERVAL:
            self._out.write(f"{line}\n")
            self._last_printed = seconds
        self._out.flush()


def table(outcome: Outcome) -> str:
    """Return the comparison as text."""
    reference = outcome.reference
    fp8 = outcome.fp8
    rows = [
        _row("held-out loss, first", reference.held_out[0][1], fp8.held_out[0][1], "", 4),
        _row("held-out loss, last", reference.held_out[-1][1], fp8.held_out[-1][1], "", 4),
        _row(
            "gathered in a step", reference.allgather_bytes / 1e6, fp8.allgather_bytes / 1e6, "MB"
        ),
        _row("stored: weights", reference.at_rest["weights"], fp8.at_rest["weights"], "B"),
        _row("stored: optimizer", reference.at_rest["optimizer"], fp8.at_rest["optimizer"], "B"),
    ]
    if outcome.device == "cuda":
        rows.append(_row("peak memory", reference.peak_memory / 1e6, fp8.peak_memory / 1e6, "MB"))
    rows.append(_row("training", reference.seconds, fp8.seconds, "s", 1))

    ranks = "1 rank" if outcome.ranks == 1 else f"{outcome.ranks} ranks"
    lines = [
        f"{reference.params / 1e6:.2f} M parameters, {outcome.steps} steps, {ranks} on "
        f"{outcome.device}",
        f"{'':<24}{outcome.dtype:>12}{outcome.recipe:>12}{'ratio':>8}",
        *rows,
        "Stored bytes are of a parameter of the converted layers.",
    ]
    if outcome.dtype == "fp32":
        lines.append("fp32 parameters are gathered in twice the bytes of bf16 parameters.")
    if outcome.device == "cpu":
        lines.append(ON_CPU)
    return "\n".join(lines)


def _row(name: str, reference: float, fp8: float, unit: str, digits: int = 2) -> str:
    cells = []
    for value in (reference, fp8):
        cells.append(f"{value:.{digits}f} {unit}".rstrip())
    # One rank gathers nothing.
    ratio = f"{fp8 / reference:.3f}" if reference else ""
    return f"{name:<24}{cells[0]:>12}{cells[1]:>12}{ratio:>8}".rstrip()


def plot(outcome: Outcome, path: Path) -> None:
    """Draw both held-out loss curves and the gathered bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    losses, traffic = figure.subplots(1, 2, width_ratios=(3, 1))
    for name, result in ((outcome.dtype, outcome.reference), (outcome.recipe, outcome.fp8)):
        steps, values = zip(*result.held_out, strict=True)
        losses.plot(steps, values, marker="o", markersize=3, label=name)
        traffic.bar(name, result.allgather_bytes / 1e6)
    losses.set(xlabel="step", ylabel="held-out loss (nats a byte)", title="The same training")
    losses.legend()
    losses.grid(alpha=0.3)
    traffic.set(ylabel="MB a rank", title="All-gathered in a step")

    with replace_atomically(path) as temporary:
        figure.savefig(temporary, dpi=120)


def show(outcome: Outcome, json_path: Path | None, plot_path: Path | None) -> None:
    """Print the table and write the files whose paths are given."""
    print(table(outcome))
    if json_path is not None:
        json_path.write_text(json.dumps(asdict(outcome), indent=2) + "\n")
        print(f"fields: {json_path}")
    if plot_path is not None:
        plot(outcome, plot_path)
        print(f"plot: {plot_path}")
