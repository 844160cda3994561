//! What a call asks for, in the words that `ops`, `cpu` and `cuda` share.

use std::ffi::c_void;

pub use crate::format::adamw::Hyper;
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

impl Scaling<'_> {
    /// The scaling of matrix `i` of a batch.
    pub(crate) fn at(&self, i: usize) -> Scaling<'_> {
        match self {
            Self::Known(scale) => Scaling::Known(scale.at(i)),
            Self::Delayed { scale, amax, scale_used } => {
                Scaling::Delayed { scale: scale.at(i), amax: amax.at(i), scale_used: scale_used.at(i) }
            }
            Self::Current { rule, scale_out } => Scaling::Current { rule: *rule, scale_out: scale_out.at(i) },
        }
    }
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

impl BlockPlane<'_> {
    fn at(&self, i: usize) -> BlockPlane<'_> {
        BlockPlane { codes: self.codes.at(i), scales: self.scales.at(i) }
    }

    fn flat(&self) -> BlockPlane<'_> {
        BlockPlane { codes: self.codes.flat(), scales: self.scales.flat() }
    }
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

impl<'a> BlockCall<'a> {
    /// The call for matrix `i` of a batch.
    pub(crate) fn at(&self, i: usize) -> BlockCall<'_> {
        let at = |view: Option<View<'a>>| view.map(|view| view.at(i));
        BlockCall {
            x: self.x.at(i),
            given: Given {
                amax: at(self.given.amax),
                amax_columnwise: at(self.given.amax_columnwise),
                fold: at(self.given.fold),
            },
            rowwise: self.rowwise.as_ref().map(|plane| plane.at(i)),
            columnwise: self.columnwise.as_ref().map(|plane| plane.at(i)),
            ..*self
        }
    }

    /// The call for the rows of all matrices as one matrix. None if that would put blocks across two matrices, or if
    /// something is needed by columns.
    pub(crate) fn flat(&self) -> Option<BlockCall<'_>> {
        let Self { x, spec, given, rowwise: Some(rowwise), columnwise: None, .. } = self else { return None };
        if x.batch() == 1 {
            return Some(self.at(0));
        }
        let aligned = spec.row_offset == 0 && spec.block.divides_rows(x.rows()) && !spec.packed;
        let is_flat = x.is_flat() && rowwise.codes.is_flat() && rowwise.scales.is_flat();
        let amax_is_flat = given.amax.is_none_or(|amax| amax.is_flat());
        if !(aligned && is_flat && amax_is_flat && given.fold.is_none()) {
            return None;
        }
        let given = Given { amax: given.amax.map(|amax| amax.flat()), ..Given::default() };
        Some(BlockCall { x: x.flat(), given, rowwise: Some(rowwise.flat()), columnwise: None, ..*self })
    }
}

/// Which lines of the input share a scale after `ops::rebase`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    /// Its rows; the codes keep their places.
    Rows,
    /// Its columns; the codes come out transposed, so that the columns are rows.
    Columns,
}

/// One tensor of [`crate::ops::adamw`]: all of its views have the shape of `param`, unless said otherwise, and are
/// contiguous.
#[derive(Debug)]
pub struct AdamWTensor<'a> {
    /// The gradient; fp32, bf16 or fp16.
    pub grad: View<'a>,
    /// The first moment; fp32 or bf16.
    pub exp_avg: ViewMut<'a>,
    /// The second moment, of the first one's dtype.
    pub exp_avg_sq: ViewMut<'a>,
    /// The parameter: fp32, bf16 or fp16, or FP8 codes, as the [`Target`] says.
    pub param: ViewMut<'a>,
    /// fp32. With it the step starts from its value, and leaves the unrounded result in it.
    pub master: Option<ViewMut<'a>>,
    /// The number of this step, counted from 1; fp32, one element.
    pub step: View<'a>,
    /// The scales of the codes, which are read (without a `master`) and written. One fp32 element, or one element a
    /// block of [`Target::Blocks`]. Absent for [`Target::Plain`].
    pub scale: Option<ViewMut<'a>>,
    /// [`Target::Tensor`]: the scale to write codes with; fp32, one element.
    pub new_scale: Option<View<'a>>,
    /// Where the absolute maximum of the updated values goes; fp32, one element. Not for [`Target::Blocks`].
    pub amax: Option<ViewMut<'a>>,
    /// The index of the first element in the whole tensor, and the number of that tensor: what random words depend
    /// on beside the seed and the step.
    pub offset: u64,
    /// See `offset`.
    pub stream: u32,
}

impl AdamWTensor<'_> {
    /// The number of matrices.
    pub(crate) fn batch(&self) -> usize {
        self.param.batch()
    }

    /// The tensor of matrix `i` of a batch, whose elements follow those of the matrices before.
    pub(crate) fn at(&self, i: usize) -> AdamWTensor<'_> {
        AdamWTensor {
            grad: self.grad.at(i),
            exp_avg: self.exp_avg.at(i),
            exp_avg_sq: self.exp_avg_sq.at(i),
            param: self.param.at(i),
            master: self.master.as_ref().map(|master| master.at(i)),
            step: self.step,
            scale: self.scale.as_ref().map(|scale| scale.at(i)),
            new_scale: self.new_scale.map(|scale| scale.at(i)),
            amax: self.amax.as_ref().map(|amax| amax.at(i)),
            offset: self.offset + (i * self.param.rows() * self.param.cols()) as u64,
            stream: self.stream,
        }
    }
}

/// What parameters are, and what of them a step writes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Target {
    /// fp32, bf16 or fp16, rounded to nearest. `amax` becomes the maximum (of the unrounded values).
    Plain,
    /// FP8 codes with one scale. Nothing is written but `amax`, which becomes the maximum.
    Measure,
    /// FP8 codes with one scale, which is known: `new_scale`. `amax` is raised to the maximum where that is finite.
    /// `scale` becomes `new_scale`, or NaN where a value is not finite; the codes stay as cast.
    Tensor,
    /// FP8 codes with scales of their own for blocks of (1, [`Block::ALL`]) or (128, 128) with fp32 scales, or
    /// (32, 32) with E8M0; row 0 begins a block.
    Blocks(Block, BlockScale),
}

/// What all tensors of [`crate::ops::adamw`] share.
#[derive(Debug, Clone, Copy)]
pub struct AdamW<'a> {
    /// The numbers.
    pub hyper: Hyper,
    /// The learning rate in place of the number; fp32, one element.
    pub lr: Option<View<'a>>,
    /// What gradients were multiplied with; fp32, one element.
    pub grad_scale: Option<View<'a>>,
    /// Nothing is written where this is not zero; fp32, one element.
    pub found_inf: Option<View<'a>>,
    /// Round codes stochastically, with this seed; to nearest without.
    pub stochastic: Option<u64>,
    /// What parameters are.
    pub target: Target,
}

/// Which random numbers elements get: those of [`crate::format::random::Words`].
#[derive(Debug, Clone, Copy)]
pub struct Numbers<'a> {
    /// The seed.
    pub seed: u64,
    /// The index of the first element.
    pub offset: u64,
    /// The number of the tensor.
    pub stream: u32,
    /// The step, without a fraction; fp32, one element. 0 without.
    pub step: Option<View<'a>>,
}

/// A validated call of `ops::adamw`.
pub(crate) struct AdamWCall<'a> {
    pub(crate) shared: AdamW<'a>,
    pub(crate) tensors: Vec<AdamWTensor<'a>>,
}
