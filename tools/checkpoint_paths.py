#!/usr/bin/env python3
"""Write the table of ways to save in docs/checkpoints.md.

    python tools/checkpoint_paths.py [--check]

Runs the ways of tests/checkpoint/paths.py on two ranks of the CPU, in `RECIPES`. A cell has
the worst outcome of these recipes. Errors are numbered, and their messages follow the table.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any

import written

ROOT = Path(__file__).resolve().parent.parent
PAGE = written.Page(ROOT / "docs" / "checkpoints.md", "checkpoint_paths")
PLACE = "CPU, gloo: ways to save"
RECIPES = ["current", "delayed", "block", "mxfp8", "mxfp8 of 1x32"]


def table(found: dict[tuple[str, str], Any], optimizers: list[str]) -> str:
    """Return the table.

    Args:
        found: outcomes of each way to save and to load, by recipe and optimizer.
        optimizers: the columns.
    """
    head = ["saved by", "loaded by", *optimizers, "histories of `delayed`"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    notes: dict[tuple[str, str], str] = {}  # by the way and the type of the error
    for key in found["current", optimizers[0]]:
        cells = []
        for kept in optimizers:
            worst = max((found[recipe, kept][key] for recipe in RECIPES), key=lambda one: one.rank)
            cell = worst.values
            if worst.error:
                name = key[0], worst.error.partition(":")[0]
                notes.setdefault(name, textwrap.shorten(worst.error, 400, placeholder=" ..."))
                cell += f" ({list(notes).index(name) + 1})"
            cells.append(cell)
        kept_by = [found["delayed", kept][key] for kept in optimizers]
        histories = {"kept" if one.histories else "start again" for one in kept_by if not one.error}
        lines.append(f"| {' | '.join([*key, *cells, ', '.join(sorted(histories))])} |")
    numbered = [f"({number}) `{text}`" for number, text in enumerate(notes.values(), 1)]
    return "\n\n".join(["\n".join(lines), *numbered])


def words(text: str) -> list[list[str]]:
    """Return the cells, without the numbers of errors."""
    return [[cell.partition(" (")[0] for cell in row] for row in written.rows(text)]


def main() -> int:
    """Run the ways to save, and write or check the table. Return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the page, write nothing")
    chosen = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    from checkpoint import layouts, paths
    from distributed.pool import pool

    optimizers = list(layouts.KEPT)
    found = {}
    for recipe in RECIPES:
        for kept in optimizers:
            arguments = {"recipe": recipe, "kept": kept}
            run = pool().run(paths.__name__, "outcomes", 2, "cpu", arguments, 240)
            found[recipe, kept] = run[0]
    tables = {written.name_of(PLACE): table(found, optimizers)}
    return written.update(PAGE, tables, words, chosen.check)


if __name__ == "__main__":
    sys.exit(main())
