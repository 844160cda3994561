//! Block formats. Each operation selects a kernel for the layout of its views and launches it.
//!
//! - `tile` quantizes 128x128 tiles in one or both directions, for any format and any strides.
//! - `lines` has the kernels for one direction that run at the speed of a copy, and per-row scales.
//! - `amax` computes maxima. `scales` packs and rebases.

mod amax;
mod lines;
mod scales;
mod tile;

use super::driver::Grid;
use super::views::{aligned, ordinal};
use crate::error::Error;
use crate::format::Fp8Format;
use crate::layout::{Block, Matrix};
use crate::spec::{BlockCall, BlockScale, BlockSpec, Stream};

pub(crate) use amax::block_amax;
pub(crate) use scales::{pack_scales, rebase};

/// Returns every kernel that this module launches.
#[cfg(test)]
pub(super) fn kernels() -> Vec<&'static super::modules::Kernel> {
    [amax::kernels(), lines::kernels(), scales::kernels(), tile::kernels()].concat()
}

/// The outputs and the given maxima of one direction.
#[derive(Clone, Copy)]
struct Plane<'a> {
    codes: Matrix<'a>,
    scales: Matrix<'a>,
    amax: Option<Matrix<'a>>,
}

/// A call in the kernels' orientation: if `x` or its transpose has contiguous rows, that one is `x`.
struct Job<'a> {
    device: i32,
    stream: Stream,
    x: Matrix<'a>,
    spec: BlockSpec,
    format: Fp8Format,
    /// The plane whose codes have the positions of `x`. If the call divides, this is the rowwise plane.
    row: Option<Plane<'a>>,
    /// The plane whose codes are transposed.
    col: Option<Plane<'a>>,
    /// Maxima of square blocks, which apply to both planes.
    square_amax: Option<Matrix<'a>>,
    column_scale: Option<Matrix<'a>>,
    /// Rows of the first block that lie before `x`.
    block_offset: usize,
}

impl<'a> Job<'a> {
    fn new(call: &'a BlockCall, stream: Stream) -> Result<Self, Error> {
        let BlockCall { spec, format, inputs, .. } = call;
        let square = spec.block.is_square();
        let plane = |out: &'a crate::spec::BlockPlane, amax: Option<Matrix<'a>>| Plane {
            codes: out.codes.matrix(),
            scales: out.scales.matrix(),
            amax,
        };
        let amax = inputs.amax.map(|m| m.matrix());
        let amax_columnwise = inputs.amax_columnwise.map(|m| m.matrix());
        let row = call.rowwise.as_ref().map(|out| plane(out, amax.filter(|_| !square)));
        let col = call.columnwise.as_ref().map(|out| plane(out, amax_columnwise));
        // Rowwise blocks have one row, so a shard boundary does not split them.
        let split =
            if square || col.is_some() { Block { rows: spec.block.cols, ..spec.block } } else { Block::ROW };
        let mut job = Self {
            device: ordinal(call.x.device()),
            stream,
            x: call.x.matrix(),
            spec: *spec,
            format: *format,
            row,
            col,
            square_amax: amax.filter(|_| square),
            column_scale: inputs.column_scale.map(|m| m.matrix()),
            block_offset: split.block_offset(spec.row_offset),
        };
        for (arg, plane) in [("rowwise_scale", &job.row), ("columnwise_scale", &job.col)] {
            if spec.packed && plane.is_some_and(|plane| !aligned(plane.scales.ptr, 16)) {
                return Err(Error::Misaligned { arg: arg.into(), size: 16 });
            }
        }
        if job.x.col_stride != 1
            && job.x.row_stride == 1
            && job.block_offset == 0
            && job.column_scale.is_none()
            && !(spec.divide && job.row.is_some())
        {
            job.x = job.x.transposed();
            (job.row, job.col) = (job.col, job.row);
            job.spec.divide = false; // only the rowwise plane divides, and it is not requested
            job.square_amax = job.square_amax.map(Matrix::transposed);
        }
        Ok(job)
    }
}

/// See [`crate::ops::quantize_blocks`].
pub(crate) fn quantize_blocks(call: BlockCall, stream: Stream) -> Result<(), Error> {
    let job = Job::new(&call, stream)?;
    match job.spec.scale {
        BlockScale::F32(rule) if job.spec.block == Block::ROW => lines::quantize(&job, rule),
        // An empty matrix has no scales.
        _ if job.x.numel() == 0 => Ok(()),
        BlockScale::E8m0(rounding) if lines::mx_rowwise(&job, rounding)? => Ok(()),
        _ => tile::quantize(&job),
    }
}

/// Returns a grid with one thread for each of `items`.
fn each(items: usize) -> Grid {
    Grid { blocks: (items as u64).div_ceil(256), threads: 256 }
}

fn blocks_of(blocks: usize, threads: usize) -> Grid {
    Grid { blocks: blocks as u64, threads: threads as u32 }
}
