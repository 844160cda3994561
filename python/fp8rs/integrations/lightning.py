"""Integration with Lightning 2.6: a callback for Trainer, and a ``parallelize_fn`` for Fabric.

Both convert the model before the strategy shards it. A LightningModule that builds and converts its
model in ``configure_model``, before ``fully_shard``, needs neither.

Use ``ModelParallelStrategy``, which is FSDP2. ``FSDPStrategy`` is FSDP1, which gathers in high
precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

try:
    from lightning.pytorch.callbacks import Callback
except ModuleNotFoundError:
    from pytorch_lightning.callbacks import Callback  # the standalone package

from fp8rs.convert import convert_to_float8_training
from fp8rs.quantize.recipes import Recipe, RecipeName, resolve_recipe

__all__ = ["Float8Callback", "converting"]


class Float8Callback(Callback):
    """Converts a submodule of the LightningModule before ``configure_model`` shards it.

    Args:
        recipe: a recipe or its short name.
        module: the name of the submodule whose ``forward`` a training step calls. It must exist
            after the LightningModule's ``__init__`` and have linear layers. It cannot be the
            LightningModule itself, whose ``forward`` does not run in training: converted layers
            rely on hooks on the forward of the converted module.
        filter_fqns: as in ``convert_to_float8_training``.
        enable_fsdp_float8_all_gather: as in ``convert_to_float8_training``.
    """

    def __init__(
        self,
        recipe: Recipe | RecipeName = "current",
        *,
        module: str = "model",
        filter_fqns: Iterable[str] = (),
        enable_fsdp_float8_all_gather: bool = True,
    ) -> None:
        self.recipe = resolve_recipe(recipe)
        self.module = module
        self.options: dict[str, Any] = {
            "filter_fqns": tuple(filter_fqns),
            "enable_fsdp_float8_all_gather": enable_fsdp_float8_all_gather,
        }

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Convert the submodule. Lightning calls this before ``configure_model``.

        Raises:
            ValueError: the submodule does not exist yet, or has no linear layer.
        """
        part = getattr(pl_module, self.module, None)
        if not isinstance(part, nn.Module) or not any(
            isinstance(m, nn.Linear) for m in part.modules()
        ):
            raise ValueError(
                f"{type(pl_module).__name__}.{self.module} must be a module with linear layers, "
                f"not {type(part).__name__}. Build it in __init__, pass the name of another "
                "submodule as module, or call convert_to_float8_training in configure_model, "
                "before fully_shard"
            )
        # Called for each stage. A second conversion has no effect.
        convert_to_float8_training(part, recipe=self.recipe, **self.options)


def converting(
    parallelize: Callable[[Any, Any], Any], recipe: Recipe | RecipeName = "current", **options: Any
) -> Callable[[Any, Any], Any]:
    """Return a ``parallelize_fn`` for Fabric's ModelParallelStrategy that first converts the model.

    Args:
        parallelize: called with the converted model and the device mesh.
        recipe: a recipe or its short name.
        options: arguments of ``convert_to_float8_training``.
    """
    recipe = resolve_recipe(recipe)

    def parallelize_converted(model: Any, mesh: Any) -> Any:
        convert_to_float8_training(model, recipe=recipe, **options)
        return parallelize(model, mesh)

    return parallelize_converted
