"""A transformer layer: attention and a feed-forward network, each after a norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8rs.quantize.recipes import Recipe, RecipeName, check_choice

from .attention import MultiheadAttention
from .fused import norm_for
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
            _norm_for(self.input_layernorm, x, self.self_attn),
            attn_mask=attn_mask,
            rotary_pos_emb=rotary_pos_emb,
        )
        x = self._add(x, y)
        if self.cross_attn is not None:
            y = self.cross_attn(
                _norm_for(self.cross_attn_layernorm, x, self.cross_attn),
                encoder_output=encoder_output,
                attn_mask=cross_attn_mask,
            )
            x = self._add(x, y)
        return self._add(x, self.mlp(_norm_for(self.post_attention_layernorm, x, self.mlp)))

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + F.dropout(y, self.hidden_dropout, self.training)


def _norm_for(norm: nn.Module, x: Tensor, next_module: nn.Module) -> Tensor:
    """Compute a norm for the attention or the feed-forward network, which may be wrapped."""
    if not isinstance(next_module, (MultiheadAttention, MLP)):
        y: Tensor = norm(x)
        return y
    return norm_for(norm, x, next_module.input_layers(), within=next_module)


# --- state dicts of other libraries ---------------------------------------------------------------

#: Our names for TransformerEngine's (2.x, ``fuse_qkv_params=False``), with "{}" for weight or bias.
#: With two names of ours, their parameter has the rows of the first, followed by the second.
TRANSFORMER_ENGINE = {
    "self_attention.layernorm_qkv.layer_norm_{}": ("input_layernorm.{}",),
    "self_attention.layernorm_qkv.query_{}": ("self_attn.q_proj.{}",),
    "self_attention.layernorm_qkv.key_{}": ("self_attn.k_proj.{}",),
    "self_attention.layernorm_qkv.value_{}": ("self_attn.v_proj.{}",),
    "self_attention.proj.{}": ("self_attn.o_proj.{}",),
    "inter_attention.layernorm_query.layer_norm_{}": ("cross_attn_layernorm.{}",),
    "inter_attention.layernorm_query.query_{}": ("cross_attn.q_proj.{}",),
    "inter_attention.key_value.key_{}": ("cross_attn.k_proj.{}",),
    "inter_attention.key_value.value_{}": ("cross_attn.v_proj.{}",),
    "inter_attention.proj.{}": ("cross_attn.o_proj.{}",),
    "layernorm_mlp.layer_norm_{}": ("post_attention_layernorm.{}",),
    "layernorm_mlp.fc1_{}": ("mlp.gate_proj.{}", "mlp.up_proj.{}"),
    "layernorm_mlp.fc2_{}": ("mlp.down_proj.{}",),
}

#: Tables of names. Ours are Llama's.
NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "llama": {},
    "transformer_engine": TRANSFORMER_ENGINE,
}


def load_transformer_layer(
    layer: TransformerLayer, state_dict: Mapping[str, Any], *, names: str, prefix: str = ""
) -> None:
    """Load the parameters of one layer of a Llama (transformers' names) or of TransformerEngine.

    The layer may be converted and may have FP8 weights. If it is sharded, every rank calls this
    with whole tensors. A state dict does not contain the activation, epsilon and number of heads,
    which are arguments of the constructor.

    Args:
        layer: the layer to load into.
        state_dict: the state dict of the layer, or of a model that has it under ``prefix``.
        names: "llama" or "transformer_engine". TransformerEngine's ``_extra_state`` is ignored.
            Its ``fuse_qkv_params=True`` is not supported: split the weight first.
        prefix: the prefix of the layer's names, such as "model.layers.0.". Other names are ignored.

    Raises:
        ValueError: ``names`` is invalid, or no name in ``state_dict`` starts with ``prefix``.
        RuntimeError: names are missing or unexpected, or shapes differ. All are listed.
    """
    check_choice("names", names, NAMES)
    layer_tensors: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        if name.startswith(prefix):
            layer_tensors[name.removeprefix(prefix)] = tensor
    if not layer_tensors:
        raise ValueError(f"state_dict has no name that begins with {prefix!r}")

    layer_state = layer.state_dict()
    renamed = _rename(layer_tensors, NAMES[names], set(layer_state))
    if any(hasattr(value, "device_mesh") for value in layer_state.values()):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        set_model_state_dict(layer, renamed, options=StateDictOptions(full_state_dict=True))
    else:
        layer.load_state_dict(renamed)


def _rename(
    state_dict: Mapping[str, Tensor], table: dict[str, tuple[str, ...]], layer_names: set[str]
) -> dict[str, Any]:
    """Return the tensors under our names. Names without an entry in the table stay.

    Args:
        state_dict: the tensors of a layer of another library.
        table: a table of `NAMES`.
        layer_names: the names that our layer has a parameter for. Some of the table's may be
            missing.
    """
    our_names: dict[str, list[str]] = {}
    for their_pattern, our_patterns in table.items():
        for kind in ("weight", "bias"):
            ours = [pattern.format(kind) for pattern in our_patterns]
            ours = [name for name in ours if name in layer_names]
            our_names[their_pattern.format(kind)] = ours

    renamed: dict[str, Any] = {}
    for name, tensor in state_dict.items():
        if table and name.endswith("_extra_state"):
            continue
        ours = our_names.get(name) or [name]
        for our_name, part in zip(ours, tensor.chunk(len(ours)), strict=True):
            renamed[our_name] = part
    return renamed
