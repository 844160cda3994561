"""Where a weight's shard lies in the whole weight, and which ranks hold the rest."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

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
        whole: the shape that FSDP gathers: under tensor parallelism, this rank's part.
    """

    device_type: str
    groups: tuple[Any, ...]
    shard_groups: tuple[Any, ...]
    ranks: int
    rank: int
    dim: int
    whole: tuple[int, ...]

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


def place(parameter: DTensor) -> Placement:
    """The placement of a parameter that FSDP2 has sharded."""
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh holds no shard"
    placements: list[Any] = list(parameter.placements)
    sharded = [(i, p) for i, p in enumerate(placements) if not p.is_replicate()]
    whole = list(parameter.shape)
    if not sharded:
        return Placement(mesh.device_type, (), (), 1, 0, 0, tuple(whole))
    # FSDP's mesh dimension comes before those of tensor parallelism.
    fsdp, placement = sharded[0]
    for i, p in sharded[1:]:
        chunk = -(-whole[p.dim] // mesh.size(i))
        start = min(coordinate[i] * chunk, whole[p.dim])
        whole[p.dim] = min(chunk, whole[p.dim] - start)
    groups = {i: mesh.get_group(i) for i, _ in sharded if mesh.size(i) > 1}
    return Placement(
        mesh.device_type,
        tuple(groups.values()),
        tuple(group for i, group in groups.items() if i == fsdp),
        mesh.size(fsdp),
        coordinate[fsdp],
        placement.dim,
        tuple(whole),
    )
