"""The README's commands and figures exist, and links between pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_figures_are_those_of_the_measurements() -> None:
    measured = (ROOT / "benches" / "RESULTS.md").read_text()
    table = README.split("| times bf16 |")[1].split("\n\n")[0]
    assert len(table.splitlines()[2:]) == 4
    numbers = re.findall(r"\b\d\d,\d{3}\b|\b\d\d\.\d GB", table)
    assert len(numbers) == 8
    for number in numbers:
        figure = number.replace(" GB", "")
        assert re.search(rf"(?<![\d.]){re.escape(figure)}", measured), number


def test_targets_and_files_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"(?:`|^    )make ([a-z-]+)", README, re.MULTILINE)
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert targets and links
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for link in links:
        assert (ROOT / link).is_file(), link


def anchors(page: Path) -> set[str]:
    """Return the fragments that links may use: the headings as they appear in addresses."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.newest_torch
@pytest.mark.parametrize(
    "page",
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benches/**/*.md")],
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_links_have_targets(page: Path) -> None:
    for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", page.read_text()):
        target = page.parent / link if link else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), (link, anchor)
