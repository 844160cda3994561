//! The extension module `fp8rs._core`: glue and nothing else.
//!
//! Functions take tensors that the caller allocated and write into them. The checks that matter are those of
//! [`crate::ops`]; here objects become views, and errors exceptions.

use pyo3::prelude::*;

mod blocks;
mod capsule;
mod errors;
mod machine;
mod native;
mod parse;
mod tensors;
mod tensorwise;

/// The compiled core of fp8rs.
#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("CudaError", py.get_type::<errors::CudaError>())?;
    module.add("UnsupportedError", py.get_type::<errors::UnsupportedError>())?;
    macro_rules! functions {
        ($($file:ident::$name:ident),* $(,)?) => {
            $(module.add_function(wrap_pyfunction!($file::$name, module)?)?;)*
        };
    }
    functions! {
        machine::cpu_features,
        machine::set_cpu_simd,
        native::register_kernels,
        tensorwise::amax,
        tensorwise::multi_amax,
        tensorwise::scale_from_amax,
        tensorwise::quantize,
        tensorwise::quantize_delayed,
        tensorwise::quantize_current,
        tensorwise::multi_quantize,
        tensorwise::multi_quantize_delayed,
        tensorwise::transpose,
        tensorwise::dequantize,
        blocks::block_amax,
        blocks::quantize_blocks,
        blocks::pack_scales,
        blocks::unpack_scales,
        blocks::rebase,
    }
    Ok(())
}
