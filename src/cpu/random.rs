//! Random numbers that depend on an element's position only.

use super::convert::Element;
use super::pool;
use super::simd::{Kernel, dispatch};
use super::tensorwise::{PARALLEL, PIECE};
use super::types::with_element;
use crate::format::random::{Words, between};
use crate::layout::{Matrix, ViewMut};
use crate::spec::Numbers;

/// Number of elements whose words are computed together.
const CHUNK: usize = 512;

/// Buffer for the words of [`CHUNK`] elements. Their first Philox block may start up to 3 elements earlier.
pub(super) struct Buffer([u32; CHUNK + 4]);

impl Buffer {
    pub(super) const fn new() -> Self {
        Self([0; CHUNK + 4])
    }

    /// Returns the words of `count` elements (at most [`CHUNK`]), starting at `index`.
    #[inline(always)]
    pub(super) fn words(&mut self, words: Words, index: u64, count: usize) -> &[u32] {
        let (first, skip) = (index >> 2, (index & 3) as usize);
        let (blocks, _) = self.0.as_chunks_mut::<4>();
        for (i, block) in blocks[..(skip + count).div_ceil(4)].iter_mut().enumerate() {
            *block = words.block(first.wrapping_add(i as u64));
        }
        &self.0[skip..skip + count]
    }
}

struct Fill<'a, T> {
    x: Matrix<'a>,
    row: usize,
    cols: std::ops::Range<usize>,
    words: Words,
    offset: u64,
    range: (f32, f32),
    dtype: std::marker::PhantomData<T>,
}

impl<T: Element> Kernel for Fill<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut buffer = Buffer::new();
        for start in self.cols.clone().step_by(CHUNK) {
            let count = CHUNK.min(self.cols.end - start);
            let index = self.offset.wrapping_add((self.row * self.x.cols + start) as u64);
            for (i, word) in buffer.words(self.words, index, count).iter().enumerate() {
                let value = T::narrow(between(*word, self.range.0, self.range.1));
                // SAFETY: the element is inside the matrix, `T` is the type of its dtype, and no other piece
                // contains it.
                unsafe { self.x.write(self.row, start + i, value) };
            }
        }
    }
}

pub(crate) fn random_uniform(x: ViewMut, numbers: Numbers, range: (f32, f32)) {
    let _env = super::float_env::DefaultFloatEnv::enter();
    let whole = x.matrix();
    let x = if whole.is_contiguous() { whole.flat() } else { whole };
    if x.numel() == 0 {
        return;
    }
    let per_row = x.cols.div_ceil(PIECE);
    let Numbers { seed, offset, stream, step } = numbers;
    // SAFETY: `ops` checks that `step` is one fp32 element.
    let step = step.map_or(0.0, |step| unsafe { step.matrix().read::<f32>(0, 0) });
    let words = Words { seed, stream, step: step as u32 };
    pool::for_each(x.rows * per_row, x.numel() >= PARALLEL, |i| {
        let (row, start) = (i / per_row, i % per_row * PIECE);
        let cols = start..(start + PIECE).min(x.cols);
        with_element!(x.dtype, T => {
            let dtype = std::marker::PhantomData::<T>;
            dispatch(Fill { x, row, cols, words, offset, range, dtype });
        });
    });
}
