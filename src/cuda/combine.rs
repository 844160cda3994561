//! The weighted sum of the rows of each token, and its gradients (`kernels/combine.cu`).

use std::ptr;

use super::driver::{Grid, args, launch};
use super::modules::{ByInput, Kernel, Module, by_input, input_index, module};
use super::views::{aligned, ordinal, rows_aligned};
use crate::error::Error;
use crate::layout::{DType, Matrix, ViewMut};
use crate::spec::{Combine, CombineBackward, Stream};

#[derive(Clone, Copy)]
#[repr(C)]
struct CombineArgs {
    rows: *const u8,
    grad: *const u8,
    token_rows: *const u8,
    weights: *const u8,
    out: *mut u8,
    d_weights: *mut u8,
    rows_rs: i64,
    rows_cs: i64,
    grad_rs: i64,
    grad_cs: i64,
    count: i64,
    tokens: i64,
    k: i64,
    cols: i64,
    flags: u32,
    lanes: u32,
}

args!(CombineArgs);

// Defined in `kernels/combine.cu`.
const ROWS_VECTORS: u32 = 1;
const GRAD_VECTORS: u32 = 2;
const OUT_VECTORS: u32 = 4;
const F32_WEIGHTS: u32 = 8;
const THREADS: u32 = 256;
const WARP: u32 = 32;

static COMBINE_MODULE: Module = module!("combine");

/// Kernels that load two rows at a time, and eight rows.
static COMBINE: [ByInput; 2] = [
    by_input!(COMBINE_MODULE, "combine_2", CombineArgs),
    by_input!(COMBINE_MODULE, "combine_8", CombineArgs),
];
static BACKWARD: [ByInput; 2] = [
    by_input!(COMBINE_MODULE, "combine_backward_2", CombineArgs),
    by_input!(COMBINE_MODULE, "combine_backward_8", CombineArgs),
];

#[cfg(test)]
pub(super) fn kernels() -> Vec<&'static Kernel> {
    COMBINE.iter().chain(&BACKWARD).flatten().collect()
}

/// Returns the kernel for `k` rows of a token.
fn kernel(kernels: &'static [ByInput; 2], k: usize, dtype: DType) -> &'static Kernel {
    &kernels[usize::from(k > 2)][input_index(dtype)]
}

/// Returns the arguments that do not depend on the direction. Kernels count rows in 31 bits.
fn shared(
    token_rows: Matrix,
    weights: Option<Matrix>,
    count: usize,
    cols: usize,
) -> Result<CombineArgs, Error> {
    if i32::try_from(count).is_err() {
        return Err(Error::Value {
            arg: "rows".into(),
            got: format!("a matrix with {count} rows"),
            expected: "a matrix with fewer than 2^31 rows".into(),
        });
    }
    let is_f32 = weights.is_some_and(|weights| weights.dtype == DType::F32);
    Ok(CombineArgs {
        rows: ptr::null(),
        grad: ptr::null(),
        token_rows: token_rows.ptr,
        weights: weights.map_or(ptr::null(), |weights| weights.ptr),
        out: ptr::null_mut(),
        d_weights: ptr::null_mut(),
        rows_rs: 0,
        rows_cs: 0,
        grad_rs: 0,
        grad_cs: 0,
        count: count as i64,
        tokens: token_rows.rows as i64,
        k: token_rows.cols as i64,
        cols: cols as i64,
        flags: if is_f32 { F32_WEIGHTS } else { 0 },
        lanes: THREADS,
    })
}

impl CombineArgs {
    fn set_rows(&mut self, rows: &Matrix) {
        self.rows = rows.ptr;
        (self.rows_rs, self.rows_cs) = (rows.row_stride as i64, rows.col_stride as i64);
        let pitch = rows.row_stride.saturating_mul(rows.dtype.size() as isize);
        if rows_aligned(rows, 16) && i32::try_from(pitch).is_ok() {
            self.flags |= ROWS_VECTORS;
        }
    }

    /// Sets the contiguous output.
    fn set_out(&mut self, out: &Matrix) {
        self.out = out.ptr;
        if aligned(out.ptr, 16) && (out.cols * out.dtype.size()).is_multiple_of(16) {
            self.flags |= OUT_VECTORS;
        }
    }
}

/// Returns the number of vectors of 16 bytes in a row.
fn vectors(cols: usize, dtype: DType) -> usize {
    cols.div_ceil(16 / dtype.size())
}

pub(crate) fn combine_rows(combine: Combine, out: ViewMut, stream: Stream) -> Result<(), Error> {
    let (rows, token_rows, out) = (combine.rows.matrix(), combine.token_rows.matrix(), out.matrix());
    let mut args = shared(token_rows, combine.weights.map(|w| w.matrix()), rows.rows, rows.cols)?;
    args.set_rows(&rows);
    args.set_out(&out);
    let threads = token_rows.rows as u64 * vectors(rows.cols, rows.dtype) as u64;
    let grid = Grid { blocks: threads.div_ceil(THREADS.into()), threads: THREADS };
    launch(ordinal(rows.device), stream, kernel(&COMBINE, token_rows.cols, rows.dtype), grid, &args)
}

pub(crate) fn combine_rows_backward(backward: CombineBackward, stream: Stream) -> Result<(), Error> {
    let (grad, token_rows) = (backward.grad.matrix(), backward.token_rows.matrix());
    if token_rows.cols == 0 {
        return Ok(());
    }
    let count = token_rows.rows * token_rows.cols;
    let mut args = shared(token_rows, Some(backward.weights.matrix()), count, grad.cols)?;
    args.grad = grad.ptr;
    (args.grad_rs, args.grad_cs) = (grad.row_stride as i64, grad.col_stride as i64);
    if rows_aligned(&grad, 16) {
        args.flags |= GRAD_VECTORS;
    }
    // Rows are read for the gradient of the weights only.
    if let (Some(rows), Some(d_weights)) = (backward.rows, backward.d_weights) {
        args.set_rows(&rows.matrix());
        args.d_weights = d_weights.ptr();
    }
    if let Some(d_rows) = backward.d_rows {
        args.set_out(&d_rows.matrix());
    }
    // A token's threads are whole warps of one block.
    let wanted = vectors(grad.cols, grad.dtype).clamp(1, THREADS as usize) as u32;
    args.lanes = wanted.next_power_of_two().max(WARP);
    let tokens = u64::from(THREADS / args.lanes);
    let grid = Grid { blocks: (token_rows.rows as u64).div_ceil(tokens), threads: THREADS };
    launch(ordinal(grad.device), stream, kernel(&BACKWARD, token_rows.cols, grad.dtype), grid, &args)
}
