//! The arguments and results of one kernel call.
//!
//! Arguments arrive in the order of the operator's schema, and the kernel owns them. A kernel reads all of
//! them before anything can fail. They are released when dropped.

use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};
use std::sync::{Mutex, TryLockError};

use super::raise::Failure;
use super::shim::{self, RawTensor, Shim, Value};
use crate::dlpack::{CUDA, list};
use crate::error::{Arg, Error};
use crate::format::Fp8Format;
use crate::layout::{DType, Device, Matrices, View, ViewMut, collapse, matrices};
use crate::ops::Stream;
use crate::python::parse;

/// Reads the arguments of a call one after the other.
pub(super) struct Values<'a> {
    shim: &'static Shim,
    values: std::slice::Iter<'a, Value>,
}

impl<'a> Values<'a> {
    pub(super) fn new(values: &'a [Value]) -> Self {
        Self { shim: shim::get(), values: values.iter() }
    }

    fn next(&mut self) -> Value {
        *self.values.next().expect("the kernel reads as many arguments as the schema has")
    }

    fn pointer(&mut self) -> *mut c_void {
        ptr::with_exposed_provenance_mut(self.next() as usize)
    }

    pub(super) fn tensor(&mut self) -> Tensor {
        Tensor(NonNull::new(self.pointer()).expect("a tensor"))
    }

    pub(super) fn optional_tensor(&mut self) -> Option<Tensor> {
        let inner = NonNull::new(self.pointer().cast::<Value>())?;
        // SAFETY: torch allocated the value with `new`, and the kernel owns it.
        let value = unsafe {
            let value = inner.read();
            (self.shim.delete_value)(inner.as_ptr().cast());
            value
        };
        NonNull::new(ptr::with_exposed_provenance_mut(value as usize)).map(Tensor)
    }

    pub(super) fn tensors(&mut self) -> Vec<Tensor> {
        let tensor = |value| NonNull::new(ptr::with_exposed_provenance_mut(value as usize)).map(Tensor);
        self.list().into_iter().filter_map(tensor).collect()
    }

    pub(super) fn integers(&mut self) -> Vec<i64> {
        self.list().into_iter().map(|value| value as i64).collect()
    }

    fn list(&mut self) -> Vec<Value> {
        let (shim, list, mut len) = (self.shim, self.pointer(), 0);
        // SAFETY: the kernel owns the list, and every index is below its size.
        unsafe {
            (shim.list_size)(list, &raw mut len);
            let item = |i| {
                let mut value = 0;
                (shim.list_item)(list, i, &raw mut value);
                value
            };
            let items = (0..len).map(item).collect();
            (shim.delete_list)(list);
            items
        }
    }

    pub(super) fn string(&mut self) -> String {
        let (shim, string, mut chars) = (self.shim, self.pointer(), ptr::null());
        // SAFETY: the kernel owns the string, which ends in NUL.
        unsafe {
            (shim.string_chars)(string, &raw mut chars);
            let text = CStr::from_ptr(chars).to_string_lossy().into_owned();
            (shim.delete_string)(string);
            text
        }
    }

    pub(super) fn integer(&mut self) -> i64 {
        self.next() as i64
    }

    pub(super) fn float(&mut self) -> f32 {
        parse::narrowed(f64::from_bits(self.next()))
    }

    pub(super) fn flag(&mut self) -> bool {
        self.next() as u8 != 0
    }

    /// Reads an element type, as torch's number.
    pub(super) fn dtype(&mut self) -> Number {
        Number(self.next() as i32)
    }
}

/// An element type, as torch's number.
#[derive(Clone, Copy)]
pub(super) struct Number(i32);

impl Number {
    /// Returns the element type, or None if the crate does not support it.
    pub(super) fn supported(self) -> Option<DType> {
        shim::get().dtype_of(self.0)
    }

    /// Returns the type's name in Python.
    pub(super) fn name(self) -> String {
        usize::try_from(self.0)
            .ok()
            .and_then(|i| NAMES.get(i))
            .map_or_else(|| format!("a type with the number {}", self.0), |name| format!("torch.{name}"))
    }

    /// Returns the FP8 format, or the error that the Python kernels raise.
    pub(super) fn format(self) -> Result<Fp8Format, Failure> {
        self.supported().and_then(DType::fp8).ok_or_else(|| {
            let got = self.name();
            Failure::Type(format!("fp8_dtype is {got}; it must be torch.float8_e4m3fn or torch.float8_e5m2"))
        })
    }
}

/// The names of `c10::ScalarType` for error messages.
const NAMES: [&str; 46] = [
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "bool",
    "qint8",
    "quint8",
    "qint32",
    "bfloat16",
    "quint4x2",
    "quint2x4",
    "bits1x8",
    "bits2x4",
    "bits4x2",
    "bits8",
    "bits16",
    "float8_e5m2",
    "float8_e4m3fn",
    "float8_e5m2fnuz",
    "float8_e4m3fnuz",
    "uint16",
    "uint32",
    "uint64",
    "uint1",
    "uint2",
    "uint3",
    "uint4",
    "uint5",
    "uint6",
    "uint7",
    "int1",
    "int2",
    "int3",
    "int4",
    "int5",
    "int6",
    "int7",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
];

/// An owned reference to a tensor.
pub(super) struct Tensor(RawTensor);

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: this struct owns the reference and releases it once.
        unsafe { (shim::get().delete_tensor)(self.0) };
    }
}

/// Calls a shim function that returns an error code and writes its result to a pointer.
macro_rules! query {
    ($function:ident($tensor:expr): $zero:expr) => {{
        let mut result = $zero;
        // SAFETY: the tensor is alive, and `result` is a valid place for the result.
        match unsafe { (shim::get().$function)($tensor, &raw mut result) } {
            0 => Ok(result),
            _ => Err(Failure::Torch(stringify!($function))),
        }
    }};
}

impl Tensor {
    /// Converts the tensor to a result of the kernel.
    pub(super) fn into_value(self) -> Value {
        let raw = self.0;
        std::mem::forget(self);
        raw.as_ptr().expose_provenance() as Value
    }

    fn number(&self) -> Result<Number, Failure> {
        query!(dtype(self.0): 0).map(Number)
    }

    fn dim(&self) -> Result<usize, Failure> {
        query!(dim(self.0): 0_i64).map(|dim| dim as usize)
    }

    pub(super) fn sizes(&self) -> Result<&[i64], Failure> {
        let sizes = query!(sizes(self.0): ptr::null::<i64>())?;
        // SAFETY: torch returned `dim` sizes, which live as long as the tensor.
        Ok(unsafe { list(sizes, self.dim()?) })
    }

    fn strides(&self) -> Result<&[i64], Failure> {
        let strides = query!(strides(self.0): ptr::null::<i64>())?;
        // SAFETY: torch returned `dim` strides, which live as long as the tensor.
        Ok(unsafe { list(strides, self.dim()?) })
    }

    /// Returns whether the tensor is read as a batch of matrices along its first dimension. This requires at
    /// least three dimensions.
    pub(super) fn is_batch(&self, batched: bool) -> Result<bool, Failure> {
        Ok(batched && self.sizes()?.len() > 2)
    }

    /// Splits the sizes into the batch dimension and the other dimensions. The batch dimension is None if the
    /// tensor is one matrix.
    fn split(&self, batch: bool) -> Result<(Option<i64>, &[i64]), Failure> {
        let sizes = self.sizes()?;
        Ok(if batch { (sizes.first().copied(), sizes.get(1..).unwrap_or(&[])) } else { (None, sizes) })
    }

    /// Returns the rows and columns of each matrix that the tensor is read as.
    pub(super) fn matrix_shape(&self, batch: bool) -> Result<(i64, i64), Failure> {
        Ok(match self.split(batch)?.1.split_last() {
            None => (1, 1),
            Some((cols, leading)) => (leading.iter().product(), *cols),
        })
    }

    /// Returns the sizes of a result that has `sizes` for each matrix of this tensor.
    pub(super) fn each(&self, batch: bool, sizes: &[i64]) -> Result<Vec<i64>, Failure> {
        Ok(self.split(batch)?.0.into_iter().chain(sizes.iter().copied()).collect())
    }

    /// Returns the device type and device index as torch's numbers.
    fn place(&self) -> Result<(i32, i32), Failure> {
        Ok((query!(device_type(self.0): 0)?, query!(device_index(self.0): 0)?))
    }

    pub(super) fn device(&self) -> Result<Device, Failure> {
        let (kind, index) = self.place()?;
        Ok(if kind == shim::get().cuda { Device::Cuda(index) } else { Device::Cpu })
    }

    fn parts(&self, arg: Arg, batch: bool) -> Result<Parts, Failure> {
        let number = self.number()?;
        let dtype = number.supported().ok_or_else(|| Error::ForeignDType {
            arg,
            got: number.name().trim_start_matches("torch.").to_owned(),
        })?;
        let layout = matrices(arg, self.sizes()?, self.strides()?, batch)?;
        Ok((dtype, self.device()?, layout))
    }

    /// Returns a view of the tensor as a matrix to read.
    pub(super) fn view(&self, name: &'static str) -> Result<View<'_>, Failure> {
        self.view_of(name.into(), false)
    }

    /// Returns a view of the tensor to read, as a batch if `batch` is set and as a matrix otherwise.
    pub(super) fn batch_view(&self, name: &'static str, batch: bool) -> Result<View<'_>, Failure> {
        self.view_of(name.into(), batch)
    }

    fn view_of(&self, arg: Arg, batch: bool) -> Result<View<'_>, Failure> {
        let (dtype, device, (shape, strides, (count, stride))) = self.parts(arg, batch)?;
        let data = query!(data(self.0): ptr::null_mut())?;
        // SAFETY: torch's sizes and strides stay within the tensor's memory, which the tensor keeps alive.
        Ok(unsafe { View::from_raw(data.cast(), dtype, device, shape, strides).batched(count, stride) })
    }

    /// Returns a view of the tensor as a matrix to write.
    pub(super) fn view_mut(&self, name: &'static str) -> Result<ViewMut<'_>, Failure> {
        self.batch_view_mut(name, false)
    }

    /// Returns a view of the tensor to write, as a batch if `batch` is set and as a matrix otherwise.
    pub(super) fn batch_view_mut(&self, name: &'static str, batch: bool) -> Result<ViewMut<'_>, Failure> {
        let (dtype, device, (shape, strides, (count, stride))) = self.parts(name.into(), batch)?;
        let data = query!(data_mut(self.0): ptr::null_mut())?;
        // SAFETY: torch's sizes and strides stay within the tensor's memory, which the tensor keeps alive.
        // The call owns its outputs, and operations return an error if an output shares memory with another
        // argument.
        Ok(unsafe { ViewMut::from_raw(data.cast(), dtype, device, shape, strides).batched(count, stride) })
    }

    /// Returns the tensor, or a contiguous copy if the leading dimensions of its matrices do not collapse
    /// into one stride.
    pub(super) fn matrix(self, batch: bool) -> Result<Self, Failure> {
        let (sizes, first) = (self.sizes()?, usize::from(batch));
        if sizes.len() < 3 || collapse(&sizes[first..], &self.strides()?[first..]).is_some() {
            return Ok(self);
        }
        let Some(dtype) = self.number()?.supported() else { return Ok(self) };
        let copy = self.allocate(dtype, sizes)?;
        // SAFETY: both tensors are alive and have the same shape.
        match unsafe { (shim::get().copy)(copy.0, self.0, 0) } {
            0 => Ok(copy),
            _ => Err(Failure::Torch("copy")),
        }
    }

    /// Allocates a contiguous tensor on this tensor's device.
    pub(super) fn allocate(&self, dtype: DType, sizes: &[i64]) -> Result<Self, Failure> {
        let mut strides = [1_i64; MAX_DIMENSIONS];
        if sizes.len() > MAX_DIMENSIONS {
            let message =
                format!("a tensor has {} dimensions; at most {MAX_DIMENSIONS} are supported", sizes.len());
            return Err(Failure::Value(message));
        }
        for i in (1..sizes.len()).rev() {
            strides[i - 1] = strides[i] * sizes[i].max(1);
        }
        self.allocate_strided(dtype, sizes, &strides[..sizes.len()])
    }

    /// Allocates a tensor with the given strides on this tensor's device.
    pub(super) fn allocate_strided(
        &self,
        dtype: DType,
        sizes: &[i64],
        strides: &[i64],
    ) -> Result<Self, Failure> {
        let shim = shim::get();
        let (kind, index) = self.place()?;
        let mut tensor = None;
        let number = shim.number(dtype);
        // SAFETY: `sizes` and `strides` have one entry per dimension, and `tensor` is a valid place for the
        // result.
        let code = unsafe {
            (shim.empty_strided)(
                sizes.len() as i64,
                sizes.as_ptr(),
                strides.as_ptr(),
                number,
                kind,
                index,
                &raw mut tensor,
            )
        };
        tensor.filter(|_| code == 0).map(Self).ok_or_else(|| Failure::Allocation {
            sizes: sizes.to_vec(),
            strides: strides.to_vec(),
            dtype: dtype.to_string(),
            device: if kind == shim.cuda { format!("cuda:{index}") } else { "cpu".into() },
        })
    }

    /// Returns a tensor of shape (0,) on this tensor's device. It is a new tensor over an empty allocation
    /// that is made once, because allocating zero bytes takes nearly as long as allocating some. The lock is
    /// never waited for: if the process is forked while another thread holds it, that thread does not exist
    /// in the child, and the child would wait forever.
    pub(super) fn empty(&self, dtype: DType) -> Result<Self, Failure> {
        let place = self.place()?;
        let mut empties = match EMPTIES.try_lock() {
            Ok(empties) => empties,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return self.allocate(dtype, &[0]),
        };
        let cached = empties.iter().find(|empty| (empty.place, empty.dtype) == (place, dtype));
        let first = if let Some(empty) = cached {
            empty.tensor.0
        } else {
            let tensor = self.allocate(dtype, &[0])?;
            let first = tensor.0;
            empties.push(Empty { place, dtype, tensor });
            first
        };
        let (size, stride) = (0_i64, 1_i64);
        let mut view = None;
        // SAFETY: `first` is never freed. There is one size and one stride for one dimension, and `view` is a
        // valid place for the result.
        let code = unsafe {
            (shim::get().reinterpret)(first, 1, &raw const size, &raw const stride, 0, &raw mut view)
        };
        view.filter(|_| code == 0).map(Self).ok_or(Failure::Torch("aoti_torch__reinterpret_tensor"))
    }
}

/// A cached tensor without elements.
struct Empty {
    place: (i32, i32),
    dtype: DType,
    tensor: Tensor,
}

// SAFETY: torch's reference counts are atomic, and no code writes to the tensor.
unsafe impl Send for Empty {}

/// The cached tensors, one per device and type. They are never freed.
static EMPTIES: Mutex<Vec<Empty>> = Mutex::new(Vec::new());

/// Limit on dimensions, which is higher than the limit of torch's own loops.
const MAX_DIMENSIONS: usize = 64;

/// The parts of a view besides its data pointer: element type, device, and layout.
type Parts = (DType, Device, Matrices);

/// Returns views of the items of a list to read, each a batch or a matrix.
pub(super) fn views<'a>(
    tensors: &'a [Tensor],
    name: &'static str,
    batched: bool,
) -> Result<Vec<View<'a>>, Failure> {
    let view =
        |(i, tensor): (usize, &'a Tensor)| tensor.view_of(Arg::Item(name, i), tensor.is_batch(batched)?);
    tensors.iter().enumerate().map(view).collect()
}

/// Returns the stream for a call with these arguments: the current stream of the first argument that is on
/// CUDA.
pub(super) fn stream<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Result<Stream, Failure> {
    for tensor in tensors {
        let Device::Cuda(index) = tensor.device()? else { continue };
        let mut stream = ptr::null_mut();
        // SAFETY: a tensor is on this device, so it exists.
        if unsafe { (shim::get().current_stream)(CUDA, index, &raw mut stream) } != 0 {
            return Err(Failure::Torch("reading the current stream"));
        }
        // SAFETY: this is torch's current stream on the device of a tensor of the call, and `ops` checks that
        // all tensors are on that device.
        return Ok(unsafe { Stream::from_raw(stream) });
    }
    Ok(Stream::default())
}
