#!/usr/bin/env python3
"""Generate the tables of docs/checkpoints.md from the tests that save and load between layouts.

    python tools/checkpoint_table.py --full [--check]

Runs the test of unbatched weights in tests/checkpoint/test_moves.py on the CPU. A row is a pair of
layouts. Cells are as in tools/matrix_table.py. Without ``--full``, the test leaves out three
recipes, and no table is written.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matrix_table
import written

ROOT = Path(__file__).resolve().parent.parent
PAGE = written.Page(ROOT / "docs" / "checkpoints.md", "checkpoint_table")
CLAIM = "test_a_checkpoint_restores_every_bit_in_another_layout"
TEST = f"{ROOT}/tests/checkpoint/test_moves.py::{CLAIM}"


class Results(matrix_table.Results):
    """Results by pair of layouts."""

    row = ("saved", "loaded")

    def name_of(self, row: tuple[str, ...]) -> str:
        """Return the title of a row."""
        return " to ".join(row)


def main() -> int:
    """Run the test, and write or check the table. Return the exit status."""
    results = Results()
    chosen = matrix_table.run(__doc__, TEST, results)
    table = results.table("cpu")
    tables = {} if table is None else {written.name_of("CPU, gloo"): table}
    return written.update(PAGE, tables, matrix_table.words, chosen.check)


if __name__ == "__main__":
    sys.exit(main())
