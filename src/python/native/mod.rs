//! Kernels of `torch.ops.fp8rs.*` that are called without a Python frame, through torch's stable C interface.
//!
//! The dispatcher calls a C function with the operator's arguments as 64-bit values, and reads the results
//! from the same array. The extension does not link torch: `shim` looks up the functions in the libraries
//! that Python has loaded. If one is missing, [`register_kernels`] raises and fp8rs cannot be imported.
//!
//! - `shim`: torch's C functions.
//! - `call`: the arguments and results of one call.
//! - `operators`: one function per operator.
//! - `raise`: converts an error to a Python exception that passes through torch's C++ frames.

use pyo3::prelude::*;
use pyo3::types::PyType;

mod call;
mod operators;
mod raise;
mod shim;

use super::errors::UnsupportedError;

/// Registers the CPU and CUDA kernels, and returns the names of the operators that have one. `tensor` is
/// torch.Tensor. `raiser` is an object whose `__torch_function__` raises the exception that it is called
/// with. If this torch lacks a required function, raises `UnsupportedError` and registers nothing.
#[pyfunction]
pub(in crate::python) fn register_kernels<'py>(
    tensor: &Bound<'py, PyType>,
    raiser: &Bound<'py, PyAny>,
) -> PyResult<Vec<&'static str>> {
    let unsupported = |what: String| {
        UnsupportedError::new_err(format!(
            "this torch cannot register fp8rs's kernels: {what}; use torch 2.11 or newer"
        ))
    };
    let streams = super::tensors::exchange_api(tensor)?.and_then(|api| api.current_work_stream);
    let streams = streams
        .ok_or_else(|| unsupported("torch.Tensor's DLPack exchange API has no current_work_stream".into()))?;
    let shim = shim::load(streams).map_err(unsupported)?;
    raise::prepare(raiser).map_err(unsupported)?;
    for key in [c"CPU", c"CUDA"] {
        let library = shim.library(key).map_err(unsupported)?;
        for (name, kernel) in operators::ALL {
            shim.implement(library, name, *kernel).map_err(unsupported)?;
        }
    }
    Ok(operators::ALL.iter().map(|(name, _)| name.to_str().expect("ASCII")).collect())
}
