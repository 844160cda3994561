"""The tables of GEMMs, GPUs and times have rows for each recipe."""

import pytest
from torch import nn

import fp8rs
from cases import RECIPES
from fp8rs.gemm.devices import gpu_path
from fp8rs.gemm.table import GEMMS
from fp8rs.quantize.recipes import resolve_recipe


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_each_recipe_has_gemms_gpus_and_estimates(recipe):
    recipe = resolve_recipe(RECIPES[recipe])
    input, weight, grad = (recipe.block_format(role) for role in ("input", "weight", "grad"))
    for operands in ((input, weight), (grad, weight), (grad, recipe.wgrad_input_format)):
        assert ("cuda", *operands) in GEMMS
    path, _ = gpu_path(recipe.name, (9, 0))
    assert path in ("native", "rebased")
    assert isinstance(fp8rs.min_speedup(1024, recipe=recipe)(nn.Linear(16, 16), ""), bool)
