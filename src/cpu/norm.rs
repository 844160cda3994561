//! Norms over rows, with quantization of their result.

use std::ops::Range;

use super::convert::Element;
use super::float_env::DefaultFloatEnv;
use super::groups::for_rows;
use super::simd::{Kernel, dispatch};
use super::types::with_element;
use crate::format::Fp8Format;
use crate::format::norm::{LANES, RowStats, sum_lanes};
use crate::layout::{Matrix, View, ViewMut};
use crate::spec::{Norm, TensorPlanes};

/// Computes rows of a norm.
#[derive(Clone)]
struct NormPiece<'a, T> {
    x: Matrix<'a>,
    weight: &'a [f32],
    bias: &'a [f32],
    centered: bool,
    eps: f32,
    /// The output, contiguous.
    values: Matrix<'a>,
    mean: Option<Matrix<'a>>,
    rstd: Matrix<'a>,
    rows: Range<usize>,
    buffer: Vec<T>,
}

impl<T: Element> Kernel for NormPiece<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        if self.centered { self.compute::<true>() } else { self.compute::<false>() }
    }
}

impl<T: Element> NormPiece<'_, T> {
    #[inline(always)]
    fn compute<const CENTERED: bool>(mut self) {
        let (x, cols) = (self.x, self.x.cols);
        for row in self.rows {
            // SAFETY: the elements of `x` are `T`.
            let xs = unsafe { x.row::<T>(row, 0..cols, &mut self.buffer) };
            let mean = if CENTERED { sum(xs, |x| x) / cols as f32 } else { 0.0 };
            let squares = sum(xs, |x| if CENTERED { (x - mean) * (x - mean) } else { x * x });
            let stats = RowStats::new(mean, squares, cols, self.eps);

            // SAFETY: `ops` checks that the statistics are fp32 with one element for each row. No other piece
            // has this row.
            unsafe {
                self.rstd.write(row, 0, stats.rstd);
                if let Some(mean) = &self.mean {
                    mean.write(row, 0, stats.mean);
                }
            }

            // SAFETY: the output is contiguous and has the dtype of `T`. No other piece has this row.
            let out = unsafe { self.values.row_mut::<T>(row, 0..cols) };
            match (self.weight, self.bias) {
                ([], _) => {
                    for (out, x) in out.iter_mut().zip(xs) {
                        *out = T::narrow(stats.normalize::<CENTERED>(x.widen()));
                    }
                }
                (weight, []) => {
                    for ((out, x), weight) in out.iter_mut().zip(xs).zip(weight) {
                        *out = T::narrow(stats.normalize::<CENTERED>(x.widen()) * weight);
                    }
                }
                (weight, bias) => {
                    for (((out, x), weight), bias) in out.iter_mut().zip(xs).zip(weight).zip(bias) {
                        *out = T::narrow(stats.normalize::<CENTERED>(x.widen()) * weight + bias);
                    }
                }
            }
        }
    }
}

/// Sums a term of each element in the order of `format::norm`.
#[inline(always)]
fn sum<T: Element>(xs: &[T], term: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    for chunk in xs.chunks(LANES) {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += term(x.widen());
        }
    }
    sum_lanes(&lanes)
}

/// Returns the elements of a row vector as fp32.
fn widened(vector: Option<&View>) -> Vec<f32> {
    let Some(vector) = vector.map(View::matrix) else { return Vec::new() };
    with_element!(vector.dtype, T => {
        // SAFETY: `T` is the type of the dtype.
        (0..vector.cols).map(|col| unsafe { vector.read::<T>(0, col) }.widen()).collect()
    })
}

/// See `ops::quantize_norm`.
pub(crate) fn quantize_norm(norm: &Norm, format: Fp8Format, planes: &TensorPlanes) {
    let _env = DefaultFloatEnv::enter();
    let (rows, cols) = norm.x.shape();
    let (weight, bias) = (widened(norm.weight.as_ref()), widened(norm.bias.as_ref()));
    with_element!(norm.x.dtype(), T => {
        let mut values = vec![T::narrow(0.0); rows * cols];
        let out = ViewMut::from_slice(&mut values, rows, cols).expect("the length is that of the shape");
        let all_rows = NormPiece::<T> {
            x: norm.x.matrix(),
            weight: &weight,
            bias: &bias,
            centered: norm.centered,
            eps: norm.eps,
            values: out.matrix(),
            mean: norm.mean.as_ref().map(ViewMut::matrix),
            rstd: norm.rstd.matrix(),
            rows: 0..rows,
            buffer: Vec::new(),
        };
        for_rows(rows, cols, |rows| dispatch(NormPiece { rows, ..all_rows.clone() }));
        let x = View::from_slice(&values, rows, cols).expect("the length is that of the shape");
        super::quantize(planes.call(x, format));
    });
}
