"""The tables of formats, of the crate and in Python, have the same rows."""

import torch

from cases import RECIPES
from fp8rs.quantize.formats import FORMATS
from fp8rs.quantize.recipes import resolve_recipe
from internals import core


def test_the_table_of_the_crate_has_the_same_formats():
    """The crate has operators of its own for one scale per tensor."""
    of_crate = {}
    for row in core.block_formats():
        of_crate[row["name"]] = (row["block"], getattr(torch, row["scale_dtype"]))
    of_python = {}
    for format in FORMATS.values():
        if not format.per_tensor:
            of_python[format.name] = (format.block, format.scale_dtype)
    assert of_crate == of_python


def test_each_format_is_that_of_an_operand_of_a_tested_recipe():
    formats = set()
    for recipe in map(resolve_recipe, RECIPES.values()):
        formats |= {recipe.block_format(role) for role in ("input", "weight", "grad")}
    assert formats == set(FORMATS.values())
