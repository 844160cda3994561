//! The extension module `fp8rs._core`. It converts tensors to views and errors to exceptions. All argument
//! checks are in [`crate::ops`].
//!
//! `native` has the kernels of most operators. The other operators have kernels in Python, which call the
//! functions of this module. These functions write to tensors that the caller allocated.

use pyo3::prelude::*;

/// `functions!(one, another)` defines `register`, which adds a file's functions to the module.
macro_rules! functions {
    ($($name:ident),* $(,)?) => {
        pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
            $(module.add_function(wrap_pyfunction!($name, module)?)?;)*
            Ok(())
        }
    };
}

mod adamw;
mod errors;
mod formats;
mod groups;
mod lists;
mod machine;
mod native;
mod parse;
mod rows;
mod tensors;

/// The compiled core of fp8rs.
#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("CudaError", py.get_type::<errors::CudaError>())?;
    module.add("UnsupportedError", py.get_type::<errors::UnsupportedError>())?;
    let registers = [
        machine::register,
        formats::register,
        lists::register,
        groups::register,
        adamw::register,
        rows::register,
    ];
    for register in registers {
        register(module)?;
    }
    module.add_function(wrap_pyfunction!(native::register_kernels, module)?)?;
    crate::ops::when_device_memory_lacks(empty_torch_cache);
    Ok(())
}

/// Empties torch's caching allocator. If that fails, the error is ignored: the driver call is retried anyway,
/// and its error is reported.
fn empty_torch_cache() {
    Python::attach(|py| {
        let _ = py.import("torch.cuda").and_then(|cuda| cuda.call_method0("empty_cache"));
    });
}
