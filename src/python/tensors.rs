//! Python objects as views, for the length of one call.
//!
//! [`Arguments`] takes each tensor of a call through its type's C exchange API (no reference is taken and nothing
//! allocated), and remembers what the launch needs to know: the stream, and how much work it is. Objects without that
//! API (numpy's) are refused: `torch.from_dlpack` makes tensors of them.
//!
//! Views borrow from the arguments, and from the objects themselves where nothing else keeps those alive, so
//! that the compiler sees to it that memory outlives the work on it, also while other threads run Python.

use std::cell::{Cell, RefCell};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple, PyType};

use crate::dlpack::{CUDA, DLTensor, EXCHANGE_CAPSULE, ExchangeApi};
use crate::error::{Arg, Error};
use crate::layout::{Device, View, ViewMut};
use crate::ops::Stream;

/// From this many elements on, CPU work lets go of the interpreter: below, the hand-over costs more than the
/// work (about 10 us).
const DETACH_FROM: usize = 1 << 15;

/// The tensors of one call, which its views borrow from.
pub(super) struct Arguments<'py> {
    py: Python<'py>,
    /// Of the first tensor on CUDA: its library's current stream on that device.
    stream: Cell<Option<Stream>>,
    elements: Cell<usize>,
    /// The elements of lists, by a reference of our own each: another thread may empty a list while the
    /// interpreter is let go of. Only grows.
    lists: RefCell<Vec<Bound<'py, PyTuple>>>,
}

impl<'py> Arguments<'py> {
    pub(super) fn new(py: Python<'py>) -> Self {
        Self { py, stream: Cell::new(None), elements: Cell::new(0), lists: RefCell::default() }
    }

    /// A tensor to read.
    pub(super) fn input<'a>(
        &'a self,
        name: &'static str,
        tensor: &'a Bound<'py, PyAny>,
    ) -> PyResult<View<'a>> {
        check_sign(name, tensor)?;
        // SAFETY: the object is borrowed for as long as the view lives.
        unsafe { self.read(Arg::Of(name), tensor, |_| false) }
    }

    /// A tensor to read, or None.
    pub(super) fn optional_input<'a>(
        &'a self,
        name: &'static str,
        tensor: Option<&'a Bound<'py, PyAny>>,
    ) -> PyResult<Option<View<'a>>> {
        tensor.map(|tensor| self.input(name, tensor)).transpose()
    }

    /// A tensor to write.
    pub(super) fn output<'a>(
        &'a self,
        name: &'static str,
        tensor: &'a Bound<'py, PyAny>,
    ) -> PyResult<ViewMut<'a>> {
        check_sign(name, tensor)?;
        // SAFETY: the object is borrowed for as long as the view lives.
        unsafe { self.write(Arg::Of(name), tensor, |_| false) }
    }

    /// A list of tensors to read, each a matrix or, where `batch` says so of its index and dimensions, a batch along its
    /// first dimension.
    pub(super) fn inputs(
        &self,
        name: &'static str,
        tensors: &Bound<'py, PyAny>,
        batch: impl Fn(usize, i32) -> bool,
    ) -> PyResult<Vec<View<'_>>> {
        let items = self.hold(name, tensors)?;
        // SAFETY: `hold` keeps a reference to each element until the arguments are dropped.
        let item = |i| unsafe { self.read(Arg::Item(name, i), &items.get_item(i)?, |ndim| batch(i, ndim)) };
        (0..items.len()).map(item).collect()
    }

    /// A list of tensors to write, as in [`Self::inputs`].
    pub(super) fn outputs(
        &self,
        name: &'static str,
        tensors: &Bound<'py, PyAny>,
        batch: impl Fn(usize, i32) -> bool,
    ) -> PyResult<Vec<ViewMut<'_>>> {
        let items = self.hold(name, tensors)?;
        // SAFETY: `hold` keeps a reference to each element until the arguments are dropped.
        let item = |i| unsafe { self.write(Arg::Item(name, i), &items.get_item(i)?, |ndim| batch(i, ndim)) };
        (0..items.len()).map(item).collect()
    }

    /// Runs the operation, without the interpreter where others may have to wait: CPU work from some size on, and all
    /// of CUDA's, since a launch may wait for the queue, and its first use loads a kernel.
    pub(super) fn run(&self, operation: impl FnOnce(Stream) -> Result<(), Error>) -> PyResult<()> {
        let stream = self.stream.get();
        if stream.is_none() && self.elements.get() < DETACH_FROM {
            return Ok(operation(Stream::default())?);
        }
        let operation = AssertSend(move || operation(stream.unwrap_or_default()));
        Ok(self.py.detach(move || operation.call())?)
    }

    /// The elements of a list or tuple, kept alive until the arguments are dropped. Not of any iterable: a tensor
    /// is one too, of its rows.
    fn hold(&self, name: &'static str, tensors: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
        let items = if let Ok(list) = tensors.cast::<PyList>() {
            list.to_tuple()
        } else if let Ok(tuple) = tensors.cast::<PyTuple>() {
            tuple.clone()
        } else {
            let class = class_name(tensors);
            let message = format!("{name} is of type {class}; it must be a list of tensors");
            return Err(PyTypeError::new_err(message));
        };
        self.lists.borrow_mut().push(items.clone());
        Ok(items)
    }

    /// # Safety
    /// The object must live for `'a`.
    unsafe fn read<'a>(
        &'a self,
        name: Arg,
        tensor: &Bound<'py, PyAny>,
        batch: impl Fn(i32) -> bool,
    ) -> PyResult<View<'a>> {
        let dl = self.describe(name, tensor)?;
        // SAFETY: the exporter filled it in. Its memory is that of the object, which lives for 'a. (To resize or rebind
        // a tensor while another thread computes with it is the caller's race, as it is with torch's own operators.)
        let view = unsafe { dl.view(|| name, batch(dl.ndim)) }?;
        self.elements.set(self.elements.get().saturating_add(view.numel()));
        Ok(view)
    }

    /// # Safety
    /// The object must live for `'a`.
    unsafe fn write<'a>(
        &'a self,
        name: Arg,
        tensor: &Bound<'py, PyAny>,
        batch: impl Fn(i32) -> bool,
    ) -> PyResult<ViewMut<'a>> {
        let dl = self.describe(name, tensor)?;
        // SAFETY: as in `read`.
        let view = unsafe { dl.view_mut(|| name, batch(dl.ndim)) }?;
        self.elements.set(self.elements.get().saturating_add(view.numel()));
        Ok(view)
    }

    /// The tensor behind an object.
    fn describe(&self, name: Arg, tensor: &Bound<'py, PyAny>) -> PyResult<DLTensor> {
        let api = exchange_api(&tensor.get_type())?.ok_or_else(|| not_a_tensor(name, tensor))?;
        let mut dl = DLTensor::empty();
        let export = api
            .dltensor_from_py_object_no_sync
            .ok_or_else(|| PyTypeError::new_err(format!("{name}'s type cannot lend a DLPack tensor")))?;
        // SAFETY: the function belongs to this object's type, the object is alive, `dl` is ours.
        if unsafe { export(tensor.as_ptr().cast(), &raw mut dl) } != 0 {
            return Err(refused(name, tensor));
        }
        if self.stream.get().is_none()
            && let Some(Device::Cuda(_)) = dl.device()
        {
            self.stream.set(Some(self.stream_of(api, &dl)?));
        }
        Ok(dl)
    }

    /// The current stream of a tensor's library.
    fn stream_of(&self, api: &ExchangeApi, dl: &DLTensor) -> PyResult<Stream> {
        let Some(current) = api.current_work_stream else { return Ok(Stream::default()) };
        let mut stream = ptr::null_mut();
        // SAFETY: the device is one that the exporter just named.
        if unsafe { current(CUDA, dl.device.device_id, &raw mut stream) } != 0 {
            return Err(PyErr::fetch(self.py));
        }
        // SAFETY: the exporter says that it is its current one, on its tensors' device.
        Ok(unsafe { Stream::from_raw(stream) })
    }
}

/// Lets raw pointers cross into `Python::detach`, which runs on this same thread.
struct AssertSend<F>(F);

// SAFETY: `detach` calls the closure on the calling thread, and returns when it has run; the views in it borrow
// from the arguments, which outlive the call. The closure holds no Python object.
unsafe impl<F> Send for AssertSend<F> {}

impl<F: FnOnce() -> T, T> AssertSend<F> {
    fn call(self) -> T {
        (self.0)()
    }
}

/// Types seen so far, by address, each with its exchange API.
static KNOWN: Mutex<Vec<(usize, Option<&'static ExchangeApi>)>> = Mutex::new(Vec::new());

/// No more types than this are remembered, since each is kept alive for ever.
const MOST_KNOWN: usize = 64;

thread_local! {
    /// The type that this thread asked for last.
    static LAST: Cell<(usize, Option<&'static ExchangeApi>)> = const { Cell::new((0, None)) };
}

/// The exchange API of a type, looked up once for each type.
pub(super) fn exchange_api(class: &Bound<'_, PyType>) -> PyResult<Option<&'static ExchangeApi>> {
    let address = class.as_ptr().addr();
    let (last, api) = LAST.get();
    if last == address {
        return Ok(api);
    }
    // The lock is never held while Python code runs, and the interpreter is: so no fork finds it taken.
    {
        let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = known.iter().find(|(known, _)| *known == address) {
            LAST.set(*known);
            return Ok(known.1);
        }
    }
    let api = match class.getattr_opt("__dlpack_c_exchange_api__")? {
        None => None,
        Some(capsule) => {
            // SAFETY: a live object; PyCapsule_GetPointer checks that it is a capsule of this name.
            let table = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), EXCHANGE_CAPSULE.as_ptr()) };
            if table.is_null() {
                return Err(PyErr::fetch(class.py()));
            }
            // SAFETY: the protocol says that tables live as long as the process.
            unsafe { ExchangeApi::compatible(table.cast()) }
        }
    };
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if known.len() < MOST_KNOWN {
        // Never freed, so that no other type can come to lie at this address.
        let _ = class.clone().into_ptr();
        known.push((address, api));
    }
    Ok(api)
}

/// Refuses a view that torch negates when it reads it (the imaginary part of a conjugate): DLPack does not show the
/// sign. Elements of lists are not asked, at 0.2 us each: torch's dispatcher has resolved those of our operators.
fn check_sign(name: &str, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
    let negated = tensor.getattr_opt(intern!(tensor.py(), "is_neg"))?;
    if negated.map_or(Ok(false), |negated| negated.call0()?.is_truthy())? {
        let message = format!("{name} is a view that torch negates when it reads it; give its resolve_neg()");
        return Err(PyValueError::new_err(message));
    }
    Ok(())
}

/// The exporter's refusal, in our words and the first line of its own.
fn refused(name: Arg, tensor: &Bound<'_, PyAny>) -> PyErr {
    let py = tensor.py();
    let cause = PyErr::take(py).map(|cause| cause.value(py).to_string()).unwrap_or_default();
    let reason = cause.lines().next().unwrap_or("no reason given").to_owned();
    PyTypeError::new_err(format!("{name} must be a dense tensor with memory: {reason}"))
}

fn not_a_tensor(name: Arg, object: &Bound<'_, PyAny>) -> PyErr {
    let class = class_name(object);
    PyTypeError::new_err(format!("{name} is of type {class}; it must be a torch tensor"))
}

fn class_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "?".into(), |name| name.to_string())
}
