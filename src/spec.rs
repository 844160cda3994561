//! What a call asks for, in the words that `ops`, `cpu` and `cuda` share.

use std::ffi::c_void;

pub use crate::format::scale::ScaleRule;

use crate::format::e8m0::Rounding;
use crate::format::{DType, Fp8Format};
use crate::layout::{Block, View, ViewMut};

/// A CUDA stream; by default the legacy one. Ignored on the CPU.
#[derive(Debug, Clone, Copy)]
pub struct Stream(pub(crate) *mut c_void);

impl Stream {
    /// A raw stream (`CUstream`); null is the legacy default stream.
    ///
    /// # Safety
    /// The stream must be alive while work is queued on it, and be of the device, and of the primary context, of the
    /// views that operations are given with it.
    #[must_use]
    pub const unsafe fn from_raw(stream: *mut c_void) -> Self {
        Self(stream)
    }

    /// The raw stream.
    #[must_use]
    pub const fn raw(self) -> *mut c_void {
        self.0
    }
}

impl Default for Stream {
    fn default() -> Self {
        Self(std::ptr::null_mut())
    }
}

/// Where the one scale of a tensor comes from.
#[derive(Debug)]
pub(crate) enum Scaling<'a> {
    /// It is known.
    Known(View<'a>),
    /// It is known, and the absolute maximum is followed.
    Delayed { scale: View<'a>, amax: ViewMut<'a>, scale_used: ViewMut<'a> },
    /// It follows from the absolute maximum.
    Current { rule: ScaleRule, scale_out: ViewMut<'a> },
}

/// A validated quantization with one scale.
pub(crate) struct TensorCall<'a> {
    pub(crate) x: View<'a>,
    pub(crate) scaling: Scaling<'a>,
    pub(crate) format: Fp8Format,
    pub(crate) rowwise: Option<ViewMut<'a>>,
    pub(crate) columnwise: Option<ViewMut<'a>>,
}

/// What a block's scale is, and how it follows from the block's absolute maximum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum BlockScale {
    /// fp32, by the rule of per-tensor scales; no margin.
    F32(ScaleRule),
    /// A power of two in a byte.
    E8m0(Rounding),
}

impl BlockScale {
    /// The element type of the scales.
    #[must_use]
    pub fn dtype(self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::E8m0(_) => DType::E8m0,
        }
    }
}

/// How to cut a matrix into blocks, and what to scale them by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockSpec {
    /// (1, [`Block::ALL`]), (1, 128) or (128, 128) with fp32 scales, (1, 32) or (32, 32) with E8M0.
    pub block: Block,
    /// The scales.
    pub scale: BlockScale,
    /// The row of the whole matrix that row 0 of `x` is: blocks are those of the whole matrix, so that a shard
    /// whose first row is inside a block has a short first block.
    pub row_offset: usize,
    /// Write E8M0 scales in the packed 128x4 layout ([`packed`]), as a contiguous vector of
    /// [`packed::bytes`]`(rows of the plane, blocks a row)`. Blocks must not start before `x`.
    pub packed: bool,
}

impl BlockSpec {
    /// The grids of blocks of the rowwise and the columnwise plane of a matrix: the shapes of their scales.
    #[must_use]
    pub fn grids(&self, rows: usize, cols: usize) -> [(usize, usize); 2] {
        let grid = self.block.grid_from(self.row_offset, rows, cols);
        let (down, across) = self.block.transposed().grid_from(self.row_offset, rows, cols);
        [grid, (across, down)]
    }
}

/// What is known before the data is read.
#[derive(Debug, Clone, Copy, Default)]
pub struct Given<'a> {
    /// Absolute maxima of the rowwise blocks, or of square ones; fp32, shaped as their compact scales. Without
    /// them they are found. With them, `x` may be a part of what they were found over. None may be negative, which
    /// is not checked, because that would wait for the device.
    pub amax: Option<View<'a>>,
    /// The same for the columnwise blocks, where they are not square; shaped as the columnwise scales.
    pub amax_columnwise: Option<View<'a>>,
    /// Factors of the columns of `x` (fp32, 1 x cols), for the rowwise output only: what is quantized is
    /// x * fold, rounded to fp32. Only with blocks of a whole row; `amax` is then that of the product.
    pub fold: Option<View<'a>>,
}

/// Where one direction's results go.
#[derive(Debug)]
pub struct BlockPlane<'a> {
    /// FP8 codes; their dtype names the format.
    pub codes: ViewMut<'a>,
    /// Scales: one element a block of `codes`, or packed.
    pub scales: ViewMut<'a>,
}

/// A validated call of `ops::quantize_blocks`.
pub(crate) struct BlockCall<'a> {
    pub(crate) x: View<'a>,
    pub(crate) spec: BlockSpec,
    pub(crate) format: Fp8Format,
    pub(crate) given: Given<'a>,
    pub(crate) rowwise: Option<BlockPlane<'a>>,
    pub(crate) columnwise: Option<BlockPlane<'a>>,
}

/// Which lines of the input share a scale after `ops::rebase`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    /// Its rows; the codes keep their places.
    Rows,
    /// Its columns; the codes come out transposed, so that the columns are rows.
    Columns,
}
