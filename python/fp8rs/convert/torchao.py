"""Convert torchao's Float8LinearConfig to a recipe.

Fields are read by name, so that torchao is not imported.
"""

from __future__ import annotations

from typing import Any

from fp8rs.quantize import formats
from fp8rs.quantize.recipes import Gemm, Recipe, resolve_recipe

#: The fields of operands, and the default dtype of each.
_CASTS = {
    "cast_config_input": formats.E4M3,
    "cast_config_weight": formats.E4M3,
    "cast_config_grad_output": formats.E5M2,
}
_SECOND_CASTS = {
    "cast_config_input_for_grad_weight": "cast_config_input",
    "cast_config_weight_for_grad_input": "cast_config_weight",
    "cast_config_grad_output_for_grad_weight": "cast_config_grad_output",
}
#: The casts of wgrad's operands, which `Float8LinearConfig` disables together.
_WGRAD_CASTS = ("cast_config_input_for_grad_weight", "cast_config_grad_output_for_grad_weight")
_GEMMS = ("gemm_config_output", "gemm_config_grad_input", "gemm_config_grad_weight")

#: The recipe of each scaling granularity.
_GRANULARITIES = {"tensorwise": "current", "axiswise": "rowwise"}


def from_float8_linear_config(config: Any) -> tuple[Recipe, bool]:
    """Return the recipe of ``config``, and its ``enable_fsdp_float8_all_gather``.

    ``Float8LinearConfig.from_recipe_name("rowwise")`` has power-of-two scales, unlike
    ``recipe="rowwise"``. The same holds for "rowwise_with_gw_hp", whose dgrad multiplies a weight
    with one scale per tensor in torchao, and with one per row here. Layers always pad, regardless
    of ``pad_inner_dim``.

    Raises:
        TypeError: ``config`` lacks the fields of a Float8LinearConfig.
        ValueError: no recipe supports the config. The message names the field.
    """
    if isinstance(config, str):
        raise TypeError(
            f"config must be a torchao Float8LinearConfig, not the str {config!r}: pass "
            f"recipe={config!r}, or Float8LinearConfig.from_recipe_name({config!r})"
        )
    missing = [name for name in (*_CASTS, *_GEMMS) if not hasattr(config, name)]
    if missing:
        raise TypeError(
            f"config must be a torchao Float8LinearConfig, but {type(config).__name__} "
            f"has no {missing[0]}"
        )
    granularities = {_granularity(config, name) for name in _CASTS}
    if len(granularities) != 1:
        raise ValueError(
            "config.cast_config_*.scaling_granularity differs between operands, which no recipe "
            "supports"
        )
    high_precision_gemms: tuple[Gemm, ...] = ()
    if all(_is_high_precision(getattr(config, name, None)) for name in _WGRAD_CASTS):
        high_precision_gemms = ("wgrad",)
    for name, first in _SECOND_CASTS.items():
        second = getattr(config, name, None)
        if high_precision_gemms and (name in _WGRAD_CASTS or _is_of_whole_tensor(second)):
            continue
        if second is not None and second != getattr(config, first):
            raise ValueError(
                f"config.{name} keeps an operand in high precision, which is supported only for "
                f"both of {' and '.join(_WGRAD_CASTS)}. Use a recipe with high_precision_gemms"
                if _is_high_precision(second)
                else f"config.{name} differs from config.{first}, but recipes cast an operand "
                "alike for both GEMMs"
            )
    dtypes = []
    for name, default_dtype in _CASTS.items():
        dtypes.append(getattr(getattr(config, name), "target_dtype", None) or default_dtype)
    if dtypes[:2] != [formats.E4M3] * 2 or dtypes[2] not in formats.FP8_MAX:
        raise ValueError(
            "config.cast_config_input.target_dtype and config.cast_config_weight.target_dtype must "
            "be torch.float8_e4m3fn, and config.cast_config_grad_output.target_dtype "
            f"torch.float8_e4m3fn or torch.float8_e5m2, not {', '.join(map(str, dtypes))}"
        )
    name = _GRANULARITIES[granularities.pop()]
    recipe = type(resolve_recipe(name))(
        fp8_format="e4m3" if dtypes[2] == formats.E4M3 else "hybrid",
        fast_accumulation=tuple(bool(getattr(config, g).use_fast_accum) for g in _GEMMS),  # type: ignore[arg-type]
        power_2_scale=bool(getattr(config, "round_scales_to_power_of_2", False)),
        emulate=bool(getattr(config, "emulate", False)),
        high_precision_gemms=high_precision_gemms,
    )
    return recipe, bool(getattr(config, "enable_fsdp_float8_all_gather", False))


def _granularity(config: Any, name: str) -> str:
    cast = getattr(config, name)
    scaling = _value(getattr(cast, "scaling_type", "dynamic"))
    if _is_high_precision(cast):
        raise ValueError(
            f"config.{name} keeps the operand in high precision, which no recipe supports"
        )
    if scaling != "dynamic":
        raise ValueError(
            f'config.{name}.scaling_type must be "dynamic", not {scaling!r}'
            + ('; use recipe="delayed"' if scaling == "delayed" else "")
        )
    granularity = _value(getattr(cast, "scaling_granularity", "tensorwise"))
    if granularity not in _GRANULARITIES:
        supported = ", ".join(map(repr, _GRANULARITIES))
        raise ValueError(
            f"config.{name}.scaling_granularity must be one of {supported}, not {granularity!r}"
        )
    return str(granularity)


def _is_high_precision(cast: Any) -> bool:
    scaling = _value(getattr(cast, "scaling_type", "dynamic"))
    return bool(getattr(cast, "keep_in_original_precision", False)) or scaling == "disabled"


def _is_of_whole_tensor(cast: Any) -> bool:
    """Whether a cast uses one scale per tensor.

    In torchao's "rowwise_with_gw_hp", this is the weight's cast for dgrad. Here dgrad uses the
    codes and the row scales of the forward.
    """
    is_tensorwise = _value(getattr(cast, "scaling_granularity", None)) == "tensorwise"
    dtype = getattr(cast, "target_dtype", None) or formats.E4M3
    return is_tensorwise and not _is_high_precision(cast) and dtype == formats.E4M3


def _value(choice: Any) -> Any:
    return getattr(choice, "value", choice)
