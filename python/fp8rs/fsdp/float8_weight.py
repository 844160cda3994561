"""The local tensor of a sharded FP8 weight: a quantized tensor whose bytes FSDP2 gathers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8rs.tensor.quantized import Float8Tensor, MXFP8Tensor, QuantizedTensor

from . import hooks
from .planes_owner import PlanesOwner


class Sharded(QuantizedTensor):
    """A quantized shard."""

    fsdp_pre_all_gather = hooks.pre_all_gather
    fsdp_post_all_gather = hooks.post_all_gather

    @property
    def _handle(self) -> PlanesOwner:
        weight = self._store.owner
        assert isinstance(weight, PlanesOwner)
        return weight

    @property
    def _is_weight(self) -> bool:
        """Whether this object is the local tensor of the parameter, and not a view or a copy."""
        return self._handle.in_place and self is self._handle.parameter_part

    @property
    def __create_chunk_list__(self) -> Callable[[], list[Any]]:
        """What DCP calls on every rank when a load begins; only empty shards have it.

        They are given nothing to load, but take part when the other ranks synchronize the scales.
        """
        if self.numel():
            raise AttributeError("__create_chunk_list__")
        found: Callable[[], list[Any]] = self._handle.begin_empty_load
        return found

    @property
    def shard(self) -> Tensor:
        """This, under the name that gathers ask for."""
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Members of lists (torch's foreach and fused optimizers) go as views: ranks agree on their
        # scales after all of them, and not at each.
        args = tuple([*map(_view, arg)] if isinstance(arg, (list, tuple)) else arg for arg in args)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _view(x: Any) -> Any:
    return x.view_of(x._window) if isinstance(x, Sharded) else x


class Float8Weight(Sharded, Float8Tensor):
    """A shard with fp32 scales."""


class MXFP8Weight(Sharded, MXFP8Tensor):
    """A shard with E8M0 scales."""


#: The class of a shard, by the dtype of its scales.
SHARD_TYPES: dict[torch.dtype, type[Sharded]] = {
    torch.float32: Float8Weight,
    torch.float8_e8m0fnu: MXFP8Weight,
}


def sharded(local: QuantizedTensor, weight: PlanesOwner) -> Sharded:
    """The shard of a weight, over the planes of ``local``."""
    local._store.owner = weight
    shard: Any = local.view_of(local._window)
    shard.__class__ = SHARD_TYPES[local.format.scale_dtype]
    found: Sharded = shard
    return found
