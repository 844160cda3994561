"""Rows of a table chosen so that what meets in it, in any two columns, meets in a chosen row too.

A fault that shows in a product of parameters mostly shows in two of them together (Kuhn, Wallace,
Gallo: Software Fault Interactions and Implications for Software Testing, IEEE TSE 30(6), 2004):
such a cover finds it in some tens of rows where the product has hundreds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, groupby

#: Of each column the place of its value in that column's list.
Row = tuple[int, ...]
#: The columns and what a row has in them.
_Meeting = tuple[tuple[int, int], ...]


def covering(rows: Sequence[Row], strength: int = 2) -> list[int]:
    """Indices, ascending, of rows that hold all that meets in ``strength`` columns of all rows.

    Strength 2 is a cover of all pairs of values, strength 1 one of all values. What is left out of
    ``rows`` is excluded, a row that repeats another is dropped, rows of no more columns than that
    give all rows. In what order the rows come does not count.

    Greedy: the row with the most meetings that are not covered yet, of several that with the values
    nearest the beginning of their lists. Rows come up by `_age`: of values that came first they are
    chosen as if there were no later ones. So a value that is written at the end of a list mostly
    adds rows. In the end what later rows have made needless is dropped, the oldest first.
    """
    meetings = [_meetings(row, strength) for row in rows]
    held: set[_Meeting] = set()
    chosen = []
    by_age = sorted(range(len(rows)), key=lambda index: _age(rows[index], strength))
    for _, same_age in groupby(by_age, lambda index: _age(rows[index], strength)):
        left = {index: meetings[index] for index in same_age}
        while left := {index: new for index, all_ in left.items() if (new := all_ - held)}:
            best = min(left, key=lambda i: (-len(left[i]), sum(rows[i]), rows[i]))
            chosen.append(best)
            held |= left[best]
    times = Counter(meeting for index in chosen for meeting in meetings[index])
    for index in chosen[:]:
        if all(times[meeting] > 1 for meeting in meetings[index]):
            times.subtract(meetings[index])
            chosen.remove(index)
    return sorted(chosen)


def _age(row: Row, strength: int) -> int:
    """When the meeting of a row's latest values came up."""
    return sorted(row)[-min(strength, len(row))]


def _meetings(row: Row, strength: int) -> frozenset[_Meeting]:
    return frozenset(combinations(enumerate(row), min(strength, len(row))))
