//! Views of Python tensors for the duration of one call.
//!
//! [`Arguments`] reads each tensor of a call through its type's C exchange API, without taking a reference or
//! allocating. It also records the current stream and the amount of work. Objects without that API (numpy
//! arrays) are errors; convert them with `torch.from_dlpack`.
//!
//! Views borrow from the arguments, or from the Python objects if nothing else keeps them alive. The borrow
//! checker thus ensures that memory outlives the work on it, also while other threads run Python.

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

/// Number of elements from which CPU work releases the interpreter. For smaller work, releasing it costs more
/// (about 10 us) than the work.
const DETACH_FROM: usize = 1 << 15;

/// The tensors of one call. Views of them borrow from this struct.
pub(super) struct Arguments<'py> {
    py: Python<'py>,
    /// The current stream of the first CUDA tensor's library on that tensor's device.
    stream: Cell<Option<Stream>>,
    elements: Cell<usize>,
    /// Owned references to the elements of lists, because another thread may modify a list while the
    /// interpreter is released. Tuples are only added.
    lists: RefCell<Vec<Bound<'py, PyTuple>>>,
}

impl<'py> Arguments<'py> {
    pub(super) fn new(py: Python<'py>) -> Self {
        Self { py, stream: Cell::new(None), elements: Cell::new(0), lists: RefCell::default() }
    }

    /// Returns a view of a tensor to read.
    pub(super) fn input<'a>(
        &'a self,
        name: &'static str,
        tensor: &'a Bound<'py, PyAny>,
    ) -> PyResult<View<'a>> {
        check_sign(name, tensor)?;
        // SAFETY: the object is borrowed for as long as the view lives.
        unsafe { self.read(Arg::Of(name), tensor, |_| false) }
    }

    /// Returns a view of a tensor to read, or None.
    pub(super) fn optional_input<'a>(
        &'a self,
        name: &'static str,
        tensor: Option<&'a Bound<'py, PyAny>>,
    ) -> PyResult<Option<View<'a>>> {
        tensor.map(|tensor| self.input(name, tensor)).transpose()
    }

    /// Returns a view of a tensor to write.
    pub(super) fn output<'a>(
        &'a self,
        name: &'static str,
        tensor: &'a Bound<'py, PyAny>,
    ) -> PyResult<ViewMut<'a>> {
        check_sign(name, tensor)?;
        // SAFETY: the object is borrowed for as long as the view lives.
        unsafe { self.write(Arg::Of(name), tensor, |_| false) }
    }

    /// Returns views of a list of tensors to read. `batch(index, ndim)` decides whether a tensor is a batch
    /// along its first dimension; otherwise it is one matrix.
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

    /// Returns views of a list of tensors to write. See [`Self::inputs`].
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

    /// Runs the operation. It releases the interpreter for large CPU work and for all CUDA work, because a
    /// launch may wait for the queue and the first use of a kernel loads it.
    pub(super) fn run(&self, operation: impl FnOnce(Stream) -> Result<(), Error>) -> PyResult<()> {
        let stream = self.stream.get();
        if stream.is_none() && self.elements.get() < DETACH_FROM {
            return Ok(operation(Stream::default())?);
        }
        let operation = AssertSend(move || operation(stream.unwrap_or_default()));
        Ok(self.py.detach(move || operation.call())?)
    }

    /// Returns the elements of a list or tuple and keeps them alive until the arguments are dropped. Other
    /// iterables are errors: a tensor is an iterable over its rows.
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
        // SAFETY: the exporter filled in `dl`. The memory belongs to the object, which lives for 'a. Resizing
        // or rebinding a tensor while another thread computes with it is a data race in the caller, as with
        // torch's own operators.
        let view = unsafe { dl.view(name, batch(dl.ndim)) }?;
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
        // SAFETY: the exporter filled in `dl`. The memory belongs to the object, which lives for 'a.
        // Concurrent resizing is a data race in the caller, as with torch's own operators.
        let view = unsafe { dl.view_mut(name, batch(dl.ndim)) }?;
        self.elements.set(self.elements.get().saturating_add(view.numel()));
        Ok(view)
    }

    /// Describes an object's tensor through its exchange API.
    fn describe(&self, name: Arg, tensor: &Bound<'py, PyAny>) -> PyResult<DLTensor> {
        let api = exchange_api(&tensor.get_type())?.ok_or_else(|| not_a_tensor(name, tensor))?;
        let mut dl = DLTensor::empty();
        let export = api
            .dltensor_from_py_object_no_sync
            .ok_or_else(|| PyTypeError::new_err(format!("{name} is of a type whose DLPack exchange API cannot lend a tensor; it must be a torch tensor")))?;
        // SAFETY: the function belongs to this object's type, the object is alive, and `dl` is a valid place
        // for the result.
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

    /// Returns the current stream of the library that exported a tensor.
    fn stream_of(&self, api: &ExchangeApi, dl: &DLTensor) -> PyResult<Stream> {
        let Some(current) = api.current_work_stream else { return Ok(Stream::default()) };
        let mut stream = ptr::null_mut();
        // SAFETY: the exporter returned this device for one of its tensors.
        if unsafe { current(CUDA, dl.device.device_id, &raw mut stream) } != 0 {
            return Err(PyErr::fetch(self.py));
        }
        // SAFETY: the exporter returned its current stream on the device of its tensor.
        Ok(unsafe { Stream::from_raw(stream) })
    }
}

/// Makes a closure with raw pointers `Send` for `Python::detach`, which runs it on the same thread.
struct AssertSend<F>(F);

// SAFETY: `detach` runs the closure on the calling thread and returns after it. The views in the closure
// borrow from the arguments, which outlive the call. The closure holds no Python object.
unsafe impl<F> Send for AssertSend<F> {}

impl<F: FnOnce() -> T, T> AssertSend<F> {
    fn call(self) -> T {
        (self.0)()
    }
}

/// The types that were looked up, by address, each with its exchange API.
static EXCHANGE_APIS: Mutex<Vec<(usize, Option<&'static ExchangeApi>)>> = Mutex::new(Vec::new());

/// Limit on the number of cached types, because each is kept alive forever.
const MAX_CACHED: usize = 64;

thread_local! {
    /// The type that this thread looked up last.
    static LAST: Cell<(usize, Option<&'static ExchangeApi>)> = const { Cell::new((0, None)) };
}

/// Returns the exchange API of a type. The result is cached per type.
pub(super) fn exchange_api(class: &Bound<'_, PyType>) -> PyResult<Option<&'static ExchangeApi>> {
    let address = class.as_ptr().addr();
    let (last, api) = LAST.get();
    if last == address {
        return Ok(api);
    }
    // Python code never runs while the lock is held, and the interpreter is held. Therefore a fork cannot
    // copy a locked mutex.
    {
        let cached = EXCHANGE_APIS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = cached.iter().find(|(class, _)| *class == address) {
            LAST.set(*entry);
            return Ok(entry.1);
        }
    }
    let api = match class.getattr_opt("__dlpack_c_exchange_api__")? {
        None => None,
        Some(capsule) => {
            // SAFETY: the capsule is a live object. PyCapsule_GetPointer checks that it is a capsule of this
            // name.
            let table = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), EXCHANGE_CAPSULE.as_ptr()) };
            if table.is_null() {
                return Err(PyErr::fetch(class.py()));
            }
            // SAFETY: the protocol requires that tables live as long as the process.
            unsafe { ExchangeApi::compatible(table.cast()) }
        }
    };
    let mut cached = EXCHANGE_APIS.lock().unwrap_or_else(PoisonError::into_inner);
    if cached.len() < MAX_CACHED {
        // Leak a reference to the type, so that its address is never reused for another type.
        let _ = class.clone().into_ptr();
        cached.push((address, api));
    }
    Ok(api)
}

/// Returns an error for a view with the negative bit (the imaginary part of a conjugate), because DLPack does
/// not export the sign. Elements of lists are not checked, which would take 0.2 us each: torch's dispatcher
/// has already resolved the sign of operator arguments.
fn check_sign(name: &str, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
    let negated = tensor.getattr_opt(intern!(tensor.py(), "is_neg"))?;
    if negated.map_or(Ok(false), |negated| negated.call0()?.is_truthy())? {
        let message =
            format!("{name} is a view that torch negates when it is read; pass {name}.resolve_neg()");
        return Err(PyValueError::new_err(message));
    }
    Ok(())
}

/// Returns the error for a tensor that the exporter cannot export, with the first line of the exporter's
/// message.
fn refused(name: Arg, tensor: &Bound<'_, PyAny>) -> PyErr {
    let py = tensor.py();
    let cause = PyErr::take(py).map(|cause| cause.value(py).to_string()).unwrap_or_default();
    let reason = cause.lines().next().unwrap_or("no reason given").to_owned();
    PyTypeError::new_err(format!("{name} must be a dense tensor with storage: {reason}"))
}

fn not_a_tensor(name: Arg, object: &Bound<'_, PyAny>) -> PyErr {
    let class = class_name(object);
    PyTypeError::new_err(format!("{name} is of type {class}; it must be a torch tensor"))
}

fn class_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "?".into(), |name| name.to_string())
}
