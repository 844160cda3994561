"""Names of statistics, the worst layers, and files with one JSON record per line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

#: The prefix of all names.
PREFIX = "fp8"


class Lossy(NamedTuple):
    """A layer and its operand with the smallest SQNR.

    Attributes:
        layer: name of the layer.
        operand: "input", "weight" or "grad".
        sqnr_db: the operand's signal-to-quantization-noise ratio in dB.
    """

    layer: str
    operand: str
    sqnr_db: float


class Record(NamedTuple):
    """A line of a monitor's file.

    Attributes:
        step: the number of the step.
        statistics: the statistics by name.
    """

    step: int
    statistics: dict[str, float]


def name_of(layer: str, operand: str, statistic: str) -> str:
    """Return the name of a statistic."""
    return f"{PREFIX}/{layer}/{operand}/{statistic}"


def of_statistic(statistics: Mapping[str, float], statistic: str) -> dict[tuple[str, str], float]:
    """Return one statistic by layer and operand, in model order."""
    found = {}
    for name, value in statistics.items():
        layer_operand, _, known = name.removeprefix(f"{PREFIX}/").rpartition("/")
        if known == statistic:
            layer, _, operand = layer_operand.rpartition("/")
            found[layer, operand] = value
    return found


def worst(statistics: Mapping[str, float], n: int) -> list[Lossy]:
    """Return the ``n`` layers with the smallest SQNR, see `Monitor.worst`."""
    found: dict[str, Lossy] = {}
    for (layer, operand), sqnr in of_statistic(statistics, "sqnr_db").items():
        one = Lossy(layer, operand, sqnr)
        if layer not in found or _rank(one) < _rank(found[layer]):
            found[layer] = one
    return sorted(found.values(), key=_rank)[:n]


def _rank(one: Lossy) -> float:
    return -math.inf if math.isnan(one.sqnr_db) else one.sqnr_db


def append(path: Path, record: Record) -> None:
    """Append a record to a file."""
    with path.open("a") as file:
        file.write(json.dumps({"step": record.step, **record.statistics}) + "\n")


def read(path: Path) -> list[Record]:
    """Return the records of a file, in the order of steps. The last record of a step is used.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is empty, or a monitor did not write one of its lines.
    """
    found: dict[int, Record] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            statistics = json.loads(line)
            step = statistics.pop("step")
            found[step] = Record(step, statistics)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(
                f"{path}, line {number}, was not written by fp8rs.monitor(model, file=...)"
            ) from None
    if not found:
        raise ValueError(f"{path} is empty: no step has been logged yet")
    return [found[step] for step in sorted(found)]
