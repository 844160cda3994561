//! Raises a kernel's error as a Python exception of the right type.
//!
//! A kernel reports failure by throwing a C++ exception: torch ignores a kernel's return value. To keep the
//! exception's type, the C++ exception must be `python_error`, which kernels written in Python throw as well,
//! with the Python exception set in the interpreter. A function of `libtorch_python` throws it if a
//! `__torch_function__` raised, so this module calls that function with an object whose `__torch_function__`
//! raises. If a torch function mode catches the exception, or if this torch lacks the function (its name is
//! private), `aoti_torch_check` of torch's C interface throws the message as a `RuntimeError`.
//!
//! The exception unwinds through Rust frames, which are declared "C-unwind". This requires one unwinder in
//! the process, libgcc's; `tools/build_wheel.py` links the wheel to it. Ending the kernel with a jump to a
//! throwing function would avoid the unwinding, but the functions that acquire the interpreter's lock
//! themselves cannot throw an arbitrary exception.
//!
//! Returning a status that a function in Python checks after each call would cost only 0.08 to 0.15 us per call,
//! but it would lose errors: code that Inductor compiled calls `torch.ops.fp8rs.*.default` directly, without that
//! function. Only an exception of the kernel itself reaches the caller in eager and in compiled code.

use std::ffi::{c_char, c_int};
use std::sync::OnceLock;

use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::shim::{loaded, symbol};
use crate::error::Error;
use crate::python::parse::Refused;

/// The reason a kernel did not run.
#[derive(Debug)]
pub(super) enum Failure {
    /// The operation returned an error.
    Operation(Error),
    /// An argument has the wrong type (Python: `TypeError`).
    Type(String),
    /// An argument is out of range (Python: `ValueError`).
    Value(String),
    /// A torch function failed (Python: `RuntimeError`).
    Torch(&'static str),
    /// The allocation of an output failed. It is repeated from Python, to raise torch's own exception.
    Allocation { sizes: Vec<i64>, strides: Vec<i64>, dtype: String, device: String },
    /// A bug in fp8rs.
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
                    Ok(()) => PyRuntimeError::new_err(
                        "allocating an output failed, but succeeded when it was repeated; try again",
                    ),
                    Err(error) => error,
                }
            }
            Self::Panic(message) => PyRuntimeError::new_err(format!("internal error in fp8rs: {message}")),
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

/// `torch::handle_torch_function_no_python_arg_parser`: (overloaded arguments, args, kwargs, function name,
/// function, module name, 0 for `__torch_function__`).
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

/// Looks up the functions that throw. `raiser.__torch_function__` is called with the exception to raise. If a
/// torch function mode passes the call on, `raiser` itself is called with it.
pub(super) fn prepare(raiser: &Bound<'_, PyAny>) -> Result<(), String> {
    let handle = loaded(c"libtorch_python.so").and_then(|library| symbol(library, HANDLE)).ok();
    // SAFETY: the mangled name identifies this function and its parameter types.
    let handle = handle.map(|f| unsafe { std::mem::transmute::<*mut std::ffi::c_void, Handle>(f) });
    let check = symbol(loaded(c"libtorch_cpu.so")?, c"aoti_torch_check")?;
    // SAFETY: torch's header declares the function with these parameters.
    let check = unsafe { std::mem::transmute::<*mut std::ffi::c_void, Check>(check) };
    let _ = RAISE.set(Raise { handle, check, raiser: raiser.clone().unbind() });
    Ok(())
}

/// Throws the failure as a Python exception. The interpreter need not be held. All values of the call must have been
/// dropped.
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
        // SAFETY: all objects are alive and borrowed for the call. The call throws unless a function mode
        // catches the exception.
        unsafe { handle(overloaded, args.as_ptr(), kwargs.as_ptr(), name, raiser, module, 0) };
        words
    });
    words.retain(|c| c != '\0');
    words.push('\0');
    let file = c"fp8rs".as_ptr();
    // SAFETY: the strings end in NUL, and torch copies them before it throws.
    unsafe { check(false, file, file, 0, words.as_ptr().cast()) };
    unreachable!("torch's check throws")
}
