"""Modules that are made FP8 by hand, with ``recipe=``: each is the root of a state of its own."""

from __future__ import annotations

from torch import nn

from fp8rs.quantize.recipes import Recipe, RecipeName

from .linear import float8_class
from .model_state import ModelState


def make_float8(module: nn.Module, recipe: Recipe | RecipeName | None) -> None:
    """Make all linear layers of a module FP8, with one state whose root is the module.

    As ``fp8rs.nn.Linear`` does with the one layer that it is: under ``fully_shard`` weights are
    gathered in high precision, until ``convert_to_float8_training`` takes the layers into a model's
    state.

    Args:
        module: it has just been made: its layers are plain ones.
        recipe: a recipe or its short name; with None nothing happens.
    """
    if recipe is None:
        return
    state = ModelState(recipe, standalone=True)
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            layer.__class__ = kind = float8_class(type(layer))
            assert isinstance(layer, kind)
            layer._join(state, name)
    state.attach(module)
