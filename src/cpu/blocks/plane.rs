//! One direction of a block quantization.

use crate::cpu::convert::Element;
use crate::format::{Fp8Format, e8m0, scale};
use crate::layout::{Block, Matrix, packed};
use crate::spec::{BlockCall, BlockScale};

/// Number of scales that are computed together, as vector code.
const RUN: usize = 64;

/// One direction, expressed as a rowwise one. For the columnwise plane, `x` is transposed.
#[derive(Clone, Copy)]
pub(super) struct Plane<'a> {
    pub(super) x: Matrix<'a>,
    pub(super) block: Block,
    /// The rows and columns of the first block that lie before `x`.
    pub(super) block_offset: (usize, usize),
    pub(super) scale: BlockScale,
    pub(super) format: Fp8Format,
    pub(super) amax: Option<Matrix<'a>>,
    pub(super) column_scale: Option<Matrix<'a>>,
    pub(super) codes: Matrix<'a>,
    pub(super) scales: Matrix<'a>,
    pub(super) packed: bool,
    /// Whether elements are divided by their scale, and not multiplied by its reciprocal.
    pub(super) divide: bool,
}

impl<'a> Plane<'a> {
    /// Returns the rowwise and the columnwise direction of a call, or None for a direction that is not
    /// requested.
    pub(super) fn of(call: &'a BlockCall) -> [Option<Self>; 2] {
        let BlockCall { x, spec, format, inputs, .. } = call;
        let block = spec.block;
        let rowwise = call.rowwise.as_ref().map(|plane| Self {
            x: x.matrix(),
            block,
            block_offset: (block.block_offset(spec.row_offset), 0),
            scale: spec.scale,
            format: *format,
            amax: inputs.amax.map(|m| m.matrix()),
            column_scale: inputs.column_scale.map(|m| m.matrix()),
            codes: plane.codes.matrix(),
            scales: plane.scales.matrix(),
            packed: spec.packed,
            divide: spec.divide,
        });
        let columnwise = call.columnwise.as_ref().map(|plane| Self {
            x: x.matrix().transposed(),
            block,
            block_offset: (0, block.transposed().block_offset(spec.row_offset)),
            scale: spec.scale,
            format: *format,
            amax: if block.is_square() {
                inputs.amax.map(|m| m.matrix().transposed())
            } else {
                inputs.amax_columnwise.map(|m| m.matrix())
            },
            column_scale: None,
            codes: plane.codes.matrix(),
            scales: plane.scales.matrix(),
            packed: spec.packed,
            divide: false,
        });
        [rowwise, columnwise]
    }

    /// Returns the number of blocks along a row of the plane.
    pub(super) fn blocks(&self) -> usize {
        match self.block.cols {
            Block::ALL => 1,
            _ if self.x.cols == 0 => 0,
            cols => (self.block_offset.1 + self.x.cols).div_ceil(cols),
        }
    }

    /// Computes and writes the scales of a run of blocks. Block i is at position `at(i)`. If maxima are
    /// given, they replace `maxima`. Stores the factors that the blocks' elements are multiplied by, or the
    /// scales that they are divided by.
    #[inline(always)]
    pub(super) fn finish(
        &self,
        at: impl Fn(usize) -> (usize, usize),
        maxima: &mut [u32],
        factors: &mut [f32],
    ) {
        if let Some(amaxes) = &self.amax {
            for (i, amax) in maxima.iter_mut().enumerate() {
                let (r, c) = at(i);
                // SAFETY: `ops` checks that there is one fp32 element for each block.
                *amax = unsafe { amaxes.read(r, c) };
            }
        }
        let format = self.format;
        for (start, (maxima, factors)) in maxima.chunks(RUN).zip(factors.chunks_mut(RUN)).enumerate() {
            let at = |i| at(start * RUN + i);
            match self.scale {
                BlockScale::F32(rule) => {
                    let mut scales = [0.0; RUN];
                    for ((amax, scale), factor) in maxima.iter().zip(&mut scales).zip(factors) {
                        *scale = rule.scale(f32::from_bits(*amax), format);
                        *factor = if self.divide { *scale } else { scale::reciprocal(*scale) };
                    }
                    for (i, scale) in scales[..maxima.len()].iter().enumerate() {
                        let (r, c) = at(i);
                        // SAFETY: the output is fp32 with one element per block, and each is written by one
                        // thread.
                        unsafe { self.scales.write(r, c, *scale) };
                    }
                }
                BlockScale::E8m0(rounding) => {
                    let mut bytes = [0; RUN];
                    for ((amax, byte), factor) in maxima.iter().zip(&mut bytes).zip(factors) {
                        *byte = e8m0::from_amax(f32::from_bits(*amax), format, rounding);
                        *factor = e8m0::reciprocal(*byte);
                    }
                    for (i, byte) in bytes[..maxima.len()].iter().enumerate() {
                        let (r, c) = at(i);
                        self.put_byte(r, c, *byte);
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn put_byte(&self, r: usize, c: usize, byte: u8) {
        if !self.packed {
            // SAFETY: the output is bytes with one element per block, and each is written by one thread.
            return unsafe { self.scales.write(r, c, byte) };
        }
        // The packed layout repeats a scale for each row of its block.
        let start = r * self.block.rows;
        for row in start..(start + self.block.rows).min(self.x.rows) {
            // SAFETY: the index is inside the packed layout, whose size `ops` checks.
            unsafe { self.scales.write(0, packed::index(row, c, self.blocks()), byte) };
        }
    }
}

/// Returns the largest of the magnitudes, as fp32 bits.
#[inline(always)]
pub(super) fn largest<T: Element>(magnitudes: &[T::Bits]) -> u32 {
    let mut maximum = T::Bits::default();
    for &bits in magnitudes {
        maximum = maximum.max(bits);
    }
    T::widen_magnitude(maximum)
}
