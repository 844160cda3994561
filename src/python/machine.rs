//! What this machine has.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::errors::UnsupportedError;
use crate::cpu::{self, Level};

functions!(cpu_features, set_cpu_simd);

/// The instruction set that CPU kernels run on: "scalar", "avx2" or "avx512".
#[pyfunction]
fn cpu_features() -> &'static str {
    cpu::simd().name()
}

/// Makes CPU kernels run on another instruction set, in all threads; None is the best there is. For tests and
/// benchmarks: the bytes are the same.
#[pyfunction]
#[pyo3(signature = (level))]
fn set_cpu_simd(level: Option<&str>) -> PyResult<()> {
    let levels = [Level::Scalar, Level::Avx2, Level::Avx512];
    let wanted = level.map(|name| {
        levels.into_iter().find(|level| level.name() == name).ok_or_else(|| {
            let message = format!("level is {name:?}; it must be \"scalar\", \"avx2\", \"avx512\" or None");
            PyValueError::new_err(message)
        })
    });
    if cpu::set_simd(wanted.transpose()?) {
        return Ok(());
    }
    Err(UnsupportedError::new_err(format!("level {level:?} is not supported: this CPU does not have it")))
}
