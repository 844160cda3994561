"""The choice of tests: what is left of a product holds every pair of its values."""

from itertools import combinations, product

import pytest

from pairwise import pairwise

pytestmark = pytest.mark.newest_torch


def pairs(rows):
    return {(i, row[i], j, row[j]) for row in rows for i, j in combinations(range(len(row)), 2)}


@pytest.mark.parametrize(
    "sizes, most",
    [
        ((3, 3, 3, 3), 12),  # 9 is the least
        ((7, 2, 3, 2, 5), 40),  # 35 is the least
        ((2,) * 10, 10),
        ((6, 5, 2), 32),
    ],
    ids=str,
)
def test_every_pair_is_in_a_cover_far_smaller_than_the_product(sizes, most):
    rows = list(product(*map(range, sizes)))
    chosen = pairwise(rows)
    assert pairs([rows[index] for index in chosen]) == pairs(rows)
    assert len(chosen) <= most < len(rows)
    assert chosen == sorted(set(chosen)) == pairwise(rows)


def test_pairs_that_are_excluded_are_not_asked_for():
    rows = [(a, b, c) for a, b, c in product("xyz", range(3), range(3)) if not (a == "x" and b)]
    chosen = [rows[index] for index in pairwise(rows)]
    assert pairs(chosen) == pairs(rows)
    assert not any(a == "x" and b for a, b, _ in chosen)


@pytest.mark.parametrize(
    "rows", [[("a",), ("b",), ("c",)], list(product(range(4), range(5)))], ids=["one", "two"]
)
def test_one_column_or_two_keep_every_row(rows):
    assert pairwise(rows) == list(range(len(rows)))


def test_nothing_comes_of_nothing():
    assert pairwise([]) == []
