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
from fp8rs.quantize.recipes import resolve_recipe

__all__ = ["Float8Converter"]


class Float8Converter(QuantizationConverter):
    """Converts the linear layers and the experts of a torchtitan model to FP8.

    Layers that torchtitan's LoRAConverter wraps override forward, so they stay in high precision.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """Arguments of `fp8rs.convert_to_float8_training`.

        Attributes:
            recipe: a recipe's short name, or a recipe.
            filter_fqns: layers, and weights of experts, whose name contains one of these strings
                stay in high precision.
            enable_fsdp_float8_all_gather: quantize weights before FSDP2 gathers them.
            experts: "auto", "fp8", "gather" or "off".
        """

        recipe: Any = "current"
        filter_fqns: list[str] = field(default_factory=list)
        enable_fsdp_float8_all_gather: bool = True
        experts: str = "auto"

    def __init__(self, config: Config) -> None:
        resolve_recipe(config.recipe)  # raises now rather than when the model is built
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Return a config like ``model_config``, whose ``build()`` returns a converted model."""
        made = _converted_kind(type(model_config))
        values = {f.name: getattr(model_config, f.name) for f in fields(model_config) if f.init}
        return made(**values, fp8rs=self.config)


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
                recipe=self.fp8rs.recipe,
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
