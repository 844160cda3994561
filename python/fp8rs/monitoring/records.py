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
    values = {}
    for name, value in statistics.items():
        layer_and_operand, _, name_of_value = name.removeprefix(f"{PREFIX}/").rpartition("/")
        if name_of_value == statistic:
            layer, _, operand = layer_and_operand.rpartition("/")
            values[layer, operand] = value
    return values


def worst(statistics: Mapping[str, float], n: int) -> list[Lossy]:
    """Return the ``n`` layers with the smallest SQNR, see `Monitor.worst`."""
    worst_by_layer: dict[str, Lossy] = {}
    for (layer, operand), sqnr_db in of_statistic(statistics, "sqnr_db").items():
        lossy = Lossy(layer, operand, sqnr_db)
        if layer not in worst_by_layer or _rank(lossy) < _rank(worst_by_layer[layer]):
            worst_by_layer[layer] = lossy
    return sorted(worst_by_layer.values(), key=_rank)[:n]


def _rank(lossy: Lossy) -> float:
    return -math.inf if math.isnan(lossy.sqnr_db) else lossy.sqnr_db


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
    records: dict[int, Record] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            statistics = json.loads(line)
            step = statistics.pop("step")
            records[step] = Record(step, statistics)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(
                f"{path}, line {number}, was not written by fp8rs.monitor(model, file=...)"
            ) from None
    if not records:
        raise ValueError(f"{path} is empty: no step has been logged yet")
    return [records[step] for step in sorted(records)]
