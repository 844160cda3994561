//! The weighted sum of the rows of each token, and its gradients.

use super::validate::{Call, Kind, contiguous, one_matrix, shape};
use crate::error::Error;
use crate::layout::{DType, Device, ViewMut};
use crate::spec::{Combine, CombineBackward, Stream};
use crate::{cpu, cuda};

/// Sums the rows of each token (`format::sum::weighted_sum`), and rounds the sums to the dtype of
/// the rows.
///
/// If an index in `token_rows` is not a row, nothing is written on the CPU, and the call returns an error. On
/// CUDA, which does not wait for the device, it counts as a row of zeros.
pub fn combine_rows(combine: Combine, out: ViewMut, stream: Stream) -> Result<(), Error> {
    let Combine { rows, token_rows, weights } = &combine;
    let mut call = Call::default();
    call.input("rows", rows, Kind::Wide)?;
    one_matrix("rows", rows.batch())?;
    call.input("token_rows", token_rows, Kind::Is(DType::I64))?;
    contiguous("token_rows", token_rows.is_contiguous())?;
    if let Some(weights) = weights {
        call.input("weights", weights, Kind::F32Or(rows.dtype()))?;
        shape("weights", weights.shape(), token_rows.shape(), "the shape of token_rows")?;
        contiguous("weights", weights.is_contiguous())?;
    }
    call.output("out", &out, Kind::Is(rows.dtype()))?;
    shape("out", out.shape(), (token_rows.rows(), rows.cols()), "a row for each token")?;
    contiguous("out", out.is_contiguous())?;
    match call.finish()? {
        Device::Cpu => cpu::combine_rows(combine, out),
        Device::Cuda(_) => cuda::combine_rows(combine, out, stream),
    }
}

/// Computes the gradients of the rows and of the weights of [`combine_rows`], or one of them.
///
/// `token_rows` must be a permutation of the rows. The gradient of a row is weight * grad, rounded to the dtype
/// of `grad`. The gradient of a weight is the sum of the products of the gradient's and the row's elements.
/// The products and the sum are fp32. The order of the sum depends on the device.
///
/// If it is not a permutation, the call returns an error on the CPU, and nothing is written. On CUDA, an index
/// that is not a row counts as a row of zeros and has no gradient. For rows that are not in `token_rows`,
/// `d_rows` is not written.
pub fn combine_rows_backward(backward: CombineBackward, stream: Stream) -> Result<(), Error> {
    let CombineBackward { grad, rows, token_rows, weights, d_rows, d_weights } = &backward;
    let (tokens, cols) = grad.shape();
    let count = token_rows.rows() * token_rows.cols();
    let mut call = Call::default();
    call.input("grad", grad, Kind::Wide)?;
    one_matrix("grad", grad.batch())?;
    call.input("token_rows", token_rows, Kind::Is(DType::I64))?;
    shape("token_rows", token_rows.shape(), (tokens, token_rows.cols()), "a row for each row of grad")?;
    contiguous("token_rows", token_rows.is_contiguous())?;
    call.input("weights", weights, Kind::F32Or(grad.dtype()))?;
    shape("weights", weights.shape(), token_rows.shape(), "the shape of token_rows")?;
    contiguous("weights", weights.is_contiguous())?;
    if let Some(rows) = rows {
        call.input("rows", rows, Kind::Is(grad.dtype()))?;
        shape("rows", rows.shape(), (count, cols), "a row of grad's length for each index in token_rows")?;
    }
    if let Some(d_rows) = d_rows {
        call.output("d_rows", d_rows, Kind::Is(grad.dtype()))?;
        shape(
            "d_rows",
            d_rows.shape(),
            (count, cols),
            "a row of grad's length for each index in token_rows",
        )?;
        contiguous("d_rows", d_rows.is_contiguous())?;
    }
    if let Some(d_weights) = d_weights {
        call.output("d_weights", d_weights, Kind::F32)?;
        shape("d_weights", d_weights.shape(), token_rows.shape(), "the shape of token_rows")?;
        contiguous("d_weights", d_weights.is_contiguous())?;
        if rows.is_none() {
            return Err(Error::Value {
                arg: "rows".into(),
                got: "absent".into(),
                expected: "given, because the gradient of weights depends on it".into(),
            });
        }
    }
    match call.finish()? {
        Device::Cpu => cpu::combine_rows_backward(backward),
        Device::Cuda(_) => cuda::combine_rows_backward(backward, stream),
    }
}
