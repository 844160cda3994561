//! Absolute maxima of blocks.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use super::plane::largest;
use super::{CHUNK, STRIP, part, strips};
use crate::cpu::convert::Element;
use crate::cpu::float_env::DefaultFloatEnv;
use crate::cpu::simd::{Kernel, dispatch};
use crate::cpu::tensorwise::PARALLEL;
use crate::cpu::types::with_element;
use crate::cpu::{pool, rows};
use crate::format::wide::canonical;
use crate::layout::{Block, Matrix, View, ViewMut};

/// See [`crate::ops::block_amax`]. The first block has `block_offset` rows before `x`.
pub(crate) fn block_amax(x: View, block: Block, block_offset: usize, out: ViewMut) {
    maxima(x.matrix(), None, block, block_offset, &out.matrix());
}

/// Computes the maxima of the blocks of x, or of x * `column_scale`, into `out` (fp32, any strides).
pub(super) fn maxima(
    x: Matrix,
    column_scale: Option<&[f32]>,
    block: Block,
    block_offset: usize,
    out: &Matrix,
) {
    let _env = DefaultFloatEnv::enter();
    for r in 0..out.rows {
        for c in 0..out.cols {
            // SAFETY: this is an element of the output, which is fp32.
            unsafe { out.write(r, c, 0_u32) };
        }
    }
    let parallel = x.rows * x.cols >= PARALLEL;
    pool::for_each(strips(x.rows, block_offset), parallel, |strip| {
        with_element!(x.dtype, T => {
            dispatch(Maxima::<T> { x, column_scale, block, block_offset, out, strip, element: PhantomData });
        });
    });
}

struct Maxima<'a, T> {
    x: Matrix<'a>,
    column_scale: Option<&'a [f32]>,
    block: Block,
    block_offset: usize,
    out: &'a Matrix<'a>,
    strip: usize,
    element: PhantomData<T>,
}

impl<T: Element> Kernel for Maxima<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut buffer = Vec::new();
        for start in (0..self.x.cols).step_by(CHUNK) {
            let cols = start..(start + CHUNK).min(self.x.cols);
            let strip = part(self.strip, STRIP, self.block_offset, self.x.rows);
            if self.block.rows == 1 {
                for row in strip {
                    // SAFETY: this is a part of a row of the input, and `T` is the type of its dtype.
                    let xs = unsafe { self.x.row::<T>(row, cols.clone(), &mut buffer) };
                    let column_scale = self.column_scale.map(|column_scale| &column_scale[cols.clone()]);
                    self.put_row(row, &cols, |range| match column_scale {
                        Some(column_scale) => scaled_amax(&xs[range.clone()], &column_scale[range]),
                        None => rows::amax(&xs[range]),
                    });
                }
                continue;
            }
            let size = self.block.rows.min(STRIP);
            for block in self.strip * (STRIP / size)..(self.strip + 1) * (STRIP / size) {
                let mut columns = [T::Bits::default(); CHUNK];
                let inside = part(block, size, self.block_offset, self.x.rows);
                if inside.is_empty() {
                    continue;
                }
                for row in inside {
                    // SAFETY: this is a part of a row of the input, and `T` is the type of its dtype.
                    raise_maxima(&mut columns, unsafe { self.x.row::<T>(row, cols.clone(), &mut buffer) });
                }
                let row = if self.block.rows == Block::ALL { 0 } else { block };
                self.put_row(row, &cols, |range| largest::<T>(&columns[range]));
            }
        }
    }
}

impl<T> Maxima<'_, T> {
    /// Combines the maxima of a chunk's part of a row of blocks with the maxima that other chunks and strips
    /// found.
    #[inline(always)]
    fn put_row(&self, r: usize, cols: &Range<usize>, find: impl Fn(Range<usize>) -> u32) {
        let size = self.block.cols.min(CHUNK);
        for start in (0..cols.len()).step_by(size) {
            let bits = canonical(find(start..(start + size).min(cols.len())));
            let to = self.out.at(r, (cols.start + start) / self.block.cols).cast();
            // SAFETY: this is an aligned element of the output, which all threads access only through this
            // atomic operation.
            unsafe { AtomicU32::from_ptr(to) }.fetch_max(bits, Ordering::Relaxed);
        }
    }
}

/// Raises the maxima of columns to the magnitudes of a row's elements.
#[inline(always)]
pub(super) fn raise_maxima<T: Element>(columns: &mut [T::Bits; CHUNK], xs: &[T]) {
    for (column, x) in columns.iter_mut().zip(xs) {
        *column = x.magnitude().max(*column);
    }
}

/// Returns the absolute maximum of the products, as fp32 bits.
#[inline(always)]
fn scaled_amax<T: Element>(xs: &[T], column_scale: &[f32]) -> u32 {
    let mut largest = 0;
    for (x, column_scale) in xs.iter().zip(column_scale) {
        largest = largest.max((x.widen() * column_scale).magnitude());
    }
    largest
}
