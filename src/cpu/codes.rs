//! Operations on existing FP8 codes.

use std::ops::Range;

use super::convert::{Codes, Element};
use super::float_env::DefaultFloatEnv;
use super::simd::{Kernel, dispatch};
use super::tensorwise::{PARALLEL, PIECE};
use super::types::{with_codes, with_element};
use super::walk::{Copy, Piece, Walk};
use super::{pool, rows};
use crate::format::e8m0;
use crate::layout::{Block, DType, Matrix, View, ViewMut};

pub(crate) fn transpose(codes: View, out: ViewMut) {
    let walk = Walk::new(codes.matrix(), vec![out.matrix().transposed()]);
    let pieces = walk.pieces(PIECE);
    pool::for_each(pieces.len(), codes.numel() >= PARALLEL, |i| {
        dispatch(CopyPiece { walk: &walk, piece: pieces[i].clone() });
    });
}

pub(crate) fn multi_rescale(codes: &[ViewMut], scales: View, new_scales: View, width: usize) {
    let _env = DefaultFloatEnv::enter();
    let (scales, new_scales) = (scales.matrix(), new_scales.matrix());
    let mut first = 0;
    for out in codes.iter().flat_map(ViewMut::matrices) {
        let format = out.dtype.fp8().expect("validated");
        for part in block_parts(0..out.cols, width).filter(|part| !part.is_empty()) {
            let at = first + part.start / width;
            // SAFETY: `ops` checks that both have an fp32 scale for each part.
            let (scale, new) = unsafe { (scales.read::<f32>(0, at), new_scales.read::<f32>(0, at)) };
            if scale.to_bits() != new.to_bits() {
                with_codes!(format, C => rescale::<C>(&out, part, scale, new));
            }
        }
        first += out.cols.div_ceil(width);
    }
}

/// Rounds the codes of some columns to a new scale.
fn rescale<C: Codes>(codes: &Matrix, cols: Range<usize>, scale: f32, new: f32) {
    let factor = 1.0 / new;
    let table: [u8; 256] = std::array::from_fn(|code| C::encode(C::decode(code as u8) * scale * factor));
    for row in 0..codes.rows {
        for col in cols.clone() {
            // SAFETY: this is an element of the output, whose elements are bytes.
            unsafe { codes.write(row, col, table[codes.read::<u8>(row, col) as usize]) };
        }
    }
}

struct CopyPiece<'a> {
    walk: &'a Walk<'a>,
    piece: Piece,
}

impl Kernel for CopyPiece<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        self.walk.run(self.piece, &mut Copy { bytes: self.walk.source, buffer: Vec::new() });
    }
}

pub(crate) fn dequantize(codes: View, scale: View, block: Block, out: ViewMut) {
    let _env = DefaultFloatEnv::enter();
    let format = codes.dtype().fp8().expect("validated");
    let mut task = Dequantize { codes: codes.matrix(), scale: scale.matrix(), block, out: out.matrix() };
    if task.codes.prefers_columns() {
        task = Dequantize {
            codes: task.codes.transposed(),
            scale: task.scale.transposed(),
            block: block.transposed(),
            out: task.out.transposed(),
        };
    }
    let pieces = Walk { source: task.codes, sinks: Vec::new() }.pieces(PIECE);
    pool::for_each(pieces.len(), codes.numel() >= PARALLEL, |i| {
        let piece = pieces[i].clone();
        with_codes!(format, C => with_element!(task.out.dtype, T => task.run::<C, T>(piece)));
    });
}

struct Dequantize<'a> {
    codes: Matrix<'a>,
    scale: Matrix<'a>,
    block: Block,
    out: Matrix<'a>,
}

impl Dequantize<'_> {
    fn run<C: Codes, T: Element>(&self, piece: Piece) {
        dispatch(DequantizePiece::<C, T> {
            task: self,
            piece,
            codes: Vec::new(),
            out: Vec::new(),
            format: std::marker::PhantomData,
        });
    }

    #[inline(always)]
    fn scale(&self, row: usize, col: usize) -> f32 {
        let (row, col) = (row / self.block.rows, col / self.block.cols);
        // SAFETY: `ops` checks that there is a scale of one of these types for each block.
        unsafe {
            match self.scale.dtype {
                DType::E8m0 => e8m0::decode(self.scale.read(row, col)),
                _ => self.scale.read(row, col),
            }
        }
    }
}

struct DequantizePiece<'a, C, T> {
    task: &'a Dequantize<'a>,
    piece: Piece,
    codes: Vec<u8>,
    out: Vec<T>,
    format: std::marker::PhantomData<C>,
}

impl<C: Codes, T: Element> Kernel for DequantizePiece<'_, C, T> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let Dequantize { codes, out, block, .. } = self.task;
        let Piece { rows, cols } = self.piece;
        for row in rows {
            for part in block_parts(cols.clone(), block.cols) {
                let scale = self.task.scale(row, part.start);
                // SAFETY: pieces are parts of the input, whose elements are bytes.
                let codes = unsafe { codes.row(row, part.clone(), &mut self.codes) };
                if out.col_stride == 1 {
                    // SAFETY: the elements are contiguous, and no other piece contains them.
                    rows::dequantize::<C, T>(codes, scale, unsafe { out.row_mut(row, part) });
                } else {
                    self.out.resize(part.len(), T::narrow(0.0));
                    rows::dequantize::<C, T>(codes, scale, &mut self.out);
                    for (col, value) in part.zip(&self.out) {
                        // SAFETY: this is an element of the output, `T` is the type of its dtype, and no
                        // other piece contains it.
                        unsafe { out.write(row, col, *value) };
                    }
                }
            }
        }
    }
}

/// Splits a range of columns at block boundaries.
#[inline(always)]
fn block_parts(cols: Range<usize>, block: usize) -> impl Iterator<Item = Range<usize>> {
    let end = cols.end;
    let next = move |start: usize| (start / block).saturating_add(1).saturating_mul(block).min(end);
    std::iter::successors(Some(cols.start..next(cols.start)), move |part| {
        (part.end < end).then(|| part.end..next(part.end))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_parts_end_at_block_boundaries() {
        assert_eq!(block_parts(10..70, 32).collect::<Vec<_>>(), [10..32, 32..64, 64..70]);
        assert_eq!(block_parts(0..5, Block::ALL).map(|part| part.len()).collect::<Vec<_>>(), [5]);
    }
}
