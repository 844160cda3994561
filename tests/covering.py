"""Rows of a table chosen so that what meets in it, in any two columns, meets in a chosen row too.

A fault that shows in a product of parameters mostly shows in two of them together (Kuhn, Wallace,
Gallo: Software Fault Interactions and Implications for Software Testing, IEEE TSE 30(6), 2004):
such a cover finds it in some tens of rows where the product has hundreds.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations

Row = Sequence[Hashable]
#: The columns and what a row has in them.
_Meeting = tuple[tuple[int, Hashable], ...]


def covering(rows: Sequence[Row], strength: int = 2) -> list[int]:
    """Indices, ascending, of rows that hold all that meets in ``strength`` columns of all rows.

    Strength 2 is a cover of all pairs of values, strength 1 one of all values. Greedy: the row with
    the most meetings that are not covered yet, the first of several. What is left out of ``rows``
    is excluded, a row that repeats another is dropped, rows of no more columns than that give all
    rows. Equal rows give equal indices.
    """
    left = {index: _meetings(row, strength) for index, row in enumerate(rows)}
    missing = frozenset[_Meeting]().union(*left.values())
    chosen = []
    while missing:
        left = {index: held & missing for index, held in left.items() if held & missing}
        best = max(left, key=lambda index: (len(left[index]), -index))
        chosen.append(best)
        missing -= left.pop(best)
    return sorted(chosen)


def _meetings(row: Row, strength: int) -> frozenset[_Meeting]:
    return frozenset(combinations(enumerate(row), min(strength, len(row))))
