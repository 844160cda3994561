//! Binding of the sum over rows. It wraps the function of the same name in [`crate::ops`].

use pyo3::prelude::*;

use super::parse;
use super::tensors::Arguments;
use crate::ops;

functions!(sum_rows);

/// Sums the rows of `x` in fp32, divides by `divisor`, and writes the result to `out`.
#[pyfunction]
fn sum_rows<'py>(
    py: Python<'py>,
    out: &Bound<'py, PyAny>,
    x: &Bound<'py, PyAny>,
    divisor: f64,
) -> PyResult<()> {
    let args = Arguments::new(py);
    let (out, x) = (args.output("out", out)?, args.input("x", x)?);
    args.run(|stream| ops::sum_rows(out, x, parse::narrowed(divisor), stream))
}
