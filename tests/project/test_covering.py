"""The choice of tests: what is left of a product holds every pair of its values, or every value."""

import random
from itertools import combinations, product

import pytest

from covering import covering

pytestmark = pytest.mark.newest_torch


def meetings(rows, strength):
    return {found for row in rows for found in combinations(enumerate(row), strength)}


@pytest.mark.parametrize(
    "strength, sizes, most",
    [
        (2, (3, 3, 3, 3), 13),  # 9 is the least
        (2, (7, 2, 3, 2, 5), 40),  # 35 is the least
        (2, (2,) * 10, 11),
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
    rows = [row for row in product(range(3), repeat=3) if not (row[0] == 0 and row[1])]
    chosen = [rows[index] for index in covering(rows, strength)]
    assert meetings(chosen, strength) == meetings(rows, strength)


SIZES = [(3, 3, 3, 3), (7, 2, 3, 2, 5), (2, 6, 3, 3), (6, 3, 2), (4, 6, 3), (2, 2, 2, 10)]


def chosen(sizes):
    rows = list(product(*map(range, sizes)))
    return {rows[index] for index in covering(rows)}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_value_more_for_the_longest_parameter_only_adds_rows(sizes):
    more = [n + (i == sizes.index(max(sizes))) for i, n in enumerate(sizes)]
    assert chosen(sizes) < chosen(more)


def test_a_value_more_for_any_parameter_leaves_most_rows_as_they_were():
    before = lost = 0
    for sizes in SIZES:
        for column in range(len(sizes)):
            more = [n + (i == column) for i, n in enumerate(sizes)]
            before += len(chosen(sizes))
            lost += len(chosen(sizes) - chosen(more))
    assert lost < before / 12


@pytest.mark.parametrize("strength", [1, 2])
def test_the_order_of_rows_does_not_count(strength):
    rows = list(product(*map(range, (4, 3, 2, 3))))
    shuffled = random.Random(0).sample(rows, len(rows))
    wanted = {rows[index] for index in covering(rows, strength)}
    assert {shuffled[index] for index in covering(shuffled, strength)} == wanted


@pytest.mark.parametrize(
    "strength, rows",
    [
        (1, [(0,), (1,), (2,)]),
        (2, [(0,), (1,), (2,)]),
        (2, list(product(range(4), range(5)))),
    ],
    ids=["one", "one of two", "two"],
)
def test_no_more_columns_than_meet_keep_every_row(strength, rows):
    assert covering(rows, strength) == list(range(len(rows)))


def test_nothing_comes_of_nothing():
    assert covering([]) == []
