"""All-gathers and reduce-scatters of models that FSDP2 shards, with FP8 layers or without.

- ``fsdp_comm``: `set_fsdp_comm`, which sets the collectives of a model;
- ``choice``: the collectives that it chose;
- ``reduce_scatter``: bfloat16 gradients, sent with ``all_to_all_single`` and summed in float32;
- ``symmetric``: copies between the GPUs of one host, through symmetric memory.
"""

from .choice import CommChoice, FSDPComm
from .fsdp_comm import set_fsdp_comm

__all__ = ["CommChoice", "FSDPComm", "set_fsdp_comm"]
