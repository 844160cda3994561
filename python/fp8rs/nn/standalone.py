"""FP8 modules that are constructed with ``recipe=`` and not converted."""

from __future__ import annotations

from torch import nn

from fp8rs.quantize.recipes import Recipe, RecipeName

from .linear import float8_class
from .model_state import ModelState


def make_float8(module: nn.Module, recipe: Recipe | RecipeName | None) -> None:
    """Convert all linear layers of a module that is being constructed.

    The layers share one state, whose root is the module. As with ``fp8rs.nn.Linear``, FSDP2 gathers
    their weights in high precision, unless ``convert_to_float8_training`` converts the whole model.

    Args:
        module: a module whose linear layers are not converted.
        recipe: a recipe or its short name. With None, the module is not changed.
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
