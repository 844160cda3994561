"""tools/written.py, which updates the tables of one torch version and device in a page."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import written

pytestmark = pytest.mark.newest_torch

PAGE = """# Before
<!-- tools/a.py writes from here -->

### torch 2, CPU

| | x |
|---|---|
| a | yes |

### Left out

old

<!-- to here -->
After
"""


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return written.Page(path, "a")


def update(page, tables, check=False):
    return written.update(page, tables, written.rows, check, {"Left out": "old"})


def test_equal_tables_leave_the_page_unchanged(page):
    table = "| | x |\n|---|---|\n| a | yes |"
    assert update(page, {"torch 2, CPU": table}) == 0
    assert page.path.read_text() == PAGE


def test_tables_of_other_machines_are_kept_and_the_last_part_stays_last(page):
    assert update(page, {"torch 3, CPU": "| | x |"}) == 0
    body = page.body()
    places = [body.index(part) for part in ("torch 3", "torch 2", "| a | yes |", "### Left out")]
    assert places == sorted(places)
    assert page.path.read_text().startswith("# Before\n")
    assert page.path.read_text().endswith("After\n")


@pytest.mark.parametrize(("cell", "status"), [("yes", 0), ("no", 1), ("not run", 2)])
def test_a_check_writes_nothing(page, cell, status, capsys):
    table = f"| | x |\n|---|---|\n| a | {cell} |"
    assert update(page, {"torch 2, CPU": table}, check=True) == status
    assert bool(capsys.readouterr().out) == bool(status)
    assert page.path.read_text() == PAGE


@pytest.mark.parametrize(("cell", "status"), [("yes", 0), ("no", 1)])
def test_a_table_of_fewer_cases_is_compared_and_not_written(page, cell, status):
    table = "| | x |\n|---|---|\n| a | {} |\n\n{} of 1,536 cases were run."
    assert update(page, {"torch 2, CPU": table.format("yes", "1,200")}) == 0
    before = page.path.read_text()
    assert "1,200 of 1,536" in before
    assert update(page, {"torch 2, CPU": table.format(cell, "99")}) == status
    assert page.path.read_text() == before


def test_a_page_without_the_markers_is_an_error(page):
    page.path.write_text("# Before")
    with pytest.raises(SystemExit, match=r"no .*tools/a.py"):
        page.body()
