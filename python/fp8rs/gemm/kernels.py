"""CUDA GEMMs: operands in the layout of each mode of ``torch._scaled_mm``.

Each function multiplies planes a (M, K) and b (N, K) to a @ b.T (M, N), contiguous. Sizes that
cuBLAS does not support are padded: codes with 0, scales with 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8rs._torch import outside_selective_checkpoints
from fp8rs.gemm.operands import rebased, rebases
from fp8rs.quantize import formats
from fp8rs.quantize.planes import Plane

_pack_scales = torch.ops.fp8rs.pack_scales.default
_unsafe_view = torch.ops.aten._unsafe_view.default


def tensorwise(
    a: Plane, b: Plane, bias: Tensor | None, out_dtype: torch.dtype, use_fast_accum: bool
) -> Tensor:
    """Multiply operands with one scale per tensor."""
    return _run(a, b, _aligned(a.scale), _aligned(b.scale), bias, out_dtype, use_fast_accum)


def rowwise(
    a: Plane, b: Plane, bias: Tensor | None, out_dtype: torch.dtype, use_fast_accum: bool
) -> Tensor:
    """Multiply operands with one scale per row."""
    a_scale = a.scale.contiguous()
    if out_dtype == torch.bfloat16:
        b_scale = padded(b.scale, 16, 1).t()
        return _run(a, b, a_scale, b_scale, bias, out_dtype, use_fast_accum)

    # The rowwise mode supports only bfloat16. In fp32, the scales are applied to the product.
    unit_scale = a.scale.new_ones(())
    out = _run(a, b, unit_scale, unit_scale, None, torch.float32, use_fast_accum)
    # Out of place, because selective checkpointing may have saved the product.
    out = out * a_scale * b.scale.t()
    if bias is not None:
        out = out + bias
    return out.to(out_dtype)


def blockwise(
    a: Plane, b: Plane, bias: Tensor | None, out_dtype: torch.dtype, use_fast_accum: bool
) -> Tensor:
    """Multiply blocks of 1x128 with blocks of 1x128 or 128x128. The mode accumulates exactly."""
    # The number of blocks along the contracted dim is a multiple of this.
    blocks = 1
    if b.format == formats.BLOCK_128X128:
        # cuBLAS reads 128x128 scales along the contracted dim in groups of four.
        blocks = 4
        b_scale = padded(b.scale, 1, blocks).contiguous()
    else:
        if b.data.shape[1] <= 128:
            # Torch would interpret a single 1x128 block as one scale per row.
            blocks = 2
        b_scale = _outer_contiguous(padded(b.scale, 16, blocks))
    a_scale = _outer_contiguous(padded(a.scale, 16, blocks))

    multiples = (16, 128 * blocks)
    out = _run(a, b, a_scale, b_scale.t(), bias, out_dtype, False, multiples, plain=True)
    rows = a.data.shape[0]
    if out.shape[0] == rows:
        return out
    # Drop padded rows. Autograd must not see a view, because it would forbid in-place writes.
    unpadded: Tensor = _unsafe_view(out[:rows], [rows, out.shape[1]])
    return unpadded


def microscaled(
    a: Plane, b: Plane, bias: Tensor | None, out_dtype: torch.dtype, use_fast_accum: bool
) -> Tensor:
    """Multiply MXFP8 operands. On GPUs without MXFP8 GEMMs, rebase them to one scale per row.

    On such GPUs, an operand may already have one scale per row.
    """
    if rebases(a.data.device, False):
        return rowwise(rebased(a), rebased(b), bias, out_dtype, use_fast_accum)
    return _run(a, b, _packed(a), _packed(b), bias, out_dtype, False, (1, 32), plain=True)


def _run(
    a: Plane,
    b: Plane,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    multiples: tuple[int, int] = (1, 16),
    *,
    plain: bool = False,
) -> Tensor:
    """Compute a @ b.T + bias on padded codes. Padded rows of ``a`` stay in the result.

    Args:
        a: operand (M, K), whose codes are read.
        b: operand (N, K), whose codes are read.
        scale_a: scales of ``a``, in the layout of the mode.
        scale_b: scales of ``b``, in the layout of the mode.
        bias: added by the GEMM if the mode supports it, else afterwards.
        out_dtype: dtype of the result.
        use_fast_accum: accumulate with reduced precision.
        multiples: multiples to which rows of ``a`` and the contracted dim are padded.
        plain: the mode has no bias, and its output is fp32 or bfloat16.
    """
    rows, cols = multiples
    a_codes = padded(a.data, rows, cols)
    b_codes = padded(b.data, 16, cols)
    n = b.data.shape[0]
    extra_n = b_codes.shape[0] - n
    gemm_dtype = out_dtype
    if plain and not (out_dtype == torch.bfloat16 and bias is None):
        gemm_dtype = torch.float32

    # cuBLASLt requires a bias in the output's dtype, and supports none with fp32 outputs.
    fused_bias = None
    if bias is not None and gemm_dtype != torch.float32:
        fused_bias = bias.to(gemm_dtype)
        if extra_n:
            fused_bias = pad(fused_bias, (0, extra_n))
    out = torch._scaled_mm(
        a_codes,
        b_codes.t(),
        scale_a=scale_a,
        scale_b=scale_b,
        bias=fused_bias,
        out_dtype=gemm_dtype,
        use_fast_accum=use_fast_accum,
    )

    if extra_n:
        out = out[:, :n].contiguous()
    if bias is not None and fused_bias is None:
        out = out + bias
    return out if gemm_dtype == out_dtype else out.to(out_dtype)


# --- operand layouts -----------------------------------------------------------------------------


def padded(matrix: Tensor, rows: int, cols: int) -> Tensor:
    """Pad codes with 0 or scales with 1, to multiples of ``rows`` and ``cols``.

    Codes become contiguous.
    """
    m, k = matrix.shape
    is_codes = matrix.element_size() == 1
    if m % rows == 0 and k % cols == 0:
        return matrix.contiguous() if is_codes else matrix

    padding = (0, _missing(k, cols), 0, _missing(m, rows))
    if is_codes:
        return _pad_codes(matrix, padding)
    return pad(matrix, padding, value=1.0)


# FSDP2 runs the same views in its all-gathers, where selective checkpointing counts them.
@outside_selective_checkpoints
def _pad_codes(codes: Tensor, padding: tuple[int, int, int, int]) -> Tensor:
    """Pad codes with 0, as bytes."""
    return pad(codes.view(torch.uint8), padding).view(codes.dtype)


def _missing(n: int, multiple: int) -> int:
    """Return the distance from n to the next multiple.

    If n is a multiple, the result is a plain 0 also for symbolic sizes. A symbolic expression would
    make the expressions of sizes grow from layer to layer.
    """
    remainder = n % multiple
    return multiple - remainder if remainder else 0


def _aligned(scale: Tensor) -> Tensor:
    """Return a scale at a 16-byte boundary."""
    return scale.clone() if scale.storage_offset() % 4 else scale


def _outer_contiguous(scale: Tensor) -> Tensor:
    """Return scales with adjacent rows, the layout of 1x128 scales in the block mode."""
    return scale if scale.stride() == (1, scale.shape[0]) else scale.t().contiguous().t()


def _packed(plane: Plane) -> Tensor:
    """Return an MXFP8 plane's scales in the 128x4 tiles of block-scaled GEMMs."""
    packed: Tensor = _pack_scales(
        plane.scale.contiguous(), plane.data.shape[0], plane.format.block[0]
    )
    return packed
