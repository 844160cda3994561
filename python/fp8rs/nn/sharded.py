"""Linear layers with DTensor operands, for tensor parallelism with torch's own plans.

The layer's function computes on local tensors. The rules here give the placements of the output and
of the gradients, like DTensor's rules for torch's linear. They cover the placements of
ColwiseParallel, RowwiseParallel and SequenceParallel. Each rank computes the scales of activations
and gradients from its own part. This module is imported on first use, because
torch.distributed.tensor takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fp8rs._torch import contiguous_stride

#: Maps local input, weight and bias to the output.
LocalFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_SUPPORTED = (
    "input Replicate() and weight Shard(0), input Shard(-1) and weight Shard(1), or any input that "
    "is not sharded along its last dim and weight Replicate()"
)


class _Placements(NamedTuple):
    """The placements of the results of a linear layer on one mesh dimension."""

    output: Placement
    input_grad: Placement
    weight_grad: Placement


def on_shards(
    compute: LocalFunction,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    reduce: Callable[[DTensor], DTensor] | None = None,
) -> DTensor:
    """Compute ``x @ weight.T + bias`` of DTensors by ``compute`` on their local tensors.

    Args:
        compute: the layer's function.
        x: (..., in). A plain tensor counts as replicated.
        weight: (out, in). A plain tensor counts as replicated.
        bias: (out,) or None.
        reduce: reduces a Partial output before the bias is added.

    Returns:
        A DTensor. It is Partial on mesh dimensions where the weight is Shard(1), unless reduced.

    Raises:
        ValueError: the operands are on different meshes.
        TypeError: their placements are not supported. The message lists the supported ones.
    """
    mesh = next(operand.device_mesh for operand in (weight, x) if isinstance(operand, DTensor))
    x_dtensor = _on_mesh(mesh, x, "input")
    weight_dtensor = _on_mesh(mesh, weight, "weight")
    output_placements = []
    x_grad_placements = []
    weight_grad_placements = []
    for x_placement, weight_placement in zip(
        x_dtensor.placements, weight_dtensor.placements, strict=True
    ):
        placements = _result_placements(x_placement, weight_placement, x.ndim)
        output_placements.append(placements.output)
        x_grad_placements.append(placements.input_grad)
        weight_grad_placements.append(placements.weight_grad)
    is_partial = any(placement.is_partial() for placement in output_placements)

    bias_dtensor = None if bias is None else _on_mesh(mesh, bias, "bias")
    local_bias = None
    if bias_dtensor is not None and not is_partial:
        # The bias is sharded like the output's last dim. Its gradient is partial like the weight's.
        local_bias = bias_dtensor.to_local(grad_placements=weight_grad_placements)
    y = compute(
        x_dtensor.to_local(grad_placements=x_grad_placements),
        weight_dtensor.to_local(grad_placements=weight_grad_placements),
        local_bias,
    )

    shape = torch.Size((*x_dtensor.shape[:-1], weight_dtensor.shape[0]))  # shards may be uneven
    stride = contiguous_stride(shape)
    out = DTensor.from_local(
        y, mesh, output_placements, run_check=False, shape=shape, stride=stride
    )
    if is_partial and reduce is not None:
        out = reduce(out)
    if is_partial and bias_dtensor is not None:  # add the bias to the reduced output
        out = cast(DTensor, out + bias_dtensor)
    return out


def _on_mesh(mesh: DeviceMesh, tensor: Tensor, name: str) -> DTensor:
    """Return a tensor as a DTensor on ``mesh``."""
    if not isinstance(tensor, DTensor):
        return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if tensor.device_mesh != mesh:
        raise ValueError(
            f"{name} is on the mesh {tensor.device_mesh}, the weight on {mesh}: use one"
        )
    return tensor


def _result_placements(x: Placement, weight: Placement, ndim: int) -> _Placements:
    """Return the placements of the results on one mesh dimension.

    Args:
        x: the placement of the input.
        weight: the placement of the weight.
        ndim: the number of dims of the input.
    """
    last = ndim - 1
    shards_features = isinstance(x, Shard) and x.dim % ndim == last
    if weight.is_replicate():
        if x.is_replicate():
            return _Placements(Replicate(), Replicate(), Replicate())
        if isinstance(x, Shard) and not shards_features:
            return _Placements(x, x, Partial())
    if isinstance(weight, Shard):
        if weight.dim == 0 and x.is_replicate():
            return _Placements(Shard(last), Partial(), weight)
        if weight.dim == 1 and shards_features:
            return _Placements(Partial(), x, weight)
    raise TypeError(
        f"an FP8 linear layer got an input with placement {x} and a weight with placement "
        f"{weight}. Supported are {_SUPPORTED}. Redistribute the input"
    )
