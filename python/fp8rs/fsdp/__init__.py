"""FSDP2: master weights that are quantized before they are gathered.

The sharded parameter stays in high precision, over a :class:`MasterWeight`. Its pre-all-gather
hook hands FSDP2 the shard's FP8 bytes and its post-all-gather hook builds the quantized
weight over the gathered buffer. From the bottom up:

- ``placement``: where a shard lies in the whole weight;
- ``cuts``: which blocks a sharding cuts, and where their scales are;
- ``codec``: planes of a shard to the bytes that are gathered, and gathered bytes to planes;
- ``maker``: high-precision shards to planes;
- ``weight``: one parameter of a module, whichever tensor stands for it;
- ``agreement``: whether all ranks have converted alike;
- ``passes``: one pass over all weights of a model a forward, and who reuses its bytes when;
- ``hooks``: what FSDP2 calls;
- ``master_weight``: the sharded parameter's local tensor, and its aten table;
- ``state_dicts``: plain tensors out.
"""

from .adopt import adopt, own
from .float8_weight import Float8Weight, MXFP8Weight
from .master_weight import MasterWeight
from .passes import precompute_float8_dynamic_scale_for_fsdp

__all__ = [
    "Float8Weight",
    "MXFP8Weight",
    "MasterWeight",
    "adopt",
    "own",
    "precompute_float8_dynamic_scale_for_fsdp",
]
