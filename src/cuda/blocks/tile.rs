//! The tile kernels (`kernels/tile.cuh`): 128x128 elements, one or both directions, any strides.

use std::ptr;

use super::{Job, Plane, blocks_of};
use crate::cuda::driver::{args, launch};
use crate::cuda::modules::{ByTypes, Module, by_types, format_index, input_index, module};
use crate::cuda::tensorwise::Rule;
use crate::cuda::views::rows_aligned;
use crate::error::Error;
use crate::format::e8m0::Rounding;
use crate::layout::{Block, BlockFormat, DType, Matrix};
use crate::spec::{BlockScale, ScaleRule};

const TILE: usize = 128;

const X_VECTORS: u32 = 1;
const ROW_VECTORS: u32 = 2;
const COL_VECTORS: u32 = 4;
const PACKED: u32 = 8;
const FLOOR_RULE: u32 = 16;
const ROW_SCALE_WORDS: u32 = 32;
const COL_SCALE_WORDS: u32 = 64;
const FOUND: u32 = 128;

#[derive(Clone, Copy)]
#[repr(C)]
struct TileArgs {
    x: *const u8,
    row: *mut u8,
    col: *mut u8,
    row_scale: *mut u8,
    col_scale: *mut u8,
    row_amax: *const u8,
    col_amax: *const u8,
    column_scale: *const u8,
    x_rs: i64,
    x_cs: i64,
    row_rs: i64,
    row_cs: i64,
    col_rs: i64,
    col_cs: i64,
    row_scale_rs: i64,
    row_scale_cs: i64,
    col_scale_rs: i64,
    col_scale_cs: i64,
    row_amax_rs: i64,
    row_amax_cs: i64,
    col_amax_rs: i64,
    col_amax_cs: i64,
    column_scale_cs: i64,
    rows: i64,
    cols: i64,
    rows_before: i64,
    tiles_across: i64,
    rule: Rule,
    flags: u32,
}

args!(TileArgs);

static MX_LINES_MODULE: Module = module!("mx_lines");
static MX_SQUARE_MODULE: Module = module!("mx_square");
static BLOCK_LINES_MODULE: Module = module!("block_lines");
static BLOCK_SQUARE_MODULE: Module = module!("block_square");
static ROW_BOTH_MODULE: Module = module!("row_both");

static MX_LINES: ByTypes = by_types!(MX_LINES_MODULE, "mx_lines", TileArgs);
static MX_SQUARE: ByTypes = by_types!(MX_SQUARE_MODULE, "mx_square", TileArgs);
static BLOCK_LINES: ByTypes = by_types!(BLOCK_LINES_MODULE, "block_lines", TileArgs);
static BLOCK_SQUARE: ByTypes = by_types!(BLOCK_SQUARE_MODULE, "block_square", TileArgs);
static ROW_BOTH: ByTypes = by_types!(ROW_BOTH_MODULE, "row_both", TileArgs);

#[cfg(test)]
pub(super) fn kernels() -> Vec<&'static crate::cuda::modules::Kernel> {
    [&MX_LINES, &MX_SQUARE, &BLOCK_LINES, &BLOCK_SQUARE, &ROW_BOTH].into_iter().flatten().flatten().collect()
}

/// Returns the pointer and strides of a matrix, or null if it is absent.
fn place(m: Option<&Matrix>) -> (*mut u8, i64, i64) {
    m.map_or((ptr::null_mut(), 0, 0), |m| (m.ptr, m.row_stride as i64, m.col_stride as i64))
}

/// Whether four adjacent bytes of a row can be stored as a word.
fn words(scales: &Matrix) -> bool {
    scales.dtype == DType::E8m0 && rows_aligned(scales, 4) && scales.cols > 1
}

/// Quantizes with blocks of 32 or 128.
pub(super) fn quantize(job: &Job) -> Result<(), Error> {
    run(job, kernels_for(job.spec.block, job.spec.scale)?, false)
}

/// Whether this module has a kernel for a format. Scales of whole rows and columns depend on other tiles, so
/// `lines` computes their maxima first.
fn has_kernel(format: &BlockFormat) -> bool {
    format.block != Block::ROW
}

fn kernels_for(block: Block, scale: BlockScale) -> Result<&'static ByTypes, Error> {
    Ok(match (scale, block.rows, block.cols) {
        (BlockScale::E8m0(_), 32, 32) => &MX_SQUARE,
        (BlockScale::E8m0(_), 1, 32) => &MX_LINES,
        (BlockScale::F32(_), 128, 128) => &BLOCK_SQUARE,
        (BlockScale::F32(_), 1, 128) => &BLOCK_LINES,
        _ => {
            let dtype = scale.dtype();
            let blocks = BlockFormat::list_blocks(|format| has_kernel(format) && format.scale_dtype == dtype);
            return Err(block.unsupported(format!("{blocks} with {dtype} scales")));
        }
    })
}

/// Quantizes with one scale per row and per column. The scales come from the planes' given maxima. With
/// `in_scales`, they come from the memory of the scales, which then holds maxima that `line_amax` marked, or
/// final scales.
pub(super) fn quantize_lines(job: &Job, in_scales: bool) -> Result<(), Error> {
    run(job, &ROW_BOTH, in_scales)
}

fn run<'a>(job: &Job<'a>, kernels: &'static ByTypes, in_scales: bool) -> Result<(), Error> {
    let Job { x, spec, block_offset, .. } = job;
    let (row, col) = (job.row.map(|plane| plane.codes), job.col.map(|plane| plane.codes));
    let (row_scale, col_scale) = (job.row.map(|plane| plane.scales), job.col.map(|plane| plane.scales));
    let maxima_of =
        if in_scales { |plane: Plane<'a>| Some(plane.scales) } else { |plane: Plane<'a>| plane.amax };
    let row_amax = if spec.block.is_square() { job.square_amax } else { job.row.and_then(maxima_of) };
    let col_amax = job.col.and_then(maxima_of);
    let (rule, floor) = match spec.scale {
        BlockScale::F32(rule) => (rule, false),
        BlockScale::E8m0(rounding) => (ScaleRule::default(), rounding == Rounding::Floor),
    };

    let flags = [
        (X_VECTORS, rows_aligned(x, 16) && x.col_stride == 1),
        (ROW_VECTORS, row.is_some_and(|m| m.col_stride == 1 && rows_aligned(&m, 8))),
        (
            COL_VECTORS,
            col.is_some_and(|m| m.col_stride == 1 && rows_aligned(&m, 16)) && block_offset % 16 == 0,
        ),
        (PACKED, spec.packed),
        (FLOOR_RULE, floor),
        (ROW_SCALE_WORDS, row_scale.is_some_and(|m| words(&m))),
        (COL_SCALE_WORDS, col_scale.is_some_and(|m| words(&m))),
        (FOUND, in_scales),
    ];
    let flags = flags.into_iter().filter(|(_, on)| *on).map(|(flag, _)| flag).sum();

    let tiles_across = x.cols.div_ceil(TILE);
    let (row, row_rs, row_cs) = place(row.as_ref());
    let (col, col_rs, col_cs) = place(col.as_ref());
    let (row_scale, row_scale_rs, row_scale_cs) = place(row_scale.as_ref());
    let (col_scale, col_scale_rs, col_scale_cs) = place(col_scale.as_ref());
    let (row_amax, row_amax_rs, row_amax_cs) = place(row_amax.as_ref());
    let (col_amax, col_amax_rs, col_amax_cs) = place(col_amax.as_ref());
    let (column_scale, _, column_scale_cs) = place(job.column_scale.as_ref());
    let args = TileArgs {
        x: x.ptr,
        row,
        col,
        row_scale,
        col_scale,
        row_amax,
        col_amax,
        column_scale,
        x_rs: x.row_stride as i64,
        x_cs: x.col_stride as i64,
        row_rs,
        row_cs,
        col_rs,
        col_cs,
        row_scale_rs,
        row_scale_cs,
        col_scale_rs,
        col_scale_cs,
        row_amax_rs,
        row_amax_cs,
        col_amax_rs,
        col_amax_cs,
        column_scale_cs,
        rows: x.rows as i64,
        cols: x.cols as i64,
        rows_before: *block_offset as i64,
        tiles_across: tiles_across as i64,
        rule: rule.into(),
        flags,
    };
    debug_assert!(!spec.packed || [row_scale, col_scale].iter().all(|p| p.addr().is_multiple_of(16)));
    debug_assert!(spec.block == Block::ROW || !in_scales);
    let threads = if x.dtype == DType::F32 { 256 } else { 128 };
    let grid = blocks_of((x.rows + block_offset).div_ceil(TILE) * tiles_across, threads);
    let kernel = &kernels[input_index(x.dtype)][format_index(job.format)];
    launch(job.device, job.stream, kernel, grid, &args)
}

#[cfg(test)]
mod tests {
    use super::{Block, BlockScale, DType, Rounding, ScaleRule, has_kernel, kernels_for};
    use crate::layout::{FORMATS, list};

    #[test]
    fn every_format_has_a_kernel_and_other_blocks_are_refused() {
        let extents = [1, 16, 32, 64, 128, 256];
        for scale in [BlockScale::F32(ScaleRule::default()), BlockScale::E8m0(Rounding::Ceil)] {
            for (rows, cols) in extents.into_iter().flat_map(|rows| extents.map(|cols| (rows, cols))) {
                let block = Block { rows, cols };
                let mut formats = FORMATS.iter().filter(|format| has_kernel(format));
                let expected =
                    formats.any(|format| format.block == block && format.scale_dtype == scale.dtype());
                assert_eq!(kernels_for(block, scale).is_ok(), expected, "{block} {scale:?}");
            }
        }
        let error = kernels_for(Block::ROW, BlockScale::F32(ScaleRule::default())).err().expect("refused");
        let float32_formats =
            FORMATS.iter().filter(|format| has_kernel(format) && format.scale_dtype == DType::F32);
        let blocks = list(float32_formats.map(|format| format.block.to_string()).collect());
        let expected = format!("block is (1, all); it must be {blocks} with float32 scales");
        assert_eq!(error.to_string(), expected);
        assert!(FORMATS.iter().all(|format| [DType::F32, DType::E8m0].contains(&format.scale_dtype)));
    }
}
