"""Linear layers on DTensors, for torch's tensor-parallel styles.

The layer computes on local tensors. The rules here give the placements of the output and the
gradients. They are DTensor's rules for ``F.linear`` and the placements of ColwiseParallel,
RowwiseParallel and SequenceParallel. Each rank computes scales of activations and gradients from
its local tensors.

Importing torch.distributed.tensor takes seconds, so only sharded layers import this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

#: Computes the local output from local input, weight and bias.
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
    """Compute ``x @ weight.T + bias`` of DTensors.

    A plain tensor counts as replicated.

    Args:
        compute: computes the layer's output from local tensors.
        x: (..., in_features).
        weight: (out_features, in_features).
        bias: (out_features,) or None.
        reduce: reduces a Partial output before the bias is added, or None.

    Returns:
        (..., out_features). Without ``reduce``, it is Partial on each mesh dimension on which the
        weight is Shard(1).

    Raises:
        ValueError: the operands are on different meshes.
        TypeError: the placements are not supported. The message lists those that are.
    """
    mesh = next(t.device_mesh for t in (weight, x) if isinstance(t, DTensor))
    dx, dw = _on(mesh, x, "input"), _on(mesh, weight, "weight")
    rules = [_rule(px, pw, x.ndim) for px, pw in zip(dx.placements, dw.placements, strict=True)]
    outputs, x_grads, weight_grads = ([rule[i] for rule in rules] for i in range(3))
    partial = any(p.is_partial() for p in outputs)
    local_bias = None
    if bias is not None and not partial:
        # It is sharded as the output's last dim. Its gradient is partial where the weight's is.
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
    return cast(DTensor, out + _on(mesh, bias, "bias"))


def _on(mesh: Any, t: Tensor, name: str) -> DTensor:
    """Return ``t`` as a DTensor on ``mesh``. A plain tensor is replicated."""
    if not isinstance(t, DTensor):
        return DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if t.device_mesh != mesh:
        raise ValueError(
            f"{name} is on {t.device_mesh}, but the layer is on {mesh}: use the same mesh"
        )
    return t


def _rule(x: Any, weight: Any, ndim: int) -> tuple[Any, Any, Any]:
    """Return the placements of output, input gradient and weight gradient on a mesh dimension."""
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
