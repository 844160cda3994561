"""Integration with torchtitan 0.3: a converter for ``model_registry(..., converters=[...])``.

torchtitan describes a model by a tree of configs, which converters rewrite before the model is
built. fp8rs converts modules, because all layers of a model share one state. This converter
therefore rewrites only the root config, so that ``build`` also converts the model. That happens on
the meta device, before torchtitan's tensor parallelism, checkpointing, compilation and sharding.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import spmd_types as spmd
from torch import nn
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.common.decoder_sharding import dense_param_placement

from fp8rs.convert import convert_to_float8_training
from fp8rs.model.state import state_of
from fp8rs.quantize.recipes import check_bool, resolve_recipe

__all__ = ["Float8Converter"]


class Float8Converter(QuantizationConverter):
    """Converts the linear layers and the experts of a torchtitan model to FP8.

    Layers that torchtitan's LoRAConverter wraps override forward, so they stay in high precision.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """Arguments of `fp8rs.convert_to_float8_training`.

        torchtitan's Float8LinearConverter had the fields ``recipe_name`` (with "tensorwise"),
        ``enable_fsdp_float8_all_gather`` and ``precompute_float8_dynamic_scale_for_fsdp`` before
        pull request 3127.

        Attributes:
            recipe: a recipe's short name, or a recipe. The default is "current".
            recipe_name: another name for ``recipe``, as in torchtitan.
            filter_fqns: layers, and weights of experts, whose name contains one of these strings
                stay in high precision.
            enable_fsdp_float8_all_gather: quantize weights before FSDP2 gathers them.
            precompute_float8_dynamic_scale_for_fsdp: changes nothing. The scales of all weights are
                always computed together, in the forward after a step.
            experts: "auto", "fp8", "gather" or "off".
        """

        recipe: Any = None
        recipe_name: str | None = None
        filter_fqns: list[str] = field(default_factory=list)
        enable_fsdp_float8_all_gather: bool = True
        precompute_float8_dynamic_scale_for_fsdp: bool = False
        experts: str = "auto"

    def __init__(self, config: Config) -> None:
        # Errors are raised now rather than when the model is built.
        precompute = config.precompute_float8_dynamic_scale_for_fsdp
        check_bool("precompute_float8_dynamic_scale_for_fsdp", precompute)
        if precompute and not config.enable_fsdp_float8_all_gather:
            raise ValueError(
                "precompute_float8_dynamic_scale_for_fsdp=True contradicts "
                "enable_fsdp_float8_all_gather=False: without an FP8 all-gather, no scale is "
                "computed before it. Omit one of them"
            )
        resolve_recipe(_recipe(config))
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Return a config like ``model_config``, whose ``build()`` returns a converted model."""
        made = _converted_kind(type(model_config))
        values = {f.name: getattr(model_config, f.name) for f in fields(model_config) if f.init}
        return made(**values, fp8rs=self.config)


def _recipe(config: Float8Converter.Config) -> Any:
    """Return the recipe of a config, or its name.

    Raises:
        ValueError: it is given twice.
    """
    if config.recipe is not None and config.recipe_name is not None:
        raise ValueError("recipe and recipe_name are both given: give one")
    if config.recipe_name is not None:
        return config.recipe_name
    return "current" if config.recipe is None else config.recipe


def _place_buffers(layer: Any) -> None:
    """Add delayed scaling's buffers to a layer's sharding config, which must list all its buffers.

    They are local to a rank and declared as replicated. On the meta device, replication starts no
    collective. If torchtitan makes them DTensors, the layer uses the local tensors.
    """
    config = layer._sharding_config
    names = [name for name, _ in layer.named_buffers(recurse=False)]
    if config is not None and names:
        placements = dict.fromkeys(names, dense_param_placement(tp=spmd.R))
        # Layers share a config, so replace it rather than modify it.
        layer._sharding_config = replace(
            config, state_shardings={**config.state_shardings, **placements}
        )


def _converted_kind(kind: type) -> Any:
    """Return a subclass of a config class whose ``build`` also converts."""

    @dataclass(kw_only=True, slots=True)
    class Converted(kind):
        fp8rs: Any

        def build(self, **kwargs: Any) -> nn.Module:
            model: nn.Module = kind.build(self, **kwargs)  # type: ignore[attr-defined]
            convert_to_float8_training(
                model,
                recipe=_recipe(self.fp8rs),
                filter_fqns=self.fp8rs.filter_fqns,
                enable_fsdp_float8_all_gather=self.fp8rs.enable_fsdp_float8_all_gather,
                experts=self.fp8rs.experts,
            )
            for module in model.modules():
                if state_of(module) is not None:
                    _place_buffers(module)
            return model

    Converted.__name__ = Converted.__qualname__ = f"Float8{kind.__name__}"
    Converted.__module__ = kind.__module__
    return Converted
