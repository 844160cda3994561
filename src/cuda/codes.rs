//! Operations on existing FP8 codes.

use super::driver::{Grid, args, launch};
use super::modules::{
    ByFormat, ByTypes, Kernel, Module, by_format, by_types, format_index, input_index, kernel, module,
};
use super::views::{aligned, ordinal};
use crate::error::Error;
use crate::layout::{Block, DType, View, ViewMut};
use crate::spec::Stream;

#[derive(Clone, Copy)]
#[repr(C)]
struct TransposeArgs {
    codes: *const u8,
    out: *mut u8,
    rows: i64,
    cols: i64,
    codes_rs: i64,
    codes_cs: i64,
    out_rs: i64,
    out_cs: i64,
    codes_bs: i64,
    out_bs: i64,
    tiles_across: i64,
    tiles_down: i64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct DequantizeArgs {
    codes: *const u8,
    scale: *const u8,
    out: *mut u8,
    rows: i64,
    cols: i64,
    codes_rs: i64,
    codes_cs: i64,
    scale_rs: i64,
    scale_cs: i64,
    out_rs: i64,
    out_cs: i64,
    block_rows: i64,
    block_cols: i64,
    e8m0: u32,
}

/// Number of entries in [`RescaleArgs`].
const RESCALED: usize = 48;

#[derive(Clone, Copy)]
#[repr(C)]
struct RescaleEntry {
    codes: *mut u8,
    batch: i64,
    rows: i64,
    cols: i64,
    codes_bs: i64,
    codes_rs: i64,
    codes_cs: i64,
    first_scale: i64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RescaleArgs {
    scales: *const u8,
    new_scales: *const u8,
    width: i64,
    entries: [RescaleEntry; 48],
}

/// Thread blocks per entry. Also in kernels/codes.cu.
const RESCALE_BLOCKS: u64 = 32;

args!(TransposeArgs, RescaleArgs, DequantizeArgs);

static CODES_MODULE: Module = module!("codes");

static TRANSPOSE: Kernel = kernel!(CODES_MODULE, "transpose", TransposeArgs);
static STRIDED_TRANSPOSE: Kernel = kernel!(CODES_MODULE, "strided_transpose", TransposeArgs);
// Indexed by the dtype of the output, then by format.
static DEQUANTIZE: ByTypes = by_types!(CODES_MODULE, "dequantize", DequantizeArgs);
static STRIDED_DEQUANTIZE: ByTypes = by_types!(CODES_MODULE, "strided_dequantize", DequantizeArgs);
static RESCALE: ByFormat = by_format!(CODES_MODULE, "rescale", RescaleArgs);

#[cfg(test)]
pub(super) fn kernels() -> Vec<&'static Kernel> {
    let by_types = DEQUANTIZE.iter().chain(&STRIDED_DEQUANTIZE).flatten();
    by_types.chain([&TRANSPOSE, &STRIDED_TRANSPOSE]).chain(&RESCALE).collect()
}

pub(crate) fn transpose(codes: View, out: ViewMut, stream: Stream) -> Result<(), Error> {
    if codes.numel() == 0 {
        return Ok(());
    }
    let (rows, cols) = codes.shape();
    let fast = codes.col_stride() == 1
        && out.col_stride() == 1
        && codes.row_stride() > 0
        && out.row_stride() > 0
        && rows.is_multiple_of(16)
        && cols.is_multiple_of(8)
        && aligned(codes.ptr(), 8)
        && (codes.row_stride() as usize).is_multiple_of(8)
        && aligned(out.ptr(), 16)
        && (out.row_stride() as usize).is_multiple_of(16)
        && (codes.batch_stride() as usize).is_multiple_of(8)
        && (out.batch_stride() as usize).is_multiple_of(16);
    let (kernel, tile, threads) = if fast { (&TRANSPOSE, 128, 128) } else { (&STRIDED_TRANSPOSE, 32, 256) };
    let (tiles_down, tiles_across) = (rows.div_ceil(tile), cols.div_ceil(tile));
    let blocks = (codes.batch() * tiles_down * tiles_across) as u64;
    let args = TransposeArgs {
        codes: codes.ptr(),
        out: out.ptr(),
        rows: rows as i64,
        cols: cols as i64,
        codes_rs: codes.row_stride() as i64,
        codes_cs: codes.col_stride() as i64,
        out_rs: out.row_stride() as i64,
        out_cs: out.col_stride() as i64,
        codes_bs: codes.batch_stride() as i64,
        out_bs: out.batch_stride() as i64,
        tiles_across: tiles_across as i64,
        tiles_down: tiles_down as i64,
    };
    launch(ordinal(codes.device()), stream, kernel, Grid { blocks, threads }, &args)
}

pub(crate) fn dequantize(
    codes: View,
    scale: View,
    block: Block,
    out: ViewMut,
    stream: Stream,
) -> Result<(), Error> {
    let Some(format) = codes.dtype().fp8() else { return Ok(()) };
    let (rows, cols) = codes.shape();
    let n = codes.numel() as u64;
    let block_cols = block.cols.min(cols.max(1));
    let per_thread = if out.dtype() == DType::F32 { 8 } else { 16 };
    let fast = codes.is_contiguous()
        && out.is_contiguous()
        && aligned(codes.ptr(), per_thread)
        && aligned(out.ptr(), 16)
        && (cols.is_multiple_of(per_thread)
            || block_cols == cols && block.rows >= rows && codes.numel().is_multiple_of(per_thread))
        && (block_cols.is_multiple_of(per_thread) || block_cols == cols);
    let kernels = if fast { &DEQUANTIZE } else { &STRIDED_DEQUANTIZE };
    let blocks = n.div_ceil(if fast { 256 * per_thread as u64 } else { 256 });
    let args = DequantizeArgs {
        codes: codes.ptr(),
        scale: scale.ptr(),
        out: out.ptr(),
        rows: rows as i64,
        cols: cols as i64,
        codes_rs: codes.row_stride() as i64,
        codes_cs: codes.col_stride() as i64,
        scale_rs: scale.row_stride() as i64,
        scale_cs: scale.col_stride() as i64,
        out_rs: out.row_stride() as i64,
        out_cs: out.col_stride() as i64,
        block_rows: block.rows.min(rows.max(1)) as i64,
        block_cols: block_cols as i64,
        e8m0: u32::from(scale.dtype() == DType::E8m0),
    };
    let kernel = &kernels[input_index(out.dtype())][format_index(format)];
    launch(ordinal(codes.device()), stream, kernel, Grid { blocks, threads: 256 }, &args)
}

pub(crate) fn multi_rescale(
    codes: &[ViewMut],
    scales: View,
    new_scales: View,
    width: usize,
    stream: Stream,
) -> Result<(), Error> {
    let mut lists = [Vec::new(), Vec::new()];
    let mut first_scale = 0;
    for out in codes {
        let Some(format) = out.dtype().fp8() else { continue };
        let (rows, cols) = out.shape();
        lists[format_index(format)].push(RescaleEntry {
            codes: out.ptr(),
            batch: out.batch() as i64,
            rows: rows as i64,
            cols: cols as i64,
            codes_bs: out.batch_stride() as i64,
            codes_rs: out.row_stride() as i64,
            codes_cs: out.col_stride() as i64,
            first_scale,
        });
        first_scale += (out.batch() * cols.div_ceil(width)) as i64;
    }
    for (list, kernel) in lists.iter().zip(&RESCALE) {
        for part in list.chunks(RESCALED) {
            let mut args = RescaleArgs {
                scales: scales.ptr(),
                new_scales: new_scales.ptr(),
                // The kernel adds the width to a number of columns, and the sum must not overflow.
                width: width.min(1 << 60) as i64,
                entries: [part[0]; RESCALED],
            };
            args.entries[..part.len()].copy_from_slice(part);
            let grid = Grid { blocks: part.len() as u64 * RESCALE_BLOCKS, threads: 256 };
            launch(ordinal(scales.device()), stream, kernel, grid, &args)?;
        }
    }
    Ok(())
}
