//! The sum of the rows of a matrix.

use super::driver::{Grid, args, launch};
use super::modules::{Kernel, Module, kernel, module};
use super::views::{aligned, ordinal, rows_aligned};
use crate::error::Error;
use crate::layout::{View, ViewMut};
use crate::spec::Stream;

#[derive(Clone, Copy)]
#[repr(C)]
struct SumRowsArgs {
    x: *const u8,
    out: *mut u8,
    rows: u64,
    cols: u64,
    x_rs: i64,
    x_cs: i64,
    out_cs: i64,
    divisor: f32,
}

args!(SumRowsArgs);

static SUM_ROWS_MODULE: Module = module!("sum_rows");

static SUM_ROWS: Kernel = kernel!(SUM_ROWS_MODULE, "sum_rows", SumRowsArgs);
static STRIDED_SUM_ROWS: Kernel = kernel!(SUM_ROWS_MODULE, "strided_sum_rows", SumRowsArgs);

#[cfg(test)]
pub(super) fn kernels() -> Vec<&'static Kernel> {
    vec![&SUM_ROWS, &STRIDED_SUM_ROWS]
}

pub(crate) fn sum_rows(out: ViewMut, x: View, divisor: f32, stream: Stream) -> Result<(), Error> {
    let args = SumRowsArgs {
        x: x.ptr(),
        out: out.ptr(),
        rows: x.rows() as u64,
        cols: x.cols() as u64,
        x_rs: x.row_stride() as i64,
        x_cs: x.col_stride() as i64,
        out_cs: out.col_stride() as i64,
        divisor,
    };
    let fast = rows_aligned(&x.matrix(), 16) && aligned(out.ptr(), 16) && out.is_contiguous();
    let (kernel, each) = if fast { (&SUM_ROWS, 8) } else { (&STRIDED_SUM_ROWS, 1) };
    let grid = Grid { blocks: args.cols.div_ceil(256 * each), threads: 256 };
    launch(ordinal(x.device()), stream, kernel, grid, &args)
}
