#!/usr/bin/env python3
"""Generate the tables of docs/fsdp2-matrix.md from the tests that train under FSDP2.

    python tools/matrix_table.py [--full] [--check] [--device cpu|cuda]

Runs tests/fsdp/test_matrix.py and writes one table per device between the markers in the page.
Tables of other torch versions and devices are not changed. Without ``--full``, a cover of all pairs
of parameters runs. Its table is only compared with the page's if that one is of more cases.
``--check`` writes nothing, and fails if a cell differs from the page.

Run it where fp8rs is installed or on PYTHONPATH. Each torch version writes its own tables.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import written

ROOT = Path(__file__).resolve().parent.parent
PAGE = written.Page(ROOT / "docs" / "fsdp2-matrix.md", "matrix_table")
TEST = ROOT / "tests" / "fsdp" / "test_matrix.py"
WEIGHTS = {"master": "master weights", "fp8": "FP8 weights"}

Key = tuple[str, tuple[str, ...], str]


@dataclass
class Results:
    """A pytest plugin that collects the results of trainings by device, row and recipe."""

    ran: Counter[Key] = field(default_factory=Counter)
    all: Counter[Key] = field(default_factory=Counter)
    failed: dict[Key, str] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    #: The parameters that identify a row. The recipe identifies the column.
    row: ClassVar[tuple[str, ...]] = ("weights", "mesh", "shards")

    def key_of(self, item: Any) -> Key:
        """Return the cell of a case."""
        params = item.callspec.params
        return params["device_type"], tuple(params[name] for name in self.row), params["recipe"]

    def name_of(self, row: tuple[str, ...]) -> str:
        """Return the title of a row."""
        weights, *others = row
        return ", ".join([WEIGHTS[weights], *others])

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Count all cases of each cell, before the cover is selected."""
        self.all.update(self.key_of(item) for item in items)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        """Count a case that ran or was skipped, and store its failure."""
        report = yield
        key = self.key_of(item)
        if report.skipped:
            self.skipped[key[0]] += 1
            return report
        if report.failed:
            lines = call.excinfo.exconly().strip().splitlines()
            self.failed.setdefault(key, lines[-1][:160])
        if report.when == "call":
            self.ran[key] += 1
        return report

    def table(self, device: str) -> str | None:
        """Return the table of a device, or None if no case ran or one was skipped."""
        mine = [key for key in self.all if key[0] == device]
        if self.skipped[device] or not any(self.ran[key] or key in self.failed for key in mine):
            return None
        rows = list(dict.fromkeys(key[1] for key in mine))
        recipes = list(dict.fromkeys(key[2] for key in mine))
        lines = [f"| | {' | '.join(recipes)} |", "|---" * (len(recipes) + 1) + "|"]
        reasons: dict[str, int] = {}
        for row in rows:
            cells = []
            for recipe in recipes:
                key = device, row, recipe
                if key in self.failed:
                    number = reasons.setdefault(self.failed[key], len(reasons) + 1)
                    cells.append(f"**no** ({number})")
                elif self.ran[key]:
                    cells.append("yes")
                else:
                    cells.append("not run")
            lines.append(f"| {self.name_of(row)} | {' | '.join(cells)} |")
        notes = [f"({number}) {reason}" for reason, number in reasons.items()]
        ran, known = (sum(counted[key] for key in mine) for counted in (self.ran, self.all))
        return "\n".join([*lines, "", *notes, f"{ran:,} of {known:,} cases were run."])


def left_out() -> str:
    """Return a list of the combinations that are not tested, with reasons."""
    sys.path.insert(0, str(ROOT / "tests"))
    from fsdp.test_matrix import LEFT_OUT

    reasons: dict[str, list[str]] = {}
    for cell, reason in LEFT_OUT.items():
        reasons.setdefault(reason, []).append(" with ".join(f"`{value}`" for value in cell))
    return "\n".join(f"- {', '.join(cells)}: {reason}." for reason, cells in reasons.items())


def words(table: str) -> list[list[str]]:
    """Return the cells of a table, without references to reasons."""
    return [
        [row[0], *(cell.split("(")[0].strip() for cell in row[1:])] for row in written.rows(table)
    ]


def run(description: str | None, test: str | Path, results: Results) -> argparse.Namespace:
    """Run a test with the options of the command line, and return these. Exit on pytest errors."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument(
        "--full", action="store_true", help="run every case instead of a cover of pairs"
    )
    parser.add_argument("--check", action="store_true", help="compare with the page, write nothing")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="run only this device")
    chosen = parser.parse_args()
    options = ["--full"] if chosen.full else []
    options += written.on_device(chosen.device)
    status = pytest.main(["-q", *options, "--rootdir", str(ROOT), str(test)], plugins=[results])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit(int(status))
    return chosen


def main() -> int:
    """Run the test, and write or check the tables. Return the exit status."""
    results = Results()
    chosen = run(__doc__, TEST, results)
    tables = {}
    for device in ("cpu", "cuda"):
        table = results.table(device)
        if table is not None:
            gpus = device == "cuda"
            place = f"2 x {torch.cuda.get_device_name()}, NCCL" if gpus else "CPU, gloo"
            tables[written.name_of(place)] = table
    return written.update(PAGE, tables, words, chosen.check, {"Left out": left_out()})


if __name__ == "__main__":
    sys.exit(main())
