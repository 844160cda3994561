"""TransformerEngine's recipe objects as ours, read by their field names: TE is not imported.

The fields are those of ``transformer_engine.common.recipe`` up to release 2.20; a field that is not
known here must have its default value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from fp8rs.quantize.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
)

_QUANTIZED = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
_GEMMS = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")
_FORMATS = {"E4M3": "e4m3", "HYBRID": "hybrid"}

#: Field -> the value that asks for nothing, and what to say of another one. In every recipe of TE.
_NOTHING: dict[str, tuple[Any, str]] = {
    "fp8_dpa": (False, "attention is not quantized: leave it False"),
    "fp8_mha": (False, "attention is not quantized: leave it False"),
    "backward_override": (None, "the backward runs on FP8 operands: leave it None"),
    "override_linear_precision": ((False,) * 3, "all three GEMMs of a layer run in FP8"),
}
_NO_DELAYED: dict[str, tuple[Any, str]] = {
    "scaling_factor_compute_algo": (None, "scales are the amax / max * 2**margin: leave it None"),
    "reduce_amax": (
        True,
        "amaxes of a sharded model are always reduced over its shards, and those of one that is "
        "not sharded never, unless amax_reduction_group is given",
    ),
}
_NO_MX: dict[str, tuple[Any, str]] = {"margin": (0, "MXFP8's scales have no margin: leave it 0")}
_NO_BLOCK: dict[str, tuple[Any, str]] = {
    "x_block_scaling_dim": (1, "activations have one scale for each 1x128"),
    "w_block_scaling_dim": (2, "weights have one scale for each 128x128"),
    "grad_block_scaling_dim": (1, "gradients have one scale for each 1x128"),
}


def is_te_recipe(recipe: Any) -> bool:
    """Whether this is a recipe of TransformerEngine's, or a copy of one."""
    return not isinstance(recipe, Recipe) and _kind(recipe) is not None


def from_te_recipe(recipe: Any) -> Recipe:
    """The recipe of ours that does what TransformerEngine's says.

    Raises:
        ValueError: it asks for what no recipe does; the message names the field, and what there is.
    """
    kind = _kind(recipe)
    assert kind is not None, "ask is_te_recipe first"
    return _KINDS[kind](recipe, kind)


def _kind(recipe: Any) -> str | None:
    """The name of TE's class that ``recipe`` is an instance of."""
    if isinstance(recipe, type) or not hasattr(recipe, "fp8_format"):
        return None
    return next((c.__name__ for c in type(recipe).__mro__ if c.__name__ in _KINDS), None)


def _delayed(recipe: Any, kind: str) -> Recipe:
    mapped = ("margin", "amax_history_len", "amax_compute_algo")
    _refuse(recipe, kind, mapped, _NO_DELAYED)
    algorithm = recipe.amax_compute_algo
    if callable(algorithm):
        raise ValueError(
            f'{kind}.amax_compute_algo must be "max" or "most_recent", not a function '
            f"({algorithm!r})"
        )
    # TE's GEMMs of delayed scaling accumulate as our default says: fast in the forward alone.
    return DelayedScaling(
        fp8_format=_format(recipe, kind),
        margin=recipe.margin,
        amax_history_len=recipe.amax_history_len,
        amax_compute_algo=algorithm,
    )


def _current(recipe: Any, kind: str) -> Recipe:
    _refuse(recipe, kind, (*_QUANTIZED, *_GEMMS, "use_power_2_scales"), {})
    quantized = _quantized(recipe, kind)
    asked = getattr(recipe, "use_power_2_scales", quantized["power_2_scale"])
    _agree(kind, "use_power_2_scales", asked, quantized["power_2_scale"])
    return Float8CurrentScaling(
        fp8_format=_format(recipe, kind),
        fast_accumulation=_accumulation(recipe),
        **quantized,
    )


def _block(recipe: Any, kind: str) -> Recipe:
    _refuse(recipe, kind, (*_QUANTIZED, *_GEMMS, "use_f32_scales"), _NO_BLOCK)
    quantized = _quantized(recipe, kind)
    asked = getattr(recipe, "use_f32_scales", not quantized["power_2_scale"])
    _agree(kind, "use_f32_scales", not asked, quantized["power_2_scale"])
    return Float8BlockScaling(
        fp8_format=_format(recipe, kind),
        fast_accumulation=_accumulation(recipe),
        **quantized,
    )


def _mxfp8(recipe: Any, kind: str) -> Recipe:
    _refuse(recipe, kind, ("enable_2d_quantization",), _NO_MX)
    square = getattr(recipe, "enable_2d_quantization", False)
    return MXFP8BlockScaling(
        fp8_format=_format(recipe, kind), weight_block=(32, 32) if square else (1, 32)
    )


def _none(recipe: Any, kind: str) -> Recipe:
    nearest = {
        "NVFP4BlockScaling": 'there are no 4-bit formats; the nearest is recipe="mxfp8"',
        "CustomRecipe": "quantizers of one's own are not taken; give one of fp8rs's recipes",
    }
    raise ValueError(f"recipe is TransformerEngine's {kind}: {nearest[kind]}")


_KINDS: dict[str, Callable[[Any, str], Recipe]] = {
    "DelayedScaling": _delayed,
    "Float8CurrentScaling": _current,
    "Float8BlockScaling": _block,
    "MXFP8BlockScaling": _mxfp8,
    "NVFP4BlockScaling": _none,
    "CustomRecipe": _none,
}


def _refuse(
    recipe: Any, kind: str, mapped: tuple[str, ...], nothing: dict[str, tuple[Any, str]]
) -> None:
    """Raise ValueError for a field that asks for what there is not."""
    nothing = {**_NOTHING, **nothing}
    for name, (value, instead) in nothing.items():
        found = getattr(recipe, name, value)
        if found != value:
            raise ValueError(f"{kind}.{name}={found!r} has no counterpart: {instead}")
    known = {"fp8_format", *mapped, *nothing}
    fields = dataclasses.fields(recipe) if dataclasses.is_dataclass(recipe) else ()
    for field in fields:
        found = getattr(recipe, field.name)
        if field.name not in known and found != field.default:
            raise ValueError(
                f"{kind}.{field.name}={found!r} is not known to fp8rs: leave it {field.default!r}, "
                "or give one of fp8rs's recipes"
            )


def _format(recipe: Any, kind: str) -> str:
    name = getattr(recipe.fp8_format, "name", recipe.fp8_format)
    if name not in _FORMATS:
        raise ValueError(
            f"{kind}.fp8_format must be Format.E4M3 or Format.HYBRID, not {recipe.fp8_format}"
        )
    return _FORMATS[name]


def _quantized(recipe: Any, kind: str) -> dict[str, Any]:
    """What the parameters of the three operands say, which must be the same."""
    of_one = getattr(recipe, _QUANTIZED[0])
    for name in _QUANTIZED:
        parameters = getattr(recipe, name)
        for option in ("random_hadamard_transform", "stochastic_rounding", "fp4_2d_quantization"):
            if getattr(parameters, option, False):
                raise ValueError(
                    f"{kind}.{name}.{option} has no counterpart in FP8: leave it False"
                )
        for option in ("power_2_scale", "amax_epsilon"):
            if getattr(parameters, option) != getattr(of_one, option):
                raise ValueError(
                    f"{kind}.{name}.{option} differs from {_QUANTIZED[0]}'s: "
                    "input, weight and gradient are quantized alike"
                )
    return {"power_2_scale": of_one.power_2_scale, "amax_epsilon": of_one.amax_epsilon}


def _accumulation(recipe: Any) -> tuple[bool, bool, bool]:
    """Fast accumulation is what TE calls not splitting the accumulator."""
    forward, dgrad, wgrad = (not getattr(recipe, name).use_split_accumulator for name in _GEMMS)
    return forward, dgrad, wgrad


def _agree(kind: str, name: str, asked: bool, found: bool) -> None:
    # TE makes its QParams from the environment's value, once for the class, and quantizes by them.
    if asked != found:
        raise ValueError(
            f"{kind}.{name} contradicts power_2_scale={found} in {', '.join(_QUANTIZED)}, which "
            "TransformerEngine quantizes by: set them too, or give fp8rs's recipe with "
            "power_2_scale"
        )
