"""Modules with weights of experts: how grouped GEMMs in their forward run on FP8 operands.

Three kinds of modules are supported:

- Experts of transformers 5 call `experts_forward`, which transformers finds in its registry.
- `fp8rs.nn.GroupedLinear` calls `fp8rs.nn.grouped.grouped`.
- Other modules call ``torch.nn.functional.grouped_mm`` or ``torch._grouped_mm``. `GroupedGemms`
  replaces these calls while the module's forward runs.

All other operators dequantize a gathered weight.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fp8rs._torch import gradients_needed, is_distributed
from fp8rs.tensor.quantized import QuantizedTensor

from .backward import refuse_double_backward
from .fp8_params import Float8Params
from .functional import as_stored, cast_input, key_of, local_part
from .grouped import Gemms, check, gated_mlp, grouped, prefers_gated_mlp

#: The name of `experts_forward` in the registry of transformers.
TRANSFORMERS_KEY = "fp8rs"

_combine_rows = torch.ops.fp8rs.combine_rows.default
_combine_rows_backward = torch.ops.fp8rs.combine_rows_backward.default


class Float8Experts(Float8Params):
    """Mixin of modules with weights of experts.

    Attributes:
        _gemms: which grouped GEMMs run on FP8 operands, if recipe and device have such GEMMs.
        _gemms_reason: why all of them run in high precision, or a condition of ``_gemms``, or an
            empty string.
        _fp8_activation: the gated activation of experts of transformers that `gated_mlp` supports,
            or None.
        config: transformers' config of the model, if the module calls `experts_forward`.
    """

    config: Any
    _gemms: Gemms
    _gemms_reason: str = ""
    _fp8_activation: str | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if uses_registry(self) and self.config._experts_implementation == TRANSFORMERS_KEY:
            register_experts_forward()  # another process may have converted the module


class GroupedExperts(Float8Experts):
    """Mixin of modules whose forward calls torch's grouped GEMMs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward with other grouped GEMMs."""
        with GroupedGemms(self._fp8_state.key, self._gemms):
            return super().forward(*args, **kwargs)


class GroupedGemms(TorchFunctionMode):
    """Replaces torch's grouped GEMMs of rows and a weight (E, in, out).

    Args:
        key: the key of a recipe.
        gemms: which GEMMs run on FP8 operands. With "gather", only GEMMs with gathered weights are
            replaced, to dequantize the weight again in the backward instead of saving it.
    """

    def __init__(self, key: str, gemms: Gemms) -> None:
        super().__init__()
        self.key, self.gemms = key, gemms

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (functional.grouped_mm, torch._grouped_mm):
            return self.grouped_mm(func, *args, **kwargs)
        return func(*args, **kwargs)

    def grouped_mm(
        self,
        func: Any,
        mat_a: Tensor,
        mat_b: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Compute ``func`` of these arguments.

        As in torch, rows after the last group are not written on CUDA.
        """
        of_weight = mat_a.dim() == 2 and mat_b.dim() == 3 and offs is not None and bias is None
        local = self.gemms != "gather" and not is_distributed(mat_b)
        replaced = local or isinstance(mat_b, QuantizedTensor)
        if not of_weight or not replaced or out_dtype not in (None, mat_a.dtype):
            out: Tensor = func(mat_a, mat_b, offs=offs, bias=bias, out_dtype=out_dtype)
            return out
        assert offs is not None
        weight, transposed = as_stored(mat_b.transpose(-2, -1))
        check(mat_a, weight, offs, None, transposed)
        return grouped(mat_a, weight, offs, None, self.key, transposed, self.gemms, False)


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute the experts of transformers 5: an entry of its ``ALL_EXPERTS_FUNCTIONS``.

    It supports what transformers' own ``grouped_mm`` supports: transposed weights, biases, gates of
    any kind, and expert parallelism, where pairs of a token and an expert of another rank have the
    id ``num_experts``. Modules that are not converted compute in high precision.

    Args:
        self: the module of experts.
        hidden_states: (T, H).
        top_k_index: (T, k), the experts of each token.
        top_k_weights: (T, k).

    Returns:
        (T, H), with the dtype of ``hidden_states``.
    """
    gemms: Gemms = getattr(self, "_gemms", "gather")
    state = getattr(self, "_fp8_state", None)
    key = key_of("current") if state is None else state.key
    # transformers before 5.18 does not say whether experts are parallel, before 5.20 has no norm.
    parallel, transposed = getattr(self, "_is_expert_parallel", True), self.is_transposed
    name = "gate_up_proj" if self.has_gate else "up_proj"
    up, down = local_part(getattr(self, name)), local_part(self.down_proj)
    up_bias = local_part(getattr(self, f"{name}_bias")) if self.has_bias else None
    down_bias = local_part(self.down_proj_bias) if self.has_bias else None
    x = cast_input(hidden_states, up.dtype)
    offs, order, places = _route(top_k_index, up.shape[0])
    rows = order // top_k_index.shape[-1]
    activation = None if gemms == "gather" else self._fp8_activation
    if activation and (gemms == "fp8" or prefers_gated_mlp(rows.shape[0], down)):
        index = rows.to(torch.int32)
        y = gated_mlp(x, up, down, index, places, offs, activation, key, parallel)
    else:
        x = _Gather.apply(x, rows, places)
        h = grouped(x, up, offs, up_bias, key, transposed, gemms, parallel)
        h = self._apply_gate(h) if self.has_gate else self.act_fn(h)
        h = cast_input(h, down.dtype)
        y = grouped(h, down, offs, down_bias, key, transposed, gemms, parallel)
    if getattr(self, "has_post_expert_norm", False):
        y = self.post_expert_norm(y)
    # Under autocast, tokens may be more precise than the GEMMs. Then the sum must be, too.
    y = y.to(torch.promote_types(y.dtype, hidden_states.dtype))
    weights = top_k_weights if top_k_weights.dtype == y.dtype else top_k_weights.float()
    combined: Tensor = _Combine.apply(y, places, weights.contiguous())
    return combined.to(hidden_states.dtype)


def uses_registry(module: nn.Module) -> bool:
    """Whether transformers dispatches a module's forward through its registry."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


def register_experts_forward() -> None:
    """Add `experts_forward` to the registry of transformers, which has been imported."""
    registry: Any = sys.modules["transformers.integrations.moe"]
    registry.ALL_EXPERTS_FUNCTIONS.register(TRANSFORMERS_KEY, experts_forward)


def _route(top_k_index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort pairs of a token and an expert by expert.

    Returns:
        The offsets of experts, the pair (token * k + position) of each row, and the rows of each
        token (T, k). Rows of experts that do not exist are the last ones.
    """
    ids, order = torch.sort(top_k_index.reshape(-1))
    each = torch.arange(experts, dtype=ids.dtype, device=ids.device)
    offs = torch.searchsorted(ids, each, right=True, out_int32=True)
    numbers = torch.arange(order.shape[0], device=order.device)
    places = torch.empty_like(order).scatter_(0, order, numbers)
    return offs, order, places.view(top_k_index.shape)


class _Gather(torch.autograd.Function):
    """``x[index]`` with a backward that gathers too.

    torch's backward sorts the index and accumulates rows one by one, because it does not know where
    each row of ``x`` went.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, places: Tensor) -> Tensor:
        """Gather rows of ``x``.

        Args:
            ctx: context of the autograd function.
            x: (T, H).
            index: (T * k,), which has each row of ``x`` k times.
            places: (T, k), where each row of ``x`` is in ``index``.
        """
        ctx.save_for_backward(places)
        return x[index]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of ``x``."""
        refuse_double_backward("experts")
        (places,) = ctx.saved_tensors
        return _combine_rows(dy.contiguous(), places), None, None


class _Combine(torch.autograd.Function):
    """The weighted sum of the rows of each token."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """Sum rows of ``y``.

        Args:
            ctx: context of the autograd function.
            y: (T * k, H).
            places: (T, k), the rows of each token, a permutation of all rows.
            weights: (T, k), float32 or with the dtype of ``y``.

        Returns:
            (T, H), with the dtype of ``y``.
        """
        ctx.save_for_backward(y if ctx.needs_input_grad[2] else None, places, weights)
        combined: Tensor = _combine_rows(y, places, weights)
        return combined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``y`` and ``weights``."""
        refuse_double_backward("experts")
        y, places, weights = ctx.saved_tensors
        needs_y, _, needs_weights = gradients_needed(ctx)
        dy, d_weights = _combine_rows_backward(
            grad.contiguous(), y, places, weights, needs_y, needs_weights
        )
        return dy if needs_y else None, None, d_weights.to(weights.dtype) if needs_weights else None


def batched_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own parameters that are batches of matrices."""
    return {
        name: p
        for name, p in module._parameters.items()
        if p is not None
        and not nn.parameter.is_lazy(p)
        and p.dim() > 2
        and (p.is_floating_point() or isinstance(p, QuantizedTensor))
    }
