"""FSDP2 integration: sharded weights that are all-gathered as FP8 codes and scales.

The local tensor of a sharded parameter is a :class:`MasterWeight`, which is stored in high
precision and quantized for each all-gather, or an FP8 weight, which is gathered as it is stored.

- ``sharded_model``: the FSDP2 side of one converted model; decides when weights are quantized;
- ``param``: the handle of one FP8 parameter;
- ``wrap``: installs the local tensor when FSDP2 puts a sharded parameter on a module;
- ``master_weight``, ``float8_weight``: the local tensors;
- ``hooks``: FSDP2's all-gather hooks;
- ``quantize``: amaxes, their all-reduce, and casts of shards;
- ``layout``: planes to all-gather buffers and back, and blocks that shard boundaries split;
- ``shard_spec``: which part of a parameter this rank holds;
- ``agreement``: compares what the ranks have converted;
- ``checks``: settings of FSDP2 that FP8 all-gathers do not support;
- ``state_dicts``: plain tensors in state dicts;
- ``planes_owner``, ``at_rest``, ``scales``, ``padding``: FP8 weights;
- ``sizes``, ``memory``: bytes that sharding comes to, before any rank runs;
- ``links``: the former name of `fp8rs.comm.set_fsdp_comm`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8rs.comm import set_fsdp_comm

    from .float8_weight import Float8Weight, MXFP8Weight
    from .links import set_links
    from .master_weight import MasterWeight
    from .planes_owner import own
    from .sharded_model import precompute_float8_dynamic_scale_for_fsdp

__all__ = [
    "Float8Weight",
    "MXFP8Weight",
    "MasterWeight",
    "own",
    "precompute_float8_dynamic_scale_for_fsdp",
    "set_fsdp_comm",
    "set_links",
]

#: Modules that are imported on first use, because torch.distributed.fsdp takes seconds to import.
_LAZY = {
    "Float8Weight": "float8_weight",
    "MXFP8Weight": "float8_weight",
    "MasterWeight": "master_weight",
    "own": "planes_owner",
    "precompute_float8_dynamic_scale_for_fsdp": "sharded_model",
    "set_fsdp_comm": "links",
    "set_links": "links",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
