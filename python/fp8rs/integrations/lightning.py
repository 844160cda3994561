"""Lightning: a callback for the Trainer, and a wrapper of ``parallelize_fn`` for Fabric.

Both convert before the strategy shards, which is all that Lightning needs of it: a LightningModule
that builds and converts its model in ``configure_model``, before ``fully_shard``, needs neither.

(Written for Lightning 2.6, ``ModelParallelStrategy``, which is FSDP2. ``FSDPStrategy`` is torch's
first FSDP, and gathers in high precision.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

try:
    from lightning.pytorch.callbacks import Callback
except ModuleNotFoundError:
    from pytorch_lightning.callbacks import Callback  # what it is called alone

from fp8rs.convert import convert_to_float8_training
from fp8rs.quantize.recipes import Recipe, RecipeName, resolve_recipe

__all__ = ["Float8Callback", "converting"]


class Float8Callback(Callback):
    """Converts a part of the LightningModule before its ``configure_model`` shards it.

    Args:
        recipe: a recipe or its short name.
        module: the name of the part, which must be there after ``__init__`` of the LightningModule
            and have linear layers: the module whose ``forward`` a training step calls. Not the
            LightningModule itself: its ``forward`` does not run in training, and the converted
            layers are told of a forward by that of the module that was converted.
        filter_fqns: see ``convert_to_float8_training``.
        enable_fsdp_float8_all_gather: see there.
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
        """Lightning calls this before ``configure_model``.

        Raises:
            ValueError: there is no such part yet, or it has no linear layer.
        """
        part = getattr(pl_module, self.module, None)
        if not isinstance(part, nn.Module) or not any(
            isinstance(m, nn.Linear) for m in part.modules()
        ):
            kind = type(part).__name__
            article = "an" if kind[0] in "AEIOU" else "a"
            found = "is missing" if part is None else f"is {article} {kind}"
            raise ValueError(
                f"{type(pl_module).__name__}.{self.module} {found}, with no linear layer to "
                "convert: build it in __init__, name another part with module=..., or call "
                "convert_to_float8_training in configure_model, before fully_shard"
            )
        # Again for each stage; what is converted already stays as it is.
        convert_to_float8_training(part, recipe=self.recipe, **self.options)


def converting(
    parallelize: Callable[[Any, Any], Any], recipe: Recipe | RecipeName = "current", **options: Any
) -> Callable[[Any, Any], Any]:
    """A ``parallelize_fn`` for Fabric's ModelParallelStrategy that converts the model first.

    Args:
        parallelize: called with the converted model and the device mesh.
        recipe: a recipe or its short name.
        options: of ``convert_to_float8_training``.
    """
    recipe = resolve_recipe(recipe)

    def parallelize_converted(model: Any, mesh: Any) -> Any:
        convert_to_float8_training(model, recipe=recipe, **options)
        return parallelize(model, mesh)

    return parallelize_converted
