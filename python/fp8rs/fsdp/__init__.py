"""FSDP2 integration: sharded weights that are all-gathered as FP8 codes and scales.

The local tensor of a sharded parameter is a :class:`MasterWeight`, which is stored in high
precision and quantized for each all-gather, or an FP8 weight, which is gathered as it is stored.

- ``sharded_model``: the FSDP2 side of one converted model; decides when weights are quantized;
- ``param``, ``float8_param``: the handle of one FP8 parameter, and of one FP8 weight;
- ``wrap``: installs the local tensor when FSDP2 puts a sharded parameter on a module;
- ``master_weight``, ``float8_shard``: the local tensors;
- ``hooks``: FSDP2's all-gather hooks;
- ``quantize``: amaxes, their all-reduce, and casts of shards;
- ``layout``: planes to all-gather buffers and back, and blocks that shard boundaries split;
- ``shard_spec``: which part of a parameter this rank holds;
- ``conversion_check``: compares what the ranks have converted;
- ``checks``: settings of FSDP2 that FP8 all-gathers do not support;
- ``state_dict``: plain tensors in state dicts;
- ``scale_sync``: synchronizes the scales that FP8 shards share;
- ``padding``: how FSDP2 pads FP8 shards;
- ``links``: the former name of `fp8rs.comm.set_fsdp_comm`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8rs.comm import set_fsdp_comm

    from .float8_param import register_handle
    from .float8_shard import Float8Shard
    from .links import set_links
    from .master_weight import MasterWeight
    from .sharded_model import precompute_float8_dynamic_scale_for_fsdp

__all__ = [
    "Float8Shard",
    "MasterWeight",
    "precompute_float8_dynamic_scale_for_fsdp",
    "register_handle",
    "set_fsdp_comm",
    "set_links",
]

#: Modules that are imported on first use, because torch.distributed.fsdp takes seconds to import.
_LAZY = {
    "Float8Shard": "float8_shard",
    "MasterWeight": "master_weight",
    "precompute_float8_dynamic_scale_for_fsdp": "sharded_model",
    "register_handle": "float8_param",
    "set_fsdp_comm": "links",
    "set_links": "links",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
