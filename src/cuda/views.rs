//! What launches ask of views: where they are, and how they lie.

use crate::layout::{Device, Matrix, View};

/// The ordinal of a CUDA device.
pub(super) fn ordinal(device: Device) -> i32 {
    match device {
        Device::Cuda(ordinal) => ordinal,
        Device::Cpu => -1,
    }
}

pub(super) fn aligned(ptr: *const u8, bytes: usize) -> bool {
    ptr.addr().is_multiple_of(bytes)
}

/// Whether all elements lie in a row that 16-byte loads can start at.
pub(super) fn contiguous_and_aligned(x: &View) -> bool {
    x.is_contiguous() && aligned(x.ptr(), 16)
}

/// Whether a row starts and goes on at multiples of `bytes`, elements next to each other.
pub(super) fn rows_aligned(m: &Matrix, bytes: usize) -> bool {
    let pitch = m.row_stride.unsigned_abs() * m.dtype.size();
    (m.col_stride == 1 || m.cols == 1)
        && aligned(m.ptr, bytes)
        && (m.rows == 1 || pitch.is_multiple_of(bytes))
}
