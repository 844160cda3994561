"""axolotl: a plugin, ``plugins: [fp8rs.integrations.axolotl.Float8Plugin]``.

It converts the model when axolotl has built it, before adapters are put on it and before Trainer
shards it. Its keys in axolotl's config are those of `Float8Args`.

(Written for axolotl 0.19.)
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, field_validator

from fp8rs.convert import convert_to_float8_training
from fp8rs.quantize.recipes import resolve_recipe

__all__ = ["Float8Args", "Float8Plugin"]

#: Settings of axolotl's that take linear layers' weights past their forward, or convert by torchao.
_CONTRADICTS = {
    "fp8": "it converts by torchao: leave it out and give fp8rs_recipe",
    "lora_mlp_kernel": "it multiplies by the layers' weights itself",
    "lora_qkv_kernel": "it multiplies by the layers' weights itself",
    "lora_o_kernel": "it multiplies by the layers' weights itself",
}


class Float8Args(BaseModel):
    """Keys of an axolotl config.

    Attributes:
        fp8rs_recipe: a recipe's short name.
        fp8rs_filter_fqns: layers with one of these strings in their names stay in high precision.
        fp8rs_enable_fsdp_float8_all_gather: quantize weights before FSDP2 gathers them.
        fp8rs_monitor_every: report the statistics of ``fp8rs.monitor`` each so many steps.
    """

    fp8rs_recipe: str = "current"
    fp8rs_filter_fqns: list[str] = ["lm_head"]
    fp8rs_enable_fsdp_float8_all_gather: bool = True
    fp8rs_monitor_every: int | None = None

    @field_validator("fp8rs_recipe")
    @classmethod
    def _is_known(cls, name: str) -> str:
        resolve_recipe(name)
        return name


class Float8Plugin(BasePlugin):
    """Converts the linear layers of the model that axolotl trains to FP8."""

    def get_input_args(self) -> str:
        """Where axolotl finds the keys."""
        return f"{Float8Args.__module__}.{Float8Args.__qualname__}"

    def pre_model_load(self, cfg: Any) -> None:
        """Before the model is built.

        Raises:
            ValueError: another key of the config contradicts the conversion.
        """
        for key, why in _CONTRADICTS.items():
            if cfg.get(key):
                raise ValueError(f"{key}: true does not go with {type(self).__name__}: {why}")

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """After the model is built, before adapters are put on it."""
        asked = {name: cfg.get(name) for name in Float8Args.model_fields}
        args = Float8Args(**{name: value for name, value in asked.items() if value is not None})
        convert_to_float8_training(
            model,
            recipe=resolve_recipe(args.fp8rs_recipe),
            filter_fqns=args.fp8rs_filter_fqns,
            enable_fsdp_float8_all_gather=args.fp8rs_enable_fsdp_float8_all_gather,
        )

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        """After the Trainer is built: what it is to call."""
        from .transformers import MonitorCallback

        every = cfg.get("fp8rs_monitor_every")
        return [MonitorCallback(trainer, every)] if every else []
