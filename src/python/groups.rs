//! Bindings of functions of groups of rows. They wrap the functions of the same names in [`crate::ops`].

use pyo3::prelude::*;

use super::tensors::Arguments;
use crate::ops;

functions!(check_offsets, zero_tail);

/// Raises `RuntimeError` if a GPU found invalid offsets since the last check. Does not wait for queued work.
#[pyfunction]
fn check_offsets() -> PyResult<()> {
    Ok(ops::check_offsets()?)
}

/// Sets the rows of `out` after the last group to 0.
#[pyfunction]
fn zero_tail<'py>(py: Python<'py>, out: &Bound<'py, PyAny>, ends: &Bound<'py, PyAny>) -> PyResult<()> {
    let args = Arguments::new(py);
    let (out, ends) = (args.output("out", out)?, args.input("ends", ends)?);
    args.run(|stream| ops::zero_tail(out, ends, stream))
}
