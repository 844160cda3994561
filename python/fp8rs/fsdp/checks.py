"""Refuse settings of FSDP2 that FP8 all-gathers do not support."""

from __future__ import annotations

from fp8rs._torch import fsdp_groups, fsdp_place, local_tensor
from fp8rs.nn.model_state import ModelState
from fp8rs.tensor.quantized import QuantizedTensor


def refuse_partial_reshard(state: ModelState) -> None:
    """Raise ValueError if ``reshard_after_forward`` is a number below the world size.

    FSDP2 would keep a part of the gathered bytes as a parameter, which requires high precision. The
    first forward would then fail with an error that does not name the cause.
    """
    root = state.root
    for name, group in () if root is None else fsdp_groups(root):
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


def refuse_recast(state: ModelState) -> None:
    """Raise RuntimeError if parameters were cast after FSDP2 gathered them for the first time.

    In a group with FP8 weights, FSDP2 gathers bytes and computes their number in its first forward.
    It would misread parameters of another dtype. For other groups, FSDP2 raises an error itself.
    """
    root = state.root
    for _, group in () if root is None else fsdp_groups(root):
        for known in group.fsdp_params:
            owner, name, parameter = fsdp_place(known)
            if isinstance(local_tensor(parameter), QuantizedTensor):
                continue  # FP8 weights are bytes in any dtype
            begun = getattr(known, "orig_dtype", None)  # with FSDP2's first forward
            if begun is not None and parameter.dtype != begun:
                raise RuntimeError(
                    f"{name} of {type(owner).__name__} is {parameter.dtype}, and was "
                    f"{begun} when FSDP2 began to gather it: cast a model "
                    "before its first forward"
                )
