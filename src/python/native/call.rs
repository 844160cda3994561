//! The arguments and results of one call of a kernel.
//!
//! Values come in the order of the operator's schema, and each belongs to the kernel: all are taken before anything
//! can fail, and given back when dropped.

use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};
use std::sync::{Mutex, TryLockError};

use super::raise::Failure;
use super::shim::{self, RawTensor, Shim, Value};
use crate::dlpack::CUDA;
use crate::error::{Arg, Error};
use crate::format::Fp8Format;
use crate::format::wide::narrowed;
use crate::layout::{DType, Device, View, ViewMut, collapse};
use crate::ops::Stream;

/// The values of a call, read one after the other.
pub(super) struct Values<'a> {
    shim: &'static Shim,
    values: std::slice::Iter<'a, Value>,
}

impl<'a> Values<'a> {
    pub(super) fn new(values: &'a [Value]) -> Self {
        Self { shim: shim::get(), values: values.iter() }
    }

    fn next(&mut self) -> Value {
        *self.values.next().expect("the kernel takes what the schema says")
    }

    fn pointer(&mut self) -> *mut c_void {
        ptr::with_exposed_provenance_mut(self.next() as usize)
    }

    pub(super) fn tensor(&mut self) -> Tensor {
        Tensor(NonNull::new(self.pointer()).expect("a tensor"))
    }

    pub(super) fn optional_tensor(&mut self) -> Option<Tensor> {
        let inner = NonNull::new(self.pointer().cast::<Value>())?;
        // SAFETY: a value that torch made with `new` for us to delete.
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
        // SAFETY: a list that torch made for us; its items are below its size.
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
        // SAFETY: a string that torch made for us, ending in NUL.
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
        narrowed(f64::from_bits(self.next()))
    }

    pub(super) fn flag(&mut self) -> bool {
        self.next() as u8 != 0
    }

    /// An element type, by torch's number.
    pub(super) fn dtype(&mut self) -> Number {
        Number(self.next() as i32)
    }
}

/// An element type, by torch's number.
#[derive(Clone, Copy)]
pub(super) struct Number(i32);

impl Number {
    /// One of ours.
    pub(super) fn known(self) -> Option<DType> {
        shim::get().known(self.0)
    }

    /// The name that Python gives it.
    pub(super) fn name(self) -> String {
        usize::try_from(self.0)
            .ok()
            .and_then(|i| NAMES.get(i))
            .map_or_else(|| format!("a type with the number {}", self.0), |name| format!("torch.{name}"))
    }

    /// The FP8 format, or a refusal in the words of the Python kernels.
    pub(super) fn format(self) -> Result<Fp8Format, Failure> {
        self.known().and_then(DType::fp8).ok_or_else(|| {
            let got = self.name();
            Failure::Type(format!("fp8_dtype is {got}; it must be torch.float8_e4m3fn or torch.float8_e5m2"))
        })
    }
}

/// `c10::ScalarType`, for messages.
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

/// A tensor that is ours to give back.
pub(super) struct Tensor(RawTensor);

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: ours, and given back once.
        unsafe { (shim::get().delete_tensor)(self.0) };
    }
}

/// Calls a function that gives an error code and leaves its result behind.
macro_rules! ask {
    ($function:ident($tensor:expr): $zero:expr) => {{
        let mut result = $zero;
        // SAFETY: a live tensor, and a place for the result.
        match unsafe { (shim::get().$function)($tensor, &raw mut result) } {
            0 => Ok(result),
            _ => Err(Failure::Torch(stringify!($function))),
        }
    }};
}

impl Tensor {
    /// As a result of the kernel.
    pub(super) fn into_value(self) -> Value {
        let raw = self.0;
        std::mem::forget(self);
        raw.as_ptr().expose_provenance() as Value
    }

    fn number(&self) -> Result<Number, Failure> {
        ask!(dtype(self.0): 0).map(Number)
    }

    pub(super) fn sizes(&self) -> Result<&[i64], Failure> {
        let (dim, sizes) = (ask!(dim(self.0): 0_i64)?, ask!(sizes(self.0): ptr::null::<i64>())?);
        // SAFETY: the numbers of a live tensor.
        Ok(unsafe { list(sizes, dim) })
    }

    fn strides(&self) -> Result<&[i64], Failure> {
        let (dim, strides) = (ask!(dim(self.0): 0_i64)?, ask!(strides(self.0): ptr::null::<i64>())?);
        // SAFETY: the numbers of a live tensor.
        Ok(unsafe { list(strides, dim) })
    }

    /// Whether the tensor is read as a batch of matrices along its first dimension, which takes three dimensions.
    pub(super) fn is_batch(&self, batched: bool) -> Result<bool, Failure> {
        Ok(batched && self.sizes()?.len() > 2)
    }

    /// The first dimension of a batch, and the others; no first dimension for one matrix.
    fn split(&self, batch: bool) -> Result<(Option<i64>, &[i64]), Failure> {
        let sizes = self.sizes()?;
        Ok(if batch { (sizes.first().copied(), sizes.get(1..).unwrap_or(&[])) } else { (None, sizes) })
    }

    /// Rows and columns of each matrix that the tensor is read as.
    pub(super) fn matrix_shape(&self, batch: bool) -> Result<(i64, i64), Failure> {
        Ok(match self.split(batch)?.1.split_last() {
            None => (1, 1),
            Some((cols, leading)) => (leading.iter().product(), *cols),
        })
    }

    /// Sizes of a result that has `sizes` for each matrix of this tensor.
    pub(super) fn each(&self, batch: bool, sizes: &[i64]) -> Result<Vec<i64>, Failure> {
        Ok(self.split(batch)?.0.into_iter().chain(sizes.iter().copied()).collect())
    }

    /// The numbers of the device: type, index.
    fn place(&self) -> Result<(i32, i32), Failure> {
        Ok((ask!(device_type(self.0): 0)?, ask!(device_index(self.0): 0)?))
    }

    pub(super) fn device(&self) -> Result<Device, Failure> {
        let (kind, index) = self.place()?;
        Ok(if kind == shim::get().cuda { Device::Cuda(index) } else { Device::Cpu })
    }

    fn parts(&self, arg: Arg, batch: bool) -> Result<Parts, Failure> {
        let number = self.number()?;
        let dtype = number.known().ok_or_else(|| Error::ForeignDType {
            arg,
            got: number.name().trim_start_matches("torch.").to_owned(),
        })?;
        let (sizes, strides) = (self.sizes()?, self.strides()?);
        let first = usize::from(batch && !sizes.is_empty());
        let (rows, cols, row_stride, col_stride) =
            collapse(&sizes[first..], &strides[first..]).ok_or_else(|| Error::Value {
                arg,
                got: format!("of shape {sizes:?} with strides {strides:?}, which is no 2-d view"),
                expected: "contiguous".into(),
            })?;
        let matrices = if first == 1 { (sizes[0] as usize, strides[0] as isize) } else { (1, 0) };
        Ok((dtype, self.device()?, (rows, cols), (row_stride, col_stride), matrices))
    }

    /// As a matrix to read.
    pub(super) fn view(&self, name: &'static str) -> Result<View<'_>, Failure> {
        self.view_of(name.into(), false)
    }

    /// As a batch to read, or as a matrix.
    pub(super) fn batch_view(&self, name: &'static str, batch: bool) -> Result<View<'_>, Failure> {
        self.view_of(name.into(), batch)
    }

    fn view_of(&self, arg: Arg, batch: bool) -> Result<View<'_>, Failure> {
        let (dtype, device, shape, strides, (count, stride)) = self.parts(arg, batch)?;
        let data = ask!(data(self.0): ptr::null_mut())?;
        // SAFETY: torch's sizes and strides stay within its memory, which the tensor keeps alive.
        Ok(unsafe { View::from_raw(data.cast(), dtype, device, shape, strides).batched(count, stride) })
    }

    /// As a matrix to write.
    pub(super) fn view_mut(&self, name: &'static str) -> Result<ViewMut<'_>, Failure> {
        self.batch_view_mut(name, false)
    }

    /// As a batch to write, or as a matrix.
    pub(super) fn batch_view_mut(&self, name: &'static str, batch: bool) -> Result<ViewMut<'_>, Failure> {
        let (dtype, device, shape, strides, (count, stride)) = self.parts(name.into(), batch)?;
        let data = ask!(data_mut(self.0): ptr::null_mut())?;
        // SAFETY: torch's sizes and strides stay within its memory, which the tensor keeps alive. This call owns its
        // outputs, and operations refuse arguments that share memory with one.
        Ok(unsafe { ViewMut::from_raw(data.cast(), dtype, device, shape, strides).batched(count, stride) })
    }

    /// Itself, or a copy if the leading dimensions of its matrices do not collapse into one stride.
    pub(super) fn matrix(self, batch: bool) -> Result<Self, Failure> {
        let (sizes, first) = (self.sizes()?, usize::from(batch));
        if sizes.len() < 3 || collapse(&sizes[first..], &self.strides()?[first..]).is_some() {
            return Ok(self);
        }
        let Some(dtype) = self.number()?.known() else { return Ok(self) };
        let copy = self.room(dtype, sizes)?;
        // SAFETY: two live tensors of one shape.
        match unsafe { (shim::get().copy)(copy.0, self.0, 0) } {
            0 => Ok(copy),
            _ => Err(Failure::Torch("copy")),
        }
    }

    /// Room on this tensor's device, contiguous.
    pub(super) fn room(&self, dtype: DType, sizes: &[i64]) -> Result<Self, Failure> {
        let mut strides = [1_i64; MOST_DIMENSIONS];
        if sizes.len() > MOST_DIMENSIONS {
            return Err(Failure::Value(format!("a tensor has more than {MOST_DIMENSIONS} dimensions")));
        }
        for i in (1..sizes.len()).rev() {
            strides[i - 1] = strides[i] * sizes[i].max(1);
        }
        self.room_strided(dtype, sizes, &strides[..sizes.len()])
    }

    /// Room on this tensor's device.
    pub(super) fn room_strided(&self, dtype: DType, sizes: &[i64], strides: &[i64]) -> Result<Self, Failure> {
        let shim = shim::get();
        let ((kind, index), mut made) = (self.place()?, None);
        let number = shim.number(dtype);
        // SAFETY: as many sizes and strides as dimensions, and a place for the tensor.
        let code = unsafe {
            (shim.empty_strided)(
                sizes.len() as i64,
                sizes.as_ptr(),
                strides.as_ptr(),
                number,
                kind,
                index,
                &raw mut made,
            )
        };
        made.filter(|_| code == 0).map(Self).ok_or_else(|| Failure::Allocation {
            sizes: sizes.to_vec(),
            strides: strides.to_vec(),
            dtype: dtype.to_string(),
            device: if kind == shim.cuda { format!("cuda:{index}") } else { "cpu".into() },
        })
    }
}

impl Tensor {
    /// Of the shape (0,) on this tensor's device: a tensor of its own over an allocation of no bytes that is made once,
    /// since to allocate none takes nearly as long as to allocate some. Nobody waits for another thread here: a process
    /// that is forked meanwhile has not got the thread, and would wait forever.
    pub(super) fn empty(&self, dtype: DType) -> Result<Self, Failure> {
        let place = self.place()?;
        let mut empties = match EMPTIES.try_lock() {
            Ok(empties) => empties,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return self.room(dtype, &[0]),
        };
        let known = empties.iter().find(|known| (known.place, known.dtype) == (place, dtype));
        let first = if let Some(known) = known {
            known.tensor.0
        } else {
            let tensor = self.room(dtype, &[0])?;
            let first = tensor.0;
            empties.push(Empty { place, dtype, tensor });
            first
        };
        let (none, one, mut made) = (0_i64, 1_i64, None);
        // SAFETY: a tensor that is kept for ever; one size and stride for one dimension, and a place for the result.
        let code =
            unsafe { (shim::get().reinterpret)(first, 1, &raw const none, &raw const one, 0, &raw mut made) };
        made.filter(|_| code == 0).map(Self).ok_or(Failure::Torch("another tensor of no elements"))
    }
}

/// A tensor of no elements that others are made of.
struct Empty {
    place: (i32, i32),
    dtype: DType,
    tensor: Tensor,
}

// SAFETY: torch counts references atomically, and nobody writes to the tensor.
unsafe impl Send for Empty {}

/// A handful: one for each device and type. Kept for ever.
static EMPTIES: Mutex<Vec<Empty>> = Mutex::new(Vec::new());

/// More than torch's own loops take.
const MOST_DIMENSIONS: usize = 64;

/// Element type, device, shape and strides of a matrix, and the number of matrices with their stride.
type Parts = (DType, Device, (usize, usize), (isize, isize), (usize, isize));

/// The items of a list to read, as batches or as matrices.
pub(super) fn views<'a>(
    tensors: &'a [Tensor],
    name: &'static str,
    batched: bool,
) -> Result<Vec<View<'a>>, Failure> {
    let view =
        |(i, tensor): (usize, &'a Tensor)| tensor.view_of(Arg::Item(name, i), tensor.is_batch(batched)?);
    tensors.iter().enumerate().map(view).collect()
}

/// The stream that a call with these arguments runs on: the current one of the first that is on CUDA.
pub(super) fn stream<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Result<Stream, Failure> {
    for tensor in tensors {
        let Device::Cuda(index) = tensor.device()? else { continue };
        let mut stream = ptr::null_mut();
        // SAFETY: the device is one that a tensor is on.
        if unsafe { (shim::get().current_stream)(CUDA, index, &raw mut stream) } != 0 {
            return Err(Failure::Torch("the current stream"));
        }
        // SAFETY: torch's current stream on the device of the call's tensors, which `ops` compares.
        return Ok(unsafe { Stream::from_raw(stream) });
    }
    Ok(Stream::default())
}

/// # Safety
/// `start` points to `len` numbers that live for `'a`, or `len` is 0.
unsafe fn list<'a>(start: *const i64, len: i64) -> &'a [i64] {
    if len <= 0 || start.is_null() {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(start, len as usize) }
}
