"""Functions of tensors whose GEMMs run on FP8 operands."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fp8rs._core import check_offsets as native_check_offsets
from fp8rs._torch import autocast_dtype, constant_when_traced, is_distributed
from fp8rs.model.linear_spec import register
from fp8rs.quantize.recipes import Recipe, RecipeName, resolve_recipe

from .function import prepare_compilers
from .grouped_function import bounds_of, check_arguments, check_sizes, grouped

__all__ = ["check_offsets", "grouped_linear"]


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    *,
    bias: Tensor | None = None,
    recipe: Recipe | RecipeName | None = None,
) -> Tensor:
    r"""Multiply each group of rows by the transpose of its own matrix, and add its own bias.

    ``y[i] = x[i] @ weight[g].T + bias[g]`` for each row i of group g. Rows of one group are
    consecutive. Groups may have any length, also 0.

    The recipes "current", "delayed" and "rowwise" have FP8 GEMMs for forward, dgrad and wgrad on
    GPUs of compute capability 9.0 (Hopper). On the CPU, operands are quantized in the same way. A
    weight has one scale per expert, with "rowwise" one per row. Inputs and gradients have one scale
    per row, which comes from the data also with "delayed". All codes are E4M3, and all GEMMs use
    fast accumulation. On other GPUs, and with "block" and "mxfp8", the GEMMs run in the dtype of
    ``x``, and so does wgrad with a recipe that runs it in high precision ("rowwise_with_gw_hp").

    A weight that FSDP2 gathered in FP8 is not quantized again: its codes are multiplied, or
    dequantized for GEMMs in high precision.

    Args:
        x: (rows, in), float32, bfloat16 or float16. Under autocast, it is cast to autocast's dtype.
        weight: (E, out, in) or (E, \*, in), with the dtype of ``x``, or a quantized tensor, for
            example the gathered weight of a converted module or ``to_local()`` of its DTensor.
            ``in`` and ``out`` are multiples of 16, and E is less than 1,024. A transposed view of a
            weight that is stored as (E, in, out) is quantized as it is stored.
        offs: int32 (E,), the row after the last one of each group, which is the cumulative sum of
            the groups' sizes. Rows after the last group give 0 and receive no gradient. They are
            not read.
        bias: (E, out), with the dtype of ``x``, or None.
        recipe: a recipe or its short name. The default is "current". For a quantized weight, the
            weight's format decides.

    Returns:
        (rows, out), with the dtype of ``x``.

    Raises:
        ValueError: a shape or device does not fit. On the CPU, also if ``offs`` decreases or
            exceeds the number of rows.
        TypeError: an argument is not a tensor, or a dtype is not supported.
        RuntimeError: on CUDA, ``offs`` of this call or an earlier one decreased or exceeded the
            number of rows. See `check_offsets`.
    """
    weight, transposed = as_stored(weight)
    check_arguments(x, weight, offs, bias, transposed)
    check_sizes(weight)
    key = key_of("current" if recipe is None else recipe)
    return grouped(cast_input(x), weight, bounds_of(offs, x), bias, key, transposed)


def check_offsets() -> None:
    """Raise an error if ``offs`` of an earlier grouped GEMM on CUDA was invalid.

    Offsets are computed on the GPU, so their values are unknown when a GEMM is launched. The GPU
    replaces invalid offsets by the nearest valid ones and sets a flag in host memory. The next
    grouped GEMM in eager code reads the flag. Call this function to read it after the last one, or
    between replays of a CUDA graph. It does not synchronize: kernels that are still running may set
    the flag later.

    To find the layer that passed the offsets, set the environment variable
    ``CUDA_LAUNCH_BLOCKING=1`` or run the model on the CPU. The error is then raised by that layer.

    Raises:
        RuntimeError: ``offs`` was negative, decreased, or exceeded the number of rows since the
            last check. Results since then are wrong.
    """
    native_check_offsets()


def key_of(recipe: Recipe | RecipeName) -> str:
    """Return the key of a recipe, by which graphs refer to it.

    Compilers trace this function. In the functions that it calls, torch 2.11 does not report that a
    compiler is running.
    """
    if torch.compiler.is_compiling():
        _prepare_compilers()
    key: str = _key_of(recipe)
    return key


@constant_when_traced
def _prepare_compilers() -> bool:
    """Let a compiler put `grouped` into the graph that it traces."""
    prepare_compilers()
    return True


@constant_when_traced
def _key_of(recipe: Recipe | RecipeName) -> str:
    return _registered(recipe)


@lru_cache(maxsize=256)
def _registered(recipe: Recipe | RecipeName) -> str:
    return register(resolve_recipe(recipe), None)


def as_stored(weight: Tensor) -> tuple[Tensor, bool]:
    """Return a weight (E, out, in) as it is stored, and whether that is (E, in, out).

    Raises:
        TypeError: it is not a tensor.
    """
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight must be a torch.Tensor, not {type(weight).__name__}")
    if weight.dim() != 3:
        return weight, False
    transposed = weight.stride(-1) != 1 and weight.stride(-2) == 1
    if transposed:
        return weight.transpose(-2, -1), True
    return weight, False


def local_part(parameter: Any) -> Tensor:
    """Return this rank's part of a parameter, for expert parallelism."""
    local: Tensor = parameter.to_local() if is_distributed(parameter) else parameter
    return local


def cast_input(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an input in autocast's dtype. Without autocast, return it in ``dtype`` if given."""
    dtype = autocast_dtype(x.device.type) or dtype
    return x if dtype is None else x.to(dtype)
