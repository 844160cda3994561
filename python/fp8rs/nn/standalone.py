"""Modules that are created as FP8 modules with ``recipe=``, each the root of its own state."""

from __future__ import annotations

from torch import nn

from fp8rs.quantize.recipes import Recipe, RecipeName

from .linear import float8_class
from .model_state import ModelState
from .root_hooks import attach


def make_float8(module: nn.Module, recipe: Recipe | RecipeName | None) -> None:
    """Make all linear layers of a module FP8, with one state whose root is the module.

    Under ``fully_shard``, the weights are gathered in high precision until
    ``convert_to_float8_training`` adds the layers to a model's state.

    Args:
        module: a new module, whose layers are plain.
        recipe: a recipe or its short name, or None to leave the module as it is.
    """
    if recipe is None:
        return
    state = ModelState(recipe, standalone=True)
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            layer.__class__ = kind = float8_class(type(layer))
            assert isinstance(layer, kind)
            layer._join(state, name)
    attach(state, module)
