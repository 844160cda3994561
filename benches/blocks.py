"""Other blocks for the benchmark's Llama: fp8rs.nn.TransformerLayer, and TransformerEngine's layer.

They compute what `fp8rs.demo.model.Block` computes, from equal weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fp8rs.demo.model import Llama, LlamaConfig
from fp8rs.nn import TransformerLayer, load_transformer_layer

#: Llama's names for those of a `Block`.
NAMES = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}

#: TransformerEngine's names for Llama's. Rows of several weights are in this order.
TRANSFORMER_ENGINE = {
    "self_attention.layernorm_qkv.layer_norm_weight": ["input_layernorm"],
    "self_attention.layernorm_qkv.weight": [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
    ],
    "self_attention.proj.weight": ["self_attn.o_proj"],
    "layernorm_mlp.layer_norm_weight": ["post_attention_layernorm"],
    "layernorm_mlp.fc1_weight": ["mlp.gate_proj", "mlp.up_proj"],
    "layernorm_mlp.fc2_weight": ["mlp.down_proj"],
}

Rotation = tuple[Tensor, Tensor]


def _options(config: LlamaConfig) -> dict[str, Any]:
    """Return arguments that both libraries have."""
    return {
        "num_gqa_groups": config.kv_heads,
        "layernorm_epsilon": 1e-5,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "self_attn_mask_type": "causal",
        "bias": False,
        "activation": "swiglu",
        "normalization": "RMSNorm",
    }


class ModuleBlock(TransformerLayer):
    """fp8rs.nn.TransformerLayer with a block's arguments."""

    def __init__(self, config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(
            config.dim,
            config.hidden,
            config.heads,
            device=device,
            dtype=dtype,
            **_options(config),
        )

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:  # type: ignore[override]
        """(batch, length, dim) -> (batch, length, dim)."""
        return super().forward(x, rotary_pos_emb=rotation)


class TransformerEngineBlock(nn.Module):
    """TransformerEngine's TransformerLayer with a block's arguments."""

    def __init__(self, config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        from transformer_engine.pytorch import TransformerLayer as Peer

        self.config = config
        self.layer = Peer(
            config.dim,
            config.hidden,
            config.heads,
            attn_input_format="bshd",
            # One parameter, which weights in FP8 require.
            fuse_qkv_params=True,
            qkv_weight_interleaved=False,
            params_dtype=dtype,
            device=device,
            **_options(config),
        )

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """(batch, length, dim) -> (batch, length, dim)."""
        angles = _angles(self.config, x.shape[1], x.device)
        out: Tensor = self.layer(x, rotary_pos_emb=angles)
        return out


def _angles(config: LlamaConfig, length: int, device: torch.device) -> Tensor:
    """Return TransformerEngine's argument for rotary positions, (length, 1, 1, head_dim)."""
    exponents = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
    positions = torch.arange(length, device=device).float()
    angles = torch.outer(positions, config.rope_base**-exponents).repeat(1, 2)
    return angles.view(length, 1, 1, config.head_dim)


def _llama_state(block: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a `Block` by Llama's names."""
    state = {}
    for name, tensor in block.state_dict().items():
        state[f"{NAMES[name.removesuffix('.weight')]}.weight"] = tensor
    return state


def _to_modules(block: nn.Module, config: LlamaConfig) -> nn.Module:
    weight = next(block.parameters())
    new = ModuleBlock(config, weight.device, weight.dtype)
    load_transformer_layer(new, _llama_state(block), names="llama")
    return new


def _to_transformer_engine(block: nn.Module, config: LlamaConfig) -> nn.Module:
    weight = next(block.parameters())
    new = TransformerEngineBlock(config, weight.device, weight.dtype)
    llama = _llama_state(block)
    state = {}
    for name, parts in TRANSFORMER_ENGINE.items():
        state[name] = torch.cat([llama[f"{part}.weight"] for part in parts])
    missing, unexpected = new.layer.load_state_dict(state, strict=False)
    missing = [name for name in missing if not name.endswith("_extra_state")]
    if missing or unexpected:
        raise RuntimeError(f"weights of TransformerEngine: {missing=}, {unexpected=}")
    return new


CONVERSIONS: dict[str, Callable[[nn.Module, LlamaConfig], nn.Module]] = {
    "modules": _to_modules,
    "te": _to_transformer_engine,
}


def replace_blocks(model: Llama, kind: str) -> None:
    """Replace a model's blocks by others with equal weights, one after the other.

    Args:
        model: the model, with plain blocks.
        kind: "plain" for no change, "modules" for fp8rs.nn, or "te" for TransformerEngine.
    """
    if kind == "plain":
        return
    for i, block in enumerate(model.blocks):
        model.blocks[i] = CONVERSIONS[kind](block, model.config)
