//! How an error of a kernel reaches Python with its type.
//!
//! A kernel that fails must throw: torch's C interface has no other way to say so. What survives torch's C++ with
//! the exception's type is what a kernel in Python throws too: `python_error`, with the exception set in the
//! interpreter. A function of `libtorch_python` throws it where a `__torch_function__` has raised, so that we let
//! one raise. Where a torch function mode catches that, or a torch has no such function (its name is private),
//! `aoti_torch_check` of torch's C interface throws the words, as a `RuntimeError`.
//!
//! The unwinding passes through frames of ours that are declared for it ("C-unwind"). It needs one unwinder in the
//! process, libgcc's: `tools/build_wheel.py` links the wheel to it. No way was found in which no exception passes
//! through them. Of what a kernel gives back torch looks at the results alone; and of the functions that our last
//! instruction could jump to, those that take the interpreter's lock by themselves throw no exception of our choice.

use std::ffi::{c_char, c_int};
use std::sync::OnceLock;

use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::shim::{loaded, symbol};
use crate::error::Error;
use crate::python::parse::Refused;

/// Why a kernel did not run.
#[derive(Debug)]
pub(super) enum Failure {
    /// The operation's own words.
    Operation(Error),
    /// An argument of the wrong type (Python: `TypeError`).
    Type(String),
    /// An argument out of its range (Python: `ValueError`).
    Value(String),
    /// A function of torch's failed (Python: `RuntimeError`).
    Torch(&'static str),
    /// Room for an output was refused. Asked for again in Python, it gives torch's own exception.
    Allocation { sizes: Vec<i64>, strides: Vec<i64>, dtype: String, device: String },
    /// A defect of ours.
    Panic(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Operation(error)
    }
}

impl From<Refused> for Failure {
    fn from(Refused(message): Refused) -> Self {
        Self::Value(message)
    }
}

impl Failure {
    fn exception(self, py: Python<'_>) -> PyErr {
        match self {
            Self::Operation(error) => error.into(),
            Self::Type(message) => PyTypeError::new_err(message),
            Self::Value(message) => PyValueError::new_err(message),
            Self::Torch(call) => PyRuntimeError::new_err(format!("{call} failed")),
            Self::Allocation { sizes, strides, dtype, device } => {
                match allocate(py, sizes, strides, &dtype, &device) {
                    Ok(()) => PyRuntimeError::new_err("torch refused to allocate an output, once"),
                    Err(error) => error,
                }
            }
            Self::Panic(message) => PyRuntimeError::new_err(format!("a defect of fp8rs: {message}")),
        }
    }
}

fn allocate(py: Python<'_>, sizes: Vec<i64>, strides: Vec<i64>, dtype: &str, device: &str) -> PyResult<()> {
    let torch = py.import("torch")?;
    let options = PyDict::new(py);
    options.set_item("dtype", torch.getattr(dtype)?)?;
    options.set_item("device", device)?;
    torch.call_method("empty_strided", (sizes, strides), Some(&options)).map(drop)
}

/// `c10::ArrayRef<PyObject*>`.
#[repr(C)]
struct Objects {
    start: *const *mut ffi::PyObject,
    len: usize,
}

/// `torch::handle_torch_function_no_python_arg_parser`: (overloaded arguments, args, kwargs, name of the function,
/// the function, name of its module, 0 for `__torch_function__`).
type Handle = unsafe extern "C-unwind" fn(
    Objects,
    *mut ffi::PyObject,
    *mut ffi::PyObject,
    *const c_char,
    *mut ffi::PyObject,
    *const c_char,
    c_int,
) -> *mut ffi::PyObject;

const HANDLE: &std::ffi::CStr =
    c"_ZN5torch42handle_torch_function_no_python_arg_parserEN3c108ArrayRefIP7_objectEES3_S3_PKcS3_S6_NS_17TorchFunctionNameE";

/// `aoti_torch_check`: (condition, function, file, line, message). Throws unless the condition holds.
type Check = unsafe extern "C-unwind" fn(bool, *const c_char, *const c_char, u32, *const c_char);

struct Raise {
    handle: Option<Handle>,
    check: Check,
    raiser: Py<PyAny>,
}

static RAISE: OnceLock<Raise> = OnceLock::new();

/// Looks up what throws. `raiser`'s `__torch_function__` is called with the exception to raise, or it itself where a
/// function mode passes the call on.
pub(super) fn prepare(raiser: &Bound<'_, PyAny>) -> Result<(), String> {
    let handle = loaded(c"libtorch_python.so").and_then(|library| symbol(library, HANDLE)).ok();
    // SAFETY: the mangled name says that it is this function, with these parameters.
    let handle = handle.map(|f| unsafe { std::mem::transmute::<*mut std::ffi::c_void, Handle>(f) });
    let check = symbol(loaded(c"libtorch_cpu.so")?, c"aoti_torch_check")?;
    // SAFETY: the function is in a header of torch's, with these parameters.
    let check = unsafe { std::mem::transmute::<*mut std::ffi::c_void, Check>(check) };
    let _ = RAISE.set(Raise { handle, check, raiser: raiser.clone().unbind() });
    Ok(())
}

/// Throws the failure as a Python exception. Needs no interpreter held, and must have nothing of a call alive.
pub(super) fn throw(failure: Failure) -> ! {
    let Raise { handle, check, raiser } = RAISE.get().expect("prepared before a kernel is registered");
    let mut words = Python::attach(|py| {
        let error = failure.exception(py);
        let words = error.to_string();
        let Some(handle) = handle else { return words };
        let args = match (error.into_value(py),).into_pyobject(py) {
            Ok(args) => args,
            Err(error) => return error.to_string(),
        };
        let (raiser, kwargs) = (raiser.as_ptr(), PyDict::new(py));
        let overloaded = Objects { start: &raw const raiser, len: 1 };
        let (name, module) = (c"fp8rs".as_ptr(), c"torch.ops".as_ptr());
        // SAFETY: live objects, borrowed for the call, which throws.
        unsafe { handle(overloaded, args.as_ptr(), kwargs.as_ptr(), name, raiser, module, 0) };
        words
    });
    words.retain(|c| c != '\0');
    words.push('\0');
    let file = c"fp8rs".as_ptr();
    // SAFETY: strings that end in NUL; torch copies them. It throws.
    unsafe { check(false, file, file, 0, words.as_ptr().cast()) };
    unreachable!("torch's check throws")
}
