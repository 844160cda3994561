//! Maps errors to Python exceptions.

use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::error::Error;

create_exception!(
    fp8rs,
    CudaError,
    PyRuntimeError,
    "A CUDA call failed.\n\n``code`` is the driver's error code (CUresult) and ``name`` its name \
     (CUDA_ERROR_ILLEGAL_ADDRESS). Both are None if the failure did not come from the driver. \
     ``is_out_of_memory`` is True if the device is out of memory."
);
create_exception!(
    fp8rs,
    UnsupportedError,
    PyRuntimeError,
    "The device or the installed torch does not support an operation. The message gives the reason and an alternative."
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
            Error::Offsets { .. } => PyRuntimeError::new_err(message),
            Error::Unsupported { .. } => UnsupportedError::new_err(message),
            Error::Cuda { .. } => cuda_error(message, None, false),
            Error::Driver { code, ref name, .. } => {
                cuda_error(message, Some((code, name)), error.is_out_of_memory())
            }
        }
    }
}

fn cuda_error(message: String, code: Option<(u32, &str)>, is_out_of_memory: bool) -> PyErr {
    Python::attach(|py| {
        let error = CudaError::new_err(message);
        let object = error.value(py);
        let set = object
            .setattr("code", code.map(|(code, _)| code))
            .and_then(|()| object.setattr("name", code.map(|(_, name)| name)))
            .and_then(|()| object.setattr("is_out_of_memory", is_out_of_memory));
        set.map_or_else(|failed| failed, |()| error)
    })
}
