//! One scale per tensor: see the functions of the same names in [`crate::ops`].

use pyo3::prelude::*;

use super::parse;
use super::tensors::Arguments;
use crate::ops;

functions!(
    amax,
    multi_amax,
    scale_from_amax,
    quantize,
    quantize_delayed,
    quantize_current,
    multi_quantize,
    multi_quantize_delayed,
    transpose,
    dequantize
);

type Tensor<'a, 'py> = &'a Bound<'py, PyAny>;
type Optional<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// The largest magnitude of `x`, into `out` (float32, one element).
#[pyfunction]
fn amax<'py>(py: Python<'py>, x: Tensor<'_, 'py>, out: Tensor<'_, 'py>) -> PyResult<()> {
    let args = Arguments::new(py);
    let x = args.input("x", x)?;
    let out = args.output("out", out)?;
    args.run(|stream| ops::amax(x, out, stream))
}

/// The largest magnitude of each tensor, into `out` (float32, one element for each).
#[pyfunction]
fn multi_amax<'py>(py: Python<'py>, xs: Tensor<'_, 'py>, out: Tensor<'_, 'py>) -> PyResult<()> {
    let args = Arguments::new(py);
    let xs = args.inputs("xs", xs)?;
    let out = args.output("out", out)?;
    args.run(|stream| ops::multi_amax(&xs, out, stream))
}

/// The scale for each amax, into `scale_out` (float32, the shape of `amax`).
#[pyfunction]
#[pyo3(signature = (amax, scale_out, fp8_dtype, power_2_scale=false, amax_epsilon=0.0, margin=0))]
fn scale_from_amax<'py>(
    py: Python<'py>,
    amax: Tensor<'_, 'py>,
    scale_out: Tensor<'_, 'py>,
    fp8_dtype: &str,
    power_2_scale: bool,
    amax_epsilon: f64,
    margin: i64,
) -> PyResult<()> {
    let rule = parse::scale_rule(power_2_scale, amax_epsilon, margin);
    let format = parse::format(fp8_dtype)?;
    let args = Arguments::new(py);
    let amax = args.input("amax", amax)?;
    let scale_out = args.output("scale_out", scale_out)?;
    args.run(|stream| ops::scale_from_amax(amax, format, rule, scale_out, stream))
}

/// Quantizes with a known scale. `columnwise` is the transpose; either output may be None.
#[pyfunction]
fn quantize<'py>(
    py: Python<'py>,
    x: Tensor<'_, 'py>,
    scale: Tensor<'_, 'py>,
    rowwise: Optional<'_, 'py>,
    columnwise: Optional<'_, 'py>,
) -> PyResult<()> {
    let args = Arguments::new(py);
    let x = args.input("x", x)?;
    let scale = args.input("scale", scale)?;
    let rowwise = args.optional_output("rowwise", rowwise)?;
    let columnwise = args.optional_output("columnwise", columnwise)?;
    args.run(|stream| ops::quantize(x, scale, rowwise, columnwise, stream))
}

/// Quantizes with a known scale, raises `amax` to the finite amax of `x`, and writes the scale that the codes
/// have (NaN if `x` is not finite) to `scale_used`.
#[pyfunction]
fn quantize_delayed<'py>(
    py: Python<'py>,
    x: Tensor<'_, 'py>,
    scale: Tensor<'_, 'py>,
    amax: Tensor<'_, 'py>,
    scale_used: Tensor<'_, 'py>,
    rowwise: Optional<'_, 'py>,
    columnwise: Optional<'_, 'py>,
) -> PyResult<()> {
    let args = Arguments::new(py);
    let x = args.input("x", x)?;
    let scale = args.input("scale", scale)?;
    let amax = args.output("amax", amax)?;
    let scale_used = args.output("scale_used", scale_used)?;
    let rowwise = args.optional_output("rowwise", rowwise)?;
    let columnwise = args.optional_output("columnwise", columnwise)?;
    args.run(|stream| ops::quantize_delayed(x, scale, amax, scale_used, rowwise, columnwise, stream))
}

/// Finds the scale of `x` (into `scale_out`) and quantizes with it.
#[pyfunction]
#[pyo3(signature = (x, scale_out, rowwise, columnwise, power_2_scale=false, amax_epsilon=0.0))]
fn quantize_current<'py>(
    py: Python<'py>,
    x: Tensor<'_, 'py>,
    scale_out: Tensor<'_, 'py>,
    rowwise: Optional<'_, 'py>,
    columnwise: Optional<'_, 'py>,
    power_2_scale: bool,
    amax_epsilon: f64,
) -> PyResult<()> {
    let rule = parse::scale_rule(power_2_scale, amax_epsilon, 0);
    let args = Arguments::new(py);
    let x = args.input("x", x)?;
    let scale_out = args.output("scale_out", scale_out)?;
    let rowwise = args.optional_output("rowwise", rowwise)?;
    let columnwise = args.optional_output("columnwise", columnwise)?;
    args.run(|stream| ops::quantize_current(x, rule, scale_out, rowwise, columnwise, stream))
}

/// Quantizes each tensor with its own known scale.
#[pyfunction]
fn multi_quantize<'py>(
    py: Python<'py>,
    xs: Tensor<'_, 'py>,
    scales: Tensor<'_, 'py>,
    outs: Tensor<'_, 'py>,
) -> PyResult<()> {
    let args = Arguments::new(py);
    let xs = args.inputs("xs", xs)?;
    let scales = args.input("scales", scales)?;
    let outs = args.outputs("outs", outs)?;
    args.run(|stream| ops::multi_quantize(&xs, scales, &outs, stream))
}

/// [`quantize_delayed`] over a list, rowwise.
#[pyfunction]
fn multi_quantize_delayed<'py>(
    py: Python<'py>,
    xs: Tensor<'_, 'py>,
    scales: Tensor<'_, 'py>,
    amaxes: Tensor<'_, 'py>,
    scales_used: Tensor<'_, 'py>,
    outs: Tensor<'_, 'py>,
) -> PyResult<()> {
    let args = Arguments::new(py);
    let xs = args.inputs("xs", xs)?;
    let scales = args.input("scales", scales)?;
    let amaxes = args.output("amaxes", amaxes)?;
    let scales_used = args.output("scales_used", scales_used)?;
    let outs = args.outputs("outs", outs)?;
    args.run(|stream| ops::multi_quantize_delayed(&xs, scales, amaxes, scales_used, &outs, stream))
}

/// Transposes FP8 codes.
#[pyfunction]
fn transpose<'py>(py: Python<'py>, codes: Tensor<'_, 'py>, out: Tensor<'_, 'py>) -> PyResult<()> {
    let args = Arguments::new(py);
    let codes = args.input("codes", codes)?;
    let out = args.output("out", out)?;
    args.run(|stream| ops::transpose(codes, out, stream))
}

/// Code times scale in float32, then one cast. A block size of -1 is the whole extent.
#[pyfunction]
fn dequantize<'py>(
    py: Python<'py>,
    codes: Tensor<'_, 'py>,
    scale: Tensor<'_, 'py>,
    block_rows: i64,
    block_cols: i64,
    out: Tensor<'_, 'py>,
) -> PyResult<()> {
    let block = parse::block(block_rows, block_cols)?;
    let args = Arguments::new(py);
    let codes = args.input("codes", codes)?;
    let scale = args.input("scale", scale)?;
    let out = args.output("out", out)?;
    args.run(|stream| ops::dequantize(codes, scale, block, out, stream))
}
