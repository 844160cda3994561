"""torchao's Float8LinearConfig as a recipe, read by its field names: torchao is not imported."""

from __future__ import annotations

from typing import Any

from fp8rs.quantize.recipes import Recipe, resolve_recipe
from fp8rs.tensor import formats

_CASTS = (
    "cast_config_input",
    "cast_config_weight",
    "cast_config_grad_output",
)
_SECOND_CASTS = {
    "cast_config_input_for_grad_weight": "cast_config_input",
    "cast_config_weight_for_grad_input": "cast_config_weight",
    "cast_config_grad_output_for_grad_weight": "cast_config_grad_output",
}
_GEMMS = ("gemm_config_output", "gemm_config_grad_input", "gemm_config_grad_weight")

#: Scaling granularity -> the recipe that has it.
_GRANULARITIES = {"tensorwise": "current", "axiswise": "rowwise"}


def from_float8_linear_config(config: Any) -> tuple[Recipe, bool]:
    """A recipe, and enable_fsdp_float8_all_gather, that do what ``config`` says.

    ``Float8LinearConfig.from_recipe_name("rowwise")`` asks for power-of-two scales, which
    ``recipe="rowwise"`` has not. Padding is always on, whatever ``pad_inner_dim`` says.

    Raises:
        TypeError: ``config`` lacks the fields of a Float8LinearConfig.
        ValueError: it asks for what no recipe does; the message names the field.
    """
    if isinstance(config, str):
        raise TypeError(
            f"config must be a torchao Float8LinearConfig, not the str {config!r}: give "
            f"recipe={config!r}, or Float8LinearConfig.from_recipe_name({config!r})"
        )
    missing = [name for name in (*_CASTS, *_GEMMS) if not hasattr(config, name)]
    if missing:
        raise TypeError(
            f"config must be a torchao Float8LinearConfig, but {type(config).__name__} "
            f"has no {missing[0]}"
        )
    granularities = {_granularity(config, name) for name in _CASTS}
    for name, first in _SECOND_CASTS.items():
        second = getattr(config, name, None)
        if second is not None and _high_precision(second):
            raise ValueError(
                f"config.{name} keeps one GEMM in high precision: all three run in FP8 here; the "
                'nearest is recipe="rowwise"'
            )
        if second is not None and second != getattr(config, first):
            raise ValueError(
                f"config.{name} differs from config.{first}: "
                "both directions of an operand are quantized alike"
            )
    if len(granularities) != 1:
        raise ValueError(
            "config.cast_config_*.scaling_granularity differ between operands; no recipe does that"
        )
    dtypes = [
        getattr(getattr(config, name), "target_dtype", None) or default
        for name, default in zip(_CASTS, (formats.E4M3, formats.E4M3, formats.E5M2), strict=True)
    ]
    if dtypes[0] != formats.E4M3 or dtypes[1] != formats.E4M3:
        raise ValueError(
            "config.cast_config_input.target_dtype and config.cast_config_weight.target_dtype "
            f"must be torch.float8_e4m3fn, not {dtypes[0]} and {dtypes[1]}"
        )
    if dtypes[2] not in formats.FP8_MAX:
        raise ValueError(
            "config.cast_config_grad_output.target_dtype must be torch.float8_e4m3fn or "
            f"torch.float8_e5m2, not {dtypes[2]}"
        )
    name = _GRANULARITIES[granularities.pop()]
    recipe = type(resolve_recipe(name))(
        fp8_format="e4m3" if dtypes[2] == formats.E4M3 else "hybrid",
        fast_accumulation=tuple(bool(getattr(config, g).use_fast_accum) for g in _GEMMS),  # type: ignore[arg-type]
        power_2_scale=bool(getattr(config, "round_scales_to_power_of_2", False)),
        emulate=bool(getattr(config, "emulate", False)),
    )
    return recipe, bool(getattr(config, "enable_fsdp_float8_all_gather", False))


def _granularity(config: Any, name: str) -> str:
    cast = getattr(config, name)
    scaling = _value(getattr(cast, "scaling_type", "dynamic"))
    if _high_precision(cast):
        raise ValueError(f"config.{name} keeps the operand in high precision; no recipe does that")
    if scaling != "dynamic":
        raise ValueError(
            f'config.{name}.scaling_type must be "dynamic", not {scaling!r}'
            + ('; use recipe="delayed"' if scaling == "delayed" else "")
        )
    granularity = _value(getattr(cast, "scaling_granularity", "tensorwise"))
    if granularity not in _GRANULARITIES:
        known = ", ".join(repr(g) for g in _GRANULARITIES)
        raise ValueError(
            f"config.{name}.scaling_granularity must be one of {known}, not {granularity!r}"
        )
    return str(granularity)


def _high_precision(cast: Any) -> bool:
    scaling = _value(getattr(cast, "scaling_type", "dynamic"))
    return bool(getattr(cast, "keep_in_original_precision", False)) or scaling == "disabled"


def _value(choice: Any) -> Any:
    return getattr(choice, "value", choice)
