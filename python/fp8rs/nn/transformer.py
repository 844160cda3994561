"""A transformer layer: attention and a feed-forward network, each after a norm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8rs.quantize.recipes import Recipe, RecipeName, check_choice

from .attention import MultiheadAttention
from .linear import make_float8
from .normalized import MLP, make_norm


class TransformerLayer(nn.Module):
    """A pre-norm transformer layer. Compile it, and call ``fully_shard`` on it.

    Its parameters have the names of Llama's layers: ``input_layernorm``, ``self_attn``,
    ``post_attention_layernorm`` and ``mlp``. A decoder also has ``cross_attn_layernorm`` and
    ``cross_attn``. The norms are modules of the layer, so that torch's plans for tensor and
    sequence parallelism can gather after them. ``load_transformer_layer`` reads state dicts of
    Llama and of TransformerEngine.

    Args:
        hidden_size: size of the last dim of input and output.
        ffn_hidden_size: hidden size of the feed-forward network.
        num_attention_heads: number of query heads.
        num_gqa_groups: number of key and value heads. num_attention_heads by default.
        layernorm_epsilon: epsilon of the norms.
        hidden_dropout: dropout probability of the outputs that are added to the residual.
        attention_dropout: dropout probability of attention weights.
        kv_channels: size of a head. hidden_size / num_attention_heads by default.
        self_attn_mask_type: "causal" or "no_mask".
        layer_type: "encoder", or "decoder" for cross-attention after self-attention.
        bias: whether the linear layers have biases.
        activation: "gelu" (tanh approximation), "relu", "geglu" or "swiglu".
        normalization: "LayerNorm" or "RMSNorm".
        device: see `LayerNormLinear`.
        dtype: see `LayerNormLinear`.
        recipe: see `LayerNormLinear`.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        *,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        layer_type: str = "encoder",
        bias: bool = True,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        device: Any = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | RecipeName | None = None,
    ) -> None:
        super().__init__()
        check_choice("self_attn_mask_type", self_attn_mask_type, ("causal", "no_mask"))
        check_choice("layer_type", layer_type, ("encoder", "decoder"))
        self.hidden_dropout = hidden_dropout
        factory: dict[str, Any] = {"device": device, "dtype": dtype}

        def norm() -> nn.Module:
            return make_norm(normalization, hidden_size, layernorm_epsilon, **factory)

        def attention(attention_type: str, attn_mask_type: str) -> MultiheadAttention:
            return MultiheadAttention(
                hidden_size,
                num_attention_heads,
                kv_channels=kv_channels,
                num_gqa_groups=num_gqa_groups,
                attention_dropout=attention_dropout,
                attn_mask_type=attn_mask_type,
                attention_type=attention_type,
                bias=bias,
                **factory,
            )

        self.input_layernorm = norm()
        self.self_attn = attention("self", self_attn_mask_type)
        self.cross_attn: MultiheadAttention | None = None
        if layer_type == "decoder":
            self.cross_attn_layernorm = norm()
            self.cross_attn = attention("cross", "no_mask")
        self.post_attention_layernorm = norm()
        self.mlp = MLP(hidden_size, ffn_hidden_size, bias, activation, **factory)
        make_float8(self, recipe)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        encoder_output: Tensor | None = None,
        attn_mask: Tensor | None = None,
        cross_attn_mask: Tensor | None = None,
        rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Compute the layer. The result has the shape of ``hidden_states``.

        Args:
            hidden_states: (batch, length, hidden_size).
            encoder_output: (batch, other length, hidden_size). Required for a decoder.
            attn_mask: mask of the self-attention (see `MultiheadAttention`).
            cross_attn_mask: mask of a decoder's cross-attention.
            rotary_pos_emb: cosines and sines for the self-attention (see `MultiheadAttention`).

        Raises:
            ValueError: an argument is missing, or does not apply to this type of layer.
        """
        if self.cross_attn is None and (encoder_output is not None or cross_attn_mask is not None):
            raise ValueError('encoder_output and cross_attn_mask are for layer_type="decoder"')
        x = hidden_states
        y = self.self_attn(
            self.input_layernorm(x), attn_mask=attn_mask, rotary_pos_emb=rotary_pos_emb
        )
        x = self._add(x, y)
        if self.cross_attn is not None:
            y = self.cross_attn(
                self.cross_attn_layernorm(x),
                encoder_output=encoder_output,
                attn_mask=cross_attn_mask,
            )
            x = self._add(x, y)
        return self._add(x, self.mlp(self.post_attention_layernorm(x)))

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + F.dropout(y, self.hidden_dropout, self.training)
