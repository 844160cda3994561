"""Loads transformer layers of Llama and of TransformerEngine under their own parameter names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from fp8rs.quantize.recipes import check_choice

from .transformer import TransformerLayer

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
            ``fuse_qkv_params=True`` is not supported: split the weight first.
        prefix: the prefix of the layer's names, such as "model.layers.0.". Other names are ignored.

    Raises:
        ValueError: ``names`` is invalid, or no name in ``state_dict`` starts with ``prefix``.
        RuntimeError: names are missing or unexpected, or shapes differ. All are listed.
    """
    check_choice("names", names, NAMES)
    found = {n.removeprefix(prefix): t for n, t in state_dict.items() if n.startswith(prefix)}
    if not found:
        raise ValueError(f"state_dict has no name that begins with {prefix!r}")
    own = layer.state_dict()
    renamed: dict[str, Any] = dict(_renamed(found, NAMES[names], set(own)))
    if any(hasattr(value, "device_mesh") for value in own.values()):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        set_model_state_dict(layer, renamed, options=StateDictOptions(full_state_dict=True))
    else:
        layer.load_state_dict(renamed)


def _renamed(
    state_dict: Mapping[str, Tensor], table: dict[str, tuple[str, ...]], own: set[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors under our names. Names without an entry in the table stay."""
    ours = {
        theirs.format(kind): [name.format(kind) for name in names if name.format(kind) in own]
        for theirs, names in table.items()
        for kind in ("weight", "bias")
    }
    for name, tensor in state_dict.items():
        if table and name.endswith("_extra_state"):
            continue
        renamed = ours.get(name) or [name]
        yield from zip(renamed, tensor.chunk(len(renamed)), strict=True)
