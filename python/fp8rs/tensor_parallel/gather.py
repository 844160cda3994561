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

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
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
_all_gather_coalesced = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default
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
        ctx.placements = [Shard(dim)]
        ctx.operand = operand
        return y.redistribute(placements=ctx.placements)

    @staticmethod
    def backward(ctx: Any, dy: DTensor) -> tuple[Any, ...]:
        dy = dy.redistribute(placements=ctx.placements)
        return gathered(dy, ctx.operand), None, None


def gathered(x: DTensor, operand: Operand) -> DTensor:
    """Quantize and gather a tensor that is sharded by rows. The result is replicated."""
    mesh = x.device_mesh
    (placement,) = x.placements
    dim = check_rows(placement, x.ndim)
    local = x.to_local()
    spec = operand.spec(local.device)

    scale = _tensor_scale(local, spec, operand, mesh.get_group().group_name)
    local_planes = quantize_planes(spec, local, True, False, scale=scale, amax=operand.amax)
    is_delayed = operand.scale is not None
    row = _gather_plane(cast(Plane, local_planes[0]), dim, x.shape, not is_delayed, mesh)

    columnwise = _columnwise(row, spec, x.dtype) if operand.columnwise else None
    # With delayed scaling, sibling layers reuse the scale and the amax slot.
    slots = None
    if scale is not None and operand.scale is not None and operand.amax is not None:
        slots = scale, operand.amax
    whole_tensor = wrap(PlaneStorage(row, columnwise, spec, slots), x.shape, x.dtype)
    return DTensor.from_local(whole_tensor, mesh, [Replicate()], run_check=False)


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


def _tensor_scale(x: Tensor, spec: QuantSpec, operand: Operand, group: str) -> Tensor | None:
    """Return the scale of the whole tensor. None for formats with scales of rows or blocks.

    Args:
        x: this rank's rows.
        spec: how the tensor is quantized.
        operand: with delayed scaling, it has the scale, if there is one already.
        group: the name of the process group of the ranks that have the other rows.
    """
    if not spec.format.per_tensor:
        return None
    delayed_scale = operand.scale
    if delayed_scale is not None and operand.ready:
        return delayed_scale

    amax = _amax(x)
    for name in (group, spec.group):
        if name is not None:
            amax = reduce_amax(amax, name)
    current_scale = spec.scale_from_amax(amax)
    if delayed_scale is None:
        return current_scale
    return torch.where(delayed_scale > 0, delayed_scale, current_scale)


def _columnwise(row: Plane, spec: QuantSpec, dtype: torch.dtype) -> Plane:
    """Return the columnwise plane of a gathered tensor, for wgrad."""
    if row.format.square:
        return row.transposed("columnwise", "wgrad")
    values = row.dequantize(dtype)
    return cast(Plane, quantize_planes(spec, values, False, True)[1])


# --- collectives ----------------------------------------------------------------------------------


class RankPart(NamedTuple):
    """This rank's part of a tensor, as `torch.chunk` divides it.

    Attributes:
        data: the part.
        dim: the sharded dimension, not the last.
        extent: the whole tensor's extent along it.
    """

    data: Tensor
    dim: int
    extent: int


def _gather_plane(
    part: Plane, dim: int, shape: torch.Size, has_common_scale: bool, mesh: DeviceMesh
) -> Plane:
    """Gather the plane of a whole tensor.

    Args:
        part: the plane of this rank's part.
        dim: the sharded dimension.
        shape: the shape of the whole tensor.
        has_common_scale: for formats with one scale per tensor, whether all ranks have the same
            bits.
        mesh: the tensor-parallel mesh.
    """
    format = part.format
    codes_part = RankPart(part.data, dim, shape[dim])
    if format.per_tensor and has_common_scale:
        (codes,) = _all_gather([codes_part], mesh)
        return Plane(codes, part.scale, format)

    if format.per_tensor:
        # The scale was known beforehand. On ranks whose values are not finite, it is NaN.
        scale_part = RankPart(part.scale.view(1, 1), 0, mesh.size())
        codes, scales = _all_gather([codes_part, scale_part], mesh)
        largest = scales.view(torch.int32).amax()  # NaN is above all numbers, as in `reduce_amax`
        return Plane(codes, largest.view(torch.float32), format)

    # Scales belong to rows. Give them the dimensions of the codes.
    blocks_per_row = part.scale.shape[1]
    scale = part.scale.reshape(*part.data.shape[:-1], blocks_per_row)
    codes, scales = _all_gather([codes_part, RankPart(scale, dim, shape[dim])], mesh)
    scales = scales.reshape(-1, blocks_per_row)
    if part.scale.stride(0) == 1:  # the layout that the GEMM reads
        scales = scales.t().contiguous().t()
    return Plane(codes, scales, format)


def _all_gather(parts: Sequence[RankPart], mesh: DeviceMesh) -> list[Tensor]:
    """Gather several tensors in one collective. Short parts are padded."""
    ranks = mesh.size()
    inputs = []
    for part in parts:
        padded_extent = -(-part.extent // ranks)
        inputs.append(_padded_bytes(part, padded_extent))
    outputs = _all_gather_coalesced(inputs, ranks, mesh.get_group().group_name)

    tensors = []
    for part, input, output in zip(parts, inputs, outputs, strict=True):
        dim = part.dim
        bytes_per_rank = _wait(output).view(ranks, *input.shape)
        padded = bytes_per_rank.movedim(0, dim).flatten(dim, dim + 1)
        tensor = padded.narrow(dim, 0, part.extent).contiguous()
        tensors.append(tensor.view(part.data.dtype))
    return tensors


def _padded_bytes(part: RankPart, padded_extent: int) -> Tensor:
    """Return a part's bytes, with ``padded_extent`` elements along the sharded dimension."""
    data = part.data
    shape = (*data.shape[:-1], data.shape[-1] * data.element_size())
    # Viewing the flat tensor as bytes works for parts without elements, too.
    data_bytes = data.contiguous().view(-1).view(torch.uint8).view(shape)
    missing = padded_extent - data.shape[part.dim]
    if not missing:
        return data_bytes
    # `pad` takes two numbers for each dimension, from the last one.
    padding = [0, 0] * (data.ndim - 1 - part.dim) + [0, missing]
    return functional.pad(data_bytes, padding)
