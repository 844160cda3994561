"""All-gathers of operands over a tensor-parallel mesh as FP8 codes and scales.

Each rank has some rows (tokens) of an activation or a gradient. It quantizes them, and the gathered
operand has the bytes of the whole operand quantized on one rank:

- One scale per tensor: amaxes are reduced first, except with delayed scaling, where the scale is
  known. Only codes are gathered.
- One scale per row, 1x128 or 1x32 block: a block lies within a row. Scales are gathered with the
  codes.

The columnwise plane, which wgrad multiplies, is not gathered. With one scale per tensor, it is the
transpose of the codes. Otherwise it has other blocks and is quantized from the dequantized gathered
codes. Gathering it too would take two bytes per element, as bf16 does.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import functional

from fp8rs._core import UnsupportedError
from fp8rs.nn.spec import GRAD, INPUT, LinearSpec, spec_for
from fp8rs.tensor.planes import Plane
from fp8rs.tensor.quantized import wrap_planes
from fp8rs.tensor.spec import QuantSpec, quantize_planes, reduce_amax

_amax = torch.ops.fp8rs.amax.default
_all_gather = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default
_wait = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True)
class Operand:
    """How an operand of a layer is quantized when it is gathered.

    Args:
        key: the key of the layer's `LinearSpec`.
        role: INPUT or GRAD.
        columnwise: whether wgrad needs the columnwise plane.
        scale: with delayed scaling, the operand's scale, 0 if there is none yet.
        amax: with delayed scaling, the tensor that is raised to the operand's amax.
        ready: with delayed scaling, whether the scale is known to be nonzero.
    """

    key: str
    role: int
    columnwise: bool
    scale: Tensor | None = None
    amax: Tensor | None = None
    ready: bool = False

    def spec(self, device: torch.device) -> QuantSpec:
        """Return how the operand is quantized on a device."""
        spec = spec_for(self.key, device)
        return spec.input if self.role == INPUT else spec.grad


@functools.cache
def prepare() -> None:
    """Let compilers put `gather_input` and `reduce_output` into their graphs.

    This imports Dynamo, so it runs when a style is applied and not at import.
    """
    torch.compiler.allow_in_graph(gather_input)
    torch.compiler.allow_in_graph(reduce_output)


def gather_input(
    x: DTensor,
    key: str,
    columnwise: bool,
    scale: Tensor | None,
    amax: Tensor | None,
    ready: bool,
) -> DTensor:
    """Quantize and gather an input that is sharded by rows.

    The backward redistributes the gradient to the input's placements, in the gradient's dtype. See
    `Operand` for the other arguments.
    """
    operand = Operand(key, INPUT, columnwise, scale, amax, ready)
    return cast(DTensor, _Gather.apply(x, operand))


def reduce_output(
    y: DTensor,
    dim: int,
    key: str,
    columnwise: bool,
    scale: Tensor | None,
    amax: Tensor | None,
    ready: bool,
) -> DTensor:
    """Reduce and scatter partial sums along ``dim``.

    The backward gathers the gradient in FP8. See `Operand` for the other arguments.
    """
    operand = Operand(key, GRAD, columnwise, scale, amax, ready)
    return cast(DTensor, _Reduce.apply(y, dim, operand))


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


def gathers_grad(spec: LinearSpec) -> bool:
    """Return whether the gradient of a row-parallel layer's output is gathered in FP8.

    If the weight has one scale per row, these scales are multiplied into the gradient before it is
    quantized. They differ between ranks, so the gradient is gathered in high precision.
    """
    return not spec.weight.format.per_row


def gathered(x: DTensor, operand: Operand) -> DTensor:
    """Quantize and gather a tensor that is sharded by rows. The result is replicated."""
    mesh, (placement,) = x.device_mesh, x.placements
    dim = check_rows(placement, x.ndim)
    group = mesh.get_group().group_name
    local = x.to_local()
    spec = operand.spec(local.device)
    own, recorded = _quantized(local, spec, operand, group)
    row = _gather(own, dim, x.shape, recorded is None, mesh)
    planes = row, _columnwise(row, spec, x.dtype) if operand.columnwise else None
    whole = wrap_planes(*planes, shape=x.shape, dtype=x.dtype, spec=spec, delayed=recorded)
    return DTensor.from_local(whole, mesh, [Replicate()], run_check=False)


def check_rows(placement: Placement, ndim: int) -> int:
    """Return the dimension that a tensor is sharded along.

    Raises:
        UnsupportedError: it is not sharded, or it is sharded along the features, where blocks would
            span ranks.
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
    """Quantize this rank's rows with the scale of the whole tensor.

    Returns:
        The plane. With delayed scaling also the scale and the recorded amax, from which other
        layers with this input record the amax.
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
    """Return the columnwise plane of a gathered tensor for wgrad."""
    if row.format.square:
        return row.transposed("columnwise", "wgrad")
    values = row.dequantize(dtype)
    return cast(Plane, quantize_planes(spec, values, False, True)[1])


# --- all-gathers ---------------------------------------------------------------------------------


def _gather(own: Plane, dim: int, shape: torch.Size, shared: bool, mesh: Any) -> Plane:
    """Gather the plane of the whole tensor.

    Args:
        own: the plane of this rank's part.
        dim: the dimension that is sharded.
        shape: the shape of the whole tensor.
        shared: whether all ranks have the same per-tensor scale.
        mesh: the mesh to gather over.
    """
    if own.format.per_tensor:
        if shared:
            (codes,) = _all_gather_parts([(own.data, dim, shape[dim])], mesh)
            return Plane(codes, own.scale, own.format)
        # With delayed scaling, the scale is NaN on ranks with non-finite values.
        parts = [(own.data, dim, shape[dim]), (own.scale.view(1, 1), 0, mesh.size())]
        codes, scales = _all_gather_parts(parts, mesh)
        largest = scales.view(torch.int32).amax()  # as in `reduce_amax`, NaN is above all numbers
        return Plane(codes, largest.view(torch.float32), own.format)
    blocks = own.scale.shape[1]
    scale = own.scale.reshape(*own.data.shape[:-1], blocks)
    codes, scales = _all_gather_parts([(own.data, dim, shape[dim]), (scale, dim, shape[dim])], mesh)
    scales = scales.reshape(-1, blocks)
    if own.scale.stride(0) == 1:  # the layout that the GEMM requires
        scales = scales.t().contiguous().t()
    return Plane(codes, scales, own.format)


def _all_gather_parts(parts: list[tuple[Tensor, int, int]], mesh: Any) -> list[Tensor]:
    """Gather several tensors in one collective.

    Args:
        parts: for each tensor, this rank's part, the sharded dimension (not the last), and the
            extent of the whole tensor along it. Parts are those of `torch.chunk`, so that only the
            last ranks need padding.
        mesh: the mesh to gather over.
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
    """Return a part as uint8, which every backend supports, padded to ``extent`` along ``dim``."""
    sizes = *part.shape[:-1], part.shape[-1] * part.element_size()
    part = part.contiguous().view(-1).view(torch.uint8).view(sizes)
    missing = extent - part.shape[dim]
    if missing:
        part = functional.pad(part, [0, 0] * (part.ndim - 1 - dim) + [0, missing])
    return part
