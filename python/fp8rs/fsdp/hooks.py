"""The hooks that FSDP2 calls around an all-gather, for both kinds of local tensor."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8rs._torch import own_part
from fp8rs.scaling.streams import StreamDependency
from fp8rs.tensor.quantized import wrap
from fp8rs.tensor.store import Store

from .layout import AllGatherLayout
from .param import ParamHandle
from .shard_spec import ShardSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(eq=False, slots=True)
class AllGatherMetadata:
    """Input of the post-all-gather hook besides the gathered bytes.

    Attributes:
        handle: the parameter's handle.
        shard_spec: how the parameter is sharded.
        layout: how the gathered bytes are laid out.
        scale: the scales on the handle.
        inputs: with one rank, all tensors to gather, because FSDP2 passes on the first alone.
        ready: the work that wrote ``scale`` and ``inputs``.
    """

    handle: ParamHandle
    shard_spec: ShardSpec
    layout: AllGatherLayout
    scale: Tensor | None
    inputs: tuple[Tensor, ...]
    ready: StreamDependency


class PreAllGather:
    """A local tensor's ``fsdp_pre_all_gather``, in the form with one argument.

    In this form, codes and scales may have different sizes. FSDP2 reads the signature at every
    all-gather. Computing the signature of a method takes longer than the hook itself.
    """

    __slots__ = ("_local",)
    __signature__ = inspect.Signature(
        [inspect.Parameter("mesh", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    )

    def __init__(self, local: Any) -> None:
        self._local = local

    def __call__(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], AllGatherMetadata]:
        """Return the shard as flat uint8 tensors, equally long on all ranks, and metadata."""
        handle: ParamHandle = self._local._handle
        found: tuple[tuple[Tensor, ...], AllGatherMetadata]
        found = handle.state.ensure_sharded_model().all_gather_inputs(handle, self._local)
        return found


def post_all_gather(
    self: Any,
    all_gather_outputs: tuple[Tensor, ...],
    metadata: AllGatherMetadata,
    param_dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Build the unsharded weight over the gathered bytes, or let ``out`` refer to them.

    Returns:
        On the first call, the weight and its inner tensors besides the gathered ones. FSDP2 frees
        and allocates their memory.
    """
    metadata.handle.state.ensure_sharded_model().end_all_gather()
    metadata.ready.wait()
    outputs = (*all_gather_outputs, *metadata.inputs[len(all_gather_outputs) :])
    layout, shard_spec = metadata.layout, metadata.shard_spec
    store: Store | None = None if out is None else own_part(out)._store
    if store is not None:
        known = store.rowwise, store.columnwise
        if (again := layout.refilled(known, outputs, shard_spec, metadata.scale)) is not None:
            store.rowwise, store.columnwise = again
            return None
    # A training forward may write tensors that an inference forward has created.
    with torch.inference_mode(False), torch.no_grad():
        columnwise = None if store is None else store.columnwise
        planes = layout.unpack(outputs, shard_spec, metadata.scale, columnwise)
        if store is None:
            weight = wrap(
                Store(*planes, gathered=True), torch.Size(shard_spec.unsharded_shape), param_dtype
            )
            return weight, layout.inner_tensors(planes)
        store.rowwise, store.columnwise = planes
        return None
