"""Write generated tables to pages, one per torch version and device, between two markers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

END = "<!-- to here -->"


class Page:
    """A page with a part that one tool generates.

    Args:
        path: the page.
        tool: the tool's name, which the marker contains.
    """

    def __init__(self, path: Path, tool: str) -> None:
        self.path = path
        self.begin = f"<!-- tools/{tool}.py writes from here -->"

    def body(self) -> str:
        """Return the generated part."""
        return self._split()[1]

    def tables(self) -> dict[str, str]:
        """Return the tables of the generated part by name."""
        parts = re.split(r"^### (.+)$", self.body(), flags=re.MULTILINE)
        return dict(zip(parts[1::2], (part.strip() for part in parts[2::2]), strict=True))

    def write(self, body: str) -> None:
        """Replace the generated part."""
        before, _, after = self._split()
        self.path.write_text(f"{before}{self.begin}\n{body}\n{END}{after}")

    def _split(self) -> tuple[str, str, str]:
        before, _, rest = self.path.read_text().partition(self.begin)
        body, end, after = rest.partition(END)
        if not end:
            raise SystemExit(f"{self.path} has no {self.begin!r} with {END!r} after it")
        return before, body, after


def on_device(device: str | None) -> list[str]:
    """Return pytest's options for the tests of "cpu" or "cuda", or for all tests."""
    return [] if device is None else ["-m", "gpu" if device == "cuda" else "not gpu"]


def name_of(place: str) -> str:
    """Return the name of a table in the page."""
    return f"torch {'.'.join(torch.__version__.split('.')[:2])}, {place}"


def update(
    page: Page,
    tables: dict[str, str],
    words: Callable[[str], Any],
    check: bool,
    last: dict[str, str] | None = None,
) -> int:
    """Replace tables of a page by name, and print tables that differ. Other tables stay.

    A table of fewer cases than the page's is compared with it, and does not replace it.

    Args:
        page: the page.
        tables: the new tables by name.
        words: returns the content of a table to compare.
        check: compare only, and write nothing.
        last: parts to write after all tables.

    Returns:
        An exit code: 1 if a table differs and does not replace the page's, 2 if a cell did not run,
        else 0.
    """
    old = page.tables()
    fewer = {name for name, table in tables.items() if cases(table) < cases(old.get(name, ""))}
    differ = False
    for name, table in tables.items():
        if any("not run" in row for row in rows(table)):
            print(f"rows or cells without a test:\n{table}")
            return 2
        if words(old.get(name, "")) != words(table):
            differ = differ or check or name in fewer
            print(f"{name}: {'differs from' if name in old else 'is not in'} the page\n{table}")
    if check:
        return int(differ)
    last = last or {}
    new = {name: table for name, table in tables.items() if name not in fewer}
    kept = {name: part for name, part in {**old, **new}.items() if name not in last}
    ordered = [*sorted(kept.items(), reverse=True), *last.items()]
    page.write("".join(f"\n### {name}\n\n{part}\n" for name, part in ordered))
    return int(differ)


def cases(table: str) -> int:
    """Return how many cases of tests were run for a table, as its last line says. 0 without one."""
    found = re.search(r"^([\d,]+) of [\d,]+ cases were run\.", table, re.MULTILINE)
    return int(found[1].replace(",", "")) if found else 0


def rows(table: str) -> list[list[str]]:
    """Return the cells of a table by line."""
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines]
