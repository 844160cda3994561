//! Kernels of `torch.ops.fp8rs.*` without a Python frame, through torch's stable C interface.
//!
//! The dispatcher calls a C function with the operator's arguments as 64-bit values, and takes its results the same
//! way; nothing of torch is linked: `shim` looks the functions up in the libraries that Python has loaded. Where
//! one of them is missing, [`register_kernels`] says so, and fp8rs cannot be imported.
//!
//! - `shim`: torch's C functions.
//! - `call`: the arguments and results of one call.
//! - `operators`: a function for each operator.
//! - `raise`: how an error becomes a Python exception on the far side of torch's C++.

use pyo3::prelude::*;
use pyo3::types::PyType;

mod call;
mod operators;
mod raise;
mod shim;

use super::errors::UnsupportedError;

/// Registers the kernels of the CPU and of CUDA, and gives the names of the operators that have one. `tensor` is
/// torch.Tensor; `raiser` an object whose `__torch_function__` raises the exception that it is called with.
/// `UnsupportedError` says what this torch lacks; nothing is registered then.
#[pyfunction]
pub(in crate::python) fn register_kernels<'py>(
    tensor: &Bound<'py, PyType>,
    raiser: &Bound<'py, PyAny>,
) -> PyResult<Vec<&'static str>> {
    let unsupported = |what: String| {
        UnsupportedError::new_err(format!(
            "this torch lacks what fp8rs's kernels are registered through: {what}; torch 2.11 and newer have it"
        ))
    };
    let streams = super::tensors::exchange_api(tensor)?.and_then(|api| api.current_work_stream);
    let streams = streams.ok_or_else(|| unsupported("torch.Tensor names no current stream".into()))?;
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
