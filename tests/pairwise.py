"""Rows of a table chosen so that any two values that meet in it meet in a chosen row too.

A fault that shows in a product of parameters mostly shows in two of them together (Kuhn, Wallace,
Gallo: Software Fault Interactions and Implications for Software Testing, IEEE TSE 30(6), 2004):
such a cover finds it in some tens of rows where the product has hundreds.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations

Row = Sequence[Hashable]
_Pair = tuple[int, Hashable, int, Hashable]


def pairwise(rows: Sequence[Row]) -> list[int]:
    """Indices, ascending, of rows that hold every pair of values (of two columns) of all rows.

    Greedy: the row with the most pairs that are not covered yet, the first of several. What is
    left out of ``rows`` is excluded, a row that repeats another is dropped, one column or two give
    all rows. Equal rows give equal indices.
    """
    left = {index: _pairs(row) for index, row in enumerate(rows)}
    missing = frozenset[_Pair]().union(*left.values())
    chosen = []
    while missing:
        left = {index: pairs & missing for index, pairs in left.items() if pairs & missing}
        best = max(left, key=lambda index: (len(left[index]), -index))
        chosen.append(best)
        missing -= left.pop(best)
    return sorted(chosen)


def _pairs(row: Row) -> frozenset[_Pair]:
    if len(row) < 2:
        return frozenset({(0, tuple(row), 0, None)})
    return frozenset((i, a, j, b) for (i, a), (j, b) in combinations(enumerate(row), 2))
