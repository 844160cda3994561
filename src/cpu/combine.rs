//! The weighted sum of the rows of each token, and its gradients.

use std::marker::PhantomData;
use std::ops::Range;

use super::convert::Element;
use super::float_env::DefaultFloatEnv;
use super::groups::for_rows;
use super::simd::{Kernel, dispatch};
use super::types::with_element;
use crate::error::{Arg, Error};
use crate::layout::{DType, Matrix, ViewMut};
use crate::spec::{Combine, CombineBackward};

/// Number of columns that are summed together. They stay in the L1 cache from row to row.
const CHUNK: usize = 1024;

/// Number of partial sums of a product of two rows. It is the same for every instruction set, so that results
/// are equal.
const LANES: usize = 16;

/// Returns the index of the `j`-th row of a token. It was checked before.
#[inline(always)]
fn row_of(token_rows: &Matrix, token: usize, j: usize) -> usize {
    // SAFETY: validation checked that `token_rows` is int64, and callers stay inside.
    (unsafe { token_rows.read::<i64>(token, j) }) as usize
}

/// Returns the weight of a token's row, which is fp32 or `T`.
#[inline(always)]
fn weight<T: Element>(weights: &Matrix, token: usize, j: usize) -> f32 {
    // SAFETY: validation checked the dtype and that `weights` has the shape of `token_rows`.
    unsafe {
        if weights.dtype == DType::F32 {
            weights.read::<f32>(token, j)
        } else {
            weights.read::<T>(token, j).widen()
        }
    }
}

/// Returns an error if an index is not a row.
fn check_rows(token_rows: &Matrix, rows: usize) -> Result<(), Error> {
    for (token, j) in (0..token_rows.rows).flat_map(|token| (0..token_rows.cols).map(move |j| (token, j))) {
        // SAFETY: validation checked that `token_rows` is int64.
        let row = unsafe { token_rows.read::<i64>(token, j) };
        if !usize::try_from(row).is_ok_and(|row| row < rows) {
            return Err(Error::Value {
                arg: Arg::Item("token_rows", token * token_rows.cols + j),
                got: row.to_string(),
                expected: format!("at least 0 and below {rows}, the number of rows").into(),
            });
        }
    }
    Ok(())
}

/// Returns an error unless `token_rows` is a permutation of the rows.
fn check_permutation(token_rows: &Matrix) -> Result<(), Error> {
    let rows = token_rows.rows * token_rows.cols;
    check_rows(token_rows, rows)?;
    let mut is_used = vec![false; rows];
    for (token, j) in (0..token_rows.rows).flat_map(|token| (0..token_rows.cols).map(move |j| (token, j))) {
        let row = row_of(token_rows, token, j);
        if std::mem::replace(&mut is_used[row], true) {
            return Err(Error::Value {
                arg: Arg::Item("token_rows", token * token_rows.cols + j),
                got: format!("{row}, as an earlier one is"),
                expected: "another row, because each row has one gradient".into(),
            });
        }
    }
    Ok(())
}

/// Sums the rows of some tokens.
struct Sums<'a, T> {
    rows: Matrix<'a>,
    token_rows: Matrix<'a>,
    weights: Option<Matrix<'a>>,
    out: Matrix<'a>,
    tokens: Range<usize>,
    element: PhantomData<T>,
}

impl<T: Element> Kernel for Sums<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { rows, token_rows, weights, out, tokens, .. } = self;
        let mut buffer = Vec::new();
        for token in tokens {
            for start in (0..rows.cols).step_by(CHUNK) {
                let chunk = start..(start + CHUNK).min(rows.cols);
                let mut sums = [0.0_f32; CHUNK];
                for j in 0..token_rows.cols {
                    let w = weights.as_ref().map_or(1.0, |weights| weight::<T>(weights, token, j));
                    // SAFETY: each index is a row, whose elements are `T`.
                    let values: &[T] =
                        unsafe { rows.row(row_of(&token_rows, token, j), chunk.clone(), &mut buffer) };
                    for (sum, value) in sums.iter_mut().zip(values) {
                        *sum += w * value.widen();
                    }
                }
                // SAFETY: the output is contiguous and has the dtype of the rows. No other piece has this row.
                let to = unsafe { out.row_mut::<T>(token, chunk) };
                for (to, sum) in to.iter_mut().zip(sums) {
                    *to = T::narrow(sum);
                }
            }
        }
    }
}

pub(crate) fn combine_rows(combine: Combine, out: ViewMut) -> Result<(), Error> {
    let _env = DefaultFloatEnv::enter();
    let (rows, token_rows, out) = (combine.rows.matrix(), combine.token_rows.matrix(), out.matrix());
    let weights = combine.weights.map(|weights| weights.matrix());
    check_rows(&token_rows, rows.rows)?;
    for_rows(token_rows.rows, token_rows.cols.max(1) * rows.cols, |tokens| {
        with_element!(rows.dtype, T => dispatch(Sums::<T> {
            rows, token_rows, weights, out, tokens, element: PhantomData,
        }));
    });
    Ok(())
}

/// Computes the gradients of some tokens' rows and weights.
struct Gradients<'a, T> {
    grad: Matrix<'a>,
    rows: Option<Matrix<'a>>,
    token_rows: Matrix<'a>,
    weights: Matrix<'a>,
    d_rows: Option<Matrix<'a>>,
    d_weights: Option<Matrix<'a>>,
    tokens: Range<usize>,
    element: PhantomData<T>,
}

impl<T: Element> Kernel for Gradients<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { grad, rows, token_rows, weights, d_rows, d_weights, tokens, .. } = self;
        let (mut first, mut second) = (Vec::new(), Vec::new());
        let cols = 0..grad.cols;
        for token in tokens {
            // SAFETY: there is a row of the gradient for each token. Its elements are `T`.
            let grads: &[T] = unsafe { grad.row(token, cols.clone(), &mut first) };
            for j in 0..token_rows.cols {
                let row = row_of(&token_rows, token, j);
                if let Some(d_rows) = d_rows {
                    let w = weight::<T>(&weights, token, j);
                    // SAFETY: the output is contiguous and has the dtype of the gradient. `token_rows` is a
                    // permutation, so no other piece has this row.
                    let to = unsafe { d_rows.row_mut::<T>(row, cols.clone()) };
                    for (to, grad) in to.iter_mut().zip(grads) {
                        *to = T::narrow(w * grad.widen());
                    }
                }
                if let (Some(d_weights), Some(rows)) = (d_weights, rows) {
                    // SAFETY: each index is a row, whose elements are `T`.
                    let values: &[T] = unsafe { rows.row(row, cols.clone(), &mut second) };
                    let gradient = f32::narrow(product(grads, values));
                    // SAFETY: the fp32 output has the shape of `token_rows`. No other piece has this token.
                    unsafe { d_weights.write(token, j, gradient) };
                }
            }
        }
    }
}

/// Returns the sum of the products of the elements of two rows of one length.
#[inline(always)]
fn product<T: Element>(a: &[T], b: &[T]) -> f32 {
    let mut sums = [0.0_f32; LANES];
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a.iter().zip(b) {
        for i in 0..LANES {
            sums[i] += a[i].widen() * b[i].widen();
        }
    }
    for (sum, (a, b)) in sums.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *sum += a.widen() * b.widen();
    }
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            sums[i] += sums[i + width];
        }
    }
    sums[0]
}

pub(crate) fn combine_rows_backward(backward: CombineBackward) -> Result<(), Error> {
    let _env = DefaultFloatEnv::enter();
    let (grad, token_rows) = (backward.grad.matrix(), backward.token_rows.matrix());
    let (rows, weights) = (backward.rows.map(|rows| rows.matrix()), backward.weights.matrix());
    let d_rows = backward.d_rows.as_ref().map(ViewMut::matrix);
    let d_weights = backward.d_weights.as_ref().map(ViewMut::matrix);
    check_permutation(&token_rows)?;
    for_rows(grad.rows, token_rows.cols.max(1) * grad.cols, |tokens| {
        with_element!(grad.dtype, T => dispatch(Gradients::<T> {
            grad, rows, token_rows, weights, d_rows, d_weights, tokens, element: PhantomData,
        }));
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::cpu::simd::on_each_level;
    use crate::format::sum::weighted_sum;
    use crate::layout::{Device, View};

    /// A view of int64 numbers, which are not among the types of `View::from_slice`.
    fn token_rows_view(token_rows: &[i64], tokens: usize, k: usize) -> View<'_> {
        assert_eq!(token_rows.len(), tokens * k);
        // SAFETY: the slice has tokens * k elements and outlives the view.
        unsafe {
            let strides = (k as isize, 1);
            View::from_raw(token_rows.as_ptr().cast(), DType::I64, Device::Cpu, (tokens, k), strides)
        }
    }

    const TOKENS: usize = 5;
    const K: usize = 3;
    /// More than one chunk, with a tail.
    const COLS: usize = CHUNK + LANES + 3;

    /// A permutation of the rows, rows of all kinds of values, and weights.
    fn inputs() -> (Vec<i64>, Vec<bf16>, Vec<f32>) {
        let count = TOKENS * K;
        let token_rows = (0..count).map(|i| (i * 7 % count) as i64).collect();
        let rows = (0..count * COLS).map(|i| bf16::from_bits((i * 40_961) as u16)).collect();
        let weights = (0..count).map(|i| (i as f32 - 4.0) / 7.0).collect();
        (token_rows, rows, weights)
    }

    #[test]
    fn combined_rows_match_the_definition_at_every_level() {
        let (token_rows, rows, weights) = inputs();
        on_each_level(|level| {
            for weighted in [false, true] {
                let mut out = vec![bf16::ZERO; TOKENS * COLS];
                let combine = Combine {
                    rows: View::from_slice(&rows, TOKENS * K, COLS).expect("its length"),
                    token_rows: token_rows_view(&token_rows, TOKENS, K),
                    weights: weighted.then(|| View::from_slice(&weights, TOKENS, K).expect("its length")),
                };
                let to = ViewMut::from_slice(&mut out, TOKENS, COLS).expect("its length");
                combine_rows(combine, to).expect("each index is a row");
                for (i, got) in out.iter().enumerate() {
                    let (token, col) = (i / COLS, i % COLS);
                    let expected = weighted_sum((token * K..(token + 1) * K).map(|at| {
                        let value = rows[token_rows[at] as usize * COLS + col].to_f32();
                        (value, if weighted { weights[at] } else { 1.0 })
                    }));
                    let expected = bf16::narrow(expected);
                    assert_eq!(got.to_bits(), expected.to_bits(), "{level:?}, {weighted}, element {i}");
                }
            }
        });
    }

    #[test]
    fn gradients_are_equal_at_every_level() {
        let (token_rows, rows, weights) = inputs();
        let grad: Vec<_> = (0..TOKENS * COLS).map(|i| bf16::from_f32(((i * 37) % 101) as f32)).collect();
        let small = |x: &bf16| if x.is_finite() { bf16::from_f32(x.to_f32().sin()) } else { bf16::ONE };
        let rows: Vec<_> = rows.iter().map(small).collect();
        let mut first: Option<Vec<f32>> = None;
        on_each_level(|level| {
            let (mut d_rows, mut d_weights) =
                (vec![bf16::ZERO; TOKENS * K * COLS], vec![0.0_f32; TOKENS * K]);
            combine_rows_backward(CombineBackward {
                grad: View::from_slice(&grad, TOKENS, COLS).expect("its length"),
                rows: Some(View::from_slice(&rows, TOKENS * K, COLS).expect("its length")),
                token_rows: token_rows_view(&token_rows, TOKENS, K),
                weights: View::from_slice(&weights, TOKENS, K).expect("its length"),
                d_rows: Some(ViewMut::from_slice(&mut d_rows, TOKENS * K, COLS).expect("its length")),
                d_weights: Some(ViewMut::from_slice(&mut d_weights, TOKENS, K).expect("its length")),
            })
            .expect("a permutation");
            for (at, index) in token_rows.iter().enumerate() {
                let (token, row) = (at / K, *index as usize * COLS);
                let mut exact = 0.0;
                for col in 0..COLS {
                    let (grad, value) = (grad[token * COLS + col].to_f32(), rows[row + col].to_f32());
                    let expected = bf16::narrow(weights[at] * grad);
                    assert_eq!(d_rows[row + col].to_bits(), expected.to_bits(), "{level:?}, {at}, {col}");
                    exact += f64::from(grad) * f64::from(value);
                }
                assert!((f64::from(d_weights[at]) - exact).abs() < 0.05, "{level:?}, weight {at}");
            }
            assert_eq!(first.get_or_insert_with(|| d_weights.clone()), &d_weights, "{level:?}");
        });
    }
}
