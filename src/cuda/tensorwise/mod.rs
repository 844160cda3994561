//! One scale per tensor. Each operation selects a kernel for the layout of its views and launches it.
//!
//! `args` has the kernels' argument structs. `lists` launches kernels for many tensors at once.

mod args;
mod lists;

use args::{
    AmaxArgs, CastArgs, CastTransposeArgs, Current, CurrentCastArgs, CurrentCastTransposeArgs, Delayed,
    ScaleArgs, StridedAmaxArgs, StridedArgs,
};

use super::driver::{self, Grid, launch};
use super::modules::{
    ByInput, ByTypes, Kernel, Module, by_input, by_types, format_index, input_index, kernel, module,
};
use super::views::{aligned, contiguous_and_aligned, ordinal};
use super::workspace;
use crate::error::Error;
use crate::format::Fp8Format;
use crate::layout::{Matrix, View, ViewMut};
use crate::spec::{ScaleRule, Scaling, Stream, TensorCall};

pub(super) use args::Rule;
pub(crate) use lists::{multi_amax, multi_quantize, multi_quantize_delayed};

static AMAX_MODULE: Module = module!("amax");
static STRIDED_MODULE: Module = module!("strided");
static CAST_MODULE: Module = module!("cast");
static CAST_TRANSPOSE_MODULE: Module = module!("cast_transpose");

static AMAX: ByInput = by_input!(AMAX_MODULE, "amax", AmaxArgs);
static CURRENT_SCALE: ByTypes = by_types!(AMAX_MODULE, "current_scale", AmaxArgs);
static SCALE: [Kernel; 2] =
    [kernel!(AMAX_MODULE, "scale_e4m3", ScaleArgs), kernel!(AMAX_MODULE, "scale_e5m2", ScaleArgs)];
static STRIDED_AMAX: ByInput = by_input!(STRIDED_MODULE, "strided_amax", StridedAmaxArgs);
static STRIDED_SCALE: ByTypes = by_types!(STRIDED_MODULE, "strided_current_scale", StridedAmaxArgs);
static STRIDED_CAST: ByTypes = by_types!(STRIDED_MODULE, "strided_cast", StridedArgs);
static CAST: ByTypes = by_types!(CAST_MODULE, "cast", CastArgs);
static CAST_DELAYED: ByTypes = by_types!(CAST_MODULE, "cast_delayed", CastArgs);
static CAST_CURRENT: ByTypes = by_types!(CAST_MODULE, "cast_current", CurrentCastArgs);
static CAST_TRANSPOSE: ByTypes = by_types!(CAST_TRANSPOSE_MODULE, "cast_transpose", CastTransposeArgs);
static CAST_TRANSPOSE_DELAYED: ByTypes =
    by_types!(CAST_TRANSPOSE_MODULE, "cast_transpose_delayed", CastTransposeArgs);
static CAST_TRANSPOSE_CURRENT: ByTypes =
    by_types!(CAST_TRANSPOSE_MODULE, "cast_transpose_current", CurrentCastTransposeArgs);

#[cfg(test)]
pub(super) fn kernels() -> Vec<&'static Kernel> {
    let by_types = [
        &CURRENT_SCALE,
        &STRIDED_SCALE,
        &STRIDED_CAST,
        &CAST,
        &CAST_DELAYED,
        &CAST_CURRENT,
        &CAST_TRANSPOSE,
        &CAST_TRANSPOSE_DELAYED,
        &CAST_TRANSPOSE_CURRENT,
    ];
    let mut all: Vec<_> = [&AMAX, &STRIDED_AMAX].into_iter().flatten().chain(&SCALE).collect();
    all.extend(by_types.into_iter().flatten().flatten());
    all.extend(lists::kernels());
    all
}

pub(crate) fn amax(x: View, out: ViewMut, stream: Stream) -> Result<(), Error> {
    let at = input_index(x.dtype());
    find_amax(&x, out.ptr(), &AMAX[at], &STRIDED_AMAX[at], ScaleRule::default(), stream)
}

/// Launches the kernel that computes the absolute maximum and writes it, or the scale computed from it, to
/// `out`.
fn find_amax(
    x: &View,
    out: *mut u8,
    fast: &'static Kernel,
    strided: &'static Kernel,
    rule: ScaleRule,
    stream: Stream,
) -> Result<(), Error> {
    let device = ordinal(x.device());
    let grid_max = workspace::slots(device, stream, 1)?;
    let n = x.numel() as u64;
    // Four blocks per multiprocessor, or fewer if a thread would not have a full round of loads.
    let most = 4 * u64::from(driver::device(device)?.multiprocessors);
    if contiguous_and_aligned(x) {
        let per_block = 512 * 4 * 16 / x.dtype().size() as u64;
        let grid = Grid { blocks: n.div_ceil(per_block).clamp(1, most), threads: 512 };
        let args = AmaxArgs { x: x.ptr(), n, out, grid_max, rule: rule.into() };
        return launch(device, stream, fast, grid, &args);
    }
    let (mut rows, mut cols) = x.shape();
    let (mut x_rs, mut x_cs) = (x.row_stride(), x.col_stride());
    if x_rs.abs() < x_cs.abs() {
        (rows, cols, x_rs, x_cs) = (cols, rows, x_cs, x_rs);
    }
    let grid = Grid { blocks: n.div_ceil(512 * 8).clamp(1, most), threads: 512 };
    let args = StridedAmaxArgs {
        x: x.ptr(),
        rows: rows as i64,
        cols: cols as i64,
        x_rs: x_rs as i64,
        x_cs: x_cs as i64,
        out,
        grid_max,
        rule: rule.into(),
    };
    launch(device, stream, strided, grid, &args)
}

pub(crate) fn scale_from_amax(
    amax: View,
    format: Fp8Format,
    rule: ScaleRule,
    scale_out: ViewMut,
    stream: Stream,
) -> Result<(), Error> {
    scales(&amax.matrix(), format, rule, &scale_out.matrix(), stream)
}

/// Computes the scale for each absolute maximum.
pub(super) fn scales(
    amax: &Matrix,
    format: Fp8Format,
    rule: ScaleRule,
    scale_out: &Matrix,
    stream: Stream,
) -> Result<(), Error> {
    let n = amax.numel();
    let grid = Grid { blocks: (n as u64).div_ceil(256), threads: 256 };
    let args = ScaleArgs {
        amax: amax.ptr,
        scale: scale_out.ptr,
        n: n as i64,
        cols: amax.cols as i64,
        amax_rs: amax.row_stride as i64,
        amax_cs: amax.col_stride as i64,
        scale_rs: scale_out.row_stride as i64,
        scale_cs: scale_out.col_stride as i64,
        rule: rule.into(),
    };
    launch(ordinal(amax.device), stream, &SCALE[format_index(format)], grid, &args)
}

/// The source of a cast's scale, and the outputs besides codes.
#[derive(Clone, Copy)]
enum Cast {
    Known(*const u8),
    Delayed { scale: *const u8, delayed: Delayed },
    Current { rule: ScaleRule, scale: *mut u8 },
}

/// See `ops::quantize`, `ops::quantize_delayed` and `ops::quantize_current`.
pub(crate) fn quantize(call: TensorCall, stream: Stream) -> Result<(), Error> {
    let TensorCall { x, scaling, format, rowwise, columnwise } = call;
    let how = match &scaling {
        Scaling::Known(scale) => Cast::Known(scale.ptr()),
        Scaling::Delayed { scale, amax, scale_used } => {
            let grid_max = workspace::slots(ordinal(x.device()), stream, 1)?;
            let delayed = Delayed { amax: amax.ptr(), scale_used: scale_used.ptr(), grid_max };
            Cast::Delayed { scale: scale.ptr(), delayed }
        }
        Scaling::Current { rule, scale_out } => Cast::Current { rule: *rule, scale: scale_out.ptr() },
    };
    cast(&x, how, format, rowwise.as_ref(), columnwise.as_ref(), stream)
}

/// Launches the cast. Current scaling takes one launch if the fast kernels support the layout of the views.
/// Otherwise it takes two: the scale, then the cast.
fn cast(
    x: &View,
    how: Cast,
    format: Fp8Format,
    rowwise: Option<&ViewMut>,
    columnwise: Option<&ViewMut>,
    stream: Stream,
) -> Result<(), Error> {
    let device = ordinal(x.device());
    let (rows, cols) = x.shape();
    let (i, j) = (input_index(x.dtype()), format_index(format));
    let (scale, delayed) = match how {
        Cast::Known(scale) => (scale, Delayed::NONE),
        Cast::Delayed { scale, delayed } => (scale, delayed),
        Cast::Current { scale, .. } => (scale.cast_const(), Delayed::NONE),
    };
    // Current scaling needs a barrier, and at most four blocks per multiprocessor, which the kernels'
    // register use allows.
    let current = |rule: ScaleRule, pieces: u64| -> Result<(Current, u64), Error> {
        let barrier = workspace::slots(device, stream, Current::SLOTS)?;
        let blocks = pieces.clamp(1, 4 * u64::from(driver::device(device)?.multiprocessors));
        Ok((Current::new(rule, scale.cast_mut(), barrier, pieces, blocks), blocks))
    };

    if let (Some(row), None) = (rowwise, columnwise)
        && contiguous_and_aligned(x)
        && row.is_contiguous()
        && aligned(row.ptr(), 16)
    {
        let n = x.numel() as u64;
        let threads = 256;
        let cast = CastArgs { x: x.ptr(), codes: row.ptr(), n, scale, delayed };
        return match how {
            Cast::Known(_) => {
                launch(device, stream, &CAST[i][j], Grid { blocks: n.div_ceil(4096), threads }, &cast)
            }
            Cast::Delayed { .. } => {
                let grid = Grid { blocks: n.div_ceil(4 * 4096).max(1), threads };
                launch(device, stream, &CAST_DELAYED[i][j], grid, &cast)
            }
            Cast::Current { rule, .. } => {
                // A piece is 32 KiB of x.
                let (current, blocks) = current(rule, n.div_ceil((32 << 10) / x.dtype().size() as u64))?;
                let args = CurrentCastArgs { cast, current };
                launch(device, stream, &CAST_CURRENT[i][j], Grid { blocks, threads }, &args)
            }
        };
    }

    let size = x.dtype().size();
    let patch_rows = if size == 4 { 8 } else { 16 };
    if let Some(column) = columnwise
        && x.numel() > 0
        && x.col_stride() == 1
        && x.row_stride() > 0
        && aligned(x.ptr(), 16)
        && (x.row_stride() as usize * size).is_multiple_of(16)
        && rows.is_multiple_of(patch_rows)
        && cols.is_multiple_of(8)
        && column.is_contiguous()
        && aligned(column.ptr(), patch_rows)
        && rowwise.is_none_or(|row| {
            row.col_stride() == 1
                && row.row_stride() > 0
                && aligned(row.ptr(), 8)
                && (row.row_stride() as usize).is_multiple_of(8)
        })
    {
        let tiles_across = cols.div_ceil(128);
        let tiles = (rows.div_ceil(8 * patch_rows) * tiles_across) as u64;
        let cast = CastTransposeArgs {
            x: x.ptr(),
            rowwise: rowwise.map_or(std::ptr::null_mut(), ViewMut::ptr),
            columnwise: column.ptr(),
            rows: rows as i64,
            cols: cols as i64,
            x_rs: x.row_stride() as i64,
            rowwise_rs: rowwise.map_or(0, |row| row.row_stride() as i64),
            tiles_across: tiles_across as i64,
            scale,
            delayed,
        };
        let threads = 128;
        let one_each = Grid { blocks: tiles, threads };
        return match how {
            Cast::Known(_) => launch(device, stream, &CAST_TRANSPOSE[i][j], one_each, &cast),
            Cast::Delayed { .. } => launch(device, stream, &CAST_TRANSPOSE_DELAYED[i][j], one_each, &cast),
            Cast::Current { rule, .. } => {
                let (current, blocks) = current(rule, tiles)?;
                let args = CurrentCastTransposeArgs { cast, current };
                launch(device, stream, &CAST_TRANSPOSE_CURRENT[i][j], Grid { blocks, threads }, &args)
            }
        };
    }

    if let Cast::Current { rule, scale } = how {
        find_amax(x, scale, &CURRENT_SCALE[i][j], &STRIDED_SCALE[i][j], rule, stream)?;
    }
    // With delayed scaling, an empty tensor still needs a block, which writes `scale_used`.
    let least = u64::from(matches!(how, Cast::Delayed { .. }));
    strided_cast(x, scale, delayed, least, &STRIDED_CAST[i][j], [rowwise, columnwise], stream)
}

/// Launches the cast that supports any views.
fn strided_cast(
    x: &View,
    scale: *const u8,
    delayed: Delayed,
    least: u64,
    kernel: &'static Kernel,
    outs: [Option<&ViewMut>; 2],
    stream: Stream,
) -> Result<(), Error> {
    let (rows, cols) = x.shape();
    let tiles_across = cols.div_ceil(32).max(1);
    let blocks = if x.numel() == 0 { least } else { (rows.div_ceil(32) * tiles_across) as u64 };
    let [rowwise, columnwise] = outs;
    let args = StridedArgs {
        x: x.ptr(),
        rowwise: rowwise.map_or(std::ptr::null_mut(), ViewMut::ptr),
        columnwise: columnwise.map_or(std::ptr::null_mut(), ViewMut::ptr),
        rows: rows as i64,
        cols: cols as i64,
        x_rs: x.row_stride() as i64,
        x_cs: x.col_stride() as i64,
        rowwise_rs: rowwise.map_or(0, |row| row.row_stride() as i64),
        rowwise_cs: rowwise.map_or(0, |row| row.col_stride() as i64),
        columnwise_rs: columnwise.map_or(0, |column| column.row_stride() as i64),
        columnwise_cs: columnwise.map_or(0, |column| column.col_stride() as i64),
        tiles_across: tiles_across as i64,
        scale,
        delayed,
    };
    launch(ordinal(x.device()), stream, kernel, Grid { blocks, threads: 256 }, &args)
}
