"""FSDP2: master weights that are quantized before they are gathered.

The sharded parameter stays in high precision, in a :class:`MasterWeight`. Its pre-all-gather
hook hands FSDP2 the shard's FP8 bytes and its post-all-gather hook builds the quantized
weight over the gathered buffer. From the bottom up:

- ``slot``: what is known of one weight, shared by all tensors that stand for it;
- ``master_weight``: the tensor subclass and its aten table;
- ``placement``: where a shard lies in the whole weight;
- ``layouts``, ``tensor_layout``, ``block_layout``: how shards of each format become bytes, and
  gathered bytes a weight;
- ``passes``: one pass over all weights of a model a forward, and who reuses it when;
- ``hooks``: what FSDP2 calls;
- ``state_dicts``: plain tensors out, and nothing lost on the way in.
"""

from .master_weight import MasterWeight
from .passes import precompute_float8_dynamic_scale_for_fsdp
from .slot import shard_quantized

__all__ = ["MasterWeight", "precompute_float8_dynamic_scale_for_fsdp", "shard_quantized"]
