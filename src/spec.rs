//! Argument types that `ops`, `cpu` and `cuda` share.

use std::ffi::c_void;

pub use crate::format::adamw::Hyper;
pub use crate::format::scale::ScaleRule;

use crate::format::activation::Activation;
use crate::format::e8m0::Rounding;
use crate::format::groups::padded_columns;
use crate::format::{DType, Fp8Format};
use crate::layout::{Block, View, ViewMut, packed};

/// A CUDA stream. The default is the legacy default stream. CPU operations ignore it.
#[derive(Debug, Clone, Copy)]
pub struct Stream(pub(crate) *mut c_void);

impl Stream {
    /// Wraps a raw stream (`CUstream`). Null is the legacy default stream.
    ///
    /// # Safety
    /// The stream must stay alive while work is queued on it. It must belong to the device, and to the
    /// primary context of the device, of all views that are passed to an operation together with it.
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

/// How the scale of a per-tensor quantization is obtained.
#[derive(Debug)]
pub(crate) enum Scaling<'a> {
    /// The scale is given.
    Static(View<'a>),
    /// The scale is given, and the call also records the absolute maximum.
    Delayed { scale: View<'a>, amax: ViewMut<'a>, scale_used: ViewMut<'a> },
    /// The scale is computed from the absolute maximum of the tensor.
    Current { rule: ScaleRule, scale_out: ViewMut<'a> },
}

impl Scaling<'_> {
    /// The scaling of matrix `i` of a batch.
    pub(crate) fn at(&self, i: usize) -> Scaling<'_> {
        match self {
            Self::Static(scale) => Scaling::Static(scale.at(i)),
            Self::Delayed { scale, amax, scale_used } => {
                Scaling::Delayed { scale: scale.at(i), amax: amax.at(i), scale_used: scale_used.at(i) }
            }
            Self::Current { rule, scale_out } => Scaling::Current { rule: *rule, scale_out: scale_out.at(i) },
        }
    }
}

/// A validated per-tensor quantization.
pub(crate) struct TensorCall<'a> {
    pub(crate) x: View<'a>,
    pub(crate) scaling: Scaling<'a>,
    pub(crate) format: Fp8Format,
    pub(crate) rowwise: Option<ViewMut<'a>>,
    pub(crate) columnwise: Option<ViewMut<'a>>,
}

/// The outputs of a quantization with one scale per tensor, and how its scale is obtained.
#[derive(Debug)]
pub struct TensorPlanes<'a> {
    /// How the scale is computed from the absolute maximum, unless `delayed` is given.
    pub rule: ScaleRule,
    /// With delayed scaling: the scale, and the absolute maximum to raise; fp32, one element each.
    pub delayed: Option<(View<'a>, ViewMut<'a>)>,
    /// Output for the scale, or for the scale used with delayed scaling; fp32, one element.
    pub scale: ViewMut<'a>,
    /// Codes in the shape of the values. Their dtype selects the format.
    pub rowwise: Option<ViewMut<'a>>,
    /// Codes of the transposed values.
    pub columnwise: Option<ViewMut<'a>>,
}

impl TensorPlanes<'_> {
    /// Returns how the scale is obtained.
    pub(crate) fn scaling(&self) -> Scaling<'_> {
        let out = self.scale.at(0);
        match &self.delayed {
            Some((scale, amax)) => Scaling::Delayed { scale: *scale, amax: amax.at(0), scale_used: out },
            None => Scaling::Current { rule: self.rule, scale_out: out },
        }
    }

    /// Returns the quantization of these values.
    pub(crate) fn call<'b>(&'b self, x: View<'b>, format: Fp8Format) -> TensorCall<'b> {
        TensorCall {
            x,
            scaling: self.scaling(),
            format,
            rowwise: self.rowwise.as_ref().map(|codes| codes.at(0)),
            columnwise: self.columnwise.as_ref().map(|codes| codes.at(0)),
        }
    }
}

/// A norm over the rows of a matrix (`format::norm`).
#[derive(Debug)]
pub struct Norm<'a> {
    /// The values; fp32, bf16 or fp16.
    pub x: View<'a>,
    /// One factor for each column, with the dtype of `x`. If absent, 1.
    pub weight: Option<View<'a>>,
    /// One summand for each column, with the dtype of `x`. It requires a weight.
    pub bias: Option<View<'a>>,
    /// Whether the mean is subtracted: `LayerNorm`, or `RMSNorm`.
    pub centered: bool,
    /// Added to the mean square.
    pub eps: f32,
    /// Output for the mean of each row; fp32, (rows, 1), contiguous. Only if `centered`.
    pub mean: Option<ViewMut<'a>>,
    /// Output for the reciprocal standard deviation of each row; fp32, (rows, 1), contiguous.
    pub rstd: ViewMut<'a>,
}

/// A gated activation of two matrices: activation(gate) * up.
#[derive(Debug, Clone, Copy)]
pub struct Glu<'a> {
    /// The argument of the activation; fp32, bf16 or fp16.
    pub gate: View<'a>,
    /// The other factor, with the shape and dtype of `gate`.
    pub up: View<'a>,
    /// The function of the gate.
    pub activation: Activation,
}

/// A rotation of the heads of each token by the angles of its position.
#[derive(Debug, Clone, Copy)]
pub struct Rotation<'a> {
    /// One row for each token, with its heads one after the other; fp32, bf16 or fp16.
    pub x: View<'a>,
    /// Cosines, one row for each position and one column for each channel of a head; fp32, contiguous. Row r of
    /// `x` is at position r modulo the number of positions.
    pub cos: View<'a>,
    /// Sines, like the cosines.
    pub sin: View<'a>,
    /// Whether to multiply by the transposed matrix, which computes the gradient.
    pub back: bool,
}

/// The type of a block's scale, and how the scale is computed from the block's absolute maximum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum BlockScale {
    /// fp32, computed by the rule for per-tensor scales. The margin must be 0.
    F32(ScaleRule),
    /// A power of two, stored as one byte.
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

/// How a matrix is divided into blocks, and which scales the blocks get.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockSpec {
    /// The block of one of the [formats](crate::FORMATS).
    pub block: Block,
    /// The type and rule of the scales.
    pub scale: BlockScale,
    /// The row of the whole matrix that row 0 of `x` corresponds to. Blocks begin where they do in the whole
    /// matrix, so a shard that starts inside a block has a short first block.
    pub row_offset: usize,
    /// Write E8M0 scales in the packed 128x4 layout ([`packed`]), as a contiguous vector of
    /// [`packed::bytes`]`(rows of the plane, blocks per row)`. The first block must start at row 0 of `x`.
    pub packed: bool,
    /// Compute the rowwise codes as encode(x / scale), and not as encode(x * (1 / scale)). It requires blocks
    /// of a whole row. The columnwise codes do not depend on it.
    pub divide: bool,
}

/// The shapes of the outputs of one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlaneShape {
    pub(crate) codes: (usize, usize),
    pub(crate) scales: (usize, usize),
}

impl BlockSpec {
    /// Returns the block grids of the rowwise and the columnwise plane, which are the shapes of their scales.
    #[must_use]
    pub fn grids(&self, rows: usize, cols: usize) -> [(usize, usize); 2] {
        let grid = self.block.grid_from(self.row_offset, rows, cols);
        let (down, across) = self.block.transposed().grid_from(self.row_offset, rows, cols);
        [grid, (across, down)]
    }

    /// Returns the shapes of the rowwise and the columnwise plane.
    pub(crate) fn plane_shapes(&self, rows: usize, cols: usize) -> [PlaneShape; 2] {
        let [grid, columnwise_grid] = self.grids(rows, cols);
        [((rows, cols), grid), ((cols, rows), columnwise_grid)].map(|(codes, grid)| {
            let scales = if self.packed { (1, packed::bytes(codes.0, grid.1)) } else { grid };
            PlaneShape { codes, scales }
        })
    }
}

/// Optional inputs of a block quantization that replace or scale what the call would compute.
#[derive(Debug, Clone, Copy, Default)]
pub struct BlockInputs<'a> {
    /// Absolute maxima of the rowwise blocks or of square blocks (fp32, in the shape of the unpacked scales).
    /// If absent, the call computes them. If present, they may cover more than `x`, for example the whole
    /// matrix when `x` is a shard of it. They must not be negative. This is not checked, because reading them
    /// would synchronize with the device.
    pub amax: Option<View<'a>>,
    /// Absolute maxima of the columnwise blocks if blocks are not square (fp32, in the shape of the
    /// columnwise scales). The rules for `amax` apply.
    pub amax_columnwise: Option<View<'a>>,
    /// One factor per column of `x` (fp32, 1 x cols), for the rowwise output only: the call quantizes x *
    /// `column_scale`, rounded to fp32. It requires blocks of a whole row. If `amax` is given, it is the
    /// maximum of the product.
    pub column_scale: Option<View<'a>>,
}

/// The outputs of one direction.
#[derive(Debug)]
pub struct BlockPlane<'a> {
    /// FP8 codes. Their dtype selects the format.
    pub codes: ViewMut<'a>,
    /// Scales: one element per block of `codes`, or the packed layout.
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
    pub(crate) inputs: BlockInputs<'a>,
    pub(crate) rowwise: Option<BlockPlane<'a>>,
    pub(crate) columnwise: Option<BlockPlane<'a>>,
}

impl<'a> BlockCall<'a> {
    /// Returns the call for matrix `i` of a batch.
    pub(crate) fn at(&self, i: usize) -> BlockCall<'_> {
        let at = |view: Option<View<'a>>| view.map(|view| view.at(i));
        BlockCall {
            x: self.x.at(i),
            inputs: BlockInputs {
                amax: at(self.inputs.amax),
                amax_columnwise: at(self.inputs.amax_columnwise),
                column_scale: at(self.inputs.column_scale),
            },
            rowwise: self.rowwise.as_ref().map(|plane| plane.at(i)),
            columnwise: self.columnwise.as_ref().map(|plane| plane.at(i)),
            ..*self
        }
    }

    /// Returns the call for the rows of all matrices as one matrix. Returns None if a block would then span
    /// two matrices, or if the call has columnwise outputs or a column scale.
    pub(crate) fn flat(&self) -> Option<BlockCall<'_>> {
        let Self { x, spec, inputs, rowwise: Some(rowwise), columnwise: None, .. } = self else {
            return None;
        };
        if x.batch() == 1 {
            return Some(self.at(0));
        }
        let aligned = spec.row_offset == 0 && spec.block.divides_rows(x.rows()) && !spec.packed;
        let is_flat = x.is_flat() && rowwise.codes.is_flat() && rowwise.scales.is_flat();
        let amax_is_flat = inputs.amax.is_none_or(|amax| amax.is_flat());
        if !(aligned && is_flat && amax_is_flat && inputs.column_scale.is_none()) {
            return None;
        }
        let inputs = BlockInputs { amax: inputs.amax.map(|amax| amax.flat()), ..BlockInputs::default() };
        Some(BlockCall { x: x.flat(), inputs, rowwise: Some(rowwise.flat()), columnwise: None, ..*self })
    }
}

/// Rows that are divided into groups, one for each expert (`format::groups::bounds`). Rows from the
/// last end on belong to no group.
#[derive(Debug, Clone, Copy)]
pub struct Groups<'a> {
    /// The row after the last one of each group; int32, one element per group.
    pub ends: View<'a>,
    /// The column of the columnwise plane after the last one of each group; int32, one element per group.
    pub padded_ends: View<'a>,
}

impl Groups<'_> {
    /// Returns the number of groups.
    pub(crate) fn count(&self) -> usize {
        self.ends.cols()
    }

    /// Returns the shapes of the rowwise and the columnwise plane of (rows, cols) values.
    pub(crate) fn plane_shapes(&self, (rows, cols): (usize, usize)) -> [PlaneShape; 2] {
        let columns = padded_columns(rows, self.count());
        [
            PlaneShape { codes: (rows, cols), scales: (rows, 1) },
            PlaneShape { codes: (cols, columns), scales: (self.count(), cols) },
        ]
    }
}

/// Where the rows of grouped GEMMs come from. A pair is a token and one of its `k` experts, with the number
/// token * `k` + position. Rows are pairs in the order of their experts.
#[derive(Debug)]
pub struct Routes<'a> {
    /// The expert of each row, in ascending order; int64.
    pub row_experts: View<'a>,
    /// The pair of each row; int64.
    pub row_pairs: View<'a>,
    /// The number of experts of a token.
    pub k: usize,
    /// Output: the row after the last one of each expert; int32, one element per expert.
    pub ends: ViewMut<'a>,
    /// Output: the same with each expert's rows padded; int32, one element per expert.
    pub padded_ends: ViewMut<'a>,
    /// Output: the token of each row; int64.
    pub row_tokens: ViewMut<'a>,
    /// Output: the row of each pair; int64.
    pub token_rows: ViewMut<'a>,
}

/// A validated call of `ops::quantize_groups`.
pub(crate) struct GroupCall<'a> {
    pub(crate) x: View<'a>,
    pub(crate) index: Option<View<'a>>,
    pub(crate) groups: Groups<'a>,
    pub(crate) rule: ScaleRule,
    pub(crate) format: Fp8Format,
    pub(crate) rowwise: Option<BlockPlane<'a>>,
    pub(crate) columnwise: Option<BlockPlane<'a>>,
}

impl GroupCall<'_> {
    /// Returns the shape of the values: a row of `x` for each index, or all rows of `x` without an index.
    pub(crate) fn shape(&self) -> (usize, usize) {
        indexed_shape(&self.x, self.index.as_ref())
    }
}

/// Returns the shape of the rows of `x` that an index selects, or of `x` without an index.
pub(crate) fn indexed_shape(x: &View, index: Option<&View>) -> (usize, usize) {
    (index.map_or(x.rows(), View::cols), x.cols())
}

/// A gated activation: activation(gate) * up for `h` = (gate, up), or the gradient of `h`.
#[derive(Debug)]
pub struct Gated<'a> {
    /// The gate in the first half of the columns, `up` in the second half; fp32, bf16 or fp16.
    pub h: View<'a>,
    /// The gradient of the product, with the dtype of `h`. If present, the values are the gradient of `h`.
    pub dy: Option<View<'a>>,
    /// The function of the gate.
    pub activation: Activation,
    /// Output for the values: computed in fp32, rounded to the dtype of `h`. Contiguous.
    pub values: ViewMut<'a>,
}

/// Returns the shape of the values of a [`Gated`] call with an `h` of this shape: of the product, or of the
/// gradient of `h`.
pub(crate) fn gated_shape((rows, cols): (usize, usize), is_gradient: bool) -> (usize, usize) {
    (rows, if is_gradient { cols } else { cols / 2 })
}

/// The rows of all tokens, which are summed for each token.
#[derive(Debug, Clone, Copy)]
pub struct Combine<'a> {
    /// The rows; fp32, bf16 or fp16.
    pub rows: View<'a>,
    /// The rows of each token; int64, (tokens, k), contiguous.
    pub token_rows: View<'a>,
    /// The factor of each of these rows; fp32 or the dtype of `rows`, in the shape of `token_rows`, contiguous. If
    /// absent, 1.
    pub weights: Option<View<'a>>,
}

/// The arguments of `ops::combine_rows_backward`.
#[derive(Debug)]
pub struct CombineBackward<'a> {
    /// The gradient of the sums (tokens, cols); fp32, bf16 or fp16.
    pub grad: View<'a>,
    /// The rows (tokens * k, cols), with the dtype of `grad`. Required for `d_weights`.
    pub rows: Option<View<'a>>,
    /// The rows of each token, a permutation of all rows; int64, (tokens, k), contiguous.
    pub token_rows: View<'a>,
    /// The factor of each of these rows; fp32 or the dtype of `grad`, in the shape of `token_rows`, contiguous.
    pub weights: View<'a>,
    /// Output for the gradient of the rows, with the dtype of `grad`. Contiguous.
    pub d_rows: Option<ViewMut<'a>>,
    /// Output for the gradient of the weights; fp32, in the shape of `token_rows`. Contiguous.
    pub d_weights: Option<ViewMut<'a>>,
}

/// The lines of the input that share a scale after `ops::rebase`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    /// Rows. The codes keep their positions.
    Rows,
    /// Columns. The codes are written transposed, so that columns become rows.
    Columns,
}

impl Axis {
    /// Returns the shape of the codes that `ops::rebase` writes for codes of this shape. Each row has a scale.
    pub(crate) fn rebased_shape(self, (rows, cols): (usize, usize)) -> (usize, usize) {
        match self {
            Self::Rows => (rows, cols),
            Self::Columns => (cols, rows),
        }
    }
}

/// One tensor of [`crate::ops::adamw`]. All views are contiguous. Unless noted otherwise, they have the shape
/// of `param`.
#[derive(Debug)]
pub struct AdamWTensor<'a> {
    /// The gradient; fp32, bf16 or fp16.
    pub grad: View<'a>,
    /// The first moment; fp32, bf16, or 8-bit codes (`format::moments`, uint8).
    pub exp_avg: ViewMut<'a>,
    /// The second moment, with the dtype of `exp_avg`.
    pub exp_avg_sq: ViewMut<'a>,
    /// The ranges of the codes of both moments, if they are codes. Each has the largest and the smallest
    /// magnitude of each block of 128 elements of a row: fp32, (rows, 2 * columns / 128). The number of columns
    /// is a multiple of 128.
    pub ranges: Option<[ViewMut<'a>; 2]>,
    /// The parameter: fp32, bf16, fp16 or FP8 codes, depending on the [`Target`].
    pub param: ViewMut<'a>,
    /// fp32 master weight. If present, the step reads the parameter's value from it and stores the unrounded
    /// result in it.
    pub master: Option<ViewMut<'a>>,
    /// The number of this step, counted from 1; fp32, one element.
    pub step: View<'a>,
    /// The scales of the codes. They are written, and also read without a `master`. One fp32 element, or
    /// one element per block with [`Target::Blocks`]. Absent with [`Target::Plain`].
    pub scale: Option<ViewMut<'a>>,
    /// The scale to quantize the updated values with; only with [`Target::Tensor`]. fp32, one element.
    pub new_scale: Option<View<'a>>,
    /// Output for the absolute maximum of the updated values; fp32, one element. Not with [`Target::Blocks`].
    pub amax: Option<ViewMut<'a>>,
    /// The index of the tensor's first element in the whole tensor. Together with `stream`, the seed and the
    /// step, it determines the random words. With `ranges`, it is a multiple of four, because rows have whole
    /// blocks.
    pub offset: u64,
    /// The number of the whole tensor in the random number generator. See `offset`.
    pub stream: u32,
}

impl AdamWTensor<'_> {
    /// Returns the number of matrices.
    pub(crate) fn batch(&self) -> usize {
        self.param.batch()
    }

    /// Returns the tensor of matrix `i` of a batch. Its elements are numbered after all elements of the
    /// matrices before it.
    pub(crate) fn at(&self, i: usize) -> AdamWTensor<'_> {
        AdamWTensor {
            grad: self.grad.at(i),
            exp_avg: self.exp_avg.at(i),
            exp_avg_sq: self.exp_avg_sq.at(i),
            ranges: self.ranges.as_ref().map(|ranges| ranges.each_ref().map(|range| range.at(i))),
            param: self.param.at(i),
            master: self.master.as_ref().map(|master| master.at(i)),
            step: self.step,
            scale: self.scale.as_ref().map(|scale| scale.at(i)),
            new_scale: self.new_scale.map(|scale| scale.at(i)),
            amax: self.amax.as_ref().map(|amax| amax.at(i)),
            offset: self.offset.wrapping_add((i * self.param.rows() * self.param.cols()) as u64),
            stream: self.stream,
        }
    }
}

/// The type of a parameter, and which outputs a step writes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Target {
    /// fp32, bf16 or fp16, rounded to nearest. `amax` becomes the maximum of the unrounded values.
    Plain,
    /// FP8 codes with one scale. Only `amax` is written. It becomes the maximum of the updated values.
    Measure,
    /// FP8 codes with one scale. The step quantizes with `new_scale`. `amax` is raised to the maximum if that
    /// is finite. `scale` becomes `new_scale`, or NaN if a value is not finite. The codes are written in both
    /// cases.
    Tensor,
    /// FP8 codes with one scale per block of a [format](crate::FORMATS) that `AdamW` supports. Row 0
    /// starts a block.
    Blocks(Block, BlockScale),
}

/// Arguments that all tensors of [`crate::ops::adamw`] share.
#[derive(Debug, Clone, Copy)]
pub struct AdamW<'a> {
    /// The hyperparameters.
    pub hyper: Hyper,
    /// The learning rate, which replaces the one in `hyper`; fp32, one element.
    pub lr: Option<View<'a>>,
    /// The factor that the gradients were multiplied by; fp32, one element.
    pub grad_scale: Option<View<'a>>,
    /// If this is not zero, nothing is written; fp32, one element.
    pub found_inf: Option<View<'a>>,
    /// The seed for stochastic rounding of codes. If absent, codes are rounded to nearest.
    pub stochastic: Option<u64>,
    /// The type of the parameters.
    pub target: Target,
}

/// Selects the random numbers of a tensor's elements (`format::random::Words`).
#[derive(Debug, Clone, Copy)]
pub struct Numbers<'a> {
    /// The seed.
    pub seed: u64,
    /// The index of the first element.
    pub offset: u64,
    /// The number of the tensor in the random number generator.
    pub stream: u32,
    /// The step, an integer; fp32, one element. If absent, 0.
    pub step: Option<View<'a>>,
}

/// A validated call of `ops::adamw`.
pub(crate) struct AdamWCall<'a> {
    pub(crate) shared: AdamW<'a>,
    pub(crate) tensors: Vec<AdamWTensor<'a>>,
}
