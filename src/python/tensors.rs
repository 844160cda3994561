//! Python objects as views, for the length of one call.
//!
//! [`Arguments`] takes each tensor of a call through its type's C exchange API where there is one (torch: no
//! reference is taken and nothing allocated), else through `__dlpack__` (`numpy`), and remembers what the
//! launch needs to know: the stream, and how much work it is.

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyList, PyTuple, PyType};

use crate::dlpack::{
    DLManagedTensorVersioned, DLTensor, EXCHANGE_CAPSULE, ExchangeApi, FLAG_READ_ONLY, MAJOR_VERSION,
    MINOR_VERSION, USED_VERSIONED_CAPSULE, VERSIONED_CAPSULE,
};
use crate::error::{Arg, Error};
use crate::layout::{Device, View, ViewMut};
use crate::ops::Stream;

/// From this many elements on, CPU work lets go of the interpreter: below, the hand-over costs more than the
/// work (about 10 us).
const DETACH_FROM: usize = 1 << 15;

/// `__dlpack__`'s number for the legacy default stream.
const LEGACY_STREAM: usize = 1;

/// The tensors of one call. Views live until it is dropped.
pub(super) struct Arguments<'py> {
    py: Python<'py>,
    stream: Option<*mut c_void>,
    elements: usize,
    owned: Vec<Managed>,
}

/// The name of an argument: made into words only for a message.
#[derive(Clone, Copy)]
pub(super) enum Name {
    Of(&'static str),
    Item(&'static str, usize),
}

impl Name {
    fn words(self) -> Arg {
        match self {
            Self::Of(name) => name.into(),
            Self::Item(list, index) => format!("{list}[{index}]").into(),
        }
    }
}

impl<'py> Arguments<'py> {
    pub(super) fn new(py: Python<'py>) -> Self {
        Self { py, stream: None, elements: 0, owned: Vec::new() }
    }

    /// A tensor to read.
    pub(super) fn input(&mut self, name: &'static str, tensor: &Bound<'py, PyAny>) -> PyResult<View<'py>> {
        self.read(Name::Of(name), tensor)
    }

    /// A tensor to write.
    pub(super) fn output(
        &mut self,
        name: &'static str,
        tensor: &Bound<'py, PyAny>,
    ) -> PyResult<ViewMut<'py>> {
        self.write(Name::Of(name), tensor)
    }

    /// A tensor to write, or None.
    pub(super) fn optional_output(
        &mut self,
        name: &'static str,
        tensor: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<ViewMut<'py>>> {
        tensor.map(|tensor| self.output(name, tensor)).transpose()
    }

    /// A list of tensors to read.
    pub(super) fn inputs(
        &mut self,
        name: &'static str,
        tensors: &Bound<'py, PyAny>,
    ) -> PyResult<Vec<View<'py>>> {
        let item = |(i, tensor): (usize, PyResult<_>)| self.read(Name::Item(name, i), &tensor?);
        iterate(name, tensors)?.enumerate().map(item).collect()
    }

    /// A list of tensors to write.
    pub(super) fn outputs(
        &mut self,
        name: &'static str,
        tensors: &Bound<'py, PyAny>,
    ) -> PyResult<Vec<ViewMut<'py>>> {
        let item = |(i, tensor): (usize, PyResult<_>)| self.write(Name::Item(name, i), &tensor?);
        iterate(name, tensors)?.enumerate().map(item).collect()
    }

    /// Runs the operation, without the interpreter where that is worth while.
    pub(super) fn run(&self, operation: impl FnOnce(Stream) -> Result<(), Error>) -> PyResult<()> {
        let stream = Stream(self.stream.unwrap_or(ptr::null_mut()));
        // A launch is short. CPU work is not, from some size on.
        if self.stream.is_some() || self.elements < DETACH_FROM {
            return Ok(operation(stream)?);
        }
        let operation = AssertSend(move || operation(stream));
        Ok(self.py.detach(move || operation.call())?)
    }

    fn read(&mut self, name: Name, tensor: &Bound<'py, PyAny>) -> PyResult<View<'py>> {
        let (dl, _) = self.describe(name, tensor)?;
        // SAFETY: the exporter filled it in; the tensor is borrowed from the caller, or owned in `self.owned`,
        // for as long as the arguments live.
        let view = unsafe { dl.view(|| name.words()) }?;
        self.elements = self.elements.saturating_add(view.numel());
        Ok(view)
    }

    fn write(&mut self, name: Name, tensor: &Bound<'py, PyAny>) -> PyResult<ViewMut<'py>> {
        let (dl, read_only) = self.describe(name, tensor)?;
        if read_only {
            let message = format!("{} is read-only; an output must be writable", name.words());
            return Err(PyValueError::new_err(message));
        }
        // SAFETY: as in `read`; the exporter says that it may be written.
        Ok(unsafe { dl.view_mut(|| name.words()) }?)
    }

    /// The tensor behind an object, and whether it is read-only.
    fn describe(&mut self, name: Name, tensor: &Bound<'py, PyAny>) -> PyResult<(DLTensor, bool)> {
        let Some(api) = exchange_api(&tensor.get_type())? else {
            return self.describe_through_capsule(name, tensor);
        };
        let mut dl = DLTensor::empty();
        let export = api.dltensor_from_py_object_no_sync.ok_or_else(|| {
            PyTypeError::new_err(format!("{}'s type cannot lend a DLPack tensor", name.words()))
        })?;
        // SAFETY: the function belongs to this object's type, the object is alive, `dl` is ours.
        if unsafe { export(tensor.as_ptr().cast(), &raw mut dl) } != 0 {
            return Err(refused(name, tensor));
        }
        if self.stream.is_none()
            && let Some(Device::Cuda(_)) = dl.device()
        {
            self.stream = Some(self.current_stream(api, &dl)?);
        }
        Ok((dl, false))
    }

    fn current_stream(&self, api: &ExchangeApi, dl: &DLTensor) -> PyResult<*mut c_void> {
        let mut stream = ptr::null_mut();
        let Some(current) = api.current_work_stream else { return Ok(stream) };
        // SAFETY: the device is one that the exporter just named.
        if unsafe { current(dl.device.device_type, dl.device.device_id, &raw mut stream) } != 0 {
            return Err(PyErr::fetch(self.py));
        }
        Ok(stream)
    }

    /// `__dlpack__`, for types without the exchange API.
    fn describe_through_capsule(
        &mut self,
        name: Name,
        tensor: &Bound<'py, PyAny>,
    ) -> PyResult<(DLTensor, bool)> {
        let method = tensor.getattr("__dlpack__").map_err(|_| not_a_tensor(name, tensor))?;
        let options = PyDict::new(self.py);
        options.set_item("max_version", (MAJOR_VERSION, MINOR_VERSION))?;
        let (kind, _): (i32, i32) = tensor.call_method0("__dlpack_device__")?.extract()?;
        if kind == crate::dlpack::CUDA {
            // The exporter makes its data ready on the stream that is going to be used.
            let stream = self.stream.get_or_insert(ptr::null_mut()).addr();
            options.set_item("stream", if stream == 0 { LEGACY_STREAM } else { stream })?;
        }
        let capsule = method.call((), Some(&options)).map_err(|cause| {
            let message = format!("{} cannot be exported: {cause}", name.words());
            PyTypeError::new_err(message)
        })?;
        let managed = Managed::take(capsule.cast::<PyCapsule>()?).ok_or_else(|| {
            PyTypeError::new_err(format!(
                "{} exports no DLPack {MAJOR_VERSION}.x tensor; convert it to a torch tensor",
                name.words()
            ))
        })?;
        let (dl, flags) = managed.tensor();
        self.owned.push(managed);
        Ok((dl, flags & FLAG_READ_ONLY != 0))
    }
}

/// A tensor that an exporter handed over; given back when dropped.
struct Managed(NonNull<DLManagedTensorVersioned>);

impl Managed {
    fn take(capsule: &Bound<'_, PyCapsule>) -> Option<Self> {
        let object = capsule.as_ptr();
        // SAFETY: a live capsule; the name is compared before the pointer is handed out.
        let tensor = unsafe {
            if ffi::PyCapsule_IsValid(object, VERSIONED_CAPSULE.as_ptr()) == 0 {
                return None;
            }
            ffi::PyCapsule_GetPointer(object, VERSIONED_CAPSULE.as_ptr())
        };
        // SAFETY: renaming it is how a capsule's tensor changes owner; the name is static.
        unsafe { ffi::PyCapsule_SetName(object, USED_VERSIONED_CAPSULE.as_ptr()) };
        let managed = Self(NonNull::new(tensor.cast())?);
        // SAFETY: the version is laid out the same in all versions.
        let major = unsafe { managed.0.as_ref() }.version.major;
        (major == MAJOR_VERSION).then_some(managed)
    }

    fn tensor(&self) -> (DLTensor, u64) {
        // SAFETY: owned by us, of a version that we know.
        let managed = unsafe { self.0.as_ref() };
        (managed.dl_tensor, managed.flags)
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        // SAFETY: owned by us, and given back once. The deleter's place is the same in all versions.
        unsafe {
            if let Some(deleter) = self.0.as_ref().deleter {
                deleter(self.0.as_ptr());
            }
        }
    }
}

/// Lets raw pointers cross into `Python::detach`, which runs on this same thread.
struct AssertSend<F>(F);

// SAFETY: `detach` calls the closure on the calling thread, where the views' memory stays borrowed.
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

/// The exchange API of a type, looked up once for each type.
fn exchange_api(class: &Bound<'_, PyType>) -> PyResult<Option<&'static ExchangeApi>> {
    let address = class.as_ptr().addr();
    // The lock is never held while Python code runs, and the interpreter is: so no fork finds it taken.
    {
        let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, api)) = known.iter().find(|(known, _)| *known == address) {
            return Ok(*api);
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

/// The elements of a list or tuple. Not of any iterable: its elements must outlive the views of them.
fn iterate<'py>(
    name: &'static str,
    tensors: &Bound<'py, PyAny>,
) -> PyResult<impl Iterator<Item = PyResult<Bound<'py, PyAny>>> + use<'py>> {
    if tensors.is_instance_of::<PyList>() || tensors.is_instance_of::<PyTuple>() {
        return tensors.try_iter();
    }
    let class = class_name(tensors);
    Err(PyTypeError::new_err(format!("{name} is of type {class}; it must be a list of tensors")))
}

/// The exporter's refusal, in our words and the first line of its own.
fn refused(name: Name, tensor: &Bound<'_, PyAny>) -> PyErr {
    let py = tensor.py();
    let cause = PyErr::take(py).map(|cause| cause.value(py).to_string()).unwrap_or_default();
    let reason = cause.lines().next().unwrap_or("no reason given").to_owned();
    PyTypeError::new_err(format!("{} must be a dense tensor with memory: {reason}", name.words()))
}

fn not_a_tensor(name: Name, object: &Bound<'_, PyAny>) -> PyErr {
    let class = class_name(object);
    PyTypeError::new_err(format!("{} is of type {class}; it must be a tensor", name.words()))
}

fn class_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "?".into(), |name| name.to_string())
}
