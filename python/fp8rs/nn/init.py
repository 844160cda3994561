"""Initialization of sharded parameters that depends on positions in the whole parameter.

Torch's random numbers for a shard depend on the shard, and with equal seeds all ranks of a CPU mesh
draw the same numbers. The numbers here depend neither on the sharding nor on the device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8rs._torch import dtensor_like, is_distributed, local_shape_and_offset, local_tensor

_random_uniform = torch.ops.fp8rs.random_uniform_.default


def is_sharded(parameter: Any) -> bool:
    """Whether a parameter is a DTensor with memory."""
    return is_distributed(parameter) and not parameter.is_meta


@torch.no_grad()
def reset_linear(layer: Any) -> None:
    """Initialize the weight and the bias of a layer: uniform in +-1 / sqrt(fan_in).

    If they are sharded, all ranks of the mesh call it. The seed is drawn from the first rank's
    default generator.
    """
    fan_in = layer.weight.shape[-1]
    bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
    for parameter in (layer.weight, layer.bias):
        if parameter is not None:
            uniform_(parameter, bound)


def uniform_(parameter: Any, bound: float) -> None:
    """Fill a parameter with uniform numbers from -bound to bound."""
    if not is_sharded(parameter):
        parameter.uniform_(-bound, bound)
        return
    mesh = parameter.device_mesh
    global_shape = tuple(parameter.shape)
    local_shape, offset = local_shape_and_offset(global_shape, mesh, parameter.placements)
    device = local_tensor(parameter).device
    seed = common_seed(mesh)

    # Generate whole rows, and cut out the columns that this rank holds.
    cols = math.prod(global_shape[1:])
    values = torch.empty((local_shape[0], *global_shape[1:]), dtype=torch.float32, device=device)
    _random_uniform(values, seed, offset[0] * cols, -bound, bound)
    for dim in range(1, len(global_shape)):
        values = values.narrow(dim, offset[dim], local_shape[dim])
    parameter.copy_(dtensor_like(parameter, values))


def common_seed(mesh: Any) -> int:
    """Return 63 bits from the default generator of the mesh's first rank."""
    seed: Tensor = torch.empty((), dtype=torch.int64).random_()
    if dist.get_world_size() > 1:
        seed = seed.to(mesh.device_type)
        for dim in range(mesh.ndim):
            group = mesh.get_group(dim)
            dist.broadcast(seed, group=group, group_src=0)
    return int(seed)
