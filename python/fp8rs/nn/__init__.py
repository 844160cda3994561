"""Modules whose GEMMs run on FP8 operands."""

from . import functional
from .attention import MultiheadAttention
from .grouped_linear import GroupedLinear
from .linear import Float8Linear, Linear
from .normalized import LayerNormLinear, LayerNormMLP
from .rotary import rotary_pos_emb
from .transformer import TransformerLayer, load_transformer_layer

__all__ = [
    "Float8Linear",
    "GroupedLinear",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "TransformerLayer",
    "functional",
    "load_transformer_layer",
    "rotary_pos_emb",
]
