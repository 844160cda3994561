#!/usr/bin/env python3
"""Write the tables of docs/checkpoints.md: what was saved where and loaded where, as tests have it.

    python tools/checkpoint_table.py [--full] [--check] [--device cpu|cuda]

Runs tests/checkpoint/test_moves.py. A row is a move between layouts, a cell
as those of tools/matrix_table.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matrix_table
import pytest
import written

ROOT = Path(__file__).resolve().parent.parent
PAGE = written.Page(ROOT / "docs" / "checkpoints.md", "checkpoint_table")
TEST = ROOT / "tests" / "checkpoint" / "test_moves.py"


class Results(matrix_table.Results):
    """What became of the moves."""

    row = ("saved", "loaded")

    def name_of(self, row: tuple[str, ...]) -> str:
        return " to ".join(row)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true", help="every case, not a cover of pairs")
    parser.add_argument("--check", action="store_true", help="compare with the page, write nothing")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="that one alone")
    chosen = parser.parse_args()

    results = Results()
    options = ["--full"] if chosen.full else []
    options += written.on_device(chosen.device)
    status = pytest.main(["-q", *options, "--rootdir", str(ROOT), str(TEST)], plugins=[results])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return int(status)
    table = results.table("cpu")
    tables = {} if table is None else {written.name_of("CPU, gloo"): table}
    return written.update(PAGE, tables, matrix_table.words, chosen.check)


if __name__ == "__main__":
    sys.exit(main())
