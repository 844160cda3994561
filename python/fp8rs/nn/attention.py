"""Multi-head attention from FP8 linear layers and torch's attention kernel.

The three input projections share their quantized input. The attention itself is not quantized.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from fp8rs.quantize.recipes import Recipe, RecipeName, check_choice

from .fused import norm_for
from .linear import make_float8
from .normalized import make_norm
from .rotary import rotate

MASKS = ("causal", "no_mask")


class MultiheadAttention(nn.Module):
    """Multi-head self-attention or cross-attention.

    Its layers have Llama's names: ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``. With
    ``input_layernorm=True``, ``norm`` precedes them.

    Args:
        hidden_size: size of the last dim of input, encoder output and output.
        num_attention_heads: number of query heads.
        kv_channels: size of a head. hidden_size / num_attention_heads by default.
        num_gqa_groups: number of key and value heads. num_attention_heads by default.
        attention_dropout: dropout probability of attention weights.
        layernorm_epsilon: epsilon of the norm.
        attn_mask_type: "causal" or "no_mask".
        attention_type: "self", or "cross" for keys and values from an encoder's output.
        input_layernorm: whether a norm precedes the projections.
        normalization: "LayerNorm" or "RMSNorm".
        bias: whether the linear layers have biases.
        device: see `LayerNormLinear`.
        dtype: see `LayerNormLinear`.
        recipe: see `LayerNormLinear`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        *,
        kv_channels: int | None = None,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        attn_mask_type: str = "causal",
        attention_type: str = "self",
        input_layernorm: bool = False,
        normalization: str = "LayerNorm",
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | RecipeName | None = None,
    ) -> None:
        super().__init__()
        check_choice("attn_mask_type", attn_mask_type, MASKS)
        check_choice("attention_type", attention_type, ("self", "cross"))
        if num_attention_heads < 1:
            raise ValueError(
                f"num_attention_heads must be at least 1, but got {num_attention_heads}"
            )
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        if groups < 1 or num_attention_heads % groups:
            raise ValueError(
                f"num_gqa_groups must divide num_attention_heads={num_attention_heads}, "
                f"but got {groups}"
            )
        if kv_channels is None and hidden_size % num_attention_heads:
            raise ValueError(
                f"num_attention_heads must divide hidden_size={hidden_size}, but got "
                f"{num_attention_heads}. Choose another number or pass kv_channels"
            )
        channels = hidden_size // num_attention_heads if kv_channels is None else kv_channels
        self.kv_channels = channels
        self.attention_dropout = attention_dropout
        self.causal = attn_mask_type == "causal"
        self.cross = attention_type == "cross"
        self.gqa = groups != num_attention_heads

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.norm: nn.Module | None = None
        if input_layernorm:
            self.norm = make_norm(normalization, hidden_size, layernorm_epsilon, **factory)
        q_size = num_attention_heads * channels
        kv_size = groups * channels
        self.q_proj = nn.Linear(hidden_size, q_size, bias, **factory)
        self.k_proj = nn.Linear(hidden_size, kv_size, bias, **factory)
        self.v_proj = nn.Linear(hidden_size, kv_size, bias, **factory)
        self.o_proj = nn.Linear(q_size, hidden_size, bias, **factory)
        make_float8(self, recipe)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        encoder_output: Tensor | None = None,
        attn_mask: Tensor | None = None,
        rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Compute attention. The result has the shape of ``hidden_states``.

        Args:
            hidden_states: (batch, length, hidden_size). The source of queries, and with
                self-attention of keys and values.
            encoder_output: (batch, other length, hidden_size). Only for cross-attention.
            attn_mask: mask of torch's ``scaled_dot_product_attention``. True takes part, the
                opposite of TransformerEngine's ``attention_mask``. Only for
                ``attn_mask_type="no_mask"``.
            rotary_pos_emb: cosines and sines, each (length, kv_channels) or with a leading batch
                dimension, from `rotary_pos_emb` or a Llama model. Only for self-attention.

        Raises:
            ValueError: an argument is missing, or does not apply to this type of attention.
        """
        if self.cross != (encoder_output is not None):
            need = "needs an" if self.cross else "takes no"
            raise ValueError(f"{'cross' if self.cross else 'self'}-attention {need} encoder_output")
        if self.causal and attn_mask is not None:
            raise ValueError('attn_mask requires attn_mask_type="no_mask": pass a causal mask')
        if self.cross and rotary_pos_emb is not None:
            raise ValueError("cross-attention takes no rotary_pos_emb")

        x = hidden_states
        if self.norm is not None:
            x = norm_for(self.norm, hidden_states, self.input_layers())
        source = x if encoder_output is None else encoder_output
        q = self._split_heads(self.q_proj(x))
        k = self._split_heads(self.k_proj(source))
        v = self._split_heads(self.v_proj(source))
        if rotary_pos_emb is not None:
            q = rotate(q, rotary_pos_emb)
            k = rotate(k, rotary_pos_emb)
        y = F.scaled_dot_product_attention(
            q.transpose(-3, -2),
            k.transpose(-3, -2),
            v.transpose(-3, -2),
            attn_mask,
            dropout_p=self.attention_dropout if self.training else 0.0,
            is_causal=self.causal,
            enable_gqa=self.gqa,
        )
        out: Tensor = self.o_proj(y.transpose(-3, -2).flatten(-2))
        return out

    def input_layers(self) -> list[nn.Module]:
        """Return the linear layers that ``hidden_states`` is passed to."""
        if self.cross:
            return [self.q_proj]
        return [self.q_proj, self.k_proj, self.v_proj]

    def _split_heads(self, x: Tensor) -> Tensor:
        """Return (batch, length, channels) as (batch, length, heads, kv_channels).

        Under tensor parallelism, these are this rank's heads.
        """
        heads: Tensor = x.unflatten(-1, (-1, self.kv_channels))
        return heads

    @override
    def extra_repr(self) -> str:
        return (
            f"kv_channels={self.kv_channels}, attention_dropout={self.attention_dropout}, "
            f"causal={self.causal}, cross={self.cross}"
        )
