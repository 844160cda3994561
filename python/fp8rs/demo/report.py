"""What the demo shows: progress while it runs, then a table, a plot and a JSON file."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, TextIO

from .train import MASTER, Weights

ON_CPU = (
    "Memory and time on a CPU say nothing of a GPU's: the memory is the whole process's, libraries "
    "included, and GEMMs multiply fp32 copies of the FP8 operands."
)


@dataclass(frozen=True)
class Outcome:
    """Both runs' results, as the ranks returned them (see `train.Result`)."""

    ranks: int
    device: str
    recipe: str
    steps: int
    reference: list[dict[str, Any]]
    fp8: list[dict[str, Any]]
    seconds: float
    weights: Weights = MASTER

    def fields(self) -> dict[str, Any]:
        """The fields of the JSON file. Byte counts are a rank's, for one training step.

        A curve is of pairs: a step and the held-out loss before it. Peak memory is a GPU's
        allocator's, and on CPU that of the whole process.

        With FP8 weights also how they are trained, and the bytes a parameter that rank 0 keeps of
        the converted weights: see `memory.AtRest`.
        """
        reference, fp8 = self.reference[0], self.fp8[0]
        at_rest = {
            "weights": self.weights.kind,
            "masters": self.weights.masters,
            "state_dtype": self.weights.state_dtype,
            "at_rest_reference": reference["at_rest"],
            "at_rest_fp8": fp8["at_rest"],
        }
        return {
            "ranks": self.ranks,
            "device": self.device,
            "recipe": self.recipe,
            "steps": self.steps,
            "params": reference["params"],
            "loss_reference": _ends(reference),
            "loss_fp8": _ends(fp8),
            "allgather_bytes_reference": reference["allgather_bytes"],
            "allgather_bytes_fp8": fp8["allgather_bytes"],
            "weight_bytes_reference": reference["weight_bytes"],
            "weight_bytes_fp8": fp8["weight_bytes"],
            "curve_reference": reference["held_out"],
            "curve_fp8": fp8["held_out"],
            "peak_memory_reference": _memory(self.reference),
            "peak_memory_fp8": _memory(self.fp8),
            "training_seconds_reference": round(reference["seconds"], 2),
            "training_seconds_fp8": round(fp8["seconds"], 2),
            "seconds": round(self.seconds, 2),
            **(at_rest if self.weights.fp8 else {}),
        }


class Progress:
    """A line that follows a run: rewritten in place on a terminal, else now and then a new one."""

    def __init__(self, title: str, steps: int, out: TextIO) -> None:
        self._title, self._steps, self._out = title, steps, out
        self._start = time.perf_counter()
        self._live = out.isatty()
        self._last_printed: float | None = None

    def __call__(self, event: dict[str, Any]) -> None:
        """Shows an event of `train.train_under_fsdp`."""
        seconds = time.perf_counter() - self._start
        line = (
            f"{self._title}: step {event['step']:>4}/{self._steps}  "
            f"held-out loss at {event['measured']:>4}: {event['loss']:.3f}  {seconds:5.1f} s"
        )
        done = event["step"] == self._steps
        if self._live:
            self._out.write(f"\r{line}" + ("\n" if done else ""))
        elif done or self._last_printed is None or seconds - self._last_printed > 10:
            self._out.write(line + "\n")
            self._last_printed = seconds
        self._out.flush()


def table(outcome: Outcome) -> str:
    """The result as text."""
    f = outcome.fields()
    reference, fp8 = f["loss_reference"], f["loss_fp8"]
    rows = [
        ("", "bf16", outcome.recipe, "ratio"),
        ("held-out loss, first", f"{reference[0]:.4f}", f"{fp8[0]:.4f}", ""),
        (
            "held-out loss, last",
            f"{reference[1]:.4f}",
            f"{fp8[1]:.4f}",
            f"{fp8[1] / reference[1]:.3f}",
        ),
        _bytes_row("gathered in a step", f["allgather_bytes_reference"], f["allgather_bytes_fp8"]),
        _bytes_row("  converted weights", f["weight_bytes_reference"], f["weight_bytes_fp8"]),
        _bytes_row(
            f"peak memory of a {'process' if outcome.device == 'cpu' else 'rank'}",
            *map(_memory, (outcome.reference, outcome.fp8)),
        ),
        ("stored, a parameter", "", "", ""),
        _at_rest_row("  converted weights", outcome, "weights"),
        _at_rest_row("  optimizer for them", outcome, "optimizer"),
        (
            "training, seconds",
            f"{outcome.reference[0]['seconds']:.1f}",
            f"{outcome.fp8[0]['seconds']:.1f}",
            "",
        ),
    ]
    title = (
        f"{f['params'] / 1e6:.2f} M parameters, {outcome.steps} steps, "
        f"{outcome.ranks} {'rank' if outcome.ranks == 1 else 'ranks'} on {outcome.device}"
    )
    lines = [f"{a:<24}{b:>12}{c:>12}{d:>8}".rstrip() for a, b, c, d in rows]
    return "\n".join([title, *lines, *([ON_CPU] if outcome.device == "cpu" else [])])


def write_json(outcome: Outcome, path: Path) -> None:
    """Writes `Outcome.fields` as JSON."""
    path.write_text(json.dumps(outcome.fields(), indent=2) + "\n")


def plot(outcome: Outcome, path: Path) -> None:
    """Draw both held-out loss curves, the gathered bytes and the memory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    losses, traffic, memory = figure.subplots(1, 3, width_ratios=(3, 1, 1))
    names = ("bf16", outcome.recipe)
    for name, result in zip(names, (outcome.reference[0], outcome.fp8[0]), strict=True):
        losses.plot(*zip(*result["held_out"], strict=True), marker="o", markersize=3, label=name)
    losses.set(xlabel="step", ylabel="held-out loss (nats a byte)", title="The same training")
    losses.legend()
    losses.grid(alpha=0.3)
    f = outcome.fields()
    kinds = ("reference", "fp8")
    weights = [f[f"weight_bytes_{kind}"] / 1e6 for kind in kinds]
    rest = [f[f"allgather_bytes_{kind}"] / 1e6 - w for kind, w in zip(kinds, weights, strict=True)]
    traffic.bar(names, weights, label="converted weights")
    traffic.bar(names, rest, bottom=weights, label="the rest")
    traffic.set(ylabel="MB a rank", title="All-gathered in a step")
    traffic.margins(y=0.25)
    traffic.legend(loc="upper center")
    memory.bar(names, [_memory(results) / 1e6 for results in (outcome.reference, outcome.fp8)])
    memory.set(ylabel="MB", title="Peak memory of a rank")
    if outcome.device == "cpu":
        memory.set(title="Peak memory\nof a process", xlabel=fill(ON_CPU, 28))
    figure.savefig(path, dpi=120)


def show(outcome: Outcome, json_path: Path | None, plot_path: Path | None) -> None:
    """Prints the table and writes the files that were asked for."""
    print(table(outcome))
    if json_path is not None:
        write_json(outcome, json_path)
        print(f"fields: {json_path}")
    if plot_path is not None:
        plot(outcome, plot_path)
        print(f"plot: {plot_path}")


def _ends(result: dict[str, Any]) -> list[float]:
    return [result["held_out"][0][1], result["held_out"][-1][1]]


def _memory(results: list[dict[str, Any]]) -> int:
    return max(int(result["peak_memory"]) for result in results)


def _bytes_row(name: str, reference: int, fp8: int) -> tuple[str, str, str, str]:
    ratio = f"{fp8 / reference:.3f}" if reference else ""
    return name, f"{reference / 1e6:.2f} MB", f"{fp8 / 1e6:.2f} MB", ratio


def _at_rest_row(name: str, outcome: Outcome, key: str) -> tuple[str, str, str, str]:
    reference, fp8 = (float(r[0]["at_rest"][key]) for r in (outcome.reference, outcome.fp8))
    ratio = f"{fp8 / reference:.3f}" if reference else ""
    return name, f"{reference:.2f} B", f"{fp8:.2f} B", ratio
