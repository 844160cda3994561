//! One scale per tensor. Each operation selects a kernel for the layout of its views and launches it.
//!
//! `args` has the kernels' argument structs. `lists` launches kernels for many tensors at once.

mod args;
mod lists;

use args::{
    AmaxArgs, CastArgs, CastTransposeArgs, Current, CurrentCastArgs, CurrentCastTransposeArgs, ScaleArgs,
    StridedAmaxArgs,
};

use super::driver::{self, Args, Grid, launch};
use super::modules::{
    ByFormat, ByInput, ByTypes, Kernel, Module, by_format, by_input, by_types, format_index, input_index,
    module,
};
use super::views::{aligned, contiguous_and_aligned, ordinal};
use super::workspace;
use crate::error::Error;
use crate::format::Fp8Format;
use crate::layout::{Matrix, View, ViewMut};
use crate::spec::{ScaleRule, Scaling, Stream, TensorCall};

pub(super) use args::{Delayed, Rule, StridedArgs};
pub(crate) use lists::{multi_amax, multi_quantize, multi_quantize_delayed};

static AMAX_MODULE: Module = module!("amax");
static STRIDED_MODULE: Module = module!("strided");
static CAST_MODULE: Module = module!("cast");
static CAST_TRANSPOSE_MODULE: Module = module!("cast_transpose");

static AMAX: ByInput = by_input!(AMAX_MODULE, "amax", AmaxArgs);
static CURRENT_SCALE: ByTypes = by_types!(AMAX_MODULE, "current_scale", AmaxArgs);
static SCALE: ByFormat = by_format!(AMAX_MODULE, "scale", ScaleArgs);
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
enum CastScale {
    Static(*const u8),
    Delayed { scale: *const u8, delayed: Delayed },
    Current { rule: ScaleRule, scale: *mut u8 },
}

impl CastScale {
    /// Returns the address of the scale.
    fn scale(self) -> *const u8 {
        match self {
            Self::Static(scale) | Self::Delayed { scale, .. } => scale,
            Self::Current { scale, .. } => scale.cast_const(),
        }
    }

    /// Returns the other outputs of delayed scaling.
    fn delayed(self) -> Delayed {
        match self {
            Self::Delayed { delayed, .. } => delayed,
            Self::Static(_) | Self::Current { .. } => Delayed::NONE,
        }
    }
}

/// See `ops::quantize`, `ops::quantize_delayed` and `ops::quantize_current`.
pub(crate) fn quantize(call: TensorCall, stream: Stream) -> Result<(), Error> {
    let TensorCall { x, scaling, format, rowwise, columnwise } = call;
    let source = match &scaling {
        Scaling::Static(scale) => CastScale::Static(scale.ptr()),
        Scaling::Delayed { scale, amax, scale_used } => {
            let grid_max = workspace::slots(ordinal(x.device()), stream, 1)?;
            let delayed = Delayed { amax: amax.ptr(), scale_used: scale_used.ptr(), grid_max };
            CastScale::Delayed { scale: scale.ptr(), delayed }
        }
        Scaling::Current { rule, scale_out } => CastScale::Current { rule: *rule, scale: scale_out.ptr() },
    };
    let (rowwise, columnwise) = (rowwise.as_ref(), columnwise.as_ref());
    Cast { x: &x, source, format, rowwise, columnwise, stream }.run()
}

/// The cast of one tensor.
struct Cast<'a> {
    x: &'a View<'a>,
    source: CastScale,
    format: Fp8Format,
    rowwise: Option<&'a ViewMut<'a>>,
    columnwise: Option<&'a ViewMut<'a>>,
    stream: Stream,
}

impl Cast<'_> {
    /// Launches the fastest kernel that supports the layout of the views. The fast kernels compute the scale of
    /// current scaling in the same launch. Other layouts take two launches: the scale, then the cast.
    fn run(&self) -> Result<(), Error> {
        if let (Some(rowwise), None) = (self.rowwise, self.columnwise)
            && contiguous_and_aligned(self.x)
            && rowwise.is_contiguous()
            && aligned(rowwise.ptr(), 16)
        {
            return self.contiguous(rowwise);
        }
        if let Some(columnwise) = self.columnwise
            && tiles_are_supported(self.x, self.rowwise, Some(columnwise))
        {
            return self.tiles(columnwise);
        }
        if let CastScale::Current { rule, scale } = self.source {
            let (fast, strided) = (self.kernel(&CURRENT_SCALE), self.kernel(&STRIDED_SCALE));
            find_amax(self.x, scale, fast, strided, rule, self.stream)?;
        }
        self.strided()
    }

    fn kernel(&self, kernels: &'static ByTypes) -> &'static Kernel {
        &kernels[input_index(self.x.dtype())][format_index(self.format)]
    }

    fn launch<A: Args>(&self, kernels: &'static ByTypes, grid: Grid, args: &A) -> Result<(), Error> {
        launch(ordinal(self.x.device()), self.stream, self.kernel(kernels), grid, args)
    }

    /// Returns the arguments of current scaling over `pieces` pieces of `x`, and the number of blocks. The
    /// barrier of current scaling allows at most four blocks per multiprocessor, which the kernels' register use
    /// allows.
    fn current(&self, rule: ScaleRule, scale: *mut u8, pieces: u64) -> Result<(Current, u64), Error> {
        let device = ordinal(self.x.device());
        let barrier = workspace::slots(device, self.stream, Current::SLOTS)?;
        let blocks = pieces.clamp(1, 4 * u64::from(driver::device(device)?.multiprocessors));
        Ok((Current::new(rule, scale, barrier, pieces, blocks), blocks))
    }

    /// Casts contiguous elements.
    fn contiguous(&self, rowwise: &ViewMut) -> Result<(), Error> {
        let n = self.x.numel() as u64;
        let threads = 256;
        let cast = CastArgs {
            x: self.x.ptr(),
            codes: rowwise.ptr(),
            n,
            scale: self.source.scale(),
            delayed: self.source.delayed(),
        };
        match self.source {
            CastScale::Static(_) => self.launch(&CAST, Grid { blocks: n.div_ceil(4096), threads }, &cast),
            CastScale::Delayed { .. } => {
                self.launch(&CAST_DELAYED, Grid { blocks: n.div_ceil(4 * 4096).max(1), threads }, &cast)
            }
            CastScale::Current { rule, scale } => {
                // A piece is 32 KiB of x.
                let pieces = n.div_ceil((32 << 10) / self.x.dtype().size() as u64);
                let (current, blocks) = self.current(rule, scale, pieces)?;
                self.launch(&CAST_CURRENT, Grid { blocks, threads }, &CurrentCastArgs { cast, current })
            }
        }
    }

    /// Casts and transposes tiles.
    fn tiles(&self, columnwise: &ViewMut) -> Result<(), Error> {
        let (rows, cols) = self.x.shape();
        let one_per_tile = tile_grid(self.x);
        let cast = CastTransposeArgs {
            x: self.x.ptr(),
            rowwise: self.rowwise.map_or(std::ptr::null_mut(), ViewMut::ptr),
            columnwise: columnwise.ptr(),
            rows: rows as i64,
            cols: cols as i64,
            x_rs: self.x.row_stride() as i64,
            rowwise_rs: self.rowwise.map_or(0, |rowwise| rowwise.row_stride() as i64),
            tiles_across: tiles_across(self.x),
            scale: self.source.scale(),
            delayed: self.source.delayed(),
        };
        match self.source {
            CastScale::Static(_) => self.launch(&CAST_TRANSPOSE, one_per_tile, &cast),
            CastScale::Delayed { .. } => self.launch(&CAST_TRANSPOSE_DELAYED, one_per_tile, &cast),
            CastScale::Current { rule, scale } => {
                let (current, blocks) = self.current(rule, scale, one_per_tile.blocks)?;
                let args = CurrentCastTransposeArgs { cast, current };
                self.launch(&CAST_TRANSPOSE_CURRENT, Grid { blocks, ..one_per_tile }, &args)
            }
        }
    }

    /// Casts views of any layout.
    fn strided(&self) -> Result<(), Error> {
        let (scale, delayed) = (self.source.scale(), self.source.delayed());
        let args = StridedArgs::new(self.x, self.rowwise, self.columnwise, scale, delayed);
        let args = StridedArgs { tiles_across: across_strided(self.x), ..args };
        self.launch(&STRIDED_CAST, strided_grid(self.x, &delayed), &args)
    }
}

/// Returns the rows of a patch, which a thread transposes in registers.
fn patch_rows(x: &View) -> usize {
    if x.dtype().size() == 4 { 8 } else { 16 }
}

/// Whether the kernels that cast and transpose tiles support the layout of the views.
pub(super) fn tiles_are_supported(x: &View, rowwise: Option<&ViewMut>, columnwise: Option<&ViewMut>) -> bool {
    let (rows, cols) = x.shape();
    let x_is_supported = x.numel() > 0
        && x.col_stride() == 1
        && x.row_stride() > 0
        && aligned(x.ptr(), 16)
        && (x.row_stride() as usize * x.dtype().size()).is_multiple_of(16)
        && rows.is_multiple_of(patch_rows(x))
        && cols.is_multiple_of(8);
    let columnwise_is_supported = columnwise
        .is_none_or(|columnwise| columnwise.is_contiguous() && aligned(columnwise.ptr(), patch_rows(x)));
    let rowwise_is_supported = rowwise.is_none_or(|rowwise| {
        rowwise.col_stride() == 1
            && rowwise.row_stride() > 0
            && aligned(rowwise.ptr(), 8)
            && (rowwise.row_stride() as usize).is_multiple_of(8)
    });
    x_is_supported && columnwise_is_supported && rowwise_is_supported
}

/// Returns the number of tiles of 128 columns in a row of tiles.
pub(super) fn tiles_across(x: &View) -> i64 {
    x.cols().div_ceil(128) as i64
}

/// Returns the grid of a cast in tiles, one block for each.
pub(super) fn tile_grid(x: &View) -> Grid {
    let tile_rows = 8 * patch_rows(x);
    let blocks = x.rows().div_ceil(tile_rows) as u64 * tiles_across(x) as u64;
    Grid { blocks, threads: 128 }
}

/// Returns the number of tiles of 32x32 elements in a row of tiles.
pub(super) fn across_strided(x: &View) -> i64 {
    x.cols().div_ceil(32).max(1) as i64
}

/// Returns the grid of a cast of views of any layout, in tiles of 32x32 elements.
pub(super) fn strided_grid(x: &View, delayed: &Delayed) -> Grid {
    let blocks = if x.numel() > 0 {
        x.rows().div_ceil(32) as u64 * across_strided(x) as u64
    } else {
        // With delayed scaling, an empty tensor still needs a block, which writes `scale_used`.
        u64::from(!delayed.grid_max.is_null())
    };
    Grid { blocks, threads: 256 }
}
