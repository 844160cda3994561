"""Integration with Hugging Face accelerate, 1.15 and newer.

With bf16 mixed precision, no integration is needed:

    convert_to_float8_training(model, recipe="current", filter_fqns=["lm_head"])
    model, optimizer = accelerator.prepare(model, optimizer)

`use_fp8rs` is for scripts and configurations with ``mixed_precision="fp8"``. `fsdp2_on_cpu` runs a
script on a machine without a GPU.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

import torch.distributed as dist
from torch import nn

from fp8rs.convert.convert import convert_to_float8_training
from fp8rs.convert.options import ModuleFilter
from fp8rs.quantize.recipes import Recipe, RecipeName, resolve_recipe

_log = logging.getLogger("fp8rs")


def _replace(owner: type, name: str, method: Callable[..., Any], what: str) -> ExitStack:
    """Replace a method of accelerate, log it, and return an object that undoes it."""
    undo = ExitStack()
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, method)
    _log.info("%s", what)
    return undo


def use_fp8rs(
    recipe: Recipe | RecipeName | None = None,
    *,
    filter_fqns: Iterable[str] = (),
) -> ExitStack:
    """Make accelerate's ``mixed_precision="fp8"`` convert models with fp8rs instead of torchao.

    ``Accelerator.prepare`` then calls ``fp8rs.convert_to_float8_training`` instead of torchao's
    function. It does not register torchao's hook that computes scales after each step, because the
    next forward computes them. Accelerate selects the backend earlier, so torchao must be installed
    and selected, but none of its code runs in training. Otherwise accelerate's "fp8" does the same
    as "bf16": autocast, and FSDP2's mixed-precision policy.

        with use_fp8rs("current"):
            accelerator = Accelerator(mixed_precision="fp8", fsdp_plugin=plugin)
            model, optimizer = accelerator.prepare(model, optimizer)

    This replaces the method ``Accelerator._prepare_ao`` in the whole process.

    Args:
        recipe: a recipe or its short name. None uses the ``config`` of the Accelerator's
            AORecipeKwargs, whose default is ``Float8CurrentScaling(fp8_format="hybrid")``. Its
            ``enable_fsdp_float8_all_gather`` applies in both cases.
        filter_fqns: as in ``convert_to_float8_training``. The ``module_filter_func`` of the
            AORecipeKwargs applies too. Its default in accelerate excludes the first and the last
            linear layer.

    Returns:
        An object that undoes the replacement by ``close()``, or at the end of a ``with`` statement.

    Raises:
        TypeError, ValueError: ``recipe`` is not a recipe or a known name.
        RuntimeError: this accelerate lacks the method.
    """
    from accelerate import Accelerator

    if recipe is not None:
        recipe = resolve_recipe(recipe)
    filter_fqns = tuple(filter_fqns)
    if not hasattr(Accelerator, "_prepare_ao"):
        raise RuntimeError(
            f"accelerate {version('accelerate')} has no Accelerator._prepare_ao, which use_fp8rs "
            "replaces. Convert the model before prepare, with mixed_precision='bf16'"
        )

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

    what = "accelerate's mixed_precision='fp8' converts models with fp8rs instead of torchao"
    return _replace(Accelerator, "_prepare_ao", _prepare_ao, what)


def _all_but_ends(model: nn.Module) -> ModuleFilter:
    """Return accelerate's default filter.

    It excludes the first and the last linear layer, and layers with sizes that are not multiples of
    16.
    """
    from accelerate.utils.ao import filter_linear_layers, find_first_last_linear_layers

    ends = list(find_first_last_linear_layers(model))
    return functools.partial(filter_linear_layers, layers_to_filter=ends)


def fsdp2_on_cpu() -> ExitStack:
    """Make accelerate shard with FSDP2 on CPU ranks over gloo, to run a script without a GPU.

    Accelerate supports FSDP only on accelerators. On a machine without one, torchrun would silently
    train a copy of the model on each rank. Call this before the first ``Accelerator`` or
    ``TrainingArguments`` of the process.

    This replaces the method ``PartialState._prepare_backend`` and sets ``ACCELERATE_TORCH_DEVICE``.

    Returns:
        An object that undoes the replacement by ``close()``, or at the end of a ``with`` statement.

    Raises:
        RuntimeError: accelerate has already chosen its device.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if PartialState._shared_state:
        raise RuntimeError(
            "accelerate has already chosen its device: call fsdp2_on_cpu before the first "
            "Accelerator, PartialState or TrainingArguments"
        )
    device = os.environ.get("ACCELERATE_TORCH_DEVICE")

    def _prepare_backend(self: Any, *args: Any, **kwargs: Any) -> tuple[str, Any]:
        # For a CPU device, the original creates a process group only for MULTI_CPU.
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return "gloo", DistributedType.MULTI_GPU

    def restore_device() -> None:
        if device is None:
            os.environ.pop("ACCELERATE_TORCH_DEVICE", None)
        else:
            os.environ["ACCELERATE_TORCH_DEVICE"] = device

    what = "accelerate treats CPU ranks as an accelerator's and shards on them"
    undo = _replace(PartialState, "_prepare_backend", _prepare_backend, what)
    undo.callback(restore_device)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    return undo
