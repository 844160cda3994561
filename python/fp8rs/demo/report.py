"""The table, the plot and the JSON file of the demo."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from fp8rs.storage import replace_atomically

from .train import Result

ON_CPU = "Times on a CPU do not predict those of a GPU: GEMMs multiply fp32 copies of FP8 operands."


@dataclass(frozen=True)
class Outcome:
    """The results of both trainings. The JSON file has the same fields.

    ``dtype`` is the dtype of the reference, and of what is not FP8 in the FP8 training.
    """

    ranks: int
    device: str
    dtype: str
    recipe: str
    steps: int
    reference: Result
    fp8: Result


def table(outcome: Outcome) -> str:
    """Return the comparison as text."""
    reference = outcome.reference
    fp8 = outcome.fp8
    lines = [
        f"{outcome.steps} steps on {outcome.device}, ranks: {outcome.ranks}",
        f"{'':<24}{outcome.dtype:>12}{outcome.recipe:>12}{'ratio':>8}",
        _row("held-out loss, first", reference.held_out[0][1], fp8.held_out[0][1], "", 4),
        _row("held-out loss, last", reference.held_out[-1][1], fp8.held_out[-1][1], "", 4),
        _row("gathered in a step", reference.gathered_bytes / 1e6, fp8.gathered_bytes / 1e6, "MB"),
        _row("training", reference.seconds, fp8.seconds, "s", 1),
    ]
    if outcome.dtype == "fp32":
        lines.append("fp32 parameters are gathered in twice the bytes of bf16 parameters.")
    if outcome.device == "cpu":
        lines.append(ON_CPU)
    return "\n".join(lines)


def _row(name: str, reference: float, fp8: float, unit: str, digits: int = 2) -> str:
    # One rank gathers nothing.
    ratio = f"{fp8 / reference:.3f}" if reference else ""
    reference_cell = f"{reference:.{digits}f} {unit}".rstrip()
    fp8_cell = f"{fp8:.{digits}f} {unit}".rstrip()
    return f"{name:<24}{reference_cell:>12}{fp8_cell:>12}{ratio:>8}".rstrip()


def plot(outcome: Outcome, path: Path) -> None:
    """Draw both held-out loss curves and the gathered bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    losses, traffic = figure.subplots(1, 2, width_ratios=(3, 1))
    for name, result in ((outcome.dtype, outcome.reference), (outcome.recipe, outcome.fp8)):
        steps, values = zip(*result.held_out, strict=True)
        losses.plot(steps, values, marker="o", markersize=3, label=name)
        traffic.bar(name, result.gathered_bytes / 1e6)
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
