//! Rotary position embeddings (`kernels/rotation.cu`).

use super::driver::{Grid, args, launch};
use super::modules::{ByInput, Module, by_input, input_index, module};
use super::views::{aligned, ordinal, rows_aligned};
use crate::error::Error;
use crate::layout::ViewMut;
use crate::spec::{Rotation, Stream};

#[derive(Clone, Copy)]
#[repr(C)]
struct RotationArgs {
    x: *const u8,
    cos: *const u8,
    sin: *const u8,
    out: *mut u8,
    rows: u64,
    positions: u64,
    x_rs: i64,
    x_cs: i64,
    heads: u32,
    half: u32,
    back: u32,
    unused: u32,
}

args!(RotationArgs);

static ROTATION_MODULE: Module = module!("rotation");

static ROTATE: ByInput = by_input!(ROTATION_MODULE, "rotate", RotationArgs);
static STRIDED_ROTATE: ByInput = by_input!(ROTATION_MODULE, "strided_rotate", RotationArgs);

#[cfg(test)]
pub(super) fn kernels() -> Vec<&'static super::modules::Kernel> {
    ROTATE.iter().chain(&STRIDED_ROTATE).collect()
}

const THREADS: u32 = 256;

/// See `ops::rotate`.
pub(crate) fn rotate(rotation: &Rotation, out: ViewMut, stream: Stream) -> Result<(), Error> {
    let Rotation { x, cos, sin, back } = rotation;
    let half = cos.cols() / 2;
    let args = RotationArgs {
        x: x.ptr(),
        cos: cos.ptr(),
        sin: sin.ptr(),
        out: out.ptr(),
        rows: x.rows() as u64,
        positions: cos.rows() as u64,
        x_rs: x.row_stride() as i64,
        x_cs: x.col_stride() as i64,
        heads: (x.cols() / cos.cols()) as u32,
        half: half as u32,
        back: u32::from(*back),
        unused: 0,
    };
    // A thread rotates a vector of 16 bytes of each half of a head, or one element.
    let elements_per_vector = 16 / x.dtype().size();
    let in_vectors = half.is_multiple_of(elements_per_vector)
        && rows_aligned(&x.matrix(), 16)
        && [cos.ptr(), sin.ptr(), out.ptr().cast_const()].into_iter().all(|ptr| aligned(ptr, 16));
    let (kernels, elements_per_thread) =
        if in_vectors { (&ROTATE, elements_per_vector) } else { (&STRIDED_ROTATE, 1) };
    let threads = (x.rows() * (x.cols() / 2 / elements_per_thread)) as u64;
    let grid = Grid { blocks: threads.div_ceil(u64::from(THREADS)), threads: THREADS };
    launch(ordinal(x.device()), stream, &kernels[input_index(x.dtype())], grid, &args)
}
