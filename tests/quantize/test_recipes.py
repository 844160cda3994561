"""Recipes are frozen, validated on construction, and available by short names."""

import dataclasses

import pytest
import torch

import fp8rs
from fp8rs.quantize import formats
from fp8rs.quantize.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    describe,
    resolve_recipe,
)


def test_defaults():
    current = Float8CurrentScaling()
    delayed = DelayedScaling()
    assert current.fp8_format == "e4m3"
    assert delayed.fp8_format == "hybrid"
    assert current.fast_accumulation == delayed.fast_accumulation == (True, False, False)
    assert (delayed.margin, delayed.amax_compute_algo) == (0, "max")
    assert (current.power_2_scale, current.amax_epsilon) == (False, 0.0)


@pytest.mark.parametrize(
    ("recipe", "input", "weight"),
    [
        (Float8CurrentScaling(), formats.TENSOR, formats.TENSOR),
        (Float8RowwiseScaling(), formats.ROW, formats.ROW),
        (Float8BlockScaling(), formats.BLOCK_1X128, formats.BLOCK_128X128),
        (MXFP8BlockScaling(), formats.MX_1X32, formats.MX_32X32),
        (MXFP8BlockScaling(weight_block=[1, 32]), formats.MX_1X32, formats.MX_1X32),
    ],
)
def test_formats(recipe, input, weight):
    assert recipe.block_format("weight") == weight
    assert recipe.wgrad_input_format == input
    assert recipe.block_format("input") == recipe.block_format("grad") == input
    assert recipe.fp8_format == "e4m3"
    assert hash(recipe) == hash(dataclasses.replace(recipe))


def test_the_transposed_input_may_have_square_blocks():
    recipe = Float8BlockScaling(wgrad_input_block=[128, 128])
    assert recipe == Float8BlockScaling(wgrad_input_block=(128, 128)) != Float8BlockScaling()
    assert recipe.wgrad_input_format == formats.BLOCK_128X128
    assert recipe.block_format("input") == recipe.block_format("grad") == formats.BLOCK_1X128


@pytest.mark.parametrize(
    "recipe",
    [
        Float8CurrentScaling,
        DelayedScaling,
        Float8RowwiseScaling,
        Float8BlockScaling,
        MXFP8BlockScaling,
    ],
)
def test_hybrid_means_e5m2_gradients_only(recipe):
    hybrid = recipe(fp8_format="hybrid")
    e4m3 = recipe(fp8_format="e4m3")
    for role in ("input", "weight"):
        assert hybrid.fp8_dtype(role) == e4m3.fp8_dtype(role) == torch.float8_e4m3fn
    assert hybrid.fp8_dtype("grad") == torch.float8_e5m2
    assert e4m3.fp8_dtype("grad") == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("current", Float8CurrentScaling()),
        ("tensorwise", Float8CurrentScaling()),
        ("delayed", DelayedScaling()),
        ("rowwise", Float8RowwiseScaling()),
        ("rowwise_with_gw_hp", Float8RowwiseScaling(high_precision_gemms=("wgrad",))),
        ("block", Float8BlockScaling()),
        ("mxfp8", MXFP8BlockScaling()),
    ],
)
def test_short_names(name, recipe):
    assert resolve_recipe(name) == recipe


def test_a_recipe_resolves_to_itself():
    recipe = DelayedScaling(margin=1)
    assert resolve_recipe(recipe) is recipe


def test_recipes_are_frozen_and_hashable():
    recipe = Float8CurrentScaling()
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.fp8_format = "hybrid"
    assert hash(recipe) == hash(Float8CurrentScaling())


def test_lists_of_fast_accumulation_become_tuples():
    assert hash(Float8CurrentScaling(fast_accumulation=[True, True, False]))


@pytest.mark.parametrize(
    ("make", "error", "field"),
    [
        (lambda: Float8CurrentScaling(fp8_format="e5m2"), ValueError, "fp8_format"),
        (lambda: DelayedScaling(fast_accumulation=True), ValueError, "fast_accumulation"),
        (
            lambda: Float8CurrentScaling(fast_accumulation=(1, 0, 0)),
            ValueError,
            "fast_accumulation",
        ),
        (lambda: Float8CurrentScaling(fast_accumulation=(True,)), ValueError, "fast_accumulation"),
        (lambda: Float8CurrentScaling(power_2_scale=1), TypeError, "power_2_scale"),
        (lambda: Float8CurrentScaling(emulate="yes"), TypeError, "emulate"),
        (lambda: Float8CurrentScaling(amax_epsilon=-1.0), ValueError, "amax_epsilon"),
        (lambda: Float8CurrentScaling(amax_epsilon=float("nan")), ValueError, "amax_epsilon"),
        (lambda: Float8CurrentScaling(amax_epsilon="0"), TypeError, "amax_epsilon"),
        (
            lambda: Float8RowwiseScaling(input_amax_epsilon=-1.0),
            ValueError,
            "input_amax_epsilon must be finite",
        ),
        (
            lambda: Float8RowwiseScaling(input_amax_epsilon="0"),
            TypeError,
            "input_amax_epsilon must be a float",
        ),
        (lambda: Float8RowwiseScaling(divide_input=1), TypeError, "divide_input must be a bool"),
        (lambda: DelayedScaling(margin=0.5), TypeError, "margin"),
        (lambda: DelayedScaling(margin=1000), ValueError, "margin"),
        (lambda: DelayedScaling(amax_history_len=0), ValueError, "amax_history_len"),
        (lambda: DelayedScaling(amax_history_len=True), TypeError, "amax_history_len"),
        (lambda: DelayedScaling(amax_compute_algo="mean"), ValueError, "amax_compute_algo"),
        (lambda: MXFP8BlockScaling(weight_block=(1, 128)), ValueError, "weight_block"),
        (lambda: MXFP8BlockScaling(weight_block=32), ValueError, "weight_block"),
        (lambda: Float8BlockScaling(wgrad_input_block=(128, 1)), ValueError, "wgrad_input_block"),
        (lambda: Float8BlockScaling(wgrad_input_block=128), ValueError, "wgrad_input_block"),
        (lambda: MXFP8BlockScaling(scale_rounding="up"), ValueError, "scale_rounding"),
        (lambda: MXFP8BlockScaling(amax_epsilon=1e-3), ValueError, "amax_epsilon"),
        (
            lambda: Float8CurrentScaling(high_precision_gemms=("fprop",)),
            ValueError,
            "high_precision_gemms must be among forward, dgrad, wgrad, not 'fprop'",
        ),
        (lambda: DelayedScaling(high_precision_gemms=1), TypeError, "high_precision_gemms"),
        (
            lambda: Float8RowwiseScaling(high_precision_gemms=["wgrad", "dgrad", "forward"]),
            ValueError,
            "high_precision_gemms names all three",
        ),
        (
            lambda: Float8RowwiseScaling(high_precision_gemms=("wgrad",), save_input=False),
            ValueError,
            "save_input=False contradicts high_precision_gemms",
        ),
        (
            lambda: Float8BlockScaling(
                high_precision_gemms=("wgrad",), wgrad_input_block=(128, 128)
            ),
            ValueError,
            "wgrad_input_block=.* contradicts high_precision_gemms",
        ),
        (lambda: resolve_recipe("tensorwide"), ValueError, "recipe"),
        (lambda: resolve_recipe(None), TypeError, "recipe"),
        (lambda: resolve_recipe(DelayedScaling), TypeError, "recipe"),
    ],
)
def test_errors_name_the_field(make, error, field):
    with pytest.raises(error, match=field):
        make()


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'delayed'.*'current'"):
        resolve_recipe("fp9")


def test_the_error_for_a_recipe_of_another_library_names_that_library():
    theirs = type("DelayedScaling", (), {"__module__": "transformer_engine.common.recipe"})
    with pytest.raises(TypeError, match=r"not transformer_engine\.common\.recipe\.DelayedScaling"):
        fp8rs.convert_to_float8_training(torch.nn.Linear(32, 32), recipe=theirs())


def test_gemms_in_high_precision_have_one_order():
    recipe = Float8RowwiseScaling(high_precision_gemms=["wgrad", "dgrad"])
    assert recipe.high_precision_gemms == ("dgrad", "wgrad")
    assert hash(recipe) == hash(Float8RowwiseScaling(high_precision_gemms=("dgrad", "wgrad")))
    assert Float8RowwiseScaling(high_precision_gemms="wgrad") == resolve_recipe(
        "rowwise_with_gw_hp"
    )


def test_descriptions_show_changed_fields():
    assert describe(resolve_recipe("rowwise_with_gw_hp")) == (
        "rowwise, high_precision_gemms=('wgrad',)"
    )
    assert describe(DelayedScaling()) == "delayed"
    assert describe(DelayedScaling(margin=2)) == "delayed, margin=2"
