"""The `QuantSpec` of each operand under a recipe."""

from __future__ import annotations

from fp8rs.quantize.recipes import DelayedScaling, Recipe, Role
from fp8rs.tensor.formats import BlockFormat
from fp8rs.tensor.spec import QuantSpec


def quant_spec(
    recipe: Recipe,
    role: Role,
    group: str | None = None,
    format: BlockFormat | None = None,
) -> QuantSpec:
    """Return how a recipe quantizes an operand.

    Args:
        recipe: the recipe.
        role: the operand.
        group: the name of the group over which per-tensor amaxes are reduced, or None.
        format: a format to use instead of the recipe's.

    Returns:
        The spec. A weight of three dimensions is a batch of matrices. An input or gradient is one
        matrix, whose leading dimensions are rows.
    """
    format = recipe.block_format(role) if format is None else format
    # A recipe with E8M0 scales uses power-of-two scales in other formats too.
    power_2_scale = recipe.power_2_scale or recipe.block_format("weight").microscaled
    return QuantSpec(
        format,
        recipe.fp8_dtype(role),
        power_2_scale=power_2_scale and not format.microscaled,
        amax_epsilon=recipe.amax_epsilon,
        scale_rounding=getattr(recipe, "scale_rounding", "ceil"),
        margin=recipe.margin if isinstance(recipe, DelayedScaling) else 0,
        group=group if format.per_tensor else None,
        batched=role == "weight",
    )
