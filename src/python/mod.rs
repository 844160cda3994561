//! The extension module `fp8rs._core`: glue and nothing else.
//!
//! `native` has the kernels of most operators. The functions beside it compute what the others, whose kernels are in
//! Python, write: they take tensors that the caller allocated. The checks that matter are those of [`crate::ops`];
//! here tensors become views, and errors exceptions.

use pyo3::prelude::*;

/// `functions!(one, another)`: what puts a file's functions into the module.
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
    for register in [machine::register, lists::register, adamw::register, rows::register] {
        register(module)?;
    }
    module.add_function(wrap_pyfunction!(native::register_kernels, module)?)?;
    crate::ops::when_device_memory_lacks(empty_torch_cache);
    Ok(())
}

/// Has torch give back the device memory that it keeps for later. Whatever fails, the driver is asked again, and its
/// error counts.
fn empty_torch_cache() {
    Python::attach(|py| {
        let _ = py.import("torch.cuda").and_then(|cuda| cuda.call_method0("empty_cache"));
    });
}
