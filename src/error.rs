//! The error type of the crate. The `python` module maps each variant to one Python exception.

use std::borrow::Cow;
use std::fmt;

use crate::format::{DType, Device};

/// The name of an argument in the caller's terms: `x`, `outs[3]`. It is formatted only when a message is
/// needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arg {
    /// An argument.
    Of(&'static str),
    /// An element of a list.
    Item(&'static str, usize),
}

impl From<&'static str> for Arg {
    fn from(name: &'static str) -> Self {
        Self::Of(name)
    }
}

impl PartialEq<&str> for Arg {
    fn eq(&self, name: &&str) -> bool {
        matches!(self, Self::Of(other) if other == name)
    }
}

impl fmt::Display for Arg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Of(name) => f.write_str(name),
            Self::Item(list, index) => write!(f, "{list}[{index}]"),
        }
    }
}

/// The reason an operation did not run. Nothing was written or queued, except as described at
/// [`Error::Offsets`] and [`Error::Cuda`].
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operation does not support an argument's element type (Python: `TypeError`).
    #[error("{arg} has dtype {got}; it must be {expected}")]
    DType {
        /// The argument.
        arg: Arg,
        /// Its element type.
        got: DType,
        /// The supported element types.
        expected: Cow<'static, str>,
    },
    /// The crate does not support an argument's element type at all (Python: `TypeError`).
    #[error("{arg} has dtype {got}; it must be float32, bfloat16, float16 or a float8 type")]
    ForeignDType {
        /// The argument.
        arg: Arg,
        /// The name of its element type.
        got: String,
    },
    /// An argument's shape does not match the other arguments (Python: `ValueError`).
    #[error("{arg} has shape ({}, {}) as a 2-d view; it must be {expected}", got.0, got.1)]
    Shape {
        /// The argument.
        arg: Arg,
        /// Its rows and columns.
        got: (usize, usize),
        /// The required shape.
        expected: String,
    },
    /// A list's length differs from the length of the list that it belongs to (Python: `ValueError`).
    #[error("{arg} has {got} elements; it must have {expected}, as many as {with}")]
    Length {
        /// The list.
        arg: Arg,
        /// Its length.
        got: usize,
        /// The required length.
        expected: usize,
        /// The list that sets the required length.
        with: &'static str,
    },
    /// The arguments are on different devices (Python: `ValueError`).
    #[error("{arg} is on {got}; it must be on {expected}, where {with} is")]
    Device {
        /// The argument.
        arg: Arg,
        /// Its device.
        got: Device,
        /// The required device.
        expected: Device,
        /// The argument that is on the required device.
        with: Arg,
    },
    /// Two elements of an output share memory (Python: `ValueError`).
    #[error(
        "{arg} has strides ({}, {}) for shape ({}, {}), so its elements overlap in memory; \
         each element of an output must have its own address",
        strides.0, strides.1, shape.0, shape.1
    )]
    SelfOverlap {
        /// The output.
        arg: Arg,
        /// Its rows and columns.
        shape: (usize, usize),
        /// Its strides in elements.
        strides: (isize, isize),
    },
    /// An output shares memory with another argument (Python: `ValueError`).
    #[error("{arg} overlaps {with} in memory; an output must not share memory with another argument")]
    Overlap {
        /// The output.
        arg: Arg,
        /// The argument that shares memory with it.
        with: Arg,
    },
    /// An argument has elements but a null data pointer, as fake tensors and wrapper subclasses do (Python:
    /// `ValueError`).
    #[error("{arg} has {elements} elements and a null data pointer; it must be a tensor with storage")]
    NullPointer {
        /// The argument.
        arg: Arg,
        /// Its number of elements.
        elements: usize,
    },
    /// An argument's address is not a multiple of its element size (Python: `ValueError`).
    #[error(
        "{arg} starts at an address that is not a multiple of its element size, {size} bytes; copy it first"
    )]
    Misaligned {
        /// The argument.
        arg: Arg,
        /// The size of an element in bytes.
        size: usize,
    },
    /// A number is out of range, or a required argument is missing (Python: `ValueError`).
    #[error("{arg} is {got}; it must be {expected}")]
    Value {
        /// The argument.
        arg: Arg,
        /// The value that was given.
        got: String,
        /// The accepted values.
        expected: Cow<'static, str>,
    },
    /// A device found invalid offsets of groups, in this call or an earlier one (Python: `RuntimeError`).
    #[error(
        "offs was invalid in a grouped GEMM on {device}: it was negative, decreased, or exceeded the number of \
         rows. offs are the ends of groups, the cumulative sums of their sizes. The GEMM ran with the nearest \
         valid offsets, so its results are wrong. Kernels run asynchronously, and a later call may raise this \
         error. Set CUDA_LAUNCH_BLOCKING=1 or run on the CPU, and the layer with the invalid offs raises it"
    )]
    Offsets {
        /// The device.
        device: Device,
    },
    /// The device does not support the operation (Python: `fp8rs.UnsupportedError`).
    #[error("{what} is not supported: {reason}; {instead}")]
    Unsupported {
        /// The operation or recipe.
        what: Cow<'static, str>,
        /// The reason.
        reason: Cow<'static, str>,
        /// A supported alternative.
        instead: Cow<'static, str>,
    },
    /// A CUDA call failed without a driver error code (Python: `fp8rs.CudaError`). An operation may take
    /// several launches: a long list is split, and current scaling takes two. Launches before the failed one
    /// are already queued, so the contents of the outputs are undefined. The driver also reports errors of
    /// earlier asynchronous work here.
    #[error("{call} failed: {message}")]
    Cuda {
        /// The call that failed.
        call: Cow<'static, str>,
        /// Why it failed.
        message: String,
    },
    /// The CUDA driver returned an error code (Python: `fp8rs.CudaError`). As with [`Error::Cuda`], the
    /// contents of the outputs are undefined.
    #[error("{call} failed: {message} ({name})")]
    Driver {
        /// The driver call.
        call: Cow<'static, str>,
        /// The driver's message.
        message: String,
        /// The error code, a `CUresult`.
        code: u32,
        /// The name of the error code, such as `CUDA_ERROR_ILLEGAL_ADDRESS`.
        name: String,
    },
}

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: u32 = 2;

impl Error {
    /// Whether the device is out of memory. Other driver errors may be permanent: after a fault in a kernel,
    /// every later call in the process fails with the same error.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Driver { code: OUT_OF_MEMORY, .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_out_of_memory_is_false_for_a_kernel_fault() {
        let error = |code, name: &str| Error::Driver {
            call: "cuMemAlloc".into(),
            message: "no".into(),
            code,
            name: name.into(),
        };
        let (memory, fault) =
            (error(2, "CUDA_ERROR_OUT_OF_MEMORY"), error(700, "CUDA_ERROR_ILLEGAL_ADDRESS"));
        assert!(memory.is_out_of_memory() && !fault.is_out_of_memory());
        assert_eq!(fault.to_string(), "cuMemAlloc failed: no (CUDA_ERROR_ILLEGAL_ADDRESS)");
    }
}
