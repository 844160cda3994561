"""FSDP2 integration: sharded weights that are all-gathered as FP8 codes and scales.

The local tensor of a sharded parameter is a `MasterWeight`, which is stored in high precision and
quantized for each all-gather, or an FP8 weight, which is gathered as it is stored.

- ``sharded_model``: the FSDP2 side of one converted model: installs local tensors on shards and
  decides when weights are quantized;
- ``param``: the handle of one FP8 parameter;
- ``master_weight``: the local tensor of a master weight, and FSDP2's all-gather hooks;
- ``float8_shard``: the local tensor and the handle of an FP8 weight;
- ``shard_quantizer``: amaxes, their all-reduce, and casts of shards;
- ``layout``: planes to all-gather buffers and back, and blocks that shard boundaries split;
- ``shard_spec``: which part of a parameter this rank holds;
- ``scale_sync``: synchronizes the scales that FP8 shards share;
- ``checks``: settings of FSDP2, and what the ranks have converted.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .float8_shard import Float8Shard
    from .master_weight import MasterWeight
    from .sharded_model import precompute_float8_dynamic_scale_for_fsdp

__all__ = ["Float8Shard", "MasterWeight", "precompute_float8_dynamic_scale_for_fsdp"]

#: Modules that are imported on first use, because torch.distributed.fsdp takes seconds to import.
_LAZY = {
    "Float8Shard": "fp8rs.fsdp.float8_shard",
    "MasterWeight": "fp8rs.fsdp.master_weight",
    "precompute_float8_dynamic_scale_for_fsdp": "fp8rs.fsdp.sharded_model",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
