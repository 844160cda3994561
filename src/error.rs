//! The one error enum. Each variant maps to one Python exception (in `python`).

use std::borrow::Cow;
use std::fmt;

use crate::format::{DType, Device};

/// The name of an argument as the caller knows it: `x`, `outs[3]`. Made into words only for a message.
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
        matches!(self, Self::Of(own) if own == name)
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

/// Why an operation did not run. Nothing was written, and nothing queued; but see [`Error::Cuda`].
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument's element type is not one that the operation takes (Python: `TypeError`).
    #[error("{arg} has dtype {got}; it must be {expected}")]
    DType {
        /// The argument.
        arg: Arg,
        /// Its element type.
        got: DType,
        /// The element types that work.
        expected: Cow<'static, str>,
    },
    /// An argument's element type is none that the crate knows (Python: `TypeError`).
    #[error("{arg} has dtype {got}; it must be float32, bfloat16, float16 or a float8 type")]
    ForeignDType {
        /// The argument.
        arg: Arg,
        /// The name of its element type.
        got: String,
    },
    /// An argument's shape does not fit the others (Python: `ValueError`).
    #[error("{arg} has shape ({}, {}) as a 2-d view; it must be {expected}", got.0, got.1)]
    Shape {
        /// The argument.
        arg: Arg,
        /// Its rows and columns.
        got: (usize, usize),
        /// The shape that works.
        expected: String,
    },
    /// A list has another length than the list it goes with (Python: `ValueError`).
    #[error("{arg} has {got} elements; it must have {expected}, as many as {with}")]
    Length {
        /// The list.
        arg: Arg,
        /// Its length.
        got: usize,
        /// The length that works.
        expected: usize,
        /// The list that it goes with.
        with: &'static str,
    },
    /// The arguments do not live on one device (Python: `ValueError`).
    #[error("{arg} is on {got}; it must be on {expected}, where {with} is")]
    Device {
        /// The argument.
        arg: Arg,
        /// Its device.
        got: Device,
        /// The device that works.
        expected: Device,
        /// The argument that is there.
        with: Arg,
    },
    /// Two elements of an output share memory (Python: `ValueError`).
    #[error(
        "{arg} has strides ({}, {}) for shape ({}, {}), so that its elements overlap; \
         an output must have one place for each element",
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
    #[error("{arg} overlaps {with} in memory; an output must have memory of its own")]
    Overlap {
        /// The output.
        arg: Arg,
        /// The argument that it overlaps.
        with: Arg,
    },
    /// An argument has elements and no memory, as fake and wrapper tensors do (Python: `ValueError`).
    #[error("{arg} has {elements} elements and a null data pointer; it must be a tensor with storage")]
    NullPointer {
        /// The argument.
        arg: Arg,
        /// Its number of elements.
        elements: usize,
    },
    /// An argument's address is no multiple of its element size (Python: `ValueError`).
    #[error("{arg} starts at an address that is no multiple of its {size}-byte elements; copy it first")]
    Misaligned {
        /// The argument.
        arg: Arg,
        /// The size of an element in bytes.
        size: usize,
    },
    /// A number is out of its range, or needed arguments are absent (Python: `ValueError`).
    #[error("{arg} is {got}; it must be {expected}")]
    Value {
        /// The argument.
        arg: Arg,
        /// What it was.
        got: String,
        /// What works.
        expected: Cow<'static, str>,
    },
    /// This device or build cannot run the operation (Python: `fp8rs.UnsupportedError`).
    #[error("{what} is not supported: {reason}; {instead}")]
    Unsupported {
        /// The operation or recipe.
        what: Cow<'static, str>,
        /// Why not.
        reason: Cow<'static, str>,
        /// The nearest thing that works.
        instead: Cow<'static, str>,
    },
    /// The CUDA driver refused a call (Python: `fp8rs.CudaError`). An operation may take several launches (a
    /// list is cut into some, current scaling takes two): those before the refused one are queued, so that what
    /// the outputs hold is not known. The driver also reports here what went wrong in earlier work.
    #[error("{call} failed: {message}")]
    Cuda {
        /// What was tried.
        call: Cow<'static, str>,
        /// Why it failed.
        message: String,
    },
    /// The same, with the driver's own code (Python: `fp8rs.CudaError`).
    #[error("{call} failed: {message} ({name})")]
    Driver {
        /// The driver call.
        call: Cow<'static, str>,
        /// The driver's words.
        message: String,
        /// Its number in `CUresult`.
        code: u32,
        /// Its name there, such as `CUDA_ERROR_ILLEGAL_ADDRESS`.
        name: String,
    },
}

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: u32 = 2;

impl Error {
    /// Whether the device has no memory left. Other errors of the driver may be for good: after a fault in a kernel,
    /// each call in the process reports it again.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Driver { code: OUT_OF_MEMORY, .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_out_of_memory_is_told_from_a_fault() {
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
