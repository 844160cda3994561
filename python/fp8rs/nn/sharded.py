"""A linear layer whose operands are DTensors: tensor parallelism by torch's own plans.

The layer's function computes on local tensors. What is here says, for the placements of input and
weight, what its result and its gradients are of the whole ones: what DTensor's own rules say of
torch's linear, for the placements that ColwiseParallel, RowwiseParallel and SequenceParallel make.
Scales of activations and gradients are those of a rank's own part. (Only those who shard import
this: torch.distributed.tensor takes seconds.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

#: Input, weight and bias (all local) to the output.
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
    """``x @ weight.T + bias`` of DTensors, by ``compute`` on their local tensors.

    Args:
        compute: the layer's function.
        x: (..., in). A plain tensor is taken as the same on all ranks.
        weight: (out, in). A plain one likewise.
        bias: (out,) or None.
        reduce: given a Partial output, which the bias is added to afterwards.

    Returns:
        A DTensor; Partial along a mesh dimension on which the weight is Shard(1), or reduced.

    Raises:
        ValueError: the operands are on different meshes.
        TypeError: there is no rule for their placements; the message says which ones have.
    """
    mesh = next(t.device_mesh for t in (weight, x) if isinstance(t, DTensor))
    dx, dw = _on(mesh, x, "input"), _on(mesh, weight, "weight")
    rules = [_rule(px, pw, x.ndim) for px, pw in zip(dx.placements, dw.placements, strict=True)]
    outputs, x_grads, weight_grads = ([rule[i] for rule in rules] for i in range(3))
    partial = any(p.is_partial() for p in outputs)
    local_bias = None
    if bias is not None and not partial:
        # Sharded as the output's last dim, its gradient partial wherever the weight's is.
        b = _on(mesh, bias, "bias")
        local_bias = b.to_local(grad_placements=weight_grads)
    y = compute(
        dx.to_local(grad_placements=x_grads),
        dw.to_local(grad_placements=weight_grads),
        local_bias,
    )
    out = DTensor.from_local(y, mesh, outputs, run_check=False)
    if partial and reduce is not None:
        out = reduce(out)
    if bias is None or not partial:
        return out
    return cast(DTensor, out + _on(mesh, bias, "bias"))  # once, not once a rank


def _on(mesh: Any, t: Tensor, name: str) -> DTensor:
    """``t`` as a DTensor on ``mesh``."""
    if not isinstance(t, DTensor):
        return DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if t.device_mesh != mesh:
        raise ValueError(f"{name} is on the mesh {t.device_mesh}, the weight on {mesh}: use one")
    return t


def _rule(x: Any, weight: Any, ndim: int) -> tuple[Any, Any, Any]:
    """Placements of the output and of the gradients of input and weight, on one mesh dimension."""
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
        f"an FP8 linear layer got an input placed {x} with a weight placed {weight}; "
        f"what works is {_WORKS}: redistribute the input"
    )
