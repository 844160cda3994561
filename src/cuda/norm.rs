//! Norms over rows with quantization of their result.

use std::ptr::null_mut;

use super::driver::{self, Grid, args, launch};
use super::modules::{ByTypes, Module, by_types, format_index, input_index, module};
use super::tensorwise::{
    Delayed, Rule, StridedArgs, across_strided, strided_grid, tile_grid, tiles_across, tiles_are_supported,
};
use super::views::{aligned, ordinal, rows_aligned};
use super::workspace;
use crate::error::Error;
use crate::format::Fp8Format;
use crate::layout::{View, ViewMut};
use crate::spec::{Norm, ScaleRule, Stream, TensorPlanes};

#[derive(Clone, Copy)]
#[repr(C)]
struct NormArgs {
    weight: *const u8,
    bias: *const u8,
    mean: *mut u8,
    rstd: *mut u8,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct NormStatsArgs {
    x: *const u8,
    norm: NormArgs,
    scale: *mut u8,
    grid_max: *mut u8,
    x_rs: i64,
    x_cs: i64,
    rows: i64,
    cols: i64,
    eps: f32,
    rule: Rule,
    flags: u32,
    unused: u32,
}

/// Defined in `kernels/norm.cu`.
const X_VECTORS: u32 = 1;
const WEIGHT_VECTORS: u32 = 2;

#[derive(Clone, Copy)]
#[repr(C)]
struct NormCastArgs {
    cast: StridedArgs,
    norm: NormArgs,
}

args!(NormStatsArgs, NormCastArgs);

static NORM_MODULE: Module = module!("norm");

static STATS: ByTypes = by_types!(NORM_MODULE, "norm_stats", NormStatsArgs);
static STATS_ANY: ByTypes = by_types!(NORM_MODULE, "norm_stats_any", NormStatsArgs);
static CAST: ByTypes = by_types!(NORM_MODULE, "norm_cast", NormCastArgs);
static STRIDED: ByTypes = by_types!(NORM_MODULE, "norm_strided", NormCastArgs);

#[cfg(test)]
pub(super) fn kernels() -> Vec<&'static super::modules::Kernel> {
    [&STATS, &STATS_ANY, &CAST, &STRIDED].into_iter().flatten().flatten().collect()
}

/// Number of threads of a block of `norm_stats`, which takes rows in turn.
const THREADS: u32 = 128;

/// Largest number of blocks of `norm_stats` for each multiprocessor.
const BLOCKS: u64 = 6;

/// Number of bytes of rows in the shared memory of a block.
const ROW_BYTES: usize = 32 << 10;

/// Number of elements that a thread reads together.
const PER_THREAD: usize = 8;

/// See `ops::quantize_norm`.
pub(crate) fn quantize_norm(
    norm: &Norm,
    format: Fp8Format,
    planes: &TensorPlanes,
    stream: Stream,
) -> Result<(), Error> {
    let x = &norm.x;
    let device = ordinal(x.device());
    let vector = |view: &Option<View>| view.as_ref().map_or(std::ptr::null(), View::ptr);
    let args = NormArgs {
        weight: vector(&norm.weight),
        bias: vector(&norm.bias),
        mean: norm.mean.as_ref().map_or(null_mut(), ViewMut::ptr),
        rstd: norm.rstd.ptr(),
    };
    let weights_are_aligned = aligned(args.weight, 16) && aligned(args.bias, 16);
    let kernel = |kernels: &'static ByTypes| &kernels[input_index(x.dtype())][format_index(format)];

    let mut flags = 0;
    if rows_aligned(&x.matrix(), 16) {
        flags |= X_VECTORS;
    }
    if weights_are_aligned {
        flags |= WEIGHT_VECTORS;
    }
    let mut stats = NormStatsArgs {
        x: x.ptr(),
        norm: args,
        scale: null_mut(),
        grid_max: null_mut(),
        x_rs: x.row_stride() as i64,
        x_cs: x.col_stride() as i64,
        rows: x.rows() as i64,
        cols: x.cols() as i64,
        eps: norm.eps,
        rule: ScaleRule::default().into(),
        flags,
        unused: 0,
    };
    if planes.delayed.is_none() {
        stats.scale = planes.scale.ptr();
        stats.rule = planes.rule.into();
        stats.grid_max = workspace::slots(device, stream, 1)?;
    }
    let fits_in_shared_memory = flags == X_VECTORS | WEIGHT_VECTORS
        && x.cols().is_multiple_of(PER_THREAD)
        && x.cols() * x.dtype().size() <= ROW_BYTES;
    // At least one block, because the scale of an empty tensor is written too.
    let max_blocks = BLOCKS * u64::from(driver::device(device)?.multiprocessors);
    let grid = Grid { blocks: (x.rows() as u64).clamp(1, max_blocks), threads: THREADS };
    launch(device, stream, kernel(if fits_in_shared_memory { &STATS } else { &STATS_ANY }), grid, &stats)?;

    let cast = Cast::new(x, planes, weights_are_aligned, stream)?;
    let kernels = if cast.in_tiles { &CAST } else { &STRIDED };
    launch(device, stream, kernel(kernels), cast.grid, &NormCastArgs { cast: cast.args, norm: args })
}

/// The launch of a cast of normalized values, in the shape of the input.
struct Cast {
    args: StridedArgs,
    grid: Grid,
    /// Whether tiles are cast in registers. Otherwise the views have any layout.
    in_tiles: bool,
}

impl Cast {
    fn new(
        x: &View,
        planes: &TensorPlanes,
        weights_are_aligned: bool,
        stream: Stream,
    ) -> Result<Self, Error> {
        let mut scale = planes.scale.ptr().cast_const();
        let mut delayed = Delayed::NONE;
        if let Some((given, amax)) = &planes.delayed {
            let grid_max = workspace::slots(ordinal(x.device()), stream, 1)?;
            scale = given.ptr();
            delayed = Delayed { amax: amax.ptr(), scale_used: planes.scale.ptr(), grid_max };
        }

        let rowwise = planes.rowwise.as_ref();
        let columnwise = planes.columnwise.as_ref();
        let in_tiles = weights_are_aligned && tiles_are_supported(x, rowwise, columnwise);
        let mut args = StridedArgs::new(x, rowwise, columnwise, scale, delayed);
        args.tiles_across = if in_tiles { tiles_across(x) } else { across_strided(x) };
        let grid = if in_tiles { tile_grid(x) } else { strided_grid(x, &delayed) };
        Ok(Self { args, grid, in_tiles })
    }
}
