"""Estimate which GEMMs the linear layers of a model run, and how fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from fp8rs.gemm.estimates import linear_us, min_tokens
from fp8rs.quantize.recipes import Recipe


@dataclass(frozen=True)
class LinearSpeed:
    """The speed of linear layers with their quantization, estimated for Hopper GPUs.

    Attributes:
        layers: the number of linear layers.
        gemms: the argument of the conversion. "fp8" if the recipe emulates GEMMs, which are then
            never replaced.
        min_tokens: the number of tokens from which a training step is faster in FP8. inf if FP8 is
            slower with any number.
        tokens: rows of the layers' inputs on each GPU, or None if none were given.
        factors: by name of a layer, how many times as fast as in bf16 it is with FP8 GEMMs. Empty
            without tokens.
        factor: the same for all layers together, or None without tokens.
    """

    layers: int
    gemms: str
    min_tokens: float
    tokens: int | None
    factors: dict[str, float]
    factor: float | None

    @property
    def run_in_fp8(self) -> bool:
        """Whether the layers have FP8 GEMMs with this number of tokens."""
        if self.gemms == "fp8" or self.tokens is None:
            return True
        return self.tokens >= self.min_tokens


def linear_speed(
    recipe: Recipe, layers: Mapping[str, nn.Linear], gemms: str, tokens: int | None
) -> LinearSpeed:
    """Estimate the speed of the linear layers of a model.

    Args:
        recipe: the recipe of the layers.
        layers: the layers by name.
        gemms: as in ``convert_to_float8_training``.
        tokens: rows of the layers' inputs on each GPU, or None.
    """
    if recipe.emulate:
        gemms = "fp8"
    high_precision_gemms = len(recipe.high_precision_gemms)
    sizes = {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}
    least = min_tokens(recipe.name, list(sizes.values()), high_precision_gemms)
    if tokens is None or not sizes:
        return LinearSpeed(len(sizes), gemms, least, tokens, {}, None)

    factors = {}
    all_bf16_us = 0.0
    all_fp8_us = 0.0
    for name, (n, k) in sizes.items():
        bf16_us = linear_us("bf16", tokens, n, k)
        fp8_us = linear_us(recipe.name, tokens, n, k, high_precision_gemms)
        factors[name] = bf16_us / fp8_us
        all_bf16_us += bf16_us
        all_fp8_us += fp8_us
    return LinearSpeed(len(sizes), gemms, least, tokens, factors, all_bf16_us / all_fp8_us)
