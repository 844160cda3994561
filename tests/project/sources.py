"""Syntax trees of Python sources, and the names that they import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import fp8rs

TESTS = Path(__file__).parents[1]
FP8RS = Path(fp8rs.__file__).parent


def modules(folder: Path) -> dict[str, ast.Module]:
    """Return the tree of each module below a folder, by dotted name."""
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts): ast.parse(path.read_text())
        for path in sorted(folder.rglob("*.py"))
    }


def imported(name: str, tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yield each ``from`` import of a module: the other module, the name there, the name here."""
    package = name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield module, alias.name, alias.asname or alias.name
