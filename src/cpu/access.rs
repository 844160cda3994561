//! Elements and rows of a matrix in memory.
//!
//! Whoever made a view vouched for each of its elements (`View::from_raw`), and `ops` has refused null,
//! misaligned and overlapping ones; what is left to the callers here is to stay inside the matrix.

use std::ops::Range;

use crate::layout::Matrix;

impl Matrix {
    /// The address of an element. Not dereferenced, so any indices are safe.
    #[inline(always)]
    pub(super) fn at(&self, row: usize, col: usize) -> *mut u8 {
        let offset = row as isize * self.row_stride + col as isize * self.col_stride;
        self.ptr.wrapping_offset(offset * self.dtype.size() as isize)
    }

    /// Reads an element. `T` must have the size of the dtype.
    #[inline(always)]
    pub(super) fn read<T: Copy>(&self, row: usize, col: usize) -> T {
        debug_assert!(row < self.rows && col < self.cols && size_of::<T>() == self.dtype.size());
        // SAFETY: an element of the matrix, see above.
        unsafe { self.at(row, col).cast::<T>().read() }
    }

    /// Writes an element. `T` must have the size of the dtype.
    #[inline(always)]
    pub(super) fn write<T: Copy>(&self, row: usize, col: usize, value: T) {
        debug_assert!(row < self.rows && col < self.cols && size_of::<T>() == self.dtype.size());
        // SAFETY: an element of the matrix, see above.
        unsafe { self.at(row, col).cast::<T>().write(value) }
    }

    /// Elements of a row, copied into `buffer` where they are not next to each other.
    #[inline(always)]
    pub(super) fn row<'a, T: Copy>(&self, row: usize, cols: Range<usize>, buffer: &'a mut Vec<T>) -> &'a [T] {
        debug_assert!(row < self.rows && cols.end <= self.cols);
        if self.col_stride == 1 || cols.len() == 1 {
            // SAFETY: these elements of the matrix are contiguous; nobody writes to an input meanwhile.
            return unsafe { std::slice::from_raw_parts(self.at(row, cols.start).cast(), cols.len()) };
        }
        buffer.clear();
        buffer.extend(cols.map(|col| self.read::<T>(row, col)));
        buffer
    }

    /// Asks for elements of a row ahead of time, if there is such a row and its elements are contiguous.
    #[inline(always)]
    pub(super) fn prefetch(&self, row: usize, cols: Range<usize>) {
        #[cfg(target_arch = "x86_64")]
        if row < self.rows && self.col_stride == 1 {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let (first, bytes) = (self.at(row, cols.start), cols.len() * self.dtype.size());
            for line in (0..bytes).step_by(64) {
                // SAFETY: SSE is part of the architecture, and a prefetch touches nothing, whatever the address.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(line).cast()) };
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (row, cols);
    }

    /// Contiguous elements of a row, to write to.
    ///
    /// # Safety
    /// The elements must be contiguous, and nobody else may use them while the slice lives.
    #[inline(always)]
    pub(super) unsafe fn row_mut<'a, T>(&self, row: usize, cols: Range<usize>) -> &'a mut [T] {
        debug_assert!(row < self.rows && cols.end <= self.cols && (self.col_stride == 1 || cols.len() <= 1));
        // SAFETY: elements of the matrix, see above; the caller vouches for the rest.
        unsafe { std::slice::from_raw_parts_mut(self.at(row, cols.start).cast(), cols.len()) }
    }

    /// The elements of a contiguous matrix as one row.
    pub(super) fn flat(self) -> Self {
        let cols = self.rows * self.cols;
        Self { rows: 1, cols, row_stride: cols as isize, col_stride: 1, ..self }
    }

    /// Whether the loops should run along the columns instead: the elements of a column are nearer to each
    /// other than those of a row.
    pub(super) fn prefers_columns(&self) -> bool {
        let (row, col) = (self.row_stride.unsigned_abs(), self.col_stride.unsigned_abs());
        self.rows > 1 && (self.cols == 1 || col != 1 && row != 0 && row < col)
    }
}
