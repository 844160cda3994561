"""Reduce-scatters of bfloat16 gradients that are summed in float32, for models that FSDP2 shards.

- ``fsdp_comm``: `set_fsdp_comm`, which sets the reduce-scatters of a model;
- ``reduce_scatter``: the reduce-scatter of one module.
"""

from .fsdp_comm import set_fsdp_comm
from .reduce_scatter import FSDPComm

__all__ = ["FSDPComm", "set_fsdp_comm"]
