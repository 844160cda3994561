"""Settings of FSDP2 that cannot work with quantized gathers, refused before anything runs."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule

from fp8rs.scaling.state import ModelState


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
            for group in param_groups(module):
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


def param_groups(module: FSDPModule) -> list[Any]:
    """A module's FSDP parameter groups, under the names that torch has had for them."""
    fsdp_state: Any = module._get_fsdp_state()
    groups = getattr(fsdp_state, "_fsdp_param_groups", None)
    if groups is None:
        group = getattr(fsdp_state, "_fsdp_param_group", None)
        groups = [] if group is None else [group]
    return list(groups)
