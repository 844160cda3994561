"""Which part of a parameter this rank holds, and which ranks hold the rest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8rs._torch import local_tensor
from fp8rs.quantize.formats import split_batch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, eq=False)
class ShardSpec:
    """How one parameter is sharded.

    Attributes:
        device_type: the mesh's device type.
        matrix_groups: process groups whose ranks share matrices: FSDP2's and tensor parallelism's,
            without replicas. A batched weight (E, N, K) on Shard(0) has none, because each rank
            holds whole matrices.
        shard_groups: FSDP2's process group alone; empty with one rank.
        num_shards: number of FSDP2's shards.
        shard_rank: this rank's shard.
        shard_dim: the dimension that FSDP2 shards.
        global_shape: the parameter's shape.
        unsharded_shape: the shape that FSDP2 gathers. With tensor parallelism, this rank's part.
        global_offset: where that part begins in the parameter, for each dimension.
    """

    device_type: str
    matrix_groups: tuple[Any, ...]
    shard_groups: tuple[Any, ...]
    num_shards: int
    shard_rank: int
    shard_dim: int
    global_shape: tuple[int, ...]
    unsharded_shape: tuple[int, ...]
    global_offset: tuple[int, ...]

    # Cached, because all-gathers and optimizer steps read these.

    @cached_property
    def batched(self) -> bool:
        """Whether the parameter is a batch of matrices."""
        return len(self.unsharded_shape) > 2

    @cached_property
    def shards_batch(self) -> bool:
        """Whether FSDP2 gives each rank whole matrices of a batch."""
        return self.batched and self.shard_dim == 0

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of each gathered matrix."""
        return split_batch(self.unsharded_shape, True)[1]

    @cached_property
    def padded_length(self) -> int:
        """Length of the longest shard along ``shard_dim``."""
        return -(-self.unsharded_shape[self.shard_dim] // self.num_shards)

    @cached_property
    def padded_numel(self) -> int:
        """Number of elements of the longest shard. FSDP2 pads all shards to it."""
        shape = list(self.unsharded_shape)
        shape[self.shard_dim] = self.padded_length
        return prod(shape)

    @property
    def shard_offset(self) -> int:
        """The shard's first index along ``shard_dim`` in the whole weight."""
        return min(self.shard_rank * self.padded_length, self.unsharded_shape[self.shard_dim])

    @property
    def row_offset(self) -> int:
        """The shard's first row in each matrix, which decides where blocks begin."""
        return 0 if self.shards_batch else self.shard_offset * self.rows_per_index

    @property
    def rows_per_index(self) -> int:
        """Rows of a matrix for each index along ``shard_dim``. Columns are not counted."""
        return prod(self.unsharded_shape[self.shard_dim + 1 : -1])

    def mesh_device(self, device: torch.device) -> torch.device:
        """Return the mesh's device for a shard that is on ``device``, possibly offloaded."""
        if device.type == self.device_type:
            return device
        accelerator = torch.get_device_module(self.device_type)
        return torch.device(self.device_type, accelerator.current_device())

    @cached_property
    def element_offsets(self) -> tuple[int, ...]:
        """The number of the shard's first element. Its other elements have the next numbers.

        Each element of the parameter has a number of its own, which selects its random numbers. If
        a (4, 4) parameter is split into two halves by columns, the left half has the numbers 0 to 7
        and the right half 8 to 15.

        If the shard has some rows of each matrix of a batch, there is one number for each matrix,
        because rows of other ranks lie between them.
        """
        if self._has_rows_of_each_matrix:
            return self._first_elements_of_matrices()

        # Count the elements with smaller numbers. Those of a matrix are:
        #
        #     left left above above .     left: all columns before the shard's
        #     left left shard shard .     above: the rows before the shard's, in its own columns
        #     left left shard shard .
        #
        # Each dimension of the parameter adds such a region.
        first_element = 0
        for dim, start in enumerate(self._shard_start):
            earlier_dims = prod(self.global_shape[:dim])
            later_dims = prod(self._shard_shape[dim + 1 :])
            first_element += earlier_dims * start * later_dims
        return (first_element,)

    @property
    def _shard_start(self) -> tuple[int, ...]:
        """Where the shard begins in the parameter, for each dimension."""
        start = list(self.global_offset)
        start[self.shard_dim] += self.shard_offset
        return tuple(start)

    @property
    def _shard_shape(self) -> tuple[int, ...]:
        """The shape of the shard, without padding."""
        shape = list(self.unsharded_shape)
        remaining_length = shape[self.shard_dim] - self.shard_offset
        shape[self.shard_dim] = min(self.padded_length, remaining_length)
        return tuple(shape)

    @property
    def _has_rows_of_each_matrix(self) -> bool:
        """Whether FSDP2 divides a batch's matrices by rows, and nothing else divides them."""
        divided_by_tensor_parallelism = self.unsharded_shape[1:] != self.global_shape[1:]
        return self.batched and self.shard_dim == 1 and not divided_by_tensor_parallelism

    def _first_elements_of_matrices(self) -> tuple[int, ...]:
        """Return the number of the shard's first element in each matrix of a batch."""
        matrix_numel = prod(self.global_shape[1:])
        numel_before_shard = self.shard_offset * prod(self.global_shape[2:])
        first_matrix = self.global_offset[0]
        first_elements = []
        for matrix in range(first_matrix, first_matrix + self.unsharded_shape[0]):
            first_elements.append(matrix * matrix_numel + numel_before_shard)
        return tuple(first_elements)

    @classmethod
    def from_dtensor(cls, parameter: DTensor) -> ShardSpec:
        """Return how FSDP2 has sharded a parameter."""
        mesh = parameter.device_mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, "ranks outside the mesh hold no shard"
        placements: list[Any] = list(parameter.placements)
        global_shape = tuple(parameter.shape)
        sharded_mesh_dims = [i for i, p in enumerate(placements) if not p.is_replicate()]
        if not sharded_mesh_dims:
            return cls(
                device_type=mesh.device_type,
                matrix_groups=(),
                shard_groups=(),
                num_shards=1,
                shard_rank=0,
                shard_dim=0,
                global_shape=global_shape,
                unsharded_shape=global_shape,
                global_offset=(0,) * len(global_shape),
            )

        # FSDP2's mesh dimension comes before the dimensions of tensor parallelism. Those divide the
        # parameter first, and FSDP2 shards the part of this rank.
        fsdp_mesh_dim, *tensor_parallel_mesh_dims = sharded_mesh_dims
        unsharded_shape = list(global_shape)
        global_offset = [0] * len(global_shape)
        for mesh_dim in tensor_parallel_mesh_dims:
            dim = placements[mesh_dim].dim
            chunk = -(-unsharded_shape[dim] // mesh.size(mesh_dim))
            start = min(coordinate[mesh_dim] * chunk, unsharded_shape[dim])
            global_offset[dim] += start
            unsharded_shape[dim] = min(chunk, unsharded_shape[dim] - start)

        matrix_groups = []
        shard_groups = []
        for mesh_dim in sharded_mesh_dims:
            if mesh.size(mesh_dim) == 1:
                continue
            group = mesh.get_group(mesh_dim)
            divides_matrices = len(global_shape) < 3 or placements[mesh_dim].dim != 0
            if divides_matrices:
                matrix_groups.append(group)
            if mesh_dim == fsdp_mesh_dim:
                shard_groups.append(group)

        return cls(
            device_type=mesh.device_type,
            matrix_groups=tuple(matrix_groups),
            shard_groups=tuple(shard_groups),
            num_shards=mesh.size(fsdp_mesh_dim),
            shard_rank=coordinate[fsdp_mesh_dim],
            shard_dim=placements[fsdp_mesh_dim].dim,
            global_shape=global_shape,
            unsharded_shape=tuple(unsharded_shape),
            global_offset=tuple(global_offset),
        )


def local_part(values: Tensor, parameter: DTensor) -> Tensor:
    """Return a copy of the part of a parameter's values that this rank's shard holds.

    Args:
        values: values of the whole parameter, or of the part that FSDP2 gathers.
        parameter: the sharded parameter.
    """
    shard_spec = ShardSpec.from_dtensor(parameter)
    if values.shape != shard_spec.unsharded_shape:
        for dim, length in enumerate(shard_spec.unsharded_shape):
            values = values.narrow(dim, shard_spec.global_offset[dim], length)
    shard_dim = shard_spec.shard_dim
    shard_length = local_tensor(parameter).shape[shard_dim]
    return values.narrow(shard_dim, shard_spec.shard_offset, shard_length).clone()
