//! Strided views of borrowed memory: a matrix, or a batch of matrices of one shape.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range;

use super::{DType, Device};
use crate::error::Error;
use crate::format::wide::Wide;

/// Describes where the elements of one matrix lie in memory that is borrowed for `'a`. Backends work on this type.
///
/// A matrix is `Copy`, because the threads of one call share its outputs. The methods that access elements are
/// therefore unsafe, and their callers ensure that no two threads access the same element of an output. The
/// lifetime ensures that neither a matrix nor a slice of its elements outlives the view.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub(crate) ptr: *mut u8,
    pub(crate) dtype: DType,
    pub(crate) device: Device,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_stride: isize,
    pub(crate) col_stride: isize,
    borrow: PhantomData<&'a [u8]>,
}

// SAFETY: a matrix only describes memory. `View` and `ViewMut` govern access to it, whichever thread it is
// sent to.
unsafe impl Send for Matrix<'_> {}
// SAFETY: a matrix only describes memory, and has no interior mutability. `View` and `ViewMut` govern access.
unsafe impl Sync for Matrix<'_> {}

impl Matrix<'_> {
    /// Describes a matrix. Strides are in elements. Nothing is accessed, so any numbers are safe.
    pub(crate) const fn new(
        ptr: *mut u8,
        dtype: DType,
        device: Device,
        (rows, cols): (usize, usize),
        (row_stride, col_stride): (isize, isize),
    ) -> Self {
        Self { ptr, dtype, device, rows, cols, row_stride, col_stride, borrow: PhantomData }
    }

    pub(crate) fn transposed(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }

    /// Returns the elements of a contiguous matrix as one row.
    pub(crate) fn flat(self) -> Self {
        let cols = self.numel();
        Self { rows: 1, cols, row_stride: cols as isize, col_stride: 1, ..self }
    }

    /// Returns a range of columns.
    pub(crate) fn columns(self, cols: Range<usize>) -> Self {
        let first = self.shifted(self.col_stride * cols.start as isize);
        Self { cols: cols.len(), ..first }
    }

    /// Returns a matrix of the same layout whose first element is `elements` further in memory.
    pub(crate) fn shifted(self, elements: isize) -> Self {
        let bytes = elements.wrapping_mul(self.dtype.size() as isize);
        Self { ptr: self.ptr.wrapping_offset(bytes), ..self }
    }

    pub(crate) fn numel(&self) -> usize {
        self.rows * self.cols
    }

    pub(crate) fn is_contiguous(&self) -> bool {
        self.numel() == 0
            || (self.cols == 1 || self.col_stride == 1)
                && (self.rows == 1 || self.row_stride == self.cols as isize)
    }

    /// Returns the first byte that the elements touch and the byte after the last one, or None without
    /// elements.
    pub(crate) fn extent(&self) -> Option<(usize, usize)> {
        if self.numel() == 0 {
            return None;
        }
        let size = self.dtype.size() as isize;
        let ends = [(self.rows, self.row_stride), (self.cols, self.col_stride)]
            .map(|(n, stride)| (n as isize - 1).wrapping_mul(stride).wrapping_mul(size));
        let start = self.ptr as isize;
        let low = start.wrapping_add(ends[0].min(0)).wrapping_add(ends[1].min(0));
        let high = start.wrapping_add(ends[0].max(0)).wrapping_add(ends[1].max(0)).wrapping_add(size);
        Some((low as usize, high as usize))
    }
}

macro_rules! accessors {
    ($($ptr:tt)*) => {
        /// Returns a pointer to the first element.
        #[must_use]
        pub fn ptr(&self) -> $($ptr)* u8 {
            self.matrix.ptr
        }

        /// Returns the element type.
        #[must_use]
        pub fn dtype(&self) -> DType {
            self.matrix.dtype
        }

        /// Returns the device of the memory.
        #[must_use]
        pub fn device(&self) -> Device {
            self.matrix.device
        }

        /// Returns the number of rows.
        #[must_use]
        pub fn rows(&self) -> usize {
            self.matrix.rows
        }

        /// Returns the number of columns.
        #[must_use]
        pub fn cols(&self) -> usize {
            self.matrix.cols
        }

        /// Returns the rows and columns of each matrix.
        #[must_use]
        pub fn shape(&self) -> (usize, usize) {
            (self.matrix.rows, self.matrix.cols)
        }

        /// Returns the number of matrices.
        #[must_use]
        pub fn batch(&self) -> usize {
            self.batch
        }

        /// Returns the distance from an element to the element of the next matrix, in elements.
        #[must_use]
        pub fn batch_stride(&self) -> isize {
            self.batch_stride
        }

        /// Returns a view of `batch` matrices of this shape whose first elements are `stride` elements apart.
        ///
        /// # Safety
        /// Each of the matrices must satisfy the requirements of `from_raw`.
        #[must_use]
        pub const unsafe fn batched(self, batch: usize, stride: isize) -> Self {
            Self { batch, batch_stride: stride, ..self }
        }

        /// Returns matrix `i` of the batch.
        fn matrix_at(&self, i: usize) -> Matrix<'a> {
            self.matrix.shifted(self.batch_stride * i as isize)
        }

        /// Returns whether the rows of all matrices are one row stride apart, so that they form one matrix.
        pub(crate) fn is_flat(&self) -> bool {
            self.batch <= 1 || self.batch_stride == self.matrix.row_stride * self.matrix.rows as isize
        }

        fn flat_matrix(&self) -> Matrix<'a> {
            Matrix { rows: self.matrix.rows * self.batch, ..self.matrix }
        }

        /// Returns the distance from an element to the element one row below, in elements.
        #[must_use]
        pub fn row_stride(&self) -> isize {
            self.matrix.row_stride
        }

        /// Returns the distance from an element to the next element of its row, in elements.
        #[must_use]
        pub fn col_stride(&self) -> isize {
            self.matrix.col_stride
        }

        /// Returns the number of elements of all matrices.
        #[must_use]
        pub fn numel(&self) -> usize {
            self.batch * self.matrix.numel()
        }

        /// Returns whether the elements lie row after row, and matrix after matrix, without gaps.
        #[must_use]
        pub fn is_contiguous(&self) -> bool {
            let apart = self.batch > 1 && self.batch_stride != self.matrix.numel() as isize;
            self.numel() == 0 || self.matrix.is_contiguous() && !apart
        }

        /// Returns a view of the same memory with rows and columns exchanged.
        #[must_use]
        pub fn transposed(self) -> Self {
            Self { matrix: self.matrix.transposed(), ..self }
        }
    };
}

/// A borrowed, strided view for reading. Strides may be 0 or negative.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    matrix: Matrix<'a>,
    batch: usize,
    batch_stride: isize,
}

impl<'a> View<'a> {
    accessors!(*const);

    /// Creates a view of borrowed memory on any device. Strides are in elements.
    ///
    /// # Safety
    /// Each element `ptr + (row * row_stride + col * col_stride) * dtype.size()` must be readable on
    /// `device`, and must not be written to, while the view or work queued with it lives. A null pointer is
    /// allowed: operations return an error if a null view has elements.
    #[must_use]
    pub const unsafe fn from_raw(
        ptr: *const u8,
        dtype: DType,
        device: Device,
        shape: (usize, usize),
        strides: (isize, isize),
    ) -> Self {
        let matrix = Matrix::new(ptr.cast_mut(), dtype, device, shape, strides);
        Self { matrix, batch: 1, batch_stride: 0 }
    }

    /// Creates a view of a slice as a contiguous matrix of fp32, bf16 or fp16. The slice must have rows *
    /// cols elements.
    pub fn from_slice<T: Wide>(slice: &'a [T], rows: usize, cols: usize) -> Result<Self, Error> {
        check_length(slice.len(), rows, cols)?;
        // SAFETY: the slice has rows * cols initialized elements and is borrowed for 'a.
        Ok(unsafe {
            Self::from_raw(slice.as_ptr().cast(), T::DTYPE, Device::Cpu, (rows, cols), (cols as isize, 1))
        })
    }

    /// Creates a view of a slice as a contiguous matrix of a one-byte `dtype`. The slice must have rows *
    /// cols bytes.
    pub fn from_bytes(slice: &'a [u8], dtype: DType, rows: usize, cols: usize) -> Result<Self, Error> {
        check_length(slice.len(), rows, cols)?;
        check_byte(dtype)?;
        // SAFETY: the slice has rows * cols initialized bytes and is borrowed for 'a.
        Ok(unsafe { Self::from_raw(slice.as_ptr(), dtype, Device::Cpu, (rows, cols), (cols as isize, 1)) })
    }

    /// Returns matrix `i` of the batch as a view.
    pub(crate) fn at(&self, i: usize) -> Self {
        Self { matrix: self.matrix_at(i), batch: 1, ..*self }
    }

    /// Returns the rows of all matrices as one matrix. Requires [`Self::is_flat`].
    pub(crate) fn flat(&self) -> Self {
        Self { matrix: self.flat_matrix(), batch: 1, ..*self }
    }

    /// Returns the first matrix of the batch.
    pub(crate) fn first(&self) -> Matrix<'a> {
        self.matrix
    }

    /// Returns the only matrix. Backends get views of one matrix each.
    pub(crate) fn matrix(&self) -> Matrix<'a> {
        debug_assert_eq!(self.batch, 1);
        self.matrix
    }
}

/// A borrowed, strided view for writing. Operations return an error if its elements overlap.
#[derive(Debug)]
pub struct ViewMut<'a> {
    matrix: Matrix<'a>,
    batch: usize,
    batch_stride: isize,
    // `Cell` makes the type `!Sync`, because operations write through shared references.
    borrow: PhantomData<(&'a mut [u8], Cell<()>)>,
}

impl<'a> ViewMut<'a> {
    accessors!(*mut);

    /// Creates a view of borrowed memory on any device. Strides are in elements.
    ///
    /// # Safety
    /// Each element `ptr + (row * row_stride + col * col_stride) * dtype.size()` must be writable on
    /// `device`, and must not be accessed by other code, while the view or work queued with it lives. A null
    /// pointer is allowed: operations return an error if a null view has elements.
    #[must_use]
    pub const unsafe fn from_raw(
        ptr: *mut u8,
        dtype: DType,
        device: Device,
        shape: (usize, usize),
        strides: (isize, isize),
    ) -> Self {
        let matrix = Matrix::new(ptr, dtype, device, shape, strides);
        Self { matrix, batch: 1, batch_stride: 0, borrow: PhantomData }
    }

    /// Creates a view of a slice as a contiguous matrix of fp32, bf16 or fp16. The slice must have rows *
    /// cols elements.
    pub fn from_slice<T: Wide>(slice: &'a mut [T], rows: usize, cols: usize) -> Result<Self, Error> {
        check_length(slice.len(), rows, cols)?;
        let ptr = slice.as_mut_ptr().cast();
        // SAFETY: the slice has rows * cols elements and is borrowed for 'a.
        Ok(unsafe { Self::from_raw(ptr, T::DTYPE, Device::Cpu, (rows, cols), (cols as isize, 1)) })
    }

    /// Creates a view of a slice as a contiguous matrix of a one-byte `dtype`. The slice must have rows *
    /// cols bytes.
    pub fn from_bytes(slice: &'a mut [u8], dtype: DType, rows: usize, cols: usize) -> Result<Self, Error> {
        check_length(slice.len(), rows, cols)?;
        check_byte(dtype)?;
        // SAFETY: the slice has rows * cols bytes and is borrowed for 'a.
        Ok(unsafe {
            Self::from_raw(slice.as_mut_ptr(), dtype, Device::Cpu, (rows, cols), (cols as isize, 1))
        })
    }

    /// Returns matrix `i` of the batch as a view. The caller must not use two views of one matrix at the same
    /// time.
    pub(crate) fn at(&self, i: usize) -> ViewMut<'_> {
        ViewMut { matrix: self.matrix_at(i), batch: 1, ..*self }
    }

    /// Returns a view for reading what was written. The caller must not write at the same time.
    pub(crate) fn read(&self) -> View<'_> {
        View { matrix: self.matrix, batch: self.batch, batch_stride: self.batch_stride }
    }

    /// Returns the rows of all matrices as one matrix. Requires [`Self::is_flat`].
    pub(crate) fn flat(&self) -> ViewMut<'_> {
        ViewMut { matrix: self.flat_matrix(), batch: 1, ..*self }
    }

    /// Returns the first matrix of the batch.
    pub(crate) fn first(&self) -> Matrix<'_> {
        self.matrix
    }

    /// Returns the matrices of the batch.
    pub(crate) fn matrices(&self) -> impl Iterator<Item = Matrix<'_>> {
        (0..self.batch).map(|i| self.matrix_at(i))
    }

    /// Returns the only matrix. Backends get views of one matrix each.
    pub(crate) fn matrix(&self) -> Matrix<'_> {
        debug_assert_eq!(self.batch, 1);
        self.matrix
    }
}

fn check_length(got: usize, rows: usize, cols: usize) -> Result<(), Error> {
    let expected = rows.saturating_mul(cols);
    if got == expected {
        return Ok(());
    }
    Err(Error::Length { arg: "slice".into(), got, expected, with: "rows * cols" })
}

fn check_byte(dtype: DType) -> Result<(), Error> {
    if dtype.size() == 1 {
        return Ok(());
    }
    let expected = "float8_e4m3fn, float8_e5m2 or float8_e8m0fnu".into();
    Err(Error::DType { arg: "slice".into(), got: dtype, expected })
}
