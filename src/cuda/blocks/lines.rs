//! Rowwise kernels that run at the speed of a copy (`kernels/mx_row.cu`, `kernels/row.cu`), per-row
//! scales, and division by them (`kernels/row_divide.cu`).

use std::ptr;

use super::amax::{LinesArgs, fill, line_amax};
use super::{Job, blocks_of, tile};
use crate::cuda::driver::{args, launch};
use crate::cuda::modules::{ByTypes, Module, by_types, format_index, input_index, module};
use crate::cuda::tensorwise::Rule;
use crate::cuda::views::{aligned, rows_aligned};
use crate::error::Error;
use crate::format::e8m0::Rounding;
use crate::layout::{Block, Matrix};
use crate::spec::ScaleRule;

#[derive(Clone, Copy)]
#[repr(C)]
struct MxRowArgs {
    x: *const u8,
    codes: *mut u8,
    scales: *mut u8,
    rows: i64,
    cols: i64,
    x_rs: i64,
    codes_rs: i64,
    tiles_across: i64,
    floor_rule: u32,
    unused: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RowArgs {
    x: *const u8,
    codes: *mut u8,
    scale: *mut u8,
    amax: *const u8,
    column_scale: *const u8,
    x_rs: i64,
    codes_rs: i64,
    scale_rs: i64,
    amax_rs: i64,
    cols: i64,
    rule: Rule,
    unused: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RowDivideArgs {
    x: *const u8,
    codes: *mut u8,
    scale: *mut u8,
    amax: *const u8,
    column_scale: *const u8,
    x_rs: i64,
    x_cs: i64,
    codes_rs: i64,
    codes_cs: i64,
    scale_rs: i64,
    amax_rs: i64,
    column_scale_cs: i64,
    cols: i64,
    rule: Rule,
    flags: u32,
}

args!(MxRowArgs, RowArgs, RowDivideArgs);

static MX_ROW_MODULE: Module = module!("mx_row");
static ROW_MODULE: Module = module!("row");
static ROW_DIVIDE_MODULE: Module = module!("row_divide");

static MX_ROW: ByTypes = by_types!(MX_ROW_MODULE, "mx_row", MxRowArgs);
static MX_ROW_PACKED: ByTypes = by_types!(MX_ROW_MODULE, "mx_row_packed", MxRowArgs);
static ROW_4: ByTypes = by_types!(ROW_MODULE, "row_4", RowArgs);
static ROW_8: ByTypes = by_types!(ROW_MODULE, "row_8", RowArgs);
static ROW_LONG: ByTypes = by_types!(ROW_MODULE, "row_long", RowArgs);
static ROW_SCALED: ByTypes = by_types!(ROW_MODULE, "row_fold", RowArgs);
static ROW_LONG_SCALED: ByTypes = by_types!(ROW_MODULE, "row_long_fold", RowArgs);
static ROW_DIVIDE: ByTypes = by_types!(ROW_DIVIDE_MODULE, "row_divide", RowDivideArgs);

/// Flags of `RowDivideArgs`, defined in `kernels/row_divide.cu`.
const X_VECTORS: u32 = 1;
const CODES_VECTORS: u32 = 2;

#[cfg(test)]
pub(super) fn kernels() -> Vec<&'static crate::cuda::modules::Kernel> {
    let all =
        [&MX_ROW, &MX_ROW_PACKED, &ROW_4, &ROW_8, &ROW_LONG, &ROW_SCALED, &ROW_LONG_SCALED, &ROW_DIVIDE];
    all.into_iter().flatten().flatten().collect()
}

/// Quantizes to MXFP8 with 1x32 blocks in one direction, if the fast kernels support the layout of the views.
/// Otherwise does nothing and returns false.
pub(super) fn mx_rowwise(job: &Job, rounding: Rounding) -> Result<bool, Error> {
    let (Some(row), None, None) = (job.row, job.col, job.square_amax) else { return Ok(false) };
    if row.amax.is_some() || job.spec.block != (Block { rows: 1, cols: 32 }) {
        return Ok(false);
    }
    let Job { x, spec, .. } = job;
    let dense = |m: &Matrix| m.col_stride == 1 && rows_aligned(m, 16);
    if !dense(x) || !dense(&row.codes) {
        return Ok(false);
    }
    let at = (input_index(x.dtype), format_index(job.format));
    let floor_rule = u32::from(rounding == Rounding::Floor);
    let contiguous = |m: &Matrix| m.rows == 1 || m.row_stride == m.cols as isize;
    if spec.packed && x.cols.is_multiple_of(16) {
        let tiles_across = x.cols.div_ceil(128);
        let args = MxRowArgs {
            x: x.ptr,
            codes: row.codes.ptr,
            scales: row.scales.ptr,
            rows: x.rows as i64,
            cols: x.cols as i64,
            x_rs: x.row_stride as i64,
            codes_rs: row.codes.row_stride as i64,
            tiles_across: tiles_across as i64,
            floor_rule,
            unused: 0,
        };
        let grid = blocks_of(x.rows.div_ceil(128) * tiles_across, 512);
        launch(job.device, job.stream, &MX_ROW_PACKED[at.0][at.1], grid, &args)?;
        return Ok(true);
    }
    let flat = contiguous(x) && contiguous(&row.codes) && contiguous(&row.scales);
    let scales_dense = row.scales.col_stride == 1 || row.scales.cols == 1 && contiguous(&row.scales);
    if !spec.packed && x.cols.is_multiple_of(32) && flat && scales_dense {
        let n = x.numel();
        let args = MxRowArgs {
            x: x.ptr,
            codes: row.codes.ptr,
            scales: row.scales.ptr,
            rows: 1,
            cols: n as i64,
            x_rs: 0,
            codes_rs: 0,
            tiles_across: 0,
            floor_rule,
            unused: 0,
        };
        let grid = blocks_of(n.div_ceil(8 * 1024), 256);
        launch(job.device, job.stream, &MX_ROW[at.0][at.1], grid, &args)?;
        return Ok(true);
    }
    Ok(false)
}

/// Quantizes with one scale per row, and per column for transposed codes.
pub(super) fn quantize(job: &Job, rule: ScaleRule) -> Result<(), Error> {
    if job.spec.divide && job.row.is_some() && job.x.numel() > 0 {
        divide(job, rule)?;
        if job.col.is_none() {
            return Ok(());
        }
        return quantize(&Job { row: None, column_scale: None, ..*job }, rule);
    }
    if job.x.numel() > 0 && one_read(job, rule)? {
        return Ok(());
    }
    let planes = [&job.row, &job.col].map(|plane| plane.as_ref());
    if job.x.numel() > 0 && planes.iter().flatten().all(|plane| plane.amax.is_some()) {
        return tile::quantize_lines(job, false);
    }
    // Maxima that are not given are computed in the memory of the scales, which later replace them.
    let computed = planes.map(|plane| plane.filter(|plane| plane.amax.is_none()).map(|plane| plane.scales));
    let empty = job.x.numel() == 0;
    let first = if empty { rule.scale(0.0, job.format) } else { 0.0 };
    fill(job.device, job.stream, &LinesArgs::new(computed[0].as_ref(), computed[1].as_ref(), first))?;
    if !empty {
        line_amax(job, computed[0].as_ref(), computed[1].as_ref())?;
    }
    for plane in planes.into_iter().flatten() {
        if let Some(amax) = &plane.amax {
            crate::cuda::tensorwise::scales(amax, job.format, rule, &plane.scales, job.stream)?;
        }
    }
    if empty { Ok(()) } else { tile::quantize_lines(job, true) }
}

/// Quantizes rowwise only, with division by the scales. Supports every layout.
fn divide(job: &Job, rule: ScaleRule) -> Result<(), Error> {
    let Some(row) = job.row else { return Ok(()) };
    let Job { x, column_scale, .. } = job;
    let vector = 16 / x.dtype.size();
    let flags = [
        (X_VECTORS, x.col_stride == 1 && rows_aligned(x, 16)),
        (CODES_VECTORS, row.codes.col_stride == 1 && rows_aligned(&row.codes, vector)),
    ];
    let args = RowDivideArgs {
        x: x.ptr,
        codes: row.codes.ptr,
        scale: row.scales.ptr,
        amax: row.amax.map_or(ptr::null(), |m| m.ptr),
        column_scale: column_scale.map_or(ptr::null(), |m| m.ptr),
        x_rs: x.row_stride as i64,
        x_cs: x.col_stride as i64,
        codes_rs: row.codes.row_stride as i64,
        codes_cs: row.codes.col_stride as i64,
        scale_rs: row.scales.row_stride as i64,
        amax_rs: row.amax.map_or(0, |m| m.row_stride as i64),
        column_scale_cs: column_scale.map_or(0, |m| m.col_stride as i64),
        cols: x.cols as i64,
        rule: rule.into(),
        flags: flags.into_iter().filter(|(_, on)| *on).map(|(flag, _)| flag).sum(),
    };
    let threads = x.cols.div_ceil(vector).next_multiple_of(32).min(256);
    let kernel = &ROW_DIVIDE[input_index(x.dtype)][format_index(job.format)];
    launch(job.device, job.stream, kernel, blocks_of(x.rows, threads), &args)
}

/// Quantizes rowwise only, with the rows in registers, if the kernels support the layout of the views.
/// Otherwise does nothing and returns false.
fn one_read(job: &Job, rule: ScaleRule) -> Result<bool, Error> {
    let (Some(row), None) = (job.row, job.col) else { return Ok(false) };
    let Job { x, column_scale, .. } = job;
    let vector = 16 / x.dtype.size();
    let supported = rows_aligned(x, 16)
        && rows_aligned(&row.codes, vector)
        && x.cols.is_multiple_of(vector)
        && column_scale
            .is_none_or(|column_scale| column_scale.col_stride == 1 && aligned(column_scale.ptr, 16));
    if !supported {
        return Ok(false);
    }
    let vectors = x.cols / vector;
    let most = |each: usize, threads: usize| vectors <= each * threads;
    let threads = |each: usize| vectors.div_ceil(each).next_multiple_of(32);
    let (kernels, threads) = match column_scale {
        None if most(4, 256) => (&ROW_4, threads(4)),
        None if most(8, 512) => (&ROW_8, threads(8)),
        None => (&ROW_LONG, 512),
        Some(_) if most(8, 512) => (&ROW_SCALED, threads(8)),
        Some(_) => (&ROW_LONG_SCALED, 512),
    };
    let args = RowArgs {
        x: x.ptr,
        codes: row.codes.ptr,
        scale: row.scales.ptr,
        amax: row.amax.map_or(ptr::null(), |m| m.ptr),
        column_scale: column_scale.map_or(ptr::null(), |m| m.ptr),
        x_rs: x.row_stride as i64,
        codes_rs: row.codes.row_stride as i64,
        scale_rs: row.scales.row_stride as i64,
        amax_rs: row.amax.map_or(0, |m| m.row_stride as i64),
        cols: x.cols as i64,
        rule: rule.into(),
        unused: 0,
    };
    debug_assert!(aligned(x.ptr, 16) && job.spec.block == Block::ROW);
    let kernel = &kernels[input_index(x.dtype)][format_index(job.format)];
    launch(job.device, job.stream, kernel, blocks_of(x.rows, threads), &args)?;
    Ok(true)
}
