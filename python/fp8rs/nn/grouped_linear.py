"""A grouped linear layer: one matrix for each expert of a mixture."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from fp8rs.gemm.grouped import ALIGNMENT, MAX_GROUPS
from fp8rs.quantize.recipes import Recipe, RecipeName, describe, resolve_recipe

from .function import prepare_compilers
from .functional import cast_input, key_of, local_part
from .grouped_function import Gemms, bounds_of, check_arguments, grouped
from .init import reset_linear


class GroupedLinear(nn.Module):
    """Multiplies each group of rows by its own matrix: see `fp8rs.nn.functional.grouped_linear`.

    The parameters are high-precision ones. ``fp8rs.convert_to_float8_training`` converts the layer
    as it converts other experts, so that FSDP2 gathers the weight in FP8.

    Args:
        num_groups: the number of groups, fewer than 1,024.
        in_features: size of each row of the input, a multiple of 16.
        out_features: size of each row of the output, a multiple of 16.
        bias: whether each group has a bias.
        device: see torch.nn.Linear.
        dtype: see torch.nn.Linear.
        recipe: a recipe or its short name.

    Attributes:
        weight: (num_groups, out_features, in_features).
        bias: (num_groups, out_features), or None.
        recipe: the recipe for quantizing the operands.

    Raises:
        ValueError: a size is not supported.
    """

    bias: nn.Parameter | None
    #: Which GEMMs run on FP8 operands where recipe and device have such GEMMs.
    _gemms: Gemms = "fp8"
    _fp8_state: Any

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | RecipeName = "current",
    ) -> None:
        super().__init__()
        for name, value in (("in_features", in_features), ("out_features", out_features)):
            if value < 0 or value % ALIGNMENT:
                raise ValueError(
                    f"{name} is {value}; it must be a multiple of {ALIGNMENT} and not negative"
                )
        if not 0 <= num_groups < MAX_GROUPS:
            raise ValueError(
                f"num_groups is {num_groups}; it must be less than {MAX_GROUPS} and not negative"
            )
        self.num_groups = num_groups
        self.in_features = in_features
        self.out_features = out_features
        self.recipe = resolve_recipe(recipe)
        self._key = key_of(self.recipe)
        prepare_compilers()

        factory = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(num_groups, out_features, in_features, **factory))
        if bias:
            self.bias = nn.Parameter(torch.empty(num_groups, out_features, **factory))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize each matrix and its bias like torch.nn.Linear.

        Sharded parameters do not depend on the number of ranks. All ranks of their mesh call this.
        """
        reset_linear(self)

    def forward(self, input: Tensor, offs: Tensor) -> Tensor:
        """Map (rows, in_features) to (rows, out_features).

        Args:
            input: the rows. Rows of one group are consecutive.
            offs: int32 (num_groups,), the row after the last one of each group, which is the
                cumulative sum of the groups' sizes.

        Raises:
            ValueError, TypeError: as for ``fp8rs.nn.functional.grouped_linear``.
        """
        weight = local_part(self.weight)
        bias = None if self.bias is None else local_part(self.bias)
        check_arguments(input, weight, offs, bias)
        values = cast_input(input)
        bounds = bounds_of(offs, values)
        return grouped(values, weight, bounds, bias, self._key, gemms=self._gemms)

    @override
    def extra_repr(self) -> str:
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}, "
            f"recipe={describe(self.recipe)}"
        )
