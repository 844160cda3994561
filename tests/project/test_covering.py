"""The cover of a product contains every pair of its values, or every value."""

import random
from itertools import combinations, product

import pytest

from covering import covering

pytestmark = pytest.mark.newest_torch


def meetings(rows, strength):
    return {pair for row in rows for pair in combinations(enumerate(row), strength)}


@pytest.mark.parametrize(
    "strength, sizes, most",
    [
        (2, (3, 3, 3, 3), 13),  # the minimum is 9
        (2, (7, 2, 3, 2, 5), 40),  # the minimum is 35
        (2, (2,) * 10, 11),
        (2, (6, 5, 2), 32),
        (1, (3, 3, 3, 3), 3),
        (1, (7, 2, 3, 2, 5), 7),
        (1, (4, 5), 5),
        (3, (2, 2, 2, 2), 12),  # the minimum is 8
    ],
    ids=str,
)
def test_a_small_cover_contains_all_combinations(strength, sizes, most):
    rows = list(product(*map(range, sizes)))
    chosen = covering(rows, strength)
    assert meetings([rows[index] for index in chosen], strength) == meetings(rows, strength)
    assert len(chosen) <= most < len(rows)
    assert chosen == sorted(set(chosen)) == covering(rows, strength)


@pytest.mark.parametrize("strength", [1, 2])
def test_excluded_combinations_are_not_covered(strength):
    rows = [row for row in product(range(3), repeat=3) if not (row[0] == 0 and row[1])]
    chosen = [rows[index] for index in covering(rows, strength)]
    assert meetings(chosen, strength) == meetings(rows, strength)


SIZES = [(3, 3, 3, 3), (7, 2, 3, 2, 5), (2, 6, 3, 3), (6, 3, 2), (4, 6, 3), (2, 2, 2, 10)]


def chosen(sizes):
    rows = list(product(*map(range, sizes)))
    return {rows[index] for index in covering(rows)}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_new_value_of_the_longest_parameter_only_adds_rows(sizes):
    more = [n + (i == sizes.index(max(sizes))) for i, n in enumerate(sizes)]
    assert chosen(sizes) < chosen(more)


def test_a_new_value_of_any_parameter_keeps_most_rows():
    before = lost = 0
    for sizes in SIZES:
        for column in range(len(sizes)):
            more = [n + (i == column) for i, n in enumerate(sizes)]
            before += len(chosen(sizes))
            lost += len(chosen(sizes) - chosen(more))
    assert lost < before / 12


@pytest.mark.parametrize("strength", [1, 2])
def test_the_order_of_rows_does_not_matter(strength):
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
def test_all_rows_are_kept_if_there_are_no_more_columns_than_the_strength(strength, rows):
    assert covering(rows, strength) == list(range(len(rows)))


def test_a_cover_of_no_rows_is_empty():
    assert covering([]) == []
