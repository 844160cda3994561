"""Modules with weights of experts: how grouped GEMMs in their forward run on FP8 operands.

Three kinds of modules are supported:

- Experts of transformers 5 call `experts_forward`, which transformers finds in its registry by the
  name in `ExpertsConfig`.
- `fp8rs.nn.GroupedLinear` calls `fp8rs.nn.grouped_function.grouped`.
- Other modules call ``torch.nn.functional.grouped_mm`` or ``torch._grouped_mm``. `GroupedGemms`
  replaces these calls while the module's forward runs.

All other operators dequantize a gathered weight.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fp8rs._torch import gradients_needed, is_distributed, is_traced
from fp8rs.model.state import state_of
from fp8rs.quantize.formats import INPUT_DTYPES
from fp8rs.tensor.quantized import QuantizedTensor

from .backward import refuse_double_backward
from .fp8_params import Float8Params
from .functional import as_stored, cast_input, key_of, local_part
from .grouped_function import (
    Gemms,
    GroupBounds,
    bounds_of,
    check_arguments,
    gated_mlp,
    grouped,
    prefers_gated_mlp,
)

#: The name of `experts_forward` in the registry of transformers.
TRANSFORMERS_KEY = "fp8rs"

_combine_rows = torch.ops.fp8rs.combine_rows.default
_combine_rows_backward = torch.ops.fp8rs.combine_rows_backward.default
_route_rows = torch.ops.fp8rs.route_rows.default


class Float8Experts(Float8Params):
    """Mixin of modules with weights of experts.

    Attributes:
        _gemms: which grouped GEMMs run on FP8 operands, if recipe and device have such GEMMs.
        _gemms_reason: why all of them run in high precision, or a condition of ``_gemms``, or an
            empty string.
        _fp8_activation: the gated activation of experts of transformers that `gated_mlp` supports,
            or None.
        config: transformers' config of the model. An `ExpertsConfig` if the module calls
            `experts_forward`.
    """

    config: Any
    _gemms: Gemms
    _gemms_reason: str = ""
    _fp8_activation: str | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if isinstance(state.get("config"), ExpertsConfig):
            register_experts_forward()  # another process may have converted the module


class GroupedExperts(Float8Experts):
    """Mixin of modules whose forward calls torch's grouped GEMMs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward with other grouped GEMMs."""
        with GroupedGemms(self._fp8_state.key, self._gemms):
            return super().forward(*args, **kwargs)


class ExpertsConfig:
    """The config of a converted module of experts, which selects `experts_forward`.

    transformers reads the experts implementation from the config of the module. The config belongs
    to the user, who may pickle it or build other models from it, so a conversion does not change
    it. The module reads it through this object instead.

    While the config selects the implementation that it selected at the conversion, this object
    selects `experts_forward`. If the user selects another implementation, that one runs.

    Args:
        config: transformers' config of the model.
        replaced: the implementation that it selects at the conversion.
    """

    def __init__(self, config: Any, replaced: str | None) -> None:
        self.config = config
        self.replaced = replaced

    @property
    def _experts_implementation(self) -> str | None:
        selected: str | None = self.config._experts_implementation
        return TRANSFORMERS_KEY if selected == self.replaced else selected

    @_experts_implementation.setter
    def _experts_implementation(self, value: str) -> None:
        self.config._experts_implementation = value

    def __getattr__(self, name: str) -> Any:
        # Copies and pickles have methods of this class, and look for them before `config` is set.
        if name == "config" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.config, name)


class GroupedGemms(TorchFunctionMode):
    """Replaces torch's grouped GEMMs of rows and a weight (E, in, out).

    Args:
        key: the key of a recipe.
        gemms: which GEMMs run on FP8 operands. With "gather", only GEMMs with gathered weights are
            replaced, to dequantize the weight again in the backward instead of saving it.
    """

    def __init__(self, key: str, gemms: Gemms) -> None:
        super().__init__()
        self.key = key
        self.gemms = gemms

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
        is_rows_by_weight = mat_a.dim() == 2 and mat_b.dim() == 3 and bias is None
        keeps_dtype = out_dtype is None or out_dtype == mat_a.dtype
        may_run_in_fp8 = self.gemms != "gather" and not is_distributed(mat_b)
        is_replaced = may_run_in_fp8 or isinstance(mat_b, QuantizedTensor)
        if offs is None or not (is_rows_by_weight and keeps_dtype and is_replaced):
            out: Tensor = func(mat_a, mat_b, offs=offs, bias=bias, out_dtype=out_dtype)
            return out
        weight, transposed = as_stored(mat_b.transpose(-2, -1))
        check_arguments(mat_a, weight, offs, None, transposed)
        bounds = bounds_of(offs, mat_a)
        return grouped(
            mat_a, weight, bounds, None, self.key, transposed, self.gemms, zero_tail=False
        )


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

    Raises:
        ValueError: a shape or device does not fit. In eager code on the CPU, also if an id is
            negative, or too large for a module without expert parallelism. On CUDA the host does
            not know the ids.
        TypeError: a dtype is not supported.
    """
    gemms: Gemms = getattr(self, "_gemms", "gather")
    state = state_of(self)
    key = key_of("current") if state is None else state.key
    # transformers before 5.18 does not say whether experts are parallel.
    parallel = getattr(self, "_is_expert_parallel", True)
    # Rows of other ranks' experts are the last, and must be 0 in the sum.
    zero_tail = parallel
    transposed = self.is_transposed

    up_name = "gate_up_proj" if self.has_gate else "up_proj"
    up = local_part(getattr(self, up_name))
    down = local_part(self.down_proj)
    up_bias = down_bias = None
    if self.has_bias:
        up_bias = local_part(getattr(self, f"{up_name}_bias"))
        down_bias = local_part(self.down_proj_bias)

    features = up.shape[1] if transposed else up.shape[-1]
    _check_routed(hidden_states, top_k_index, top_k_weights, features, up.device)
    x = cast_input(hidden_states, up.dtype)
    routing = _route(top_k_index, up.shape[0], parallel)
    bounds = routing.bounds

    activation = None if gemms == "gather" else self._fp8_activation
    if activation and prefers_gated_mlp(routing.row_tokens.shape[0], up, down, gemms):
        y = gated_mlp(
            x,
            up,
            down,
            routing.row_tokens,
            routing.token_rows,
            bounds,
            activation,
            key,
            zero_tail,
        )
    else:
        x = _Gather.apply(x, routing.row_tokens, routing.token_rows)
        hidden = grouped(x, up, bounds, up_bias, key, transposed, gemms, zero_tail)
        hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
        hidden = cast_input(hidden, down.dtype)
        y = grouped(hidden, down, bounds, down_bias, key, transposed, gemms, zero_tail)

    # transformers before 5.20 has no such norm.
    if getattr(self, "has_post_expert_norm", False):
        y = self.post_expert_norm(y)
    # Under autocast, tokens may be more precise than the GEMMs. Then the sum must be, too.
    y = y.to(torch.promote_types(y.dtype, hidden_states.dtype))
    weights = top_k_weights if top_k_weights.dtype == y.dtype else top_k_weights.float()
    combined: Tensor = _Combine.apply(y, routing.token_rows, weights.contiguous())
    return combined.to(hidden_states.dtype)


def uses_registry(module: nn.Module) -> bool:
    """Return whether transformers dispatches a module's forward through its registry."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module's batched weights are (E, in_features, out_features)."""
    # Experts in the registry of transformers have an attribute for it.
    declared = getattr(module, "is_transposed", None)
    if declared is not None:
        return bool(declared)

    # Llama 4 is not in the registry. Its experts are transposed, so compare the shapes:
    #                     gate_up_proj           down_proj
    #     transposed      (E, hidden, 2 * width) (E, width, hidden)
    #     not transposed  (E, 2 * width, hidden) (E, hidden, width)
    weights = batched_parameters(module)
    if "gate_up_proj" not in weights or "down_proj" not in weights:
        return False
    gate_up_rows, gate_up_cols = weights["gate_up_proj"].shape[-2:]
    width, hidden = weights["down_proj"].shape[-2:]
    return gate_up_rows == hidden and gate_up_cols == 2 * width


def other_implementation(module: Any) -> str | None:
    """Return the experts implementation of transformers that runs instead of `experts_forward`.

    None if `experts_forward` runs, or if the module does not select an implementation.
    """
    if not uses_registry(module):
        return None
    selected = str(module.config._experts_implementation)
    return None if selected == TRANSFORMERS_KEY else selected


def register_experts_forward() -> None:
    """Add `experts_forward` to the registry of transformers, which has been imported."""
    registry: Any = sys.modules["transformers.integrations.moe"]
    registry.ALL_EXPERTS_FUNCTIONS.register(TRANSFORMERS_KEY, experts_forward)


def _check_routed(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    features: int,
    device: torch.device,
) -> None:
    """Check the arguments of `experts_forward`, except the values of ``top_k_index``.

    Raises:
        ValueError: a shape or device does not fit.
        TypeError: a dtype is not supported.
    """
    shape = hidden_states.shape
    pairs = top_k_index.shape
    if len(shape) != 2 or shape[1] != features:
        raise ValueError(f"hidden_states has shape {tuple(shape)}; it must be (tokens, {features})")
    if len(pairs) != 2 or pairs[0] != shape[0]:
        raise ValueError(f"top_k_index has shape {tuple(pairs)}; it must be ({shape[0]}, k)")
    if top_k_weights.shape != pairs:
        raise ValueError(
            f"top_k_weights has shape {tuple(top_k_weights.shape)}; it must be {tuple(pairs)}"
        )
    if hidden_states.dtype not in INPUT_DTYPES:
        dtype = hidden_states.dtype
        raise TypeError(f"hidden_states is {dtype}; it must be float32, bfloat16 or float16")
    if top_k_index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"top_k_index is {top_k_index.dtype}; it must be int64 or int32")
    for name, tensor in (
        ("hidden_states", hidden_states),
        ("top_k_index", top_k_index),
        ("top_k_weights", top_k_weights),
    ):
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device} and the experts are on {device}")


class _Routing(NamedTuple):
    """The rows of grouped GEMMs: pairs of a token and an expert, sorted by expert.

    Attributes:
        bounds: where the rows of each expert end.
        row_tokens: (T * k,), the token of each row. Rows of experts of other ranks are the last.
        token_rows: (T, k), the rows of each token.
    """

    bounds: GroupBounds
    row_tokens: Tensor
    token_rows: Tensor


def _route(top_k_index: Tensor, experts: int, parallel: bool) -> _Routing:
    """Sort pairs of a token and an expert by expert.

    Args:
        top_k_index: (T, k), the experts of each token.
        experts: the number of experts.
        parallel: whether ids from ``experts`` on are experts of other ranks.
    """
    row_experts, row_pairs = torch.sort(top_k_index.reshape(-1))
    # Reading an id on CUDA would wait for the device.
    is_readable = (
        row_experts.is_cpu and not torch.compiler.is_compiling() and not is_traced(row_experts)
    )
    if is_readable and row_experts.shape[0]:
        lowest = int(row_experts[0])
        highest = int(row_experts[-1])
        if lowest < 0 or (highest >= experts and not parallel):
            raise ValueError(
                f"top_k_index has the expert {lowest if lowest < 0 else highest}; ids must be at "
                f"least 0 and less than {experts}, the number of experts"
            )

    ends, padded_ends, row_tokens, pair_rows = _route_rows(
        row_experts.long(), row_pairs, experts, top_k_index.shape[-1]
    )
    return _Routing(GroupBounds(ends, padded_ends), row_tokens, pair_rows.view(top_k_index.shape))


class _Gather(torch.autograd.Function):
    """``x[row_tokens]`` with a backward that gathers too.

    torch's backward sorts the index and accumulates rows one by one, because it does not know where
    each row of ``x`` went.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, row_tokens: Tensor, token_rows: Tensor) -> Tensor:
        """Gather rows of ``x``.

        Args:
            ctx: context of the autograd function.
            x: (T, H).
            row_tokens: (T * k,), which has each row of ``x`` k times.
            token_rows: (T, k), where each row of ``x`` is in ``row_tokens``.
        """
        ctx.save_for_backward(token_rows)
        return x[row_tokens]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of ``x``."""
        refuse_double_backward("experts")
        (token_rows,) = ctx.saved_tensors
        return _combine_rows(dy.contiguous(), token_rows), None, None


class _Combine(torch.autograd.Function):
    """The weighted sum of the rows of each token."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, token_rows: Tensor, weights: Tensor) -> Tensor:
        """Sum rows of ``y``.

        Args:
            ctx: context of the autograd function.
            y: (T * k, H).
            token_rows: (T, k), the rows of each token, a permutation of all rows.
            weights: (T, k), float32 or with the dtype of ``y``.

        Returns:
            (T, H), with the dtype of ``y``.
        """
        ctx.save_for_backward(y if ctx.needs_input_grad[2] else None, token_rows, weights)
        combined: Tensor = _combine_rows(y, token_rows, weights)
        return combined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``y`` and ``weights``."""
        refuse_double_backward("experts")
        y, token_rows, weights = ctx.saved_tensors
        needs_y, _, needs_weights = gradients_needed(ctx)
        dy, d_weights = _combine_rows_backward(
            grad.contiguous(), y, token_rows, weights, needs_y, needs_weights
        )
        return dy if needs_y else None, None, d_weights.to(weights.dtype) if needs_weights else None


def batched_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own parameters that are batches of matrices."""
    batched: dict[str, Tensor] = {}
    for name, parameter in module._parameters.items():
        if parameter is None or nn.parameter.is_lazy(parameter) or parameter.dim() <= 2:
            continue
        if parameter.is_floating_point() or isinstance(parameter, QuantizedTensor):
            batched[name] = parameter
    return batched
