"""The choice between FP8 and high-precision GEMMs of linear layers: ``gemms="auto"``.

FP8 pays off from some number of tokens on, which depends on the sizes of a model's layers
(`fp8rs.gemm.estimates.min_tokens`). Two things follow from it:

- Each call of a layer with fewer tokens computes in high precision (`LinearSpec.min_tokens`).
- If the first forward of a model is in training and has fewer tokens, FSDP2 gathers its master
  weights in high precision from then on. FP8 all-gathers take the host's time too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, cast

from torch import Tensor, nn

from fp8rs._torch import is_distributed, own_part
from fp8rs.gemm.estimates import min_tokens
from fp8rs.quantize.recipes import Recipe

from .shard_spec import ShardSpec


def min_tokens_of(recipe: Recipe, layers: Iterable[nn.Module | None]) -> float:
    """Return the number of tokens from which the linear layers of a model are faster in FP8.

    With tensor parallelism, the sizes are those of this rank's parts.

    Args:
        recipe: the recipe of the layers.
        layers: the converted modules. Modules of experts have a choice of their own.
    """
    if recipe.emulate:
        return 0  # whoever emulates GEMMs wants their rounding, not their speed
    weights = []
    for layer in layers:
        if isinstance(layer, nn.Linear):
            out_features, in_features = _unsharded_shape(layer)
            weights.append((out_features, in_features))
    return min_tokens(recipe.name, weights, len(recipe.high_precision_gemms))


def _unsharded_shape(layer: nn.Linear) -> tuple[int, ...]:
    """Return the shape of the weight that this rank multiplies.

    It is the whole weight, as FSDP2 gathers it, or this rank's part with tensor parallelism.
    """
    # Reading `layer.weight` would compute a parametrized weight.
    parameter: Any = layer._parameters.get("weight")
    if not is_distributed(parameter):
        return layer.out_features, layer.in_features

    is_sharded_by_fsdp = cast(Any, layer)._fp8_state.sharded_model is not None
    if is_sharded_by_fsdp:
        return ShardSpec.from_dtensor(parameter).unsharded_shape
    part: Tensor = own_part(parameter)
    return part.shape


def tokens_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the number of tokens of a model's input.

    It is the number of ids of the first tensor with integers, such as ``input_ids``, or the number
    of rows of a first tensor (batch, length, width).

    Returns:
        None if no argument is such a tensor, for example if the input is a batch of images.
    """
    for value in (*args, *kwargs.values()):
        if not isinstance(value, Tensor) or value.dim() == 0:
            continue
        if not value.is_floating_point():
            return value.numel()
        return prod(value.shape[:-1]) if value.dim() in (2, 3) else None
    return None
