"""Checks of the documentation site beyond the links and docstrings of `make docs`."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fp8rs

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"

#: Public names that are not objects with a docstring: the version, and packages.
NO_OBJECTS = {
    *(
        "__version__",
        "checkpoint",
        "comm",
        "export",
        "fsdp",
        "nn",
        "ops",
        "optim",
        "tensor_parallel",
    )
}


def documented() -> list[str]:
    pages = sorted(REFERENCE.glob("*.md"))
    return [n for page in pages for n in re.findall(r"^::: (\S+)$", page.read_text(), re.M)]


def objects() -> Iterator[tuple[str, Any]]:
    """Return everything that is documented, except integrations, whose clients may be missing."""
    for name in documented():
        module, _, attribute = name.rpartition(".")
        if not module.startswith("fp8rs.integrations"):
            yield name, getattr(importlib.import_module(module), attribute)


@pytest.mark.newest_torch
def test_every_public_name_is_in_the_reference_once() -> None:
    names = documented()
    assert len(set(names)) == len(names)
    # The class of a layer is in both packages. The reference lists it under `fp8rs.nn`.
    public = {f"fp8rs.{n}" for n in set(fp8rs.__all__) - NO_OBJECTS - set(fp8rs.nn.__all__)}
    for name in ("nn", "nn.functional", "optim", "checkpoint", "export", "tensor_parallel"):
        module = importlib.import_module(f"fp8rs.{name}")
        public |= {f"fp8rs.{name}.{public}" for public in module.__all__}
    # An alias of Float8Linear, a module, and a function that is listed under its module.
    public -= {"fp8rs.nn.Linear", "fp8rs.nn.functional", "fp8rs.export.tensors"}
    assert public <= set(names)


@pytest.mark.newest_torch
def test_every_integration_is_in_the_reference() -> None:
    """Integrations are read from their sources, because their clients may be missing."""
    sources = sorted((Path(fp8rs.__file__).parent / "integrations").glob("[a-z]*.py"))
    assert sources
    for source in sources:
        tree = ast.parse(source.read_text())
        defined = (ast.FunctionDef, ast.ClassDef)
        public = [n.name for n in tree.body if isinstance(n, defined) and n.name[0] != "_"]
        named = {n.rpartition(".")[2] for n in documented() if f".{source.stem}." in n}
        assert public, source
        assert set(public) <= named, source


@pytest.mark.newest_torch
def test_the_reference_lists_only_existing_names() -> None:
    for name, target in objects():
        assert target.__doc__ or issubclass(target, RuntimeError), name


@pytest.mark.newest_torch
def test_the_reference_lists_no_module() -> None:
    """For a module and a function of one name, the site would show everything in the module."""
    package = Path(fp8rs.__file__).parents[1]
    assert not [n for n in documented() if (package / f"{n.replace('.', '/')}.py").exists()]


@pytest.mark.newest_torch
def test_code_blocks_have_at_most_88_columns() -> None:
    """A wider line would need a scroll bar on the site."""
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        wide = [line for block in blocks for line in block.splitlines() if len(line) > 88]
        assert not wide, (page.name, wide)


@pytest.mark.newest_torch
def test_docstrings_are_markdown() -> None:
    """Roles of reStructuredText would appear unprocessed."""
    for name, target in objects():
        members = vars(target).values() if isinstance(target, type) else ()
        for member in (target, *members):
            assert not re.search(r":\w+:`", getattr(member, "__doc__", None) or ""), (name, member)


@pytest.mark.newest_torch
def test_the_citation_names_the_last_release() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    version, date = re.findall(r"^## (\d\S+) - (\S+)$", changelog, re.MULTILINE)[0]
    assert f"\nversion: {version}\n" in citation
    assert f'\ndate-released: "{date}"\n' in citation
