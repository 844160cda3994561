//! Properties of views that launches depend on: device, alignment and layout.

use crate::layout::{Device, Matrix, View};

/// Returns the ordinal of a CUDA device.
pub(super) fn ordinal(device: Device) -> i32 {
    match device {
        Device::Cuda(ordinal) => ordinal,
        Device::Cpu => -1,
    }
}

pub(super) fn aligned(ptr: *const u8, bytes: usize) -> bool {
    ptr.addr().is_multiple_of(bytes)
}

/// Returns whether all elements are contiguous and start at a 16-byte boundary.
pub(super) fn contiguous_and_aligned(x: &View) -> bool {
    x.is_contiguous() && aligned(x.ptr(), 16)
}

/// Returns whether the elements of rows are contiguous and every row starts at a multiple of `bytes`.
pub(super) fn rows_aligned(m: &Matrix, bytes: usize) -> bool {
    let pitch = m.row_stride.unsigned_abs() * m.dtype.size();
    (m.col_stride == 1 || m.cols == 1)
        && aligned(m.ptr, bytes)
        && (m.rows == 1 || pitch.is_multiple_of(bytes))
}
