//! Iteration over a matrix of any strides. Parts of rows are converted to bytes, which are written to outputs
//! of any strides.

use std::marker::PhantomData;
use std::ops::Range;

use super::convert::{Codes, Element};
use super::rows;
use super::tile::{self, Fill};
use crate::layout::Matrix;

/// Distance at which rows of a tile are prefetched. Each row is on a different page, where the hardware
/// prefetcher has not started. Without prefetching, casting into tiles takes 1.7 times as long.
const PREFETCH_BYTES: usize = 8192;

/// Casts to codes and, with `AMAX`, records the absolute maximum.
pub(super) struct Cast<'a, T, C, const AMAX: bool> {
    x: Matrix<'a>,
    q: f32,
    /// The absolute maximum so far, in the form that [`rows::amax`] returns.
    pub(super) amax_bits: u32,
    buffer: Vec<T>,
    format: PhantomData<C>,
}

impl<'a, T, C, const AMAX: bool> Cast<'a, T, C, AMAX> {
    pub(super) fn new(x: Matrix<'a>, q: f32) -> Self {
        Self { x, q, amax_bits: 0, buffer: Vec::new(), format: PhantomData }
    }
}

impl<T: Element, C: Codes, const AMAX: bool> Fill for Cast<'_, T, C, AMAX> {
    #[inline(always)]
    fn fill(&mut self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        // SAFETY: walks stay inside their source, and `T` is the type of its dtype.
        let xs = unsafe { self.x.row(row, cols, &mut self.buffer) };
        self.amax_bits = self.amax_bits.max(rows::cast::<T, C, AMAX>(xs, self.q, out));
    }
}

/// Copies bytes.
pub(super) struct Copy<'a> {
    pub(super) bytes: Matrix<'a>,
    pub(super) buffer: Vec<u8>,
}

impl Fill for Copy<'_> {
    #[inline(always)]
    fn fill(&mut self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        // SAFETY: walks stay inside their source, whose elements are bytes.
        out.copy_from_slice(unsafe { self.bytes.row(row, cols, &mut self.buffer) });
    }
}

/// Prefetches later rows of the source before filling a row.
struct Ahead<'a, F> {
    source: &'a Matrix<'a>,
    distance: usize,
    fill: &'a mut F,
}

impl<F: Fill> Fill for Ahead<'_, F> {
    #[inline(always)]
    fn fill(&mut self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        self.source.prefetch(row + self.distance, cols.clone());
        self.fill.fill(row, cols, out);
    }
}

/// A part of a matrix that a thread processes at a time.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Piece {
    pub(super) rows: Range<usize>,
    pub(super) cols: Range<usize>,
}

/// A source, and outputs with one element for each source element. All have one shape.
pub(super) struct Walk<'a> {
    pub(super) source: Matrix<'a>,
    pub(super) sinks: Vec<Matrix<'a>>,
}

impl<'a> Walk<'a> {
    /// Chooses the orientation in which the source is contiguous. If no matrix has gaps, flattens all of them
    /// to one row.
    pub(super) fn new(source: Matrix<'a>, sinks: Vec<Matrix<'a>>) -> Self {
        let (mut source, mut sinks) = (source, sinks);
        if source.prefers_columns() {
            source = source.transposed();
            sinks = sinks.into_iter().map(Matrix::transposed).collect();
        }
        if source.is_contiguous() && sinks.iter().all(Matrix::is_contiguous) {
            source = source.flat();
            sinks = sinks.into_iter().map(Matrix::flat).collect();
        }
        Self { source, sinks }
    }

    /// Splits the work into pieces of about `elements` elements.
    pub(super) fn pieces(&self, elements: usize) -> Vec<Piece> {
        let (rows, cols) = (self.source.rows, self.source.cols);
        if rows == 0 || cols == 0 {
            return Vec::new();
        }
        let multiple = if self.is_direct() { 1 } else { tile::ROWS };
        let piece_rows = (elements / cols).max(1).next_multiple_of(multiple).min(rows);
        let piece_cols = (elements / piece_rows).next_multiple_of(tile::COLS).min(cols);
        let starts = |n: usize, step| (0..n).step_by(step).map(move |start| start..(start + step).min(n));
        starts(rows, piece_rows)
            .flat_map(|rows| starts(cols, piece_cols).map(move |cols| Piece { rows: rows.clone(), cols }))
            .collect()
    }

    /// Whether bytes can be written directly to the output, without a tile.
    fn is_direct(&self) -> bool {
        match &self.sinks[..] {
            [] => true,
            [sink] => sink.col_stride == 1 || sink.cols == 1,
            _ => false,
        }
    }

    /// Fills a piece of the outputs.
    #[inline(always)]
    pub(super) fn run(&self, piece: Piece, fill: &mut impl Fill) {
        let Piece { rows, cols } = piece;
        if self.is_direct() {
            let sink = &self.sinks[0];
            for row in rows {
                // SAFETY: the elements are contiguous, and no other piece contains them.
                fill.fill(row, cols.clone(), unsafe { sink.row_mut(row, cols.clone()) });
            }
            return;
        }
        let distance = PREFETCH_BYTES.div_ceil(tile::COLS * self.source.dtype.size());
        // SAFETY: no other piece contains these elements.
        unsafe {
            tile::by_tiles(rows, cols, &self.sinks, &mut Ahead { source: &self.source, distance, fill });
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{DType, Device};

    fn matrix(rows: usize, cols: usize, row_stride: isize, col_stride: isize) -> Matrix<'static> {
        let strides = (row_stride, col_stride);
        Matrix::new(std::ptr::null_mut(), DType::E4m3, Device::Cpu, (rows, cols), strides)
    }

    #[test]
    fn pieces_cover_each_element_once() {
        let dense = |rows, cols| matrix(rows, cols, cols as isize, 1);
        for (rows, cols) in [(1, 1), (1, 100_000), (100_000, 1), (130, 700), (64, 4096), (3, 5000)] {
            let x = dense(rows, cols);
            for sinks in [vec![], vec![x], vec![dense(cols, rows).transposed()]] {
                let walk = Walk::new(x, sinks);
                let mut visits = vec![0_u8; rows * cols];
                for Piece { rows, cols } in walk.pieces(4096) {
                    for row in rows {
                        cols.clone().for_each(|col| visits[row * walk.source.cols + col] += 1);
                    }
                }
                assert!(visits.iter().all(|n| *n == 1), "{rows}x{cols}");
            }
        }
        assert_eq!(Walk::new(dense(0, 4), vec![]).pieces(64), vec![]);
    }

    #[test]
    fn transposed_source_is_walked_in_memory_order() {
        let walk = Walk::new(matrix(30, 20, 1, 30), vec![matrix(30, 20, 20, 1)]);
        assert_eq!((walk.source.rows, walk.source.col_stride, walk.sinks[0].row_stride), (20, 1, 1));
        let broadcast_row = Walk::new(matrix(30, 20, 0, 1), vec![]);
        assert_eq!(broadcast_row.source.rows, 30);
    }
}
