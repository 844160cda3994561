"""Hugging Face accelerate (1.15 and newer). In bf16 mixed precision nothing of this is needed:

    convert_to_float8_training(model, recipe="current", filter_fqns=["lm_head"])
    model, optimizer = accelerator.prepare(model, optimizer)

`use_fp8rs` is for scripts and configurations that say ``mixed_precision="fp8"``, and
`fsdp2_on_cpu` for trying a script on a machine without a GPU.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import nn

from fp8rs.convert.convert import convert_to_float8_training
from fp8rs.convert.select import ModuleFilter
from fp8rs.quantize.recipes import Recipe, RecipeName, resolve_recipe

_log = logging.getLogger("fp8rs")


class Replaced(ExitStack):
    """Something in another library that is replaced until `undo`, or to the end of a ``with``."""

    def __init__(self, what: str, undo: Callable[[], None]) -> None:
        super().__init__()
        _log.info("%s", what)
        self.callback(_log.info, "no more: %s", what)
        self.callback(undo)

    def undo(self) -> None:
        """Put back what was there. A second call does nothing."""
        self.close()


def use_fp8rs(
    recipe: Recipe | RecipeName | None = None,
    *,
    filter_fqns: Iterable[str] = (),
) -> Replaced:
    """Make accelerate's ``mixed_precision="fp8"`` convert models with this library.

    ``Accelerator.prepare`` then calls ``fp8rs.convert_to_float8_training`` where it would call
    torchao's function, and registers no hook that computes scales after each step: the next forward
    finds them. Accelerate chooses its backend before that, so torchao must be installed, and
    selected; none of its code computes. What is left of accelerate's "fp8" is what it does for
    "bf16": autocast, and FSDP2's mixed-precision policy.

        with use_fp8rs("current"):
            accelerator = Accelerator(mixed_precision="fp8", fsdp_plugin=plugin)
            model, optimizer = accelerator.prepare(model, optimizer)

    It replaces one method, ``Accelerator._prepare_ao``, for the whole process.

    Args:
        recipe: a recipe or its short name. None reads the ``config`` of the Accelerator's
            AORecipeKwargs, which by default is ``Float8CurrentScaling(fp8_format="hybrid")``.
            Its ``enable_fsdp_float8_all_gather`` holds in any case.
        filter_fqns: as for convert_to_float8_training. Beside it the AORecipeKwargs'
            ``module_filter_func`` is asked, and accelerate's default where it has none: all linear
            layers but the first and the last.

    Returns:
        What undoes it: by ``undo()``, or at the end of a ``with``.

    Raises:
        TypeError, ValueError: ``recipe`` is none.
        RuntimeError: it is in use already, or this accelerate has no such method.
    """
    from accelerate import Accelerator

    if recipe is not None:
        recipe = resolve_recipe(recipe)
    filter_fqns = tuple(filter_fqns)
    original = getattr(Accelerator, "_prepare_ao", None)
    if original is None:
        import accelerate

        raise RuntimeError(
            f"accelerate {accelerate.__version__} has no Accelerator._prepare_ao, which this "
            "replaces: convert the model before prepare, with mixed_precision='bf16'"
        )
    if hasattr(original, "_fp8rs"):
        raise RuntimeError("use_fp8rs is in use already: undo the first, or use one")

    @functools.wraps(original)
    def _prepare_ao(self: Any, *args: Any) -> tuple[Any, ...]:
        handler = self.ao_recipe_handler
        for model in args:
            if isinstance(model, nn.Module):
                keep = handler.module_filter_func or _all_but_ends(model)
                convert_to_float8_training(
                    model,
                    recipe=recipe,
                    config=handler.config if recipe is None else None,
                    module_filter_fn=keep,
                    filter_fqns=filter_fqns,
                    enable_fsdp_float8_all_gather=handler.config.enable_fsdp_float8_all_gather,
                )
        return args

    _prepare_ao._fp8rs = True  # type: ignore[attr-defined]
    Accelerator._prepare_ao = _prepare_ao
    return Replaced(
        "accelerate's mixed_precision='fp8' converts models with fp8rs, in torchao's place",
        lambda: setattr(Accelerator, "_prepare_ao", original),
    )


def _all_but_ends(model: nn.Module) -> ModuleFilter:
    """Accelerate's default: not the first linear layer, not the last, none whose sizes are no
    multiples of 16."""
    from accelerate.utils.ao import filter_linear_layers, find_first_last_linear_layers

    ends = list(find_first_last_linear_layers(model))
    return functools.partial(filter_linear_layers, layers_to_filter=ends)


def fsdp2_on_cpu() -> Replaced:
    """Let accelerate shard with FSDP2 on CPU ranks, over gloo: to try a script without a GPU.

    Accelerate knows FSDP for accelerators alone. Started by torchrun on a machine without one it
    trains a copy of the model on each rank, and says nothing. This makes it take a CPU rank for an
    accelerator's. Call it before the first ``Accelerator`` or ``TrainingArguments`` of the process.

    It replaces one method, ``PartialState._prepare_backend``, and sets ``ACCELERATE_TORCH_DEVICE``.

    Returns:
        What undoes it: by ``undo()``, or at the end of a ``with``.

    Raises:
        RuntimeError: accelerate has chosen its device already.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if PartialState._shared_state:
        raise RuntimeError(
            "accelerate has chosen its device already: call fsdp2_on_cpu before the first "
            "Accelerator, PartialState or TrainingArguments"
        )
    original = PartialState._prepare_backend
    device = os.environ.get("ACCELERATE_TORCH_DEVICE")

    def _prepare_backend(self: Any, *args: Any, **kwargs: Any) -> tuple[str, Any]:
        # Where it is told of a CPU it starts the process group for its own kind of CPU ranks alone.
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return "gloo", DistributedType.MULTI_GPU

    def undo() -> None:
        PartialState._prepare_backend = original
        if device is None:
            os.environ.pop("ACCELERATE_TORCH_DEVICE", None)
        else:
            os.environ["ACCELERATE_TORCH_DEVICE"] = device

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = _prepare_backend
    return Replaced("accelerate takes CPU ranks for an accelerator's, and shards on them", undo)
