"""The former name of `fp8rs.comm.set_fsdp_comm`. It will be removed in the next release."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from fp8rs.comm import FSDPComm, set_fsdp_comm


def set_links(
    model: nn.Module, *, gather: str = "auto", reduction: str = "auto", **kwargs: Any
) -> FSDPComm:
    """Call `fp8rs.comm.set_fsdp_comm`, with a DeprecationWarning."""
    warnings.warn(
        "fp8rs.fsdp.set_links is deprecated: call fp8rs.comm.set_fsdp_comm(model, all_gather=..., "
        "reduce_scatter=...)",
        DeprecationWarning,
        stacklevel=2,
    )
    return set_fsdp_comm(model, all_gather=gather, reduce_scatter=reduction, **kwargs)
