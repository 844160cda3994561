"""What tools write into the documentation: a part a torch and device, between two markers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

END = "<!-- to here -->"


class Page:
    """A page with a place that one tool writes.

    Args:
        path: the page.
        tool: the tool's name, which the marker has.
    """

    def __init__(self, path: Path, tool: str) -> None:
        self.path = path
        self.begin = f"<!-- tools/{tool}.py writes from here -->"

    def body(self) -> str:
        """What stands there."""
        return self._split()[1]

    def tables(self) -> dict[str, str]:
        """The parts of it, by their names."""
        parts = re.split(r"^### (.+)$", self.body(), flags=re.MULTILINE)
        return dict(zip(parts[1::2], (part.strip() for part in parts[2::2]), strict=True))

    def write(self, body: str) -> None:
        """Put ``body`` there."""
        before, _, after = self._split()
        self.path.write_text(f"{before}{self.begin}\n{body}\n{END}{after}")

    def _split(self) -> tuple[str, str, str]:
        before, _, rest = self.path.read_text().partition(self.begin)
        body, end, after = rest.partition(END)
        if not end:
            raise SystemExit(f"{self.path} has no {self.begin!r} with {END!r} after it")
        return before, body, after


def on_device(device: str | None) -> list[str]:
    """pytest's options for the tests of one device, "cpu" or "cuda"; of None for all."""
    return [] if device is None else ["-m", "gpu" if device == "cuda" else "not gpu"]


def name_of(place: str) -> str:
    """What a table is of; by this name it is found in the page."""
    return f"torch {'.'.join(torch.__version__.split('.')[:2])}, {place}"


def update(
    page: Page,
    tables: dict[str, str],
    words: Callable[[str], Any],
    check: bool,
    last: dict[str, str] | None = None,
) -> int:
    """Write tables in place of those of the same names; the others stay.

    Args:
        page: where.
        tables: by their names.
        words: what of a table must be as the page has it; what differs is printed.
        check: write nothing.
        last: parts that come after all tables.

    Returns:
        1 if something differs that was only checked, else 0; 2 where a cell has not run.
    """
    old = page.tables()
    differ = False
    for name, table in tables.items():
        if any("not run" in row for row in rows(table)):
            print(f"rows or cells without a test:\n{table}")
            return 2
        if words(old.get(name, "")) != words(table):
            differ = True
            print(f"{name}: {'differs from' if name in old else 'is not in'} the page\n{table}")
    if check:
        return int(differ)
    last = last or {}
    kept = {name: part for name, part in {**old, **tables}.items() if name not in last}
    ordered = [*sorted(kept.items(), reverse=True), *last.items()]
    page.write("".join(f"\n### {name}\n\n{part}\n" for name, part in ordered))
    return 0


def rows(table: str) -> list[list[str]]:
    """The cells of a table, line by line."""
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines]
