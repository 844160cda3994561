"""Which part of a parameter this rank holds, and which ranks hold the rest."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8rs._torch import local_tensor
from fp8rs.tensor.formats import split

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, eq=False, slots=True)
class ShardSpec:
    """How one parameter is sharded.

    Attributes:
        device_type: the mesh's device type.
        groups: process groups of all mesh dimensions that shard the parameter over more than one
            rank: FSDP2's and tensor parallelism's, without replicas.
        shard_groups: FSDP2's process group alone; empty with one rank.
        ranks: number of FSDP2's shards.
        rank: this rank's shard.
        dim: the dimension that FSDP2 shards.
        shape: the parameter's shape.
        whole: the shape that FSDP2 gathers. With tensor parallelism, this rank's part.
        origin: where that part begins in the parameter, for each dimension.
        matrix_groups: the part of ``groups`` whose ranks share matrices. A batched weight (E, N, K)
            on Shard(0) has none, because each rank holds whole matrices.
    """

    device_type: str
    groups: tuple[Any, ...]
    shard_groups: tuple[Any, ...]
    ranks: int
    rank: int
    dim: int
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    origin: tuple[int, ...]
    matrix_groups: tuple[Any, ...] = ()

    @property
    def batched(self) -> bool:
        """Whether the parameter is a batch of matrices."""
        return len(self.whole) > 2

    @property
    def by_matrix(self) -> bool:
        """Whether FSDP2 gives each rank whole matrices of a batch."""
        return self.batched and self.dim == 0

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of each gathered matrix."""
        return split(self.whole, True)[1]

    @property
    def padded(self) -> int:
        """Length of the longest shard along ``dim``."""
        return -(-self.whole[self.dim] // self.ranks)

    @property
    def padded_numel(self) -> int:
        """Number of elements of the longest shard. FSDP2 pads all shards to it."""
        shape = list(self.whole)
        shape[self.dim] = self.padded
        return prod(shape)

    @property
    def offset(self) -> int:
        """The shard's first index along ``dim`` in the whole weight."""
        return min(self.rank * self.padded, self.whole[self.dim])

    @property
    def row_offset(self) -> int:
        """The shard's first row in each matrix, which decides where blocks begin."""
        return 0 if self.by_matrix else self.offset * self.rows_per_index

    @property
    def rows_per_index(self) -> int:
        """Rows of a matrix for each index along ``dim``. Columns are not counted."""
        return prod(self.whole[self.dim + 1 : -1])

    def mesh_device(self, device: torch.device) -> torch.device:
        """Return the mesh's device for a shard that is on ``device``, possibly offloaded."""
        if device.type == self.device_type:
            return device
        accelerator = torch.get_device_module(self.device_type)
        return torch.device(self.device_type, accelerator.current_device())

    @property
    def element_offsets(self) -> tuple[int, ...]:
        """The index of the shard's first element, unique among the elements of the parameter.

        A shard with rows of all matrices of a batch has one index per matrix, counted in order.
        Elements of other shards are counted so that they are consecutive: if other dimensions than
        the first are sharded, all elements of one part are counted before the next part.
        """
        if self.batched and self.dim == 1 and self.whole[1:] == self.shape[1:]:
            numel, first = prod(self.shape[1:]), self.offset * prod(self.shape[2:])
            return tuple((self.origin[0] + i) * numel + first for i in range(self.whole[0]))
        start, size, offset = list(self.origin), list(self.whole), 0
        start[self.dim] += self.offset
        size[self.dim] = min(self.padded, self.whole[self.dim] - self.offset)
        for dim, begin in enumerate(start):
            offset += prod(self.shape[:dim]) * begin * prod(size[dim + 1 :])
        return (offset,)


def shard_spec(parameter: DTensor) -> ShardSpec:
    """Return how FSDP2 has sharded a parameter."""
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "ranks outside the mesh hold no shard"
    placements: list[Any] = list(parameter.placements)
    sharded = [(i, p) for i, p in enumerate(placements) if not p.is_replicate()]
    shape = tuple(parameter.shape)
    if not sharded:
        return ShardSpec(mesh.device_type, (), (), 1, 0, 0, shape, shape, (0,) * len(shape))
    # FSDP2's mesh dimension comes before the dimensions of tensor parallelism.
    fsdp, placement = sharded[0]
    whole, origin = list(shape), [0] * len(shape)
    for i, p in sharded[1:]:
        chunk = -(-whole[p.dim] // mesh.size(i))
        start = min(coordinate[i] * chunk, whole[p.dim])
        origin[p.dim] += start
        whole[p.dim] = min(chunk, whole[p.dim] - start)
    groups = {i: mesh.get_group(i) for i, _ in sharded if mesh.size(i) > 1}
    return ShardSpec(
        mesh.device_type,
        tuple(groups.values()),
        tuple(group for i, group in groups.items() if i == fsdp),
        mesh.size(fsdp),
        coordinate[fsdp],
        placement.dim,
        shape,
        tuple(whole),
        tuple(origin),
        tuple(group for i, group in groups.items() if len(shape) < 3 or placements[i].dim != 0),
    )


def local_part(values: Tensor, parameter: DTensor) -> Tensor:
    """Return a copy of the part of a parameter's values that this rank's shard holds.

    Args:
        values: values of the whole parameter, or of the part that FSDP2 gathers.
        parameter: the sharded parameter.
    """
    spec = shard_spec(parameter)
    if values.shape != spec.whole:
        for dim, (start, length) in enumerate(zip(spec.origin, spec.whole, strict=True)):
            values = values.narrow(dim, start, length)
    length = local_tensor(parameter).shape[spec.dim]
    return values.narrow(spec.dim, spec.offset, length).clone()
