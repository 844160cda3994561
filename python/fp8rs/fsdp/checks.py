"""Settings of FSDP2 that cannot work with quantized gathers, refused before anything runs."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule

from fp8rs._torch import fsdp_param_groups
from fp8rs.nn.registry import ModelState


def refuse_partial_reshard(state: ModelState) -> None:
    """Raise ValueError where ``reshard_after_forward`` is a number below the world size.

    FSDP2 would keep a part of the gathered bytes as a parameter, which works for
    high-precision bytes only; it fails deep inside the first forward, with an error that
    does not say why.
    """
    root = state.root
    if root is None:
        return
    for name, module in root.named_modules():
        if isinstance(module, FSDPModule):
            for group in fsdp_param_groups(module):
                smaller = getattr(group, "post_forward_mesh_info", None)
                if smaller is None or smaller == group.mesh_info:
                    continue
                if any(hasattr(p, "_extensions_data") for p in group.fsdp_params):
                    size = getattr(smaller, "shard_mesh_size", "a number")
                    raise ValueError(
                        f"fully_shard(..., reshard_after_forward={size}) on {name or 'the root'} "
                        "does not work with FP8 all-gather: use True or False, or convert with "
                        "enable_fsdp_float8_all_gather=False"
                    )
