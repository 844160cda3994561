"""Recipes for the tests of statistics."""

from __future__ import annotations

import pytest

import cases
import fp8rs

RECIPES = {
    **cases.RECIPES,
    "mxfp8 rounded down": fp8rs.MXFP8BlockScaling(scale_rounding="floor"),
    "hybrid": fp8rs.Float8CurrentScaling(fp8_format="hybrid", power_2_scale=True),
}
every_recipe = pytest.mark.parametrize("recipe", list(RECIPES))
