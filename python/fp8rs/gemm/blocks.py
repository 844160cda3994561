"""CUDA GEMMs on operands with a scale for each row or block, and which operands a device takes.

Per row: ``torch._scaled_mm``'s row-wise mode. 1x128 and 128x128: its block mode, which Hopper has.
MXFP8: packed E8M0 scales on Blackwell and newer; before it, weights are rebased to one power of
two a row, and what is quantized for the GEMM alone is quantized straight to such scales
(:func:`operand_format`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8rs.gemm import table as gemm
from fp8rs.gemm.devices import gpu_path
from fp8rs.gemm.table import aligned, check_cuda, gemm_for, padded, run
from fp8rs.tensor import formats
from fp8rs.tensor.formats import BlockFormat
from fp8rs.tensor.planes import Plane

_pack_scales = torch.ops.fp8rs.pack_scales.default
_rebase = torch.ops.fp8rs.rebase.default
_transpose = torch.ops.fp8rs.transpose.default
_unsafe_view = torch.ops.aten._unsafe_view.default

MX = (formats.MX_1X32, formats.MX_32X32)


def operand_format(format: BlockFormat, device: torch.device, emulate: bool) -> BlockFormat:
    """What an activation or gradient of a recipe's ``format`` is quantized in on ``device``.

    Itself, but for MXFP8 on a GPU without MXFP8 GEMMs, where it is one power-of-two scale a row.
    """
    return formats.ROW if format.microscaled and _rebases(device, emulate) else format


def dgrad_operand(row: Plane, emulate: bool, after: Tensor | None = None) -> Plane:
    """A weight's plane for dgrad from its rowwise one, without quantizing again.

    Where blocks are square it is the transpose. With one scale a row the codes are transposed and
    the scales are 1: the row scales are to be folded into the gradient (:func:`dgrad_fold`).

    Args:
        row: the rowwise plane.
        emulate: the recipe's.
        after: a tensor that a compiler must have before this is computed.

    Raises:
        ValueError: the weight has blocks along its rows; it needs a columnwise plane.
    """
    if row.format.per_row:
        codes = _transpose(row.matrix, after)
        return Plane(codes, row.scale.new_ones((codes.shape[0], 1)), row.format)
    if row.format == formats.MX_32X32 and _rebases(row.data.device, emulate):
        codes, scale = _rebase(row.matrix, row.scale, list(row.format.block), 1, after)
        return Plane(codes, scale, formats.ROW)
    return row.transposed("columnwise", "dgrad", after)


def dgrad_fold(format: BlockFormat, scale: Tensor) -> Tensor | None:
    """What multiplies the gradient before it is quantized for dgrad: the weight's row scales.

    None where the weight's plane for dgrad has its own scales.
    """
    return scale.view(1, -1) if format.per_row else None


def _rebases(device: torch.device, emulate: bool) -> bool:
    if device.type != "cuda" or emulate:
        return False
    return gpu_path("mxfp8", gemm.capability(device.index))[0] != "native"


# --- one scale a row -----------------------------------------------------------------------------


@gemm_for("cuda", formats.ROW, formats.ROW)
def _rowwise(
    a: Plane, b: Plane, bias: Tensor | None, out_dtype: torch.dtype, use_fast_accum: bool
) -> Tensor:
    check_cuda(a.data.device.index, "rowwise")
    n = b.matrix.shape[0]
    a_codes, b_codes = aligned(a.matrix, rows=False), aligned(b.matrix, rows=True)
    a_scale = a.scale.contiguous()
    if out_dtype == torch.bfloat16:
        b_scale = _padded_scale(b.scale, b_codes.shape[0], 1).t()
        return run(a_codes, b_codes, a_scale, b_scale, n, bias, out_dtype, use_fast_accum)
    # The row-wise mode gives bfloat16 alone. In fp32 the scales go on afterwards.
    one = a.scale.new_ones(())
    out = run(a_codes, b_codes, one, one, n, None, torch.float32, use_fast_accum)
    # Out of place: what a GEMM gave may be saved by selective checkpointing.
    out = out * a_scale * b.scale.view(1, -1)
    if bias is not None:
        out = out + bias
    return out.to(out_dtype)


# --- 1x128 and 128x128 ---------------------------------------------------------------------------


@gemm_for("cuda", formats.BLOCK_1X128, formats.BLOCK_128X128)
@gemm_for("cuda", formats.BLOCK_1X128, formats.BLOCK_1X128)
def _blockwise(
    a: Plane, b: Plane, bias: Tensor | None, out_dtype: torch.dtype, use_fast_accum: bool
) -> Tensor:
    check_cuda(a.data.device.index, "block")
    square = b.format == formats.BLOCK_128X128
    # cuBLAS reads 128x128 scales along the contracted dim in fours. One block alone would look
    # like one scale a row to torch.
    cols = 512 if square else 256 if b.matrix.shape[1] <= 128 else 128
    a_codes, b_codes = padded(a.matrix, 16, cols), padded(b.matrix, 16, cols)
    blocks = a_codes.shape[1] // 128
    a_scale = _outer_contiguous(_padded_scale(a.scale, a_codes.shape[0], blocks))
    if square:
        b_scale = _padded_scale(b.scale, b.scale.shape[0], blocks).contiguous()
    else:
        b_scale = _outer_contiguous(_padded_scale(b.scale, b_codes.shape[0], blocks))
    out = _run_plain(a_codes, b_codes, a_scale, b_scale.t(), b.matrix.shape[0], bias, out_dtype)
    m = a.matrix.shape[0]
    # Padded rows are left out; to autograd what is left is no view, which would forbid writes.
    return out if out.shape[0] == m else _unsafe_view(out[:m], [m, out.shape[1]])


def _run_plain(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    n: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """A GEMM with exact accumulation and nothing fused: what the scaled modes agree on."""
    wide = torch.bfloat16 if out_dtype == torch.bfloat16 and bias is None else torch.float32
    out = run(a, b, scale_a, scale_b, n, bias, wide, False)
    return out.to(out_dtype)


def _outer_contiguous(scale: Tensor) -> Tensor:
    """With the rows next to each other, as the block mode wants 1x128 scales."""
    return scale if scale.stride() == (1, scale.shape[0]) else scale.t().contiguous().t()


def _padded_scale(scale: Tensor, rows: int, cols: int) -> Tensor:
    """Scales padded by 1 to (rows, cols)."""
    m, k = scale.shape
    if (m, k) == (rows, cols):
        return scale
    return pad(scale, (0, cols - k, 0, rows - m), value=1.0)


# --- MXFP8 ---------------------------------------------------------------------------------------


def _microscaled(
    a: Plane, b: Plane, bias: Tensor | None, out_dtype: torch.dtype, use_fast_accum: bool
) -> Tensor:
    if _rebases(a.data.device, False):
        return _rowwise(_rebased(a), _rebased(b), bias, out_dtype, use_fast_accum)
    n = b.matrix.shape[0]
    a_codes, b_codes = padded(a.matrix, 1, 32), padded(b.matrix, 16, 32)
    return _run_plain(a_codes, b_codes, packed(a), packed(b), n, bias, out_dtype)


for _a in (formats.ROW, *MX):
    for _b in (formats.ROW, *MX):
        if formats.ROW not in (_a, _b) or _a != _b:
            gemm_for("cuda", _a, _b)(_microscaled)


def _rebased(plane: Plane) -> Plane:
    """The plane with one power-of-two scale a row."""
    if plane.format.per_row:
        return plane
    codes, scale = _rebase(plane.matrix, plane.scale, list(plane.format.block), 0)
    return Plane(codes, scale, formats.ROW)


def packed(plane: Plane) -> Tensor:
    """An MXFP8 plane's scales in the 128x4 tiles that block-scaled GEMMs read."""
    packed: Tensor = _pack_scales(
        plane.scale.contiguous(), plane.matrix.shape[0], plane.format.block[0]
    )
    return packed
