//! The one place where errors become exceptions.

use pyo3::PyErr;
use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};

use crate::error::Error;

create_exception!(fp8rs, CudaError, PyRuntimeError, "The CUDA driver refused a call.");
create_exception!(
    fp8rs,
    UnsupportedError,
    PyRuntimeError,
    "This device or build cannot run an operation; the message says why and what can."
);

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        match error {
            Error::DType { .. } | Error::ForeignDType { .. } => PyTypeError::new_err(message),
            Error::Shape { .. }
            | Error::Length { .. }
            | Error::Device { .. }
            | Error::SelfOverlap { .. }
            | Error::Overlap { .. }
            | Error::NullPointer { .. }
            | Error::Misaligned { .. }
            | Error::Value { .. } => PyValueError::new_err(message),
            Error::Unsupported { .. } => UnsupportedError::new_err(message),
            Error::Cuda { .. } => CudaError::new_err(message),
        }
    }
}
