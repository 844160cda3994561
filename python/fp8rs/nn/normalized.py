"""A norm followed by a linear layer, and a norm followed by a feed-forward network.

They are composed of torch's modules, and become FP8 by conversion of a model or by ``recipe``. In
eager mode, FP8 modules compute norms and gated activations with kernels that quantize the result
(`fp8rs.nn.fused`). Arguments have TransformerEngine's names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from fp8rs.quantize.recipes import Recipe, RecipeName, check_choice

from .fused import glu_for, norm_for
from .linear import make_float8

NORMS: dict[str, Callable[..., nn.Module]] = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}

# TransformerEngine's gelu is the approximation by tanh.
_gelu: Callable[[Tensor], Tensor] = partial(F.gelu, approximate="tanh")
ACTIVATIONS = {"gelu": _gelu, "relu": F.relu, "geglu": _gelu, "swiglu": F.silu}
#: Activations of a gate, which is multiplied by the output of a second layer.
GATED = {"geglu", "swiglu"}


def make_norm(kind: str, size: int, eps: float, **factory: Any) -> nn.Module:
    """Create torch's norm over a last dim of ``size``."""
    check_choice("normalization", kind, NORMS)
    return NORMS[kind](size, eps=eps, **factory)


class LayerNormLinear(nn.Module):
    """A norm and a linear layer: ``linear(norm(x))``.

    Args:
        in_features: size of the last dim of the input.
        out_features: size of the last dim of the output.
        eps: epsilon of the norm.
        bias: whether the linear layer has a bias.
        normalization: "LayerNorm" or "RMSNorm".
        device: device of the parameters.
        dtype: dtype of the parameters.
        recipe: a recipe or its short name, to make this module FP8. None for models that are
            converted as a whole.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: Any = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | RecipeName | None = None,
    ) -> None:
        super().__init__()
        self.norm = make_norm(normalization, in_features, eps, device=device, dtype=dtype)
        self.linear = nn.Linear(in_features, out_features, bias, device, dtype)
        make_float8(self, recipe)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        y: Tensor = self.linear(norm_for(self.norm, x, [self.linear]))
        return y


class MLP(nn.Module):
    """``down_proj(act(up_proj(x)))``, or gated: ``down_proj(act(gate_proj(x)) * up_proj(x))``.

    Its layers have Llama's names. ``gate_proj`` and ``up_proj`` share their quantized input.

    Args:
        hidden_size: size of the last dim of input and output.
        ffn_hidden_size: size between the layers.
        bias: whether the linear layers have biases.
        activation: a name in `ACTIVATIONS`.
        factory: ``device`` and ``dtype`` of the parameters.
    """

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, bias: bool, activation: str, **factory: Any
    ) -> None:
        super().__init__()
        check_choice("activation", activation, ACTIVATIONS)
        self.activation = activation
        if activation in GATED:
            self.gate_proj = nn.Linear(hidden_size, ffn_hidden_size, bias, **factory)
        self.up_proj = nn.Linear(hidden_size, ffn_hidden_size, bias, **factory)
        self.down_proj = nn.Linear(ffn_hidden_size, hidden_size, bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., hidden_size) to the same shape."""
        activate = ACTIVATIONS[self.activation]
        if self.activation in GATED:
            gate = self.gate_proj(x)
            up = self.up_proj(x)
            hidden = glu_for(
                self.activation, gate, up, self.gate_proj, self.up_proj, self.down_proj
            )
            if hidden is None:
                hidden = activate(gate) * up
        else:
            hidden = activate(self.up_proj(x))
        y: Tensor = self.down_proj(hidden)
        return y

    def input_layers(self) -> list[nn.Module]:
        """Return the linear layers that the input is passed to."""
        if self.activation in GATED:
            return [self.gate_proj, self.up_proj]
        return [self.up_proj]

    @override
    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class LayerNormMLP(nn.Module):
    """A norm and a feed-forward network: ``mlp(norm(x))``, without a residual.

    Args:
        hidden_size: size of the last dim of input and output.
        ffn_hidden_size: size between the linear layers; of the gate too.
        eps: epsilon of the norm.
        bias: whether the linear layers have biases.
        activation: "gelu" (the approximation by tanh, as TransformerEngine's), "relu", or gated:
            "geglu", "swiglu".
        normalization: "LayerNorm" or "RMSNorm".
        device: see `LayerNormLinear`.
        dtype: see `LayerNormLinear`.
        recipe: see `LayerNormLinear`.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        device: Any = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | RecipeName | None = None,
    ) -> None:
        super().__init__()
        self.norm = make_norm(normalization, hidden_size, eps, device=device, dtype=dtype)
        self.mlp = MLP(hidden_size, ffn_hidden_size, bias, activation, device=device, dtype=dtype)
        make_float8(self, recipe)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., hidden_size) to the same shape."""
        y: Tensor = self.mlp(norm_for(self.norm, x, self.mlp.input_layers(), within=self.mlp))
        return y
