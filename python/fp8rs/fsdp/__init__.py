"""FSDP2 integration: sharded weights that are all-gathered as FP8 codes and scales.

- ``sharded_model``: the FSDP2 side of one converted model;
- ``gather_unit``: what FSDP2 all-gathers at once;
- ``hooks``: FSDP2's all-gather hooks;
- ``master_weight``: the local tensor of a master weight;
- ``float8_shard``: the local tensor and the handle of an FP8 weight;
- ``local_shard``: the values of one shard, as quantizers read them;
- ``shard_quantizer``: amaxes, their all-reduce, and casts of shards;
- ``layout``: planes to all-gather buffers and back, and blocks that shard boundaries split;
- ``scale_sync``: synchronizes the scales that FP8 shards share;
- ``state_dict``: state-dict hooks of converted modules;
- ``checks``: settings of FSDP2, and what the ranks have converted.

[Note: weights under FSDP2]

*Shard.* FSDP2 replaces a parameter by a DTensor. The part of the parameter that this rank holds is
its shard, and the DTensor's local tensor is the tensor object over the shard's memory. FSDP2 may
replace the local tensor at any time.

*Master weight.* A parameter that is stored in high precision. Its local tensor is a `MasterWeight`,
which is quantized for each all-gather.

*FP8 weight.* A parameter that is stored as codes and scales. Its local tensor is a `Float8Shard`,
which is gathered as it is stored.

*Handle.* What this library knows about one parameter, whichever tensor holds it now: its identity,
how often it was written, and its scale.

*Unit.* A module, or a list of modules, that ``fully_shard`` was called on. FSDP2 all-gathers the
parameters of a unit together, in one buffer. A `GatherUnit` represents the FP8 parameters among
them.

*Gathered weight.* The whole parameter after an all-gather, a `QuantizedTensor` over FSDP2's buffer.
A reshard frees the buffer.

*Stale.* A scale is stale if it was computed for an earlier forward of the converted root, or if an
operator wrote to the shard since. Stale scales of parameters that are sharded over the same ranks
are computed together.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .float8_shard import Float8Shard
    from .master_weight import MasterWeight
    from .sharded_model import precompute_float8_dynamic_scale_for_fsdp

__all__ = [
    "Float8Shard",
    "MasterWeight",
    "precompute_float8_dynamic_scale_for_fsdp",
]

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
