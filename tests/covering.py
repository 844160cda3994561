"""Choose rows of a table such that every pair of values in two columns occurs in a chosen row.

Most faults in a product of parameters depend on at most two of them (Kuhn, Wallace, Gallo:
Software Fault Interactions and Implications for Software Testing, IEEE TSE 30(6), 2004). A cover of
pairs finds them with tens of rows where the product has hundreds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, groupby

#: For each column, the index of the row's value in the list of values.
Row = tuple[int, ...]
#: A combination of values, as (column, index) pairs.
_Meeting = tuple[tuple[int, int], ...]


def covering(rows: Sequence[Row], strength: int = 2) -> list[int]:
    """Return the ascending indices of rows that cover all combinations of ``strength`` columns.

    Strength 2 covers all pairs of values, and strength 1 covers all values. Only combinations that
    occur in ``rows`` are covered. If the rows have no more than ``strength`` columns, all distinct
    rows are returned. The result does not depend on the order of the rows.

    The algorithm is greedy. It takes the row with the most combinations that are not covered yet,
    and breaks ties in favor of values near the beginning of their lists. Rows are processed by
    `_age`, so adding a value to the end of a list mostly adds rows and keeps the others. Finally,
    redundant rows are removed, oldest first.
    """
    meetings = [_meetings(row, strength) for row in rows]
    covered: set[_Meeting] = set()
    chosen = []
    by_age = sorted(range(len(rows)), key=lambda index: _age(rows[index], strength))
    for _, same_age in groupby(by_age, lambda index: _age(rows[index], strength)):
        uncovered = {index: meetings[index] for index in same_age}
        while True:
            # A row whose combinations are all covered is not needed.
            uncovered = {index: new - covered for index, new in uncovered.items()}
            uncovered = {index: new for index, new in uncovered.items() if new}
            if not uncovered:
                break
            best = min(uncovered, key=lambda i: (-len(uncovered[i]), sum(rows[i]), rows[i]))
            chosen.append(best)
            covered |= uncovered[best]
    times = Counter(meeting for index in chosen for meeting in meetings[index])
    for index in chosen[:]:
        if all(times[meeting] > 1 for meeting in meetings[index]):
            times.subtract(meetings[index])
            chosen.remove(index)
    return sorted(chosen)


def _age(row: Row, strength: int) -> int:
    """Return the index at which the row's latest combination of values first became possible."""
    return sorted(row)[-min(strength, len(row))]


def _meetings(row: Row, strength: int) -> frozenset[_Meeting]:
    return frozenset(combinations(enumerate(row), min(strength, len(row))))
