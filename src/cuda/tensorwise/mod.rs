//! One scale per tensor: picks a kernel for how the views lie, and launches it.
//!
//! `args` is what the kernels take; `lists` launches them for many tensors at once.

mod args;
mod lists;

use args::{AmaxArgs, CastArgs, CastTransposeArgs, Delayed, ScaleArgs, StridedAmaxArgs, StridedArgs};

use super::driver::{self, Grid, launch};
use super::table::{ByInput, ByTypes, Kernel, by_input, by_types, format_index, input_index, kernel};
use super::views::{aligned, contiguous_and_aligned, ordinal};
use super::workspace::meetings;
use crate::error::Error;
use crate::format::Fp8Format;
use crate::layout::{Matrix, View, ViewMut};
use crate::spec::{ScaleRule, Scaling, Stream, TensorCall};

pub(super) use args::Rule;
pub(crate) use lists::{multi_amax, multi_quantize, multi_quantize_delayed};

static AMAX: ByInput = by_input!(Amax, "amax", AmaxArgs);
static CURRENT_SCALE: ByTypes = by_types!(Amax, "current_scale", AmaxArgs);
static SCALE: [Kernel; 2] = [kernel!(Amax, "scale_e4m3", ScaleArgs), kernel!(Amax, "scale_e5m2", ScaleArgs)];
static STRIDED_AMAX: ByInput = by_input!(Strided, "strided_amax", StridedAmaxArgs);
static STRIDED_SCALE: ByTypes = by_types!(Strided, "strided_current_scale", StridedAmaxArgs);
static STRIDED_CAST: ByTypes = by_types!(Strided, "strided_cast", StridedArgs);
static CAST: ByTypes = by_types!(Cast, "cast", CastArgs);
static CAST_DELAYED: ByTypes = by_types!(Cast, "cast_delayed", CastArgs);
static CAST_TRANSPOSE: ByTypes = by_types!(CastTranspose, "cast_transpose", CastTransposeArgs);
static CAST_TRANSPOSE_DELAYED: ByTypes =
    by_types!(CastTranspose, "cast_transpose_delayed", CastTransposeArgs);

#[cfg(test)]
pub(super) fn kernels() -> Vec<&'static Kernel> {
    let by_types = [
        &CURRENT_SCALE,
        &STRIDED_SCALE,
        &STRIDED_CAST,
        &CAST,
        &CAST_DELAYED,
        &CAST_TRANSPOSE,
        &CAST_TRANSPOSE_DELAYED,
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

/// Launches the kernel that finds the absolute maximum and leaves it, or the scale from it, at `out`.
fn find_amax(
    x: &View,
    out: *mut u8,
    fast: &'static Kernel,
    strided: &'static Kernel,
    rule: ScaleRule,
    stream: Stream,
) -> Result<(), Error> {
    let device = ordinal(x.device());
    let meeting = meetings(device, stream, 1)?;
    let n = x.numel() as u64;
    // Four blocks a multiprocessor; fewer where a thread would have no full round of loads.
    let most = 4 * u64::from(driver::device(device)?.multiprocessors);
    if contiguous_and_aligned(x) {
        let per_block = 512 * 4 * 16 / x.dtype().size() as u64;
        let grid = Grid { blocks: n.div_ceil(per_block).clamp(1, most), threads: 512 };
        let args = AmaxArgs { x: x.ptr(), n, out, meeting, rule: rule.into() };
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
        meeting,
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

/// The scale of each absolute maximum.
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

/// See `ops::quantize`, `ops::quantize_delayed` and `ops::quantize_current`.
///
/// Current scaling takes two launches: the scale, then the cast, which takes the tensor's end first, because the L2
/// still holds that. One launch with a barrier between its halves is faster alone (1.25 times the cast), but all its
/// blocks must run at once: beside a collective that holds multiprocessors it would wait for that to end.
pub(crate) fn quantize(call: TensorCall, stream: Stream) -> Result<(), Error> {
    let TensorCall { x, scaling, format, rowwise, columnwise } = call;
    let (scale, delayed, backwards) = match &scaling {
        Scaling::Known(scale) => (scale.ptr(), None, false),
        Scaling::Delayed { scale, amax, scale_used } => {
            let meeting = meetings(ordinal(x.device()), stream, 1)?;
            let delayed = Delayed { amax: amax.ptr(), scale_used: scale_used.ptr(), meeting };
            (scale.ptr(), Some(delayed), false)
        }
        Scaling::Current { rule, scale_out } => {
            let (i, j) = (input_index(x.dtype()), format_index(format));
            find_amax(&x, scale_out.ptr(), &CURRENT_SCALE[i][j], &STRIDED_SCALE[i][j], *rule, stream)?;
            (scale_out.ptr().cast_const(), None, true)
        }
    };
    cast(&x, scale, rowwise.as_ref(), columnwise.as_ref(), delayed, backwards, stream)
}

fn cast(
    x: &View,
    scale: *const u8,
    rowwise: Option<&ViewMut>,
    columnwise: Option<&ViewMut>,
    delayed: Option<Delayed>,
    backwards: bool,
    stream: Stream,
) -> Result<(), Error> {
    let Some(format) = rowwise.or(columnwise).and_then(|out| out.dtype().fp8()) else { return Ok(()) };
    let device = ordinal(x.device());
    let (rows, cols) = x.shape();
    let (i, j) = (input_index(x.dtype()), format_index(format));
    let follows = delayed.is_some();
    let delayed = delayed.unwrap_or(Delayed::NONE);
    // An empty tensor still leaves its scale behind.
    let least = u64::from(follows);
    let backwards = u32::from(backwards);

    if let (Some(row), None) = (rowwise, columnwise)
        && contiguous_and_aligned(x)
        && row.is_contiguous()
        && aligned(row.ptr(), 16)
    {
        let n = x.numel() as u64;
        let per_block = if follows { 4 * 4096 } else { 4096 };
        let grid = Grid { blocks: n.div_ceil(per_block).max(least), threads: 256 };
        let args = CastArgs { x: x.ptr(), codes: row.ptr(), n, scale, delayed, backwards };
        let kernels = if follows { &CAST_DELAYED } else { &CAST };
        return launch(device, stream, &kernels[i][j], grid, &args);
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
        let blocks = (rows.div_ceil(8 * patch_rows) * tiles_across) as u64;
        let args = CastTransposeArgs {
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
            backwards,
        };
        let kernels = if follows { &CAST_TRANSPOSE_DELAYED } else { &CAST_TRANSPOSE };
        return launch(device, stream, &kernels[i][j], Grid { blocks, threads: 128 }, &args);
    }

    let tiles_across = cols.div_ceil(32).max(1);
    let blocks = ((rows.div_ceil(32) * tiles_across) as u64).max(least);
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
    let blocks = if x.numel() == 0 { least } else { blocks };
    launch(device, stream, &STRIDED_CAST[i][j], Grid { blocks, threads: 256 }, &args)
}
