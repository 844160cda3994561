"""What is logged: names of statistics, the layers that lose most, files of lines of JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

#: What all names begin with.
PREFIX = "fp8"


class Lossy(NamedTuple):
    """A layer, and its operand that quantization costs most.

    Attributes:
        layer: its name.
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
        statistics: by name.
    """

    step: int
    statistics: dict[str, float]


class RecordsError(ValueError):
    """A file cannot be read, or is no monitor's."""


def name_of(layer: str, operand: str, statistic: str) -> str:
    """The name that a statistic is logged under."""
    return f"{PREFIX}/{layer}/{operand}/{statistic}"


def of_statistic(statistics: Mapping[str, float], statistic: str) -> dict[tuple[str, str], float]:
    """One statistic by layer and operand, in their order."""
    found = {}
    for name, value in statistics.items():
        whose, _, which = name.removeprefix(f"{PREFIX}/").rpartition("/")
        if which == statistic:
            layer, _, operand = whose.rpartition("/")
            found[layer, operand] = value
    return found


def worst(statistics: Mapping[str, float], n: int) -> list[Lossy]:
    """The ``n`` layers that lost most, each by its worst operand: see `Monitor.worst`."""
    found: dict[str, Lossy] = {}
    for (layer, operand), sqnr in of_statistic(statistics, "sqnr_db").items():
        one = Lossy(layer, operand, sqnr)
        if layer not in found or _rank(one) < _rank(found[layer]):
            found[layer] = one
    return sorted(found.values(), key=_rank)[:n]


def _rank(one: Lossy) -> float:
    return -math.inf if math.isnan(one.sqnr_db) else one.sqnr_db


def append(path: Path, record: Record) -> None:
    """Add a line."""
    with path.open("a") as file:
        file.write(json.dumps({"step": record.step, **record.statistics}) + "\n")


def read(path: Path) -> list[Record]:
    """The lines of a file in the order of their steps; of a step that is there twice, the last.

    Raises:
        RecordsError: there is no such file, or a line of it is no monitor's.
    """
    found: dict[int, Record] = {}
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RecordsError(f"{path}: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            statistics = json.loads(line)
            step = statistics.pop("step")
            found[step] = Record(step, statistics)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise RecordsError(
                f"{path}, line {number}, is not what fp8rs.monitor(model, file=...) writes"
            ) from None
    if not found:
        raise RecordsError(f"{path} has no line: no step was logged yet")
    return [found[step] for step in sorted(found)]
