"""Linear layers with DTensor operands, for tensor parallelism with torch's own plans.

The layer's function computes on local tensors. The rules here give the placements of the output and
of the gradients, like DTensor's rules for torch's linear. They cover the placements of
ColwiseParallel, RowwiseParallel and SequenceParallel. Each rank computes the scales of activations
and gradients from its own part. This module is imported on first use, because
torch.distributed.tensor takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fp8rs._torch import contiguous_stride

#: Maps local input, weight and bias to the output.
Local = Callable[[Tensor, Tensor, Any], Tensor]

_WORKS = (
    "input Replicate() and weight Shard(0), input Shard(-1) and weight Shard(1), or any input that "
    "is not sharded along its last dim and weight Replicate()"
)


def on_shards(
    compute: Local,
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
    mesh = next(t.device_mesh for t in (weight, x) if isinstance(t, DTensor))
    dx, dw = _on(mesh, x, "input"), _on(mesh, weight, "weight")
    rules = [_rule(px, pw, x.ndim) for px, pw in zip(dx.placements, dw.placements, strict=True)]
    outputs, x_grads, weight_grads = ([rule[i] for rule in rules] for i in range(3))
    partial = any(p.is_partial() for p in outputs)
    local_bias = None
    if bias is not None and not partial:
        # The bias is sharded like the output's last dim. Its gradient is partial like the weight's.
        b = _on(mesh, bias, "bias")
        local_bias = b.to_local(grad_placements=weight_grads)
    y = compute(
        dx.to_local(grad_placements=x_grads),
        dw.to_local(grad_placements=weight_grads),
        local_bias,
    )
    shape = torch.Size((*dx.shape[:-1], dw.shape[0]))  # shards may be uneven
    stride = contiguous_stride(shape)
    out = DTensor.from_local(y, mesh, outputs, run_check=False, shape=shape, stride=stride)
    if partial and reduce is not None:
        out = reduce(out)
    if bias is None or not partial:
        return out
    return cast(DTensor, out + _on(mesh, bias, "bias"))  # on the reduced output


def _on(mesh: Any, t: Tensor, name: str) -> DTensor:
    """Return ``t`` as a DTensor on ``mesh``."""
    if not isinstance(t, DTensor):
        return DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if t.device_mesh != mesh:
        raise ValueError(f"{name} is on the mesh {t.device_mesh}, the weight on {mesh}: use one")
    return t


def _rule(x: Any, weight: Any, ndim: int) -> tuple[Any, Any, Any]:
    """Return the placements of output, input gradient and weight gradient on one mesh dimension."""
    last = ndim - 1
    if weight.is_replicate():
        if x.is_replicate():
            return Replicate(), Replicate(), Replicate()
        if isinstance(x, Shard) and x.dim % ndim != last:
            return x, x, Partial()
    if isinstance(weight, Shard) and weight.dim == 0 and x.is_replicate():
        return Shard(last), Partial(), weight
    sharded_inside = isinstance(x, Shard) and x.dim % ndim == last
    if isinstance(weight, Shard) and weight.dim == 1 and sharded_inside:
        return Partial(), x, weight
    raise TypeError(
        f"an FP8 linear layer got an input with placement {x} and a weight with placement "
        f"{weight}. Supported are {_WORKS}. Redistribute the input"
    )
