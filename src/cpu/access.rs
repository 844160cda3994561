//! Elements and rows of a matrix in memory.
//!
//! The creator of a view guarantees that each of its elements is valid (`View::from_raw`), and `ops` has
//! rejected null, misaligned and overlapping views. A caller of this module guarantees that it stays inside
//! the matrix while the matrix's view is alive, and that no two threads access the same element of an output.

use std::ops::Range;

use crate::layout::Matrix;

impl<'a> Matrix<'a> {
    /// Returns the address of an element. The address is not dereferenced, so any indices are safe.
    #[inline(always)]
    pub(super) fn at(&self, row: usize, col: usize) -> *mut u8 {
        let offset = row as isize * self.row_stride + col as isize * self.col_stride;
        self.ptr.wrapping_offset(offset * self.dtype.size() as isize)
    }

    /// Reads an element.
    ///
    /// # Safety
    /// The view of the matrix must be alive, and its memory must be on the host. `row` and `col` must be
    /// inside the matrix. `T` must have the size of the dtype, and any bits must be a valid `T`. No other
    /// code may write to the element at the same time.
    #[inline(always)]
    pub(super) unsafe fn read<T: Copy>(&self, row: usize, col: usize) -> T {
        debug_assert!(row < self.rows && col < self.cols && size_of::<T>() == self.dtype.size());
        // SAFETY: the caller guarantees that this is an element of the matrix and readable.
        unsafe { self.at(row, col).cast::<T>().read() }
    }

    /// Writes an element.
    ///
    /// # Safety
    /// The requirements of [`Self::read`] apply. The view must be writable, and no other code may access the
    /// element at the same time.
    #[inline(always)]
    pub(super) unsafe fn write<T: Copy>(&self, row: usize, col: usize, value: T) {
        debug_assert!(row < self.rows && col < self.cols && size_of::<T>() == self.dtype.size());
        // SAFETY: the caller guarantees that this is an element of the matrix and writable.
        unsafe { self.at(row, col).cast::<T>().write(value) }
    }

    /// Returns elements of a row. If they are not contiguous, they are copied to `buffer`.
    ///
    /// # Safety
    /// The requirements of [`Self::read`] apply to each of the elements for as long as the slice lives.
    #[inline(always)]
    pub(super) unsafe fn row<'b, T: Copy>(
        &self,
        row: usize,
        cols: Range<usize>,
        buffer: &'b mut Vec<T>,
    ) -> &'b [T]
    where
        'a: 'b,
    {
        debug_assert!(row < self.rows && cols.end <= self.cols && size_of::<T>() == self.dtype.size());
        if cols.is_empty() {
            return &[]; // a matrix without elements may have a null pointer, which is not a valid slice
        }
        if self.col_stride == 1 || cols.len() == 1 {
            // SAFETY: these elements are contiguous, and the caller guarantees that they are readable.
            return unsafe { std::slice::from_raw_parts(self.at(row, cols.start).cast(), cols.len()) };
        }
        buffer.clear();
        // SAFETY: the caller guarantees that each of these elements is readable.
        buffer.extend(cols.map(|col| unsafe { self.read::<T>(row, col) }));
        buffer
    }

    /// Prefetches elements of a row, if the row exists and its elements are contiguous.
    #[inline(always)]
    pub(super) fn prefetch(&self, row: usize, cols: Range<usize>) {
        if row < self.rows && self.col_stride == 1 {
            let (first, bytes) = (self.at(row, cols.start), cols.len() * self.dtype.size());
            for line in (0..bytes).step_by(64) {
                prefetch_line(first.wrapping_add(line));
            }
        }
    }

    /// Returns contiguous elements of a row to write to.
    ///
    /// # Safety
    /// The elements must be contiguous. The requirements of [`Self::write`] apply to each of them for as long
    /// as the slice lives.
    #[inline(always)]
    pub(super) unsafe fn row_mut<T>(&self, row: usize, cols: Range<usize>) -> &'a mut [T] {
        debug_assert!(row < self.rows && cols.end <= self.cols && (self.col_stride == 1 || cols.len() <= 1));
        if cols.is_empty() {
            return &mut []; // a matrix without elements may have a null pointer, which is not a valid slice
        }
        // SAFETY: the caller guarantees that these elements are contiguous and writable.
        unsafe { std::slice::from_raw_parts_mut(self.at(row, cols.start).cast(), cols.len()) }
    }

    /// Whether loops should run along the columns, because the elements of a column are closer in memory than
    /// the elements of a row.
    pub(super) fn prefers_columns(&self) -> bool {
        let (row, col) = (self.row_stride.unsigned_abs(), self.col_stride.unsigned_abs());
        self.rows > 1 && (self.cols == 1 || col != 1 && row != 0 && row < col)
    }
}

/// Prefetches the cache line of an address.
#[inline(always)]
#[cfg(target_arch = "x86_64")]
fn prefetch_line(at: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: SSE is part of the architecture, and a prefetch never faults, whatever the address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
}

/// Does nothing: other processors rely on hardware prefetching.
#[inline(always)]
#[cfg(not(target_arch = "x86_64"))]
fn prefetch_line(_: *const u8) {}
