"""Modules whose GEMMs run on FP8 operands."""

from .attention import MultiheadAttention, rotary_pos_emb
from .linear import Float8Linear, Linear
from .names import load_transformer_layer
from .normalized import LayerNormLinear, LayerNormMLP
from .transformer import TransformerLayer

__all__ = [
    "Float8Linear",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "TransformerLayer",
    "load_transformer_layer",
    "rotary_pos_emb",
]
