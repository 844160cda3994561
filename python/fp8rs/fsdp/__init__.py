"""FSDP2: weights that are gathered as FP8 codes and scales.

A sharded parameter is a DTensor whose local tensor is a :class:`MasterWeight`: plain memory in high
precision, which is quantized for each gather. Or it is an FP8 weight, and its codes and scales are
gathered as they are. FSDP2 asks either for bytes before an all-gather, and for the weight after it.
From the bottom up:

- ``placement``: where a shard lies in the whole weight;
- ``cuts``: which blocks a sharding cuts, and where their scales are;
- ``codec``: planes of a shard to the bytes that are gathered, and gathered bytes to planes;
- ``weight``: one parameter of a module, whichever tensor stands for it;
- ``gathered``: a shard, what it was quantized to, and when that is there;
- ``at_rest``: shards that are FP8;
- ``planes_owner``: an FP8 weight, which hears of writes to its planes;
- ``maker``, ``tensor_maker``, ``block_maker``: high-precision shards to planes;
- ``scales``: those that shards of FP8 weights have in common, equal on all ranks;
- ``passes``: one pass over all weights of a model a forward, and who reuses its bytes when;
- ``agreement``: whether all ranks have converted alike;
- ``model``: the sharded weights of a model, and what it tells of them;
- ``hooks``: what FSDP2 calls;
- ``master_weight``, ``float8_weight``, ``parameter``: the sharded parameter's tensors;
- ``state_dicts``: plain tensors out;
- ``memory``: what a rank needs, by ``sizes``;
- ``adopt``: a parameter that is sharded becomes one of these;
- ``sizes``: what sharding comes to, in bytes, before any rank runs.

Beside these, and of use to any model that FSDP2 shards:

- ``reduction``: gradients that travel in bfloat16 and are summed in float32;
- ``symmetric``: memory that the ranks of a host read from each other;
- ``chosen_links``: which of these serve a model, for who asks;
- ``links``: the choice.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adopt import sharding_of
    from .chosen_links import Link, Links
    from .float8_weight import Float8Weight, MXFP8Weight
    from .links import set_links
    from .master_weight import MasterWeight
    from .model import precompute_float8_dynamic_scale_for_fsdp
    from .planes_owner import own

__all__ = [
    "Float8Weight",
    "Link",
    "Links",
    "MXFP8Weight",
    "MasterWeight",
    "own",
    "precompute_float8_dynamic_scale_for_fsdp",
    "set_links",
    "sharding_of",
]

#: Modules that are imported on first use, because torch.distributed.fsdp takes seconds to import.
_LAZY = {
    "Float8Weight": "float8_weight",
    "Link": "chosen_links",
    "Links": "chosen_links",
    "MXFP8Weight": "float8_weight",
    "MasterWeight": "master_weight",
    "own": "planes_owner",
    "precompute_float8_dynamic_scale_for_fsdp": "model",
    "set_links": "links",
    "sharding_of": "adopt",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
