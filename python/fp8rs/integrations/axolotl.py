"""Integration with axolotl 0.19: ``plugins: [fp8rs.integrations.axolotl.Float8Plugin]``.

The plugin converts the model after axolotl has built it, before adapters are added and before
Trainer shards it. `Float8Args` has its keys in axolotl's config.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, field_validator

from fp8rs.convert import convert_to_float8_training
from fp8rs.quantize.recipes import resolve_recipe

__all__ = ["Float8Args", "Float8Plugin"]

#: Settings of axolotl that bypass the forward of linear layers, or convert with torchao.
_CONTRADICTS = {
    "fp8": "it converts with torchao. Remove it and set fp8rs_recipe",
    "lora_mlp_kernel": "it bypasses the forward of the layers",
    "lora_qkv_kernel": "it bypasses the forward of the layers",
    "lora_o_kernel": "it bypasses the forward of the layers",
}


class Float8Args(BaseModel):
    """Keys of an axolotl config.

    Attributes:
        fp8rs_recipe: a recipe's short name.
        fp8rs_filter_fqns: layers whose name contains one of these strings stay in high precision.
        fp8rs_enable_fsdp_float8_all_gather: quantize weights before FSDP2 gathers them.
        fp8rs_monitor_every: interval in steps at which ``fp8rs.monitor`` logs statistics.
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
        """Return the import path of `Float8Args`."""
        return f"{Float8Args.__module__}.{Float8Args.__qualname__}"

    def pre_model_load(self, cfg: Any) -> None:
        """Check the config, before the model is built.

        Raises:
            ValueError: another key of the config contradicts the conversion.
        """
        for key, why in _CONTRADICTS.items():
            if cfg.get(key):
                raise ValueError(
                    f"{key}: true cannot be combined with {type(self).__name__}: {why}"
                )

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Convert the model, after it is built and before adapters are added."""
        asked = {name: cfg.get(name) for name in Float8Args.model_fields}
        args = Float8Args(**{name: value for name, value in asked.items() if value is not None})
        convert_to_float8_training(
            model,
            recipe=resolve_recipe(args.fp8rs_recipe),
            filter_fqns=args.fp8rs_filter_fqns,
            enable_fsdp_float8_all_gather=args.fp8rs_enable_fsdp_float8_all_gather,
        )

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        """Return the callbacks to add to the Trainer."""
        from .transformers import MonitorCallback

        every = cfg.get("fp8rs_monitor_every")
        return [MonitorCallback(trainer, every)] if every else []
