"""LinearSpec: how a linear layer's operands are quantized and multiplied on one device.

It is derived from a recipe and a device. Graphs of torch.compile contain its key, a string, as a
constant. Layers with equal specs have equal keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fp8rs.gemm.estimates import FP8, HIGH_PRECISION, HIGH_PRECISION_WGRAD, GroupedChoice
from fp8rs.gemm.operands import operand_format
from fp8rs.quantize.formats import BlockFormat
from fp8rs.quantize.recipes import GEMMS, Recipe, Role, quant_spec
from fp8rs.quantize.spec import QuantSpec

#: The operands of a layer, in the order of their slots in the buffers of delayed scaling.
ROLES: tuple[Role, ...] = ("weight", "input", "grad")
WEIGHT, INPUT, GRAD = range(3)
#: The GEMMs of a layer, in the order of `fp8rs.quantize.recipes.GEMMS`.
FORWARD, DGRAD, WGRAD = range(3)

#: Whether each GEMM runs in high precision.
HighPrecision = tuple[bool, bool, bool]


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
        high_precision: whether forward, dgrad and wgrad run in high precision. Their operands are
            dequantized if they are already quantized.
        min_tokens: with fewer rows of the input, all GEMMs run in high precision on devices whose
            GEMMs were measured, and nothing is quantized.
    """

    weight: QuantSpec
    input: QuantSpec
    grad: QuantSpec
    wgrad_input: QuantSpec | None
    fast_accumulation: tuple[bool, bool, bool]
    emulate: bool
    delayed: bool
    save_input: bool | None
    high_precision: HighPrecision = (False, False, False)
    min_tokens: float = 0

    def with_high_precision(self, gemms: HighPrecision) -> LinearSpec:
        """Return a spec whose ``gemms`` run in high precision too."""
        forward, dgrad, wgrad = (a or b for a, b in zip(self.high_precision, gemms, strict=True))
        return replace(self, high_precision=(forward, dgrad, wgrad))


class _Registration(NamedTuple):
    """What a key stands for.

    Attributes:
        recipe: the recipe.
        group: the name of the group that per-tensor amaxes are reduced over.
        min_tokens: see `LinearSpec`.
    """

    recipe: Recipe
    group: str | None
    min_tokens: float


_REGISTRATIONS: dict[str, _Registration] = {}  # by key


def register(recipe: Recipe, group: str | None, min_tokens: float = 0) -> str:
    """Return the key of a recipe, a reduction group and a least number of tokens."""
    key = repr(recipe)
    if group:
        key += f" over {group}"
    if min_tokens:
        key += f" from {min_tokens} tokens"
    _REGISTRATIONS[key] = _Registration(recipe, group, min_tokens)
    return key


@lru_cache(maxsize=256)
def spec_for(key: str, device: torch.device) -> LinearSpec:
    """Return the spec of a key on a device."""
    recipe, group, min_tokens = _REGISTRATIONS[key]

    def operand(role: Role, format: BlockFormat) -> QuantSpec:
        # MXFP8 on a GPU without MXFP8 GEMMs has one power of two per row.
        return quant_spec(recipe, role, group, operand_format(format, device, recipe.emulate))

    forward, dgrad, wgrad = (gemm in recipe.high_precision_gemms for gemm in GEMMS)
    input_format = recipe.block_format("input")
    wgrad_input = None
    if recipe.wgrad_input_format != input_format and not wgrad:
        wgrad_input = operand("input", recipe.wgrad_input_format)
    return LinearSpec(
        weight=quant_spec(recipe, "weight"),
        input=operand("input", input_format),
        grad=operand("grad", recipe.block_format("grad")),
        wgrad_input=wgrad_input,
        fast_accumulation=recipe.fast_accumulation,
        emulate=recipe.emulate,
        delayed=recipe.delayed,
        save_input=recipe.save_input,
        high_precision=(forward, dgrad, wgrad),
        min_tokens=min_tokens,
    )


class GroupedSpec(NamedTuple):
    """How the operands of grouped GEMMs are quantized.

    Attributes:
        weight: the quantization of weights.
        scale_options: options of ``fp8rs::quantize_groups`` and ``quantize_gated`` for the scales
            of inputs and gradients, without those that are defaults.
        fp8_gemms: which GEMMs the recipe allows on FP8 operands.
    """

    weight: QuantSpec
    scale_options: dict[str, Any]
    fp8_gemms: GroupedChoice


def grouped_fp8_gemms(recipe: Recipe) -> GroupedChoice:
    """Return which grouped GEMMs a recipe allows on FP8 operands.

    Forward and dgrad of experts have the same precision, so both run in high precision if the
    recipe names one of them. Inputs and gradients are quantized with the same options, so the GEMMs
    also run in high precision if the recipe has options for inputs.
    """
    if recipe.input_options:
        return HIGH_PRECISION
    high_precision = recipe.high_precision_gemms
    if "forward" in high_precision or "dgrad" in high_precision:
        return HIGH_PRECISION
    return HIGH_PRECISION_WGRAD if "wgrad" in high_precision else FP8


@lru_cache(maxsize=256)
def grouped_spec_for(key: str) -> GroupedSpec:
    """Return the spec of a key for grouped GEMMs."""
    recipe = _REGISTRATIONS[key].recipe
    scale_options: dict[str, Any] = {}
    if recipe.power_2_scale:
        scale_options["power_2_scale"] = recipe.power_2_scale
    if recipe.amax_epsilon:
        scale_options["amax_epsilon"] = recipe.amax_epsilon
    return GroupedSpec(quant_spec(recipe, "weight"), scale_options, grouped_fp8_gemms(recipe))
