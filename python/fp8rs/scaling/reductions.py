"""Reductions of packed maxima, each over the ranks that share its tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8rs._torch import in_fake_mode
from fp8rs.quantize.cast import reduce_amax

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def index_tensor(indices: tuple[int, ...], device: torch.device) -> Tensor:
    """Return indices as an int64 tensor on a device.

    The tensor is cached, because copying a list to a GPU makes the host wait. A fake tensor is not
    cached, because it is valid only in its mode.
    """
    if in_fake_mode():
        return torch.tensor(indices, dtype=torch.int64, device=device)
    return _cached_indices(indices, device)


@lru_cache(maxsize=1024)
def _cached_indices(indices: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(indices, dtype=torch.int64, device=device)


def mesh_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return the process groups along all dimensions of a mesh."""
    if mesh.size() == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None, "a mesh exists"
        return [world]
    return [mesh.get_group(dim) for dim in range(mesh.ndim)]


def check_same_layers(layers: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise ValueError on every rank of a group if the ranks have different numbers of layers."""
    # The maximum of negative counts is the negative minimum.
    counts = torch.tensor([layers, -layers], dtype=torch.int32, device=device)
    dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=group)
    most, negative_least = counts.tolist()
    least = -negative_least
    if most != least:
        raise ValueError(
            "amax_reduction_group has ranks whose models have different numbers of converted "
            f"layers, {least} to {most}, for example pipeline stages or experts. Pass a group of "
            "ranks that have the same layers, or None"
        )


class MaximaRange(NamedTuple):
    """Consecutive maxima of a packed tensor that the same ranks share.

    Attributes:
        indices: their indices in the packed tensor.
        groups: the process groups to reduce them over. Reducing over several groups in turn
            (FSDP's, tensor parallelism's) reduces over the ranks of their combined mesh.
    """

    indices: range
    groups: Sequence[dist.ProcessGroup]


def reduce_packed_(values: Tensor, ranges: Iterable[MaximaRange]) -> Tensor:
    """Reduce maxima in place, with one all-reduce per process group.

    Every rank of a group must pass the same ranges in the same order.

    Args:
        values: the maxima (n,), fp32 and contiguous.
        ranges: the maxima that are reduced. Two ranges of one group are equal or disjoint.
    """
    # Dictionaries without values are ordered sets.
    indices_by_group: dict[str, dict[range, None]] = {}
    for indices, groups in ranges:
        for group in groups:
            if indices and group.size() > 1:
                indices_by_group.setdefault(group.group_name, {})[indices] = None

    for group_name, group_indices in indices_by_group.items():
        if sum(map(len, group_indices)) == values.numel():
            reduce_amax(values, group_name, in_place=True)
        else:
            positions = index_tensor(tuple(chain.from_iterable(group_indices)), values.device)
            values[positions] = reduce_amax(values[positions], group_name, in_place=True)
    return values
