"""The names that others give a transformer layer's parameters, and how to load what they saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from .normalized import check_choice
from .transformer import TransformerLayer

#: TransformerEngine's names (2.x, ``fuse_qkv_params=False``), each with ours: "{}" stands for
#: weight or bias. Where two are ours, theirs has the rows of the first, then those of the second.
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

#: Whose names differ from ours, by what they are called. Llama's are ours.
NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "llama": {},
    "transformer_engine": TRANSFORMER_ENGINE,
}


def load_transformer_layer(
    layer: TransformerLayer, state_dict: Mapping[str, Any], *, names: str, prefix: str = ""
) -> None:
    """Load one layer of a Llama (transformers' names) or of TransformerEngine.

    The layer may be converted, with FP8 weights too, and sharded: then every rank calls this, with
    whole tensors. What the layer computes with its parameters (activation, epsilon, heads) no state
    dict tells: its constructor's arguments say it.

    Args:
        layer: what is loaded into.
        state_dict: of the layer, or of a model that has it under ``prefix``.
        names: "llama" or "transformer_engine". Of the latter ``_extra_state`` is left out, and
            ``fuse_qkv_params=True`` is not known: split its weight first.
        prefix: what the layer's names begin with, as in "model.layers.0.". Other names are not
            looked at.

    Raises:
        ValueError: ``names`` is neither, or ``state_dict`` has nothing under ``prefix``.
        RuntimeError: names are missing or left over, or shapes differ; all are listed.
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
    """What is loaded, under our names; under its own where the table has none for it."""
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
