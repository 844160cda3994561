"""LinearSpec: how a linear layer's operands are quantized and multiplied on one device.

It is derived from a recipe and a device. Graphs of torch.compile contain its key, a string, as a
constant. Layers with equal specs have equal keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fp8rs.gemm.operands import operand_format
from fp8rs.quantize.formats import BlockFormat
from fp8rs.quantize.recipes import Recipe, Role, quant_spec
from fp8rs.quantize.spec import QuantSpec

#: The operands of a layer, in the order of their slots in the buffers of delayed scaling.
ROLES: tuple[Role, ...] = ("weight", "input", "grad")
WEIGHT, INPUT, GRAD = range(3)


@dataclass(frozen=True)
class LinearSpec:
    """How the operands of forward, dgrad and wgrad are quantized and multiplied.

    Args:
        weight, input, grad: the quantization of each operand.
        wgrad_input: the quantization of the input's transpose for wgrad, if it differs.
        fast_accumulation: whether forward, dgrad and wgrad use fast accumulation.
        emulate: multiply dequantized operands.
        delayed: scales and slots for amaxes are passed to the function.
        save_input: save the input and quantize it again in the backward, instead of saving its
            codes. None: only if the input is traced.
    """

    weight: QuantSpec
    input: QuantSpec
    grad: QuantSpec
    wgrad_input: QuantSpec | None
    fast_accumulation: tuple[bool, bool, bool]
    emulate: bool
    delayed: bool
    save_input: bool | None


#: Key -> the recipe, and the name of the group that per-tensor amaxes are reduced over.
_RECIPES: dict[str, tuple[Recipe, str | None]] = {}


def register(recipe: Recipe, group: str | None) -> str:
    """Return the key of a recipe and a reduction group."""
    key = f"{recipe!r} over {group}" if group else repr(recipe)
    _RECIPES[key] = recipe, group
    return key


@lru_cache(maxsize=256)
def spec_for(key: str, device: torch.device) -> LinearSpec:
    """Return the spec of a key on a device."""
    recipe, group = _RECIPES[key]

    def operand(role: Role, format: BlockFormat) -> QuantSpec:
        # MXFP8 on a GPU without MXFP8 GEMMs has one power of two per row.
        return quant_spec(recipe, role, group, operand_format(format, device, recipe.emulate))

    input, wgrad_input = recipe.block_format("input"), recipe.wgrad_input_format
    return LinearSpec(
        quant_spec(recipe, "weight"),
        operand("input", input),
        operand("grad", recipe.block_format("grad")),
        None if wgrad_input == input else operand("input", wgrad_input),
        recipe.fast_accumulation,
        recipe.emulate,
        recipe.delayed,
        recipe.save_input,
    )


class GroupedSpec(NamedTuple):
    """How the operands of grouped GEMMs are quantized.

    Attributes:
        weight: the quantization of weights.
        scale_options: options of ``fp8rs::quantize_groups`` and ``quantize_gated`` for the scales
            of inputs and gradients, without those that are defaults.
    """

    weight: QuantSpec
    scale_options: dict[str, Any]


@lru_cache(maxsize=256)
def grouped_spec_for(key: str) -> GroupedSpec:
    """Return the spec of a key for grouped GEMMs."""
    recipe, _ = _RECIPES[key]
    options = {"power_2_scale": recipe.power_2_scale, "amax_epsilon": recipe.amax_epsilon}
    given = {name: value for name, value in options.items() if value}
    return GroupedSpec(quant_spec(recipe, "weight"), given)
