//! The sum of the rows of a matrix.

use std::ops::Range;

use half::bf16;

use super::convert::Element;
use super::float_env::DefaultFloatEnv;
use super::pool;
use super::simd::{Kernel, dispatch};
use super::tensorwise::{PARALLEL, PIECE};
use crate::layout::{Matrix, View, ViewMut};

/// Number of columns that are summed together. They stay in the L1 cache from row to row.
const CHUNK: usize = 1024;

struct Columns<'a> {
    x: Matrix<'a>,
    out: Matrix<'a>,
    divisor: f32,
    cols: Range<usize>,
}

impl Kernel for Columns<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { x, out, divisor, cols } = self;
        let mut buffer = Vec::new();
        for start in cols.clone().step_by(CHUNK) {
            let chunk = start..(start + CHUNK).min(cols.end);
            let mut sums = [-0.0_f32; CHUNK];
            for row in 0..x.rows {
                // SAFETY: the elements are inside the matrix, whose dtype is bf16.
                let values: &[bf16] = unsafe { x.row(row, chunk.clone(), &mut buffer) };
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum += value.widen();
                }
            }
            for (col, sum) in chunk.zip(sums) {
                // SAFETY: the element is inside the fp32 output, and no other piece contains it.
                unsafe { out.write(0, col, f32::narrow(sum / divisor)) };
            }
        }
    }
}

pub(crate) fn sum_rows(out: ViewMut, x: View, divisor: f32) {
    let _env = DefaultFloatEnv::enter();
    let (x, out) = (x.matrix(), out.matrix());
    pool::for_each(x.cols.div_ceil(PIECE), x.numel() >= PARALLEL, |i| {
        let cols = i * PIECE..((i + 1) * PIECE).min(x.cols);
        dispatch(Columns { x, out, divisor, cols });
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::on_each_level;
    use crate::format::sum::divided_sum;

    #[test]
    fn sum_rows_matches_the_definition_at_every_level() {
        // Each column combines bf16 values whose bit patterns are a prime apart. CHUNK + 3 columns leave a
        // tail.
        let (rows, cols) = (3, 65_536 + CHUNK + 3);
        let value = |row: usize, col: usize| bf16::from_bits((col * (row + 1) + row * 40_961) as u16);
        let x: Vec<bf16> = (0..rows).flat_map(|row| (0..cols).map(move |col| value(row, col))).collect();
        on_each_level(|level| {
            let mut out = vec![0.0_f32; cols];
            let view = View::from_slice(&x, rows, cols).expect("its length");
            sum_rows(ViewMut::from_slice(&mut out, 1, cols).expect("its length"), view, 3.0);
            for (col, got) in out.iter().enumerate() {
                let expected = divided_sum((0..rows).map(|row| value(row, col).to_f32()), 3.0);
                assert_eq!(got.to_bits(), expected.to_bits(), "{level:?}, column {col}");
            }
        });
    }
}
