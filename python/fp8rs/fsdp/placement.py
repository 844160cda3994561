"""Where a weight's shard lies in the whole weight, and which ranks hold the rest."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fp8rs._torch import local_tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, eq=False, slots=True)
class Placement:
    """How one weight is sharded.

    Attributes:
        device_type: the mesh's.
        groups: process groups of all mesh dimensions that the weight is sharded on and that have
            more than one rank: FSDP's and tensor parallelism's, never replicas.
        shard_groups: FSDP's alone.
        ranks: the number of FSDP's shards.
        rank: this rank's shard.
        dim: the dimension that FSDP cuts.
        shape: the parameter's.
        whole: the shape that FSDP gathers: under tensor parallelism, this rank's part.
        origin: where that part begins in the parameter, for each dimension.
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

    @property
    def padded(self) -> int:
        """Length of the longest shard along ``dim``."""
        return -(-self.whole[self.dim] // self.ranks)

    @property
    def padded_numel(self) -> int:
        """Elements of the longest shard, to which FSDP2 pads all of them."""
        shape = list(self.whole)
        shape[self.dim] = self.padded
        return prod(shape)

    @property
    def offset(self) -> int:
        """The shard's first row (along ``dim``) in the whole weight."""
        return min(self.rank * self.padded, self.whole[self.dim])

    @property
    def number(self) -> int:
        """The number of the shard's first element, where no two elements of the matrix have one.

        They are counted by rows. Of a matrix that is cut by columns all elements of one part come
        before those of the next: a shard's own are consecutive.
        """
        start, size = list(self.origin), list(self.whole)
        start[self.dim] += self.offset
        size[self.dim] = min(self.padded, self.whole[self.dim] - self.offset)
        return self.shape[0] * start[1] + start[0] * size[1]


def place(parameter: DTensor) -> Placement:
    """The placement of a parameter that FSDP2 has sharded."""
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh holds no shard"
    placements: list[Any] = list(parameter.placements)
    sharded = [(i, p) for i, p in enumerate(placements) if not p.is_replicate()]
    shape = tuple(parameter.shape)
    if not sharded:
        return Placement(mesh.device_type, (), (), 1, 0, 0, shape, shape, (0,) * len(shape))
    # FSDP's mesh dimension comes before those of tensor parallelism.
    fsdp, placement = sharded[0]
    whole, origin = list(shape), [0] * len(shape)
    for i, p in sharded[1:]:
        chunk = -(-whole[p.dim] // mesh.size(i))
        start = min(coordinate[i] * chunk, whole[p.dim])
        origin[p.dim] += start
        whole[p.dim] = min(chunk, whole[p.dim] - start)
    groups = {i: mesh.get_group(i) for i, _ in sharded if mesh.size(i) > 1}
    return Placement(
        mesh.device_type,
        tuple(groups.values()),
        tuple(group for i, group in groups.items() if i == fsdp),
        mesh.size(fsdp),
        coordinate[fsdp],
        placement.dim,
        shape,
        tuple(whole),
        tuple(origin),
    )


def local_part(values: Tensor, parameter: DTensor) -> Tensor:
    """What this rank's shard has of a parameter's values, as a tensor of its own.

    Args:
        values: of the whole parameter, or of the part of it that FSDP cuts.
        parameter: says how it is cut.
    """
    placement = place(parameter)
    if values.shape != placement.whole:
        for dim, (start, length) in enumerate(zip(placement.origin, placement.whole, strict=True)):
            values = values.narrow(dim, start, length)
    length = local_tensor(parameter).shape[placement.dim]
    return values.narrow(placement.dim, placement.offset, length).clone()
