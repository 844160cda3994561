"""torchtitan: a converter of its own kind, for ``model_registry(..., converters=[...])``.

torchtitan describes a model by a tree of configs, which converters rewrite before anything is
built. fp8rs converts modules: all layers of a model share one clock and one reduction. So this
converter rewrites the root alone, into a config that builds what it built before and converts that:
on the meta device, before torchtitan's tensor parallelism, checkpointing, compilation and sharding.

(Written for torchtitan 0.3.)
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import spmd_types as spmd
from torch import nn
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.common.decoder_sharding import dense_param_placement

from fp8rs.convert import convert_to_float8_training
from fp8rs.nn.linear import Float8Linear
from fp8rs.quantize.recipes import resolve_recipe

__all__ = ["Float8Converter"]


class Float8Converter(QuantizationConverter):
    """Converts the linear layers of a torchtitan model to FP8.

    Experts (``GroupedExperts``) are 3-D parameters and stay in high precision; the report of the
    conversion names them (logger "fp8rs", level INFO). With torchtitan's LoRAConverter behind it,
    which gives the layers that it wraps a forward of their own, those stay in high precision too.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """What `fp8rs.convert_to_float8_training` is asked for.

        Attributes:
            recipe: a recipe's short name, or a recipe.
            filter_fqns: layers with one of these strings in their names stay in high precision.
            enable_fsdp_float8_all_gather: quantize weights before FSDP2 gathers them.
        """

        recipe: Any = "current"
        filter_fqns: list[str] = field(default_factory=list)
        enable_fsdp_float8_all_gather: bool = True

    def __init__(self, config: Config) -> None:
        resolve_recipe(config.recipe)  # a wrong one is an error here, not when the model is built
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """A config like ``model_config``, whose ``build()`` makes a converted model.

        Raises:
            TypeError: ``model_config`` was converted already.
        """
        kind = type(model_config)
        if issubclass(kind, _Converted):
            raise TypeError("model_config went through fp8rs's Float8Converter already")
        made = _converted_kind(kind)
        values = {f.name: getattr(model_config, f.name) for f in fields(model_config) if f.init}
        return made(**values, fp8rs=self.config)


class _Converted:
    """Marks the configs that build a converted model."""

    __slots__ = ()


def _place_buffers(layer: Any) -> None:
    """Tell torchtitan of delayed scaling's buffers: it wants a placement for each of a layer's.

    They are a rank's own. On the meta device nothing is sent for replicas, and where torchtitan
    makes DTensors of them, the layer takes the local ones.
    """
    config = layer._sharding_config
    names = [name for name, _ in layer.named_buffers(recurse=False)]
    if config is not None and names:
        placements = dict.fromkeys(names, dense_param_placement(tp=spmd.R))
        # Layers share these configs: the other ones' must stay as they are.
        layer._sharding_config = replace(
            config, state_shardings={**config.state_shardings, **placements}
        )


_kinds: dict[type, Any] = {}


def _converted_kind(kind: type) -> Any:
    """The class of configs that build what ``kind`` builds, converted. Made once a class."""
    if kind in _kinds:
        return _kinds[kind]

    @dataclass(kw_only=True, slots=True)
    class Converted(_Converted, kind):
        fp8rs: Any

        def build(self, **kwargs: Any) -> nn.Module:
            model: nn.Module = kind.build(self, **kwargs)  # type: ignore[attr-defined]
            convert_to_float8_training(
                model,
                recipe=self.fp8rs.recipe,
                filter_fqns=self.fp8rs.filter_fqns,
                enable_fsdp_float8_all_gather=self.fp8rs.enable_fsdp_float8_all_gather,
            )
            for module in model.modules():
                if isinstance(module, Float8Linear):
                    _place_buffers(module)
            return model

    Converted.__name__ = Converted.__qualname__ = f"Float8{kind.__name__}"
    Converted.__module__ = kind.__module__
    _kinds[kind] = Converted
    return Converted
