"""All-gathers of FP8 operands over a tensor-parallel mesh.

Each rank has some rows (tokens) of an activation or a gradient, and quantizes them. The gathered
operand has the bytes of the whole operand quantized on one rank:

- With one scale per tensor, amaxes are reduced first, and only codes are gathered. Delayed scaling
  has its scale already.
- With a scale per row, 1x128 or 1x32 block, scales belong to one row and are gathered with the
  codes.

The columnwise plane, wgrad's operand, is never gathered. With one scale per tensor, it is the
transpose of the codes. Otherwise it has different blocks, and is quantized from the dequantized
codes. Gathering it too would double the bytes, to as many as bf16 takes.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import functional

from fp8rs._core import UnsupportedError
from fp8rs.model.linear_spec import INPUT, spec_for
from fp8rs.quantize.cast import quantize_planes, reduce_amax
from fp8rs.quantize.planes import Plane
from fp8rs.quantize.spec import QuantSpec
from fp8rs.tensor.plane_storage import PlaneStorage
from fp8rs.tensor.quantized import wrap

_amax = torch.ops.fp8rs.amax.default
_all_gather = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default
_wait = torch.ops._c10d_functional.wait_tensor.default


class Operand(NamedTuple):
    """How an operand of a layer is quantized when it is gathered.

    Attributes:
        key: the key of the layer's `LinearSpec`.
        role: INPUT or GRAD.
        columnwise: whether wgrad needs the columnwise plane.
        scale: with delayed scaling, the scale's slot. It is 0 before the first scale.
        amax: with delayed scaling, the slot that is raised to the operand's amax.
        ready: whether the scale is known not to be 0.
    """

    key: str
    role: int
    columnwise: bool
    scale: Tensor | None = None
    amax: Tensor | None = None
    ready: bool = False

    def spec(self, device: torch.device) -> QuantSpec:
        """Return the quantization on a device."""
        spec = spec_for(self.key, device)
        return spec.input if self.role == INPUT else spec.grad


def gather_input(x: DTensor, operand: Operand) -> DTensor:
    """Quantize and gather an input that is sharded by rows. Its gradient is sharded again.

    A gradient of partial sums is reduced in its own dtype. In a graph, ``operand`` arrives as a
    plain tuple.
    """
    return cast(DTensor, _Gather.apply(x, Operand(*operand)))


def reduce_output(y: DTensor, dim: int, operand: Operand) -> DTensor:
    """Reduce-scatter partial sums along ``dim``. The gradient is gathered in FP8."""
    return cast(DTensor, _Reduce.apply(y, dim, Operand(*operand)))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, operand: Operand) -> DTensor:
        ctx.placements = x.placements
        return gathered(x, operand)

    @staticmethod
    def backward(ctx: Any, dx: DTensor) -> tuple[Any, ...]:
        return dx.redistribute(placements=ctx.placements), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: DTensor, dim: int, operand: Operand) -> DTensor:
        ctx.placements, ctx.operand = [Shard(dim)], operand
        return y.redistribute(placements=ctx.placements)

    @staticmethod
    def backward(ctx: Any, dy: DTensor) -> tuple[Any, ...]:
        return gathered(dy.redistribute(placements=ctx.placements), ctx.operand), None, None


def gathered(x: DTensor, operand: Operand) -> DTensor:
    """Quantize and gather a tensor that is sharded by rows. The result is replicated."""
    mesh, (placement,) = x.device_mesh, x.placements
    dim = check_rows(placement, x.ndim)
    group = mesh.get_group().group_name
    local = x.to_local()
    spec = operand.spec(local.device)
    own, noted = _quantized(local, spec, operand, group)
    row = _gather(own, dim, x.shape, noted is None, mesh)
    planes = row, _columnwise(row, spec, x.dtype) if operand.columnwise else None
    whole = wrap(PlaneStorage(*planes, spec, noted), x.shape, x.dtype)
    return DTensor.from_local(whole, mesh, [Replicate()], run_check=False)


def check_rows(placement: Placement, ndim: int) -> int:
    """Return the dimension that a tensor is sharded along.

    Raises:
        UnsupportedError: it is not sharded, or sharded along the features, which scales span.
    """
    if isinstance(placement, Shard) and placement.dim % ndim != ndim - 1:
        return placement.dim % ndim
    raise UnsupportedError(
        f"an activation with placement {placement} cannot be gathered in FP8. Supported is Shard "
        "of any dimension but the last. Use another layout, or torch's style, which gathers in "
        "high precision"
    )


def _quantized(
    x: Tensor, spec: QuantSpec, operand: Operand, group: str
) -> tuple[Plane, tuple[Tensor, Tensor] | None]:
    """Quantize this rank's rows with the whole tensor's scale.

    With delayed scaling, also return the scale and the amax slot, for sibling layers.
    """
    known: Tensor | None = operand.scale
    if not spec.format.per_tensor:
        planes = quantize_planes(spec, x, True, False)
    elif known is None:
        planes = quantize_planes(spec, x, True, False, scale=_scale(x, spec, group))
    else:
        assert operand.amax is not None
        if not operand.ready:
            known = torch.where(known > 0, known, _scale(x, spec, group))
        planes = quantize_planes(spec, x, True, False, scale=known, amax=operand.amax)
        return cast(Plane, planes[0]), (known, operand.amax)
    return cast(Plane, planes[0]), None


def _scale(x: Tensor, spec: QuantSpec, group: str) -> Tensor:
    """Compute the scale of the whole tensor."""
    amax = _amax(x)
    for name in (group, spec.group):
        if name is not None:
            amax = reduce_amax(amax, name)
    return spec.scale_from_amax(amax)


def _columnwise(row: Plane, spec: QuantSpec, dtype: torch.dtype) -> Plane:
    """Return the columnwise plane of a gathered tensor, for wgrad."""
    if row.format.square:
        return row.transposed("columnwise", "wgrad")
    values = row.dequantize(dtype)
    return cast(Plane, quantize_planes(spec, values, False, True)[1])


# --- collectives ----------------------------------------------------------------------------------


def _gather(own: Plane, dim: int, shape: torch.Size, shared: bool, mesh: Any) -> Plane:
    """Gather the plane of a whole tensor.

    Args:
        own: the plane of this rank's part.
        dim: the sharded dimension.
        shape: the shape of the whole tensor.
        shared: whether all ranks have the same scale.
        mesh: the tensor-parallel mesh.
    """
    if own.format.per_tensor:
        if shared:
            (codes,) = _all([(own.data, dim, shape[dim])], mesh)
            return Plane(codes, own.scale, own.format)
        # The scale was known beforehand. On ranks whose values are not finite, it is NaN.
        parts = [(own.data, dim, shape[dim]), (own.scale.view(1, 1), 0, mesh.size())]
        codes, scales = _all(parts, mesh)
        largest = scales.view(torch.int32).amax()  # NaN is above all numbers, as in `reduce_amax`
        return Plane(codes, largest.view(torch.float32), own.format)
    blocks = own.scale.shape[1]
    scale = own.scale.reshape(*own.data.shape[:-1], blocks)
    codes, scales = _all([(own.data, dim, shape[dim]), (scale, dim, shape[dim])], mesh)
    scales = scales.reshape(-1, blocks)
    if own.scale.stride(0) == 1:  # the layout that the GEMM reads
        scales = scales.t().contiguous().t()
    return Plane(codes, scales, own.format)


def _all(parts: list[tuple[Tensor, int, int]], mesh: Any) -> list[Tensor]:
    """Gather several tensors in one collective.

    Args:
        parts: for each tensor this rank's part, the sharded dimension (not the last), and the whole
            tensor's extent along it. Parts are `torch.chunk`'s. Short parts are padded.
        mesh: the tensor-parallel mesh.
    """
    world = mesh.size()
    sent = [_padded(t, dim, -(-extent // world)) for t, dim, extent in parts]
    gathered = _all_gather(sent, world, mesh.get_group().group_name)
    whole = []
    for (part, dim, extent), own, received in zip(parts, sent, gathered, strict=True):
        every = _wait(received).view(world, *own.shape)
        joined = every.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, extent)
        whole.append(joined.contiguous().view(part.dtype))
    return whole


def _padded(part: Tensor, dim: int, extent: int) -> Tensor:
    """Return a part's bytes, padded to ``extent`` elements along a dimension."""
    sizes = *part.shape[:-1], part.shape[-1] * part.element_size()
    part = part.contiguous().view(-1).view(torch.uint8).view(sizes)
    missing = extent - part.shape[dim]
    if missing:
        part = functional.pad(part, [0, 0] * (part.ndim - 1 - dim) + [0, missing])
    return part
