//! Elements and rows of a matrix in memory.
//!
//! Whoever made a view vouched for each of its elements (`View::from_raw`), and `ops` has refused null,
//! misaligned and overlapping ones. What a caller here vouches for is to stay inside the matrix, while its view
//! lives, and that no two threads have one element of an output.

use std::ops::Range;

use crate::layout::Matrix;

impl Matrix {
    /// The address of an element. Not dereferenced, so any indices are safe.
    #[inline(always)]
    pub(super) fn at(&self, row: usize, col: usize) -> *mut u8 {
        let offset = row as isize * self.row_stride + col as isize * self.col_stride;
        self.ptr.wrapping_offset(offset * self.dtype.size() as isize)
    }

    /// Reads an element.
    ///
    /// # Safety
    /// The view that the matrix is of must be alive and its memory on the host, `row` and `col` inside, and `T` of
    /// the size of the dtype, and any bits a value of it. Nobody may write to the element meanwhile.
    #[inline(always)]
    pub(super) unsafe fn read<T: Copy>(&self, row: usize, col: usize) -> T {
        debug_assert!(row < self.rows && col < self.cols && size_of::<T>() == self.dtype.size());
        // SAFETY: an element of the matrix, for which the caller vouches.
        unsafe { self.at(row, col).cast::<T>().read() }
    }

    /// Writes an element.
    ///
    /// # Safety
    /// As for [`Self::read`], of a view to write to; nobody else may use the element meanwhile.
    #[inline(always)]
    pub(super) unsafe fn write<T: Copy>(&self, row: usize, col: usize, value: T) {
        debug_assert!(row < self.rows && col < self.cols && size_of::<T>() == self.dtype.size());
        // SAFETY: an element of the matrix, for which the caller vouches.
        unsafe { self.at(row, col).cast::<T>().write(value) }
    }

    /// Elements of a row, copied into `buffer` where they are not next to each other.
    ///
    /// # Safety
    /// As for [`Self::read`], of each of the elements, for as long as the slice lives.
    #[inline(always)]
    pub(super) unsafe fn row<'a, T: Copy>(
        &self,
        row: usize,
        cols: Range<usize>,
        buffer: &'a mut Vec<T>,
    ) -> &'a [T] {
        debug_assert!(row < self.rows && cols.end <= self.cols && size_of::<T>() == self.dtype.size());
        if self.col_stride == 1 || cols.len() == 1 {
            // SAFETY: these elements of the matrix are contiguous; the caller vouches for the rest.
            return unsafe { std::slice::from_raw_parts(self.at(row, cols.start).cast(), cols.len()) };
        }
        buffer.clear();
        // SAFETY: the caller's promise.
        buffer.extend(cols.map(|col| unsafe { self.read::<T>(row, col) }));
        buffer
    }

    /// Asks for elements of a row ahead of time, if there is such a row and its elements are contiguous.
    #[inline(always)]
    pub(super) fn prefetch(&self, row: usize, cols: Range<usize>) {
        if row < self.rows && self.col_stride == 1 {
            let (first, bytes) = (self.at(row, cols.start), cols.len() * self.dtype.size());
            for line in (0..bytes).step_by(64) {
                prefetch_line(first.wrapping_add(line));
            }
        }
    }

    /// Contiguous elements of a row, to write to.
    ///
    /// # Safety
    /// As for [`Self::write`], of each of the elements, for as long as the slice lives; they must be contiguous.
    #[inline(always)]
    pub(super) unsafe fn row_mut<'a, T>(&self, row: usize, cols: Range<usize>) -> &'a mut [T] {
        debug_assert!(row < self.rows && cols.end <= self.cols && (self.col_stride == 1 || cols.len() <= 1));
        // SAFETY: contiguous elements of the matrix, for which the caller vouches.
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

/// Asks for the cache line of an address.
#[inline(always)]
#[cfg(target_arch = "x86_64")]
fn prefetch_line(at: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: SSE is part of the architecture, and a prefetch touches nothing, whatever the address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
}

/// Other processors are left to notice by themselves.
#[inline(always)]
#[cfg(not(target_arch = "x86_64"))]
fn prefetch_line(_: *const u8) {}
