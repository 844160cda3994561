"""The values of one parameter's shard, as a quantizer reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8rs.model.handle import ParamHandle
from fp8rs.model.shard_spec import ShardSpec
from fp8rs.tensor.quantized import QuantizedTensor


@dataclass(eq=False, slots=True)
class LocalShard:
    """The values of one parameter's shard on this rank.

    Attributes:
        handle: the parameter's handle.
        data: the shard without padding, in high precision, or an FP8 weight's quantized shard.
        shard_spec: how the parameter is sharded.
        device: the mesh's device. An offloaded shard is on another one.
    """

    handle: ParamHandle
    data: Any  # a Tensor, or a QuantizedTensor if `is_fp8`
    shard_spec: ShardSpec
    device: torch.device

    @property
    def is_fp8(self) -> bool:
        """Whether the shard is stored quantized."""
        return isinstance(self.data, QuantizedTensor)

    @property
    def matrices(self) -> int:
        """The number of matrices that the shard has, or has parts of."""
        return int(self.data.shape[0]) if self.shard_spec.batched else 1


def values_of(local: Any) -> Any:
    """Return the plain tensor of a master weight, or another local tensor itself."""
    return getattr(local, "high_precision", local)


def set_scales(shards: Sequence[LocalShard], scales: Tensor) -> None:
    """Give each handle the scales of its matrices.

    Args:
        shards: the shards.
        scales: the scales of their matrices, (n,), of one shard after the other.
    """
    # GEMMs read the scale of a single matrix at a multiple of 16 bytes.
    aligned = scales.new_empty(scales.shape[0], 4)
    aligned[:, 0] = scales
    counts = [shard.matrices for shard in shards]
    scales_per_shard = scales.split(counts)
    aligned_per_shard = aligned[:, 0].split(counts)
    for index, shard in enumerate(shards):
        if shard.shard_spec.batched:
            shard.handle.scale = scales_per_shard[index]
        else:
            shard.handle.scale = aligned_per_shard[index].view(())
