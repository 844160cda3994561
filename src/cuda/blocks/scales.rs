//! Packing of E8M0 scales (`kernels/mx_scales.cu`) and rebase of planes (`kernels/mx_rebase.cu`).

use super::amax::{LinesArgs, fill};
use super::{blocks_of, each};
use crate::cuda::driver::{self, args, launch};
use crate::cuda::modules::{ByFormat, Kernel, Module, by_format, format_index, kernel, module};
use crate::cuda::views::{aligned, ordinal, rows_aligned};
use crate::error::Error;
use crate::layout::{Block, Matrix, View, ViewMut, packed};
use crate::spec::{Axis, Stream};

#[derive(Clone, Copy)]
#[repr(C)]
struct PackArgs {
    scales: *mut u8,
    packed: *mut u8,
    scales_rs: i64,
    scales_cs: i64,
    lines: i64,
    blocks: i64,
    block_rows: i64,
    tiles_across: i64,
    words: i64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RebaseArgs {
    codes: *const u8,
    scales: *const u8,
    out: *mut u8,
    out_scale: *mut u8,
    codes_rs: i64,
    codes_cs: i64,
    scales_rs: i64,
    scales_cs: i64,
    out_rs: i64,
    out_cs: i64,
    out_scale_rs: i64,
    rows: i64,
    cols: i64,
    block_rows: i64,
    tiles_across: i64,
    flags: u32,
    unused: u32,
}

args!(PackArgs, RebaseArgs);

static MX_SCALES_MODULE: Module = module!("mx_scales");
static MX_REBASE_MODULE: Module = module!("mx_rebase");

static PACK: Kernel = kernel!(MX_SCALES_MODULE, "mx_pack", PackArgs);
static REBASE_ROWS: ByFormat = by_format!(MX_REBASE_MODULE, "mx_rebase_rows", RebaseArgs);
static REBASE_COLS: ByFormat = by_format!(MX_REBASE_MODULE, "mx_rebase_cols", RebaseArgs);

#[cfg(test)]
pub(super) fn kernels() -> Vec<&'static Kernel> {
    std::iter::once(&PACK).chain(&REBASE_ROWS).chain(&REBASE_COLS).collect()
}

/// See [`crate::ops::pack_scales`].
pub(crate) fn pack_scales(
    scales: View,
    rows: usize,
    block_rows: usize,
    out: ViewMut,
    stream: Stream,
) -> Result<(), Error> {
    let (scales, out) = (scales.matrix(), out.matrix());
    if !aligned(out.ptr, 4) {
        return Err(Error::Misaligned { arg: "out".into(), size: 4 });
    }
    let args = PackArgs {
        scales: scales.ptr,
        packed: out.ptr,
        scales_rs: scales.row_stride as i64,
        scales_cs: scales.col_stride as i64,
        lines: rows as i64,
        blocks: scales.cols as i64,
        block_rows: block_rows as i64,
        tiles_across: scales.cols.div_ceil(packed::TILE_COLS) as i64,
        words: (out.numel() / 4) as i64,
    };
    launch(ordinal(out.device), stream, &PACK, each(args.words as usize), &args)
}

/// See [`crate::ops::rebase`].
pub(crate) fn rebase(
    codes: View,
    scales: View,
    block: Block,
    axis: Axis,
    out: ViewMut,
    scale_out: ViewMut,
    stream: Stream,
) -> Result<(), Error> {
    let Some(format) = codes.dtype().fp8() else { return Ok(()) };
    let (codes, scales, out, scale_out) = (codes.matrix(), scales.matrix(), out.matrix(), scale_out.matrix());
    let device = ordinal(codes.device);
    let vectors = |m: &Matrix, bytes| m.col_stride == 1 && rows_aligned(m, bytes);
    let width = if axis == Axis::Rows { 16 } else { 8 };
    let tiles_across = codes.cols.div_ceil(128);
    let words = vectors(&scales, 4) && scales.cols.is_multiple_of(4);
    // A thread block processes eight rows, if that results in at least two blocks per multiprocessor.
    // Otherwise it processes one row.
    let whole_blocks = codes.rows < 8 * 2 * driver::device(device)?.multiprocessors as usize;
    let flags = [vectors(&codes, width), vectors(&out, 16), words, whole_blocks];
    let flags = flags.iter().enumerate().map(|(bit, on)| u32::from(*on) << bit).sum();
    let args = RebaseArgs {
        codes: codes.ptr,
        scales: scales.ptr,
        out: out.ptr,
        out_scale: scale_out.ptr,
        codes_rs: codes.row_stride as i64,
        codes_cs: codes.col_stride as i64,
        scales_rs: scales.row_stride as i64,
        scales_cs: scales.col_stride as i64,
        out_rs: out.row_stride as i64,
        out_cs: out.col_stride as i64,
        out_scale_rs: scale_out.row_stride as i64,
        rows: codes.rows as i64,
        cols: codes.cols as i64,
        block_rows: block.rows as i64,
        tiles_across: tiles_across as i64,
        flags,
        unused: 0,
    };
    let at = format_index(format);
    match axis {
        Axis::Rows => {
            let blocks = if whole_blocks { codes.rows } else { codes.rows.div_ceil(8) };
            launch(device, stream, &REBASE_ROWS[at], blocks_of(blocks, 256), &args)
        }
        Axis::Columns => {
            let ones = LinesArgs::new(Some(&scale_out), None, 1.0);
            fill(device, stream, &ones)?;
            let grid = blocks_of(codes.rows.div_ceil(128) * tiles_across, 128);
            launch(device, stream, &REBASE_COLS[at], grid, &args)
        }
    }
}
