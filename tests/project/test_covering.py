"""The choice of tests: what is left of a product holds every pair of its values, or every value."""

from itertools import combinations, product

import pytest

from covering import covering

pytestmark = pytest.mark.newest_torch


def meetings(rows, strength):
    return {found for row in rows for found in combinations(enumerate(row), strength)}


@pytest.mark.parametrize(
    "strength, sizes, most",
    [
        (2, (3, 3, 3, 3), 12),  # 9 is the least
        (2, (7, 2, 3, 2, 5), 40),  # 35 is the least
        (2, (2,) * 10, 10),
        (2, (6, 5, 2), 32),
        (1, (3, 3, 3, 3), 3),
        (1, (7, 2, 3, 2, 5), 7),
        (1, (4, 5), 5),
        (3, (2, 2, 2, 2), 12),  # 8 is the least
    ],
    ids=str,
)
def test_all_that_meets_is_in_a_cover_far_smaller_than_the_product(strength, sizes, most):
    rows = list(product(*map(range, sizes)))
    chosen = covering(rows, strength)
    assert meetings([rows[index] for index in chosen], strength) == meetings(rows, strength)
    assert len(chosen) <= most < len(rows)
    assert chosen == sorted(set(chosen)) == covering(rows, strength)


@pytest.mark.parametrize("strength", [1, 2])
def test_what_is_excluded_is_not_asked_for(strength):
    rows = [(a, b, c) for a, b, c in product("xyz", range(3), range(3)) if not (a == "x" and b)]
    chosen = [rows[index] for index in covering(rows, strength)]
    assert meetings(chosen, strength) == meetings(rows, strength)
    assert not any(a == "x" and b for a, b, _ in chosen)


@pytest.mark.parametrize(
    "strength, rows",
    [
        (1, [("a",), ("b",), ("c",)]),
        (2, [("a",), ("b",), ("c",)]),
        (2, list(product(range(4), range(5)))),
    ],
    ids=["one", "one of two", "two"],
)
def test_no_more_columns_than_meet_keep_every_row(strength, rows):
    assert covering(rows, strength) == list(range(len(rows)))


def test_nothing_comes_of_nothing():
    assert covering([]) == []
