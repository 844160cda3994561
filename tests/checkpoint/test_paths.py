"""The page has the outcome of each way to save a checkpoint."""

from pathlib import Path

import pytest

from checkpoint.layouts import KEPT
from checkpoint.paths import EXACT, REFUSED, ROUNDED, outcomes
from distributed import ranks
from distributed.models import RECIPES

PAGE = Path(__file__).parents[2] / "docs" / "saving.md"


def table_of_ways() -> list[list[str]]:
    """Return the cells of the page's table, the header first."""
    text = PAGE.read_text()
    start = text.index("| saved by | loaded by |")
    lines = text[start:].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


#: Without --long, one optimizer with masters and one without. Each case takes 9 s of CPU time, and
#: test_states.py runs the same code in the first tier.
SECOND_TIER = ("FP8 weights, AdamW with masters", "FP8 weights, torch's AdamW")
SOME = [
    pytest.param(name, marks=pytest.mark.second_tier if name in SECOND_TIER else pytest.mark.long)
    for name in KEPT
]


@ranks(2, cuda=False, seconds=240)
@pytest.mark.parametrize(
    "recipe",
    [
        "current",
        "delayed",
        *(pytest.param(n, marks=pytest.mark.long) for n in list(RECIPES)[2:]),
    ],
)
@pytest.mark.parametrize("weight_kind", SOME)
def test_the_page_has_the_outcome_of_each_way(rig, recipe, weight_kind):
    """A cell has the worst outcome of all recipes."""
    results = outcomes(rig, recipe, weight_kind)
    (_, _, *columns), _, *rows = table_of_ways()
    assert [tuple(row[:2]) for row in rows] == list(results)
    for way, move, *cells in rows:
        result = results[way, move]
        cell = cells[columns.index(weight_kind)].partition(" (")[0]
        assert result.values == cell or (result.values, cell) == (EXACT, ROUNDED), (
            way,
            move,
            result,
        )
        if recipe == "delayed":
            histories, _, note = cells[-1].partition(" (")
            kept_here = histories == "kept"
            if histories == "kept with FP8 weights":
                kept_here = KEPT[weight_kind][0] and result.values != REFUSED
            if note == "3)":
                kept_here = kept_here and weight_kind != "FP8 weights, torch's AdamW"
            assert result.histories == kept_here, (way, move)
