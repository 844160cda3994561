//! Bindings to query and override the CPU instruction set.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::errors::UnsupportedError;
use crate::cpu::{self, Level};

functions!(cpu_features, set_cpu_simd);

/// Returns the instruction set of the CPU kernels: "scalar", "avx2" or "avx512".
#[pyfunction]
fn cpu_features() -> &'static str {
    cpu::simd().name()
}

/// Selects the instruction set of the CPU kernels for all threads. None selects the best one that the CPU
/// supports. For tests and benchmarks; results are byte-identical.
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
