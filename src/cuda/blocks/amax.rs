//! Absolute maxima (`kernels/block_amax.cu`): of blocks, or of all rows and columns from one read.

use std::ptr;

use super::{Job, blocks_of, each};
use crate::cuda::driver::{args, launch};
use crate::cuda::modules::{ByInput, Kernel, Module, by_input, input_index, kernel, module};
use crate::cuda::views::{ordinal, rows_aligned};
use crate::error::Error;
use crate::layout::{Block, DType, Matrix, View, ViewMut};
use crate::spec::Stream;

/// Defined in `kernels/tile.cuh`.
const MAXIMUM: u32 = 0x8000_0000;

/// Two fp32 vectors, each of which may be absent.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct LinesArgs {
    first: *mut u8,
    second: *mut u8,
    first_stride: i64,
    second_stride: i64,
    first_count: i64,
    second_count: i64,
    value: f32,
    unused: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct LineAmaxArgs {
    x: *const u8,
    row: *mut u8,
    col: *mut u8,
    column_scale: *const u8,
    x_rs: i64,
    x_cs: i64,
    row_stride: i64,
    col_stride: i64,
    column_scale_cs: i64,
    rows: i64,
    cols: i64,
    tiles_across: i64,
    flags: u32,
    mark: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct BlockAmaxArgs {
    x: *const u8,
    out: *mut u8,
    x_rs: i64,
    x_cs: i64,
    out_rs: i64,
    out_cs: i64,
    rows: i64,
    cols: i64,
    block_rows: i64,
    block_cols: i64,
    rows_before: i64,
    tiles_across: i64,
    flags: u32,
    unused: u32,
}

args!(LinesArgs, LineAmaxArgs, BlockAmaxArgs);

static BLOCK_AMAX_MODULE: Module = module!("block_amax");

static FILL_LINES: Kernel = kernel!(BLOCK_AMAX_MODULE, "fill_lines", LinesArgs);
static FILL_GRID: Kernel = kernel!(BLOCK_AMAX_MODULE, "fill_grid", BlockAmaxArgs);
static LINE_AMAX: ByInput = by_input!(BLOCK_AMAX_MODULE, "line_amax", LineAmaxArgs);
static TALL_AMAX: ByInput = by_input!(BLOCK_AMAX_MODULE, "tall_amax", BlockAmaxArgs);
static BLOCK_AMAX: ByInput = by_input!(BLOCK_AMAX_MODULE, "block_amax", BlockAmaxArgs);

#[cfg(test)]
pub(super) fn kernels() -> Vec<&'static Kernel> {
    [&FILL_LINES, &FILL_GRID].into_iter().chain(&LINE_AMAX).chain(&TALL_AMAX).chain(&BLOCK_AMAX).collect()
}

impl LinesArgs {
    /// The vectors have the shape (n, 1).
    pub(super) fn new(first: Option<&Matrix>, second: Option<&Matrix>, value: f32) -> Self {
        let ptr = |m: Option<&Matrix>| m.map_or(ptr::null_mut(), |m| m.ptr);
        let stride = |m: Option<&Matrix>| m.map_or(0, |m| m.row_stride as i64);
        let count = |m: Option<&Matrix>| m.map_or(0, |m| m.rows as i64);
        Self {
            first: ptr(first),
            second: ptr(second),
            first_stride: stride(first),
            second_stride: stride(second),
            first_count: count(first),
            second_count: count(second),
            value,
            unused: 0,
        }
    }

    fn longest(&self) -> usize {
        self.first_count.max(self.second_count) as usize
    }
}

/// Sets all elements of both vectors to the struct's value.
pub(super) fn fill(device: i32, stream: Stream, lines: &LinesArgs) -> Result<(), Error> {
    launch(device, stream, &FILL_LINES, each(lines.longest()), lines)
}

/// Raises the elements of `row` (rows, 1) and `col` (cols, 1) to the maxima of the rows (of x * `column_scale`)
/// and of the columns. The elements must be 0 before. Results are marked as maxima ([`MAXIMUM`]).
pub(super) fn line_amax(job: &Job, row: Option<&Matrix>, col: Option<&Matrix>) -> Result<(), Error> {
    run_lines(&job.x, job.column_scale.as_ref(), row, col, MAXIMUM, job.device, job.stream)
}

fn run_lines(
    x: &Matrix,
    column_scale: Option<&Matrix>,
    row: Option<&Matrix>,
    col: Option<&Matrix>,
    mark: u32,
    device: i32,
    stream: Stream,
) -> Result<(), Error> {
    if row.is_none() && col.is_none() {
        return Ok(());
    }
    // A thread block processes 128 rows of 32 16-byte vectors.
    let tiles_across = x.cols.div_ceil(32 * 16 / x.dtype.size());
    let lines = LinesArgs::new(row, col, 0.0);
    let args = LineAmaxArgs {
        x: x.ptr,
        row: lines.first,
        col: lines.second,
        column_scale: column_scale.map_or(ptr::null(), |m| m.ptr),
        x_rs: x.row_stride as i64,
        x_cs: x.col_stride as i64,
        row_stride: lines.first_stride,
        col_stride: lines.second_stride,
        column_scale_cs: column_scale.map_or(0, |m| m.col_stride as i64),
        rows: x.rows as i64,
        cols: x.cols as i64,
        tiles_across: tiles_across as i64,
        flags: u32::from(x.col_stride == 1 && rows_aligned(x, 16)),
        mark,
    };
    let grid = blocks_of(x.rows.div_ceil(128) * tiles_across, 256);
    launch(device, stream, &LINE_AMAX[input_index(x.dtype)], grid, &args)
}

/// See [`crate::ops::block_amax`]. The first block has `block_offset` rows before `x`.
pub(crate) fn block_amax(
    x: View,
    block: Block,
    block_offset: usize,
    out: ViewMut,
    stream: Stream,
) -> Result<(), Error> {
    let (mut x, mut out, mut block) = (x.matrix(), out.matrix(), block);
    if x.col_stride != 1 && x.row_stride == 1 && block_offset == 0 {
        (x, out, block) = (x.transposed(), out.transposed(), block.transposed());
    }
    let device = ordinal(x.device);
    // The whole extent is represented by a multiple of a thread block's rows and columns.
    let extent = |n: usize| if n == Block::ALL { 1 << 62 } else { n as i64 };
    let mut args = BlockAmaxArgs {
        x: x.ptr,
        out: out.ptr,
        x_rs: x.row_stride as i64,
        x_cs: x.col_stride as i64,
        out_rs: out.row_stride as i64,
        out_cs: out.col_stride as i64,
        rows: out.rows as i64,
        cols: out.cols as i64,
        block_rows: extent(block.rows),
        block_cols: extent(block.cols),
        rows_before: block_offset as i64,
        tiles_across: 0,
        flags: u32::from(x.col_stride == 1 && rows_aligned(&x, 16)),
        unused: 0,
    };
    launch(device, stream, &FILL_GRID, each(out.numel()), &args)?;
    if x.numel() == 0 {
        return Ok(());
    }
    debug_assert_eq!(out.dtype, DType::F32);
    if block == Block::ROW {
        return run_lines(&x, None, Some(&out), None, 0, device, stream);
    }
    if block == Block::ROW.transposed() {
        return run_lines(&x, None, None, Some(&out.transposed()), 0, device, stream);
    }
    if block.rows >= 32 {
        let tiles_across = x.cols.div_ceil(128);
        (args.rows, args.cols, args.tiles_across) = (x.rows as i64, x.cols as i64, tiles_across as i64);
        let threads = if x.dtype == DType::F32 { 256 } else { 128 };
        let grid = blocks_of((x.rows + block_offset).div_ceil(128) * tiles_across, threads);
        return launch(device, stream, &TALL_AMAX[input_index(x.dtype)], grid, &args);
    }
    let tiles_across = x.cols.div_ceil(256);
    (args.rows, args.cols, args.tiles_across) = (x.rows as i64, x.cols as i64, tiles_across as i64);
    let grid = blocks_of((x.rows + block_offset).div_ceil(32) * tiles_across, 256);
    launch(device, stream, &BLOCK_AMAX[input_index(x.dtype)], grid, &args)
}
