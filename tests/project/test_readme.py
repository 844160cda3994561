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
    assert len(table.splitlines()[2:]) == 5
    numbers = re.findall(r"\b\d\d,\d{3}\b|\b\d\d\.\d GB", table)
    assert len(numbers) == 11
    for number in numbers:
        figure = number.replace("14.5 GB", "14.48").replace(" GB", "")
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


@pytest.mark.newest_torch
def test_the_compile_tables_have_the_rows_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checking the contents of their cells takes minutes: tools/compile_table.py --check."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    import compile_table as tool

    tests = "".join((ROOT / name).read_text() for name in tool.FILES)
    of_recipes = re.findall(r"^def (test_\w+)\(.*\brecipe\b", tests, re.MULTILINE)
    assert {name for _, name, _ in tool.ROWS} == set(of_recipes)
    _, *tables = re.split(r"^### .+$", tool.PAGE.body(), flags=re.MULTILINE)
    assert tables
    for table in tables:
        head, _, *rows = tool.cells(table)
        assert [row[0] for row in rows] == [text for text, _, _ in tool.ROWS]
        assert all(len(row) == len(head) for row in rows)


def test_rows_skipped_on_a_machine_keep_the_measurement_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import compile_table as tool

    (first, *_), (last, *_) = tool.ROWS[0], tool.ROWS[-1]
    results = tool.Results(columns={"current": 0})
    for text, _, _ in tool.ROWS:
        results.cells["cuda", text, "current"] = ("yes", "")
    measured = results.table("cuda")
    for text in (first, last):
        results.cells["cuda", text, "current"] = ("skipped", "needs 2 GPUs")
    found = {row[0]: row[1] for row in tool.cells(results.table("cuda", measured))[2:]}
    assert found[first] == found[last] == "yes"
    found = {row[0]: row[1] for row in tool.cells(results.table("cuda", ""))[2:]}
    assert found[first] == found[last] == "skipped"
    results.cells["cuda", last, "current"] = ("**no**", "an error")
    found = {row[0]: row[1] for row in tool.cells(results.table("cuda", measured))[2:]}
    assert found[last] == "**no**"
