"""FSDP2's all-gather hooks of local tensors: master weights and FP8 shards.

FSDP2 calls the pre-all-gather hook of each parameter of a group, all-gathers the tensors that the
hooks return, and calls the post-all-gather hook of each parameter with the gathered tensors.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8rs._torch import outside_inference_mode, outside_selective_checkpoints, own_part
from fp8rs.model.handle import AllGatherInputs, LocalTensor
from fp8rs.tensor.plane_storage import PlaneStorage
from fp8rs.tensor.quantized import wrap

from .layout import AllGatherMetadata

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class PreAllGather:
    """The ``fsdp_pre_all_gather`` of a local tensor, with the signature ``(mesh)``.

    With this signature, the tensors to gather may have different sizes.

    FSDP2 may call the hook inside of a checkpointed function, in its forward only. Selective
    checkpointing must not count its operators.
    """

    #: FSDP2 reads the signature at every all-gather. Computing the signature of a method takes
    #: longer than the hook itself.
    __signature__ = inspect.Signature(
        [inspect.Parameter("mesh", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    )
    __slots__ = ("_local",)

    def __init__(self, local: LocalTensor) -> None:
        self._local = local

    @outside_selective_checkpoints
    def __call__(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], AllGatherInputs]:
        """Return the shard as flat uint8 tensors, equally long on all ranks, and metadata."""
        unit = self._local._handle.unit
        metadata = unit.all_gather_inputs(self._local)
        return metadata.inputs, metadata


@outside_selective_checkpoints
def post_all_gather(
    self: LocalTensor,
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
    metadata.ready.wait()
    # With one rank, FSDP2 passes on the first input alone.
    missing_outputs = metadata.inputs[len(all_gather_outputs) :]
    outputs = (*all_gather_outputs, *missing_outputs)
    layout = metadata.layout
    shard_spec = metadata.shard_spec

    if out is not None:
        storage: PlaneStorage = own_part(out)._storage
        planes = layout.planes_of_last_unshard(storage, outputs, shard_spec, metadata.scale)
        if planes is None:
            # A training forward may write tensors that an inference forward has created.
            with outside_inference_mode(), torch.no_grad():
                planes = layout.unpack(outputs, shard_spec, metadata.scale, storage)
        storage.rowwise, storage.columnwise = planes
        return None

    with outside_inference_mode(), torch.no_grad():
        planes = layout.unpack(outputs, shard_spec, metadata.scale)
        shape = torch.Size(shard_spec.unsharded_shape)
        weight = wrap(PlaneStorage(*planes, gathered=True), shape, param_dtype)
        return weight, layout.inner_tensors(planes, shard_spec)
