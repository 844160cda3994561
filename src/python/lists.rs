//! Bindings of operations on lists of tensors and their scales. They wrap the functions of the same names
//! in [`crate::ops`].

use pyo3::prelude::*;

use super::tensors::Arguments;
use crate::ops;

functions!(multi_quantize, multi_quantize_delayed, multi_rescale);

type Tensor<'a, 'py> = &'a Bound<'py, PyAny>;

/// Quantizes each tensor with its own given scale. If `batched`, each matrix of a tensor with more than two
/// dimensions has its own scale.
#[pyfunction]
#[pyo3(signature = (xs, scales, outs, batched=false))]
fn multi_quantize<'py>(
    py: Python<'py>,
    xs: Tensor<'_, 'py>,
    scales: Tensor<'_, 'py>,
    outs: Tensor<'_, 'py>,
    batched: bool,
) -> PyResult<()> {
    let args = Arguments::new(py);
    let batch = |_, ndim| batched && ndim > 2;
    let xs = args.inputs("xs", xs, batch)?;
    let scales = args.input("scales", scales)?;
    let outs = args.outputs("outs", outs, batch)?;
    args.run(|stream| ops::multi_quantize(&xs, scales, &outs, stream))
}

/// Runs [`ops::quantize_delayed`] on each tensor of a list, rowwise only.
#[pyfunction]
#[pyo3(signature = (xs, scales, amaxes, scales_used, outs, batched=false))]
fn multi_quantize_delayed<'py>(
    py: Python<'py>,
    xs: Tensor<'_, 'py>,
    scales: Tensor<'_, 'py>,
    amaxes: Tensor<'_, 'py>,
    scales_used: Tensor<'_, 'py>,
    outs: Tensor<'_, 'py>,
    batched: bool,
) -> PyResult<()> {
    let args = Arguments::new(py);
    let batch = |_, ndim| batched && ndim > 2;
    let xs = args.inputs("xs", xs, batch)?;
    let scales = args.input("scales", scales)?;
    let amaxes = args.output("amaxes", amaxes)?;
    let scales_used = args.output("scales_used", scales_used)?;
    let outs = args.outputs("outs", outs, batch)?;
    args.run(|stream| ops::multi_quantize_delayed(&xs, scales, amaxes, scales_used, &outs, stream))
}

/// Rounds codes to new scales, in place. Each scale belongs to `width` columns, or to a whole matrix. Codes
/// with more than two dimensions are a batch of matrices along the first one.
#[pyfunction]
#[pyo3(signature = (codes, scales, new_scales, width=None))]
fn multi_rescale<'py>(
    py: Python<'py>,
    codes: Tensor<'_, 'py>,
    scales: Tensor<'_, 'py>,
    new_scales: Tensor<'_, 'py>,
    width: Option<usize>,
) -> PyResult<()> {
    let args = Arguments::new(py);
    let codes = args.outputs("codes", codes, |_, ndim| ndim > 2)?;
    let (scales, new_scales) = (args.input("scales", scales)?, args.input("new_scales", new_scales)?);
    args.run(|stream| ops::multi_rescale(&codes, scales, new_scales, width.unwrap_or(usize::MAX), stream))
}
