"""Quantize weights of experts as the next forward does, to observe the error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8rs._torch import is_distributed, own_part
from fp8rs.gemm.grouped import has_grouped_gemm, reads_format
from fp8rs.model.linear_spec import spec_for
from fp8rs.nn.expert_modules import other_implementation
from fp8rs.nn.fp8_params import Float8Params
from fp8rs.quantize.cast import quantize_planes
from fp8rs.quantize.planes import Plane
from fp8rs.quantize.spec import QuantSpec
from fp8rs.tensor.quantized import QuantizedTensor


def plane_of(
    module: Float8Params, key: str, device: torch.device
) -> tuple[Tensor | None, Plane | None]:
    """Return this rank's part of a batched weight, and its codes and scales.

    Args:
        module: a converted module with weights of experts.
        key: the parameter's name.
        device: the device of the model's computation.

    Returns:
        The values, or None for FP8 weights. The plane is None if the weight is not quantized.
    """
    parameter = module._parameters[key]
    local = own_part(parameter)
    if isinstance(local, QuantizedTensor):
        plane = local.plane("rowwise", "fp8rs.monitor")
        return None, plane.map(lambda x: x.to(device))
    spec = spec_for(module._fp8_state.key, device).weight
    gathered = hasattr(local, "_handle")
    if not gathered and not _has_fp8_gemms(module, spec, device):
        return None, None
    values = getattr(local, "high_precision", local).detach().to(device)
    if is_distributed(parameter):
        return values, _shard_plane(module, key, values, spec)
    return values, quantize_planes(spec, values, True, False)[0]


def _has_fp8_gemms(module: Float8Params, spec: QuantSpec, device: torch.device) -> bool:
    return (
        getattr(module, "_gemms", "gather") != "gather"
        and not other_implementation(module)
        and reads_format(spec.format)
        and has_grouped_gemm(device)
    )


def _shard_plane(module: Float8Params, key: str, values: Tensor, spec: QuantSpec) -> Plane | None:
    """Quantize a shard, with the scales of the whole weight."""
    from fp8rs.fsdp.local_shard import LocalShard
    from fp8rs.fsdp.shard_quantizer import shard_quantizer
    from fp8rs.model.shard_spec import ShardSpec

    parameter: Any = module._parameters[key]
    shard_spec = ShardSpec.from_dtensor(parameter)
    shard = LocalShard(module._fp8_params[key], values, shard_spec, values.device)
    row, _ = shard_quantizer(spec).quantize([shard])[0]
    return row
