//! The `DLPack` ABI, version 1, and its C exchange API.
//!
//! Written from `dlpack.h` 1.3 (<https://github.com/dmlc/dlpack>). It contains only what a consumer needs to
//! borrow a tensor for the duration of one call: the tensor struct, and the function table in
//! `type(t).__dlpack_c_exchange_api__`.
//!
//! Invariants of a borrowed tensor:
//! - Nothing is owned. Shape, strides and data belong to the exporter and live as long as the caller keeps
//!   the exporting object alive.
//! - The exchange API does not check anything. A fake tensor or a wrapper subclass has a null data pointer,
//!   so a null pointer is an error if the tensor has elements.
//! - A [`View`] is 2-d. A layout that cannot be viewed as 2-d is an error that names the argument.

use std::ffi::{c_int, c_void};
use std::slice;

use crate::error::{Arg, Error};
use crate::layout::{DType, Device, Matrices, View, ViewMut, matrices};

/// The `DLPACK_MAJOR_VERSION` of these structs.
pub(crate) const MAJOR_VERSION: u32 = 1;
/// The name of the capsule in `__dlpack_c_exchange_api__`.
pub(crate) const EXCHANGE_CAPSULE: &std::ffi::CStr = c"dlpack_exchange_api";

const CPU: i32 = 1;
pub(crate) const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;
const CUDA_MANAGED: i32 = 13;

/// `DLPackVersion`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct DLPackVersion {
    /// Struct layout version. It must equal [`MAJOR_VERSION`].
    pub major: u32,
    /// Version of the set of enumeration values.
    pub minor: u32,
}

/// `DLDevice`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct DLDevice {
    /// `DLDeviceType`.
    pub device_type: i32,
    /// Index among the devices of that type.
    pub device_id: i32,
}

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct DLDataType {
    /// `DLDataTypeCode`.
    pub code: u8,
    /// Bits of one lane.
    pub bits: u8,
    /// Lanes of one element.
    pub lanes: u16,
}

/// `DLTensor`: describes borrowed memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct DLTensor {
    /// Start of the allocation. May be null for a tensor without elements.
    pub data: *mut c_void,
    /// The device of the memory.
    pub device: DLDevice,
    /// Number of dimensions.
    pub ndim: i32,
    /// Element type.
    pub dtype: DLDataType,
    /// `ndim` sizes.
    pub shape: *mut i64,
    /// `ndim` strides in elements. Before `DLPack` 1.2, null means contiguous.
    pub strides: *mut i64,
    /// Offset in bytes from `data` to the first element.
    pub byte_offset: u64,
}

/// `DLPackExchangeAPIHeader`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct ExchangeHeader {
    /// Version of the table that follows.
    pub version: DLPackVersion,
    /// The table of an older version, or null.
    pub prev_api: *mut ExchangeHeader,
}

/// `DLPackExchangeAPI`: the exporter's function table, valid for the lifetime of the process.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct ExchangeApi {
    /// Version, and the chain of older tables.
    pub header: ExchangeHeader,
    /// Functions for owning tensors: allocate, import from an object, export to an object.
    pub owning: [*mut c_void; 3],
    /// Borrows a tensor from an object. This is the only function that is called for each argument. May be
    /// null.
    pub dltensor_from_py_object_no_sync: Option<unsafe extern "C" fn(*mut c_void, *mut DLTensor) -> c_int>,
    /// Returns the exporter's current stream on a device.
    pub current_work_stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int>,
}

// SAFETY: an exporter does not write to a table after publishing it, and never frees it.
unsafe impl Send for ExchangeApi {}
// SAFETY: an exporter does not write to a table after publishing it, so threads may share references to it.
unsafe impl Sync for ExchangeApi {}

impl ExchangeApi {
    /// Returns the newest table of major version [`MAJOR_VERSION`] in the chain that starts at `api`.
    ///
    /// # Safety
    /// `api` must be null or come from an exporter's capsule. Exporters never free their tables.
    #[must_use]
    pub(crate) unsafe fn compatible(api: *const ExchangeApi) -> Option<&'static ExchangeApi> {
        let mut header = api.cast::<ExchangeHeader>();
        while !header.is_null() {
            // SAFETY: `header` is not null, and tables of every version start with this header.
            let candidate = unsafe { &*header };
            if candidate.version.major == MAJOR_VERSION {
                // SAFETY: the major version matches, so the table has the layout of `ExchangeApi`.
                return Some(unsafe { &*header.cast::<ExchangeApi>() });
            }
            header = candidate.prev_api;
        }
        None
    }
}

impl DLDataType {
    /// Returns the element type, or None if the crate does not support it.
    fn supported(self) -> Option<DType> {
        match (self.code, self.bits, self.lanes) {
            (2, 32, 1) => Some(DType::F32),
            (2, 16, 1) => Some(DType::F16),
            (4, 16, 1) => Some(DType::Bf16),
            (10, 8, 1) => Some(DType::E4m3),
            (12, 8, 1) => Some(DType::E5m2),
            (14, 8, 1) => Some(DType::E8m0),
            (1, 8, 1) => Some(DType::U8),
            (0, 32, 1) => Some(DType::I32),
            (0, 64, 1) => Some(DType::I64),
            _ => None,
        }
    }

    /// Returns the name that torch uses for this type, for error messages.
    fn name(self) -> String {
        let Self { code, bits, lanes } = self;
        let lanes = if lanes == 1 { String::new() } else { format!("x{lanes}") };
        match code {
            0 => format!("int{bits}{lanes}"),
            1 => format!("uint{bits}{lanes}"),
            2 => format!("float{bits}{lanes}"),
            5 => format!("complex{bits}{lanes}"),
            6 => "bool".into(),
            _ => format!("DLPack type {code} of {bits} bits{lanes}"),
        }
    }
}

/// The parts of a [`View`]: data pointer, element type, device, and layout.
type Parts = (*mut u8, DType, Device, Matrices);

impl DLTensor {
    /// Returns a tensor without memory, for an exporter to fill in.
    pub(crate) const fn empty() -> Self {
        Self {
            data: std::ptr::null_mut(),
            device: DLDevice { device_type: 0, device_id: 0 },
            ndim: 0,
            dtype: DLDataType { code: 0, bits: 0, lanes: 0 },
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            byte_offset: 0,
        }
    }

    /// Returns the tensor as a matrix to read or, if `batch` is set, as a batch of matrices along its first
    /// dimension. Error messages call the tensor `arg`.
    ///
    /// # Safety
    /// The tensor must have been filled in by an exporter, and its memory must stay readable for `'a`.
    pub(crate) unsafe fn view<'a>(&self, arg: impl Into<Arg>, batch: bool) -> Result<View<'a>, Error> {
        // SAFETY: the caller guarantees that an exporter filled in the tensor.
        let (ptr, dtype, device, (shape, strides, (count, stride))) =
            unsafe { self.parts(arg.into(), batch) }?;
        // SAFETY: the exporter's shape and strides stay within its memory, which the caller keeps readable
        // for 'a.
        Ok(unsafe { View::from_raw(ptr, dtype, device, shape, strides).batched(count, stride) })
    }

    /// Returns the tensor as a matrix or a batch to write. Takes the arguments of [`Self::view`].
    ///
    /// # Safety
    /// The tensor must have been filled in by an exporter, and its memory must stay writable for `'a`.
    pub(crate) unsafe fn view_mut<'a>(&self, arg: impl Into<Arg>, batch: bool) -> Result<ViewMut<'a>, Error> {
        // SAFETY: the caller guarantees that an exporter filled in the tensor.
        let (ptr, dtype, device, (shape, strides, (count, stride))) =
            unsafe { self.parts(arg.into(), batch) }?;
        // SAFETY: the exporter's shape and strides stay within its memory, which the caller keeps writable
        // for 'a.
        Ok(unsafe { ViewMut::from_raw(ptr, dtype, device, shape, strides).batched(count, stride) })
    }

    /// Returns the device of the tensor, or None if operations do not support it.
    #[must_use]
    pub(crate) fn device(&self) -> Option<Device> {
        match self.device.device_type {
            CPU | CUDA_HOST => Some(Device::Cpu),
            CUDA | CUDA_MANAGED => Some(Device::Cuda(self.device.device_id)),
            _ => None,
        }
    }

    /// # Safety
    /// `shape` and `strides` must have been filled in by an exporter.
    unsafe fn parts(&self, arg: Arg, batch: bool) -> Result<Parts, Error> {
        let Some(dtype) = self.dtype.supported() else {
            return Err(Error::ForeignDType { arg, got: self.dtype.name() });
        };
        let Some(device) = self.device() else {
            return Err(Error::Value {
                arg,
                got: format!("on a device of DLPack type {}", self.device.device_type),
                expected: "on cpu or cuda".into(),
            });
        };
        let ndim = usize::try_from(self.ndim).unwrap_or(0);
        // SAFETY: an exporter provides `ndim` sizes and, unless `strides` is null, `ndim` strides.
        let (shape, strides) = unsafe { (list(self.shape, ndim), list(self.strides, ndim)) };
        let of_shape = contiguous(shape);
        let strides = if strides.len() == shape.len() { strides } else { &of_shape };
        let layout = matrices(arg, shape, strides, batch)?;
        let offset = usize::try_from(self.byte_offset).unwrap_or(0);
        let ptr = self.data.cast::<u8>().wrapping_add(offset);
        Ok((ptr, dtype, device, layout))
    }
}

/// Returns the numbers at a pointer, or no numbers if it is null.
///
/// # Safety
/// `start` must be null or point to `len` numbers that live for `'a`.
pub(crate) unsafe fn list<'a>(start: *const i64, len: usize) -> &'a [i64] {
    if start.is_null() {
        return &[];
    }
    // SAFETY: `start` is not null, so it points to `len` numbers that live for 'a.
    unsafe { slice::from_raw_parts(start, len) }
}

fn contiguous(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i];
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(shape: &mut [i64], strides: Option<&mut [i64]>, dtype: DLDataType) -> DLTensor {
        DLTensor {
            data: std::ptr::dangling_mut::<u64>().cast(),
            device: DLDevice { device_type: CPU, device_id: 0 },
            ndim: shape.len() as i32,
            dtype,
            shape: shape.as_mut_ptr(),
            strides: strides.map_or(std::ptr::null_mut(), <[i64]>::as_mut_ptr),
            byte_offset: 4,
        }
    }

    const F32: DLDataType = DLDataType { code: 2, bits: 32, lanes: 1 };

    #[test]
    fn struct_layout_matches_dlpack_h() {
        assert_eq!(size_of::<DLTensor>(), 48);
        assert_eq!(std::mem::offset_of!(DLTensor, shape), 24);
        assert_eq!(std::mem::offset_of!(ExchangeApi, dltensor_from_py_object_no_sync), 40);
    }

    #[test]
    fn null_strides_mean_contiguous_and_byte_offset_is_added() {
        let (mut shape, start) = ([2, 3, 4], std::ptr::dangling::<u64>() as usize);
        // SAFETY: `shape` outlives the view, and no element is read.
        let view = unsafe { tensor(&mut shape, None, F32).view("x", false) }.unwrap();
        assert_eq!((view.shape(), view.row_stride(), view.col_stride()), ((6, 4), 4, 1));
        assert_eq!(view.ptr() as usize, start + 4);
    }

    #[test]
    fn unsupported_layouts_and_dtypes_name_the_argument() {
        let (mut shape, mut strides) = ([2, 3, 4], [4, 8, 1]);
        let int16 = DLDataType { code: 0, bits: 16, lanes: 1 };
        // SAFETY: `shape` and `strides` outlive the calls, and no element is read.
        let (layout, dtype) = unsafe {
            (
                tensor(&mut shape, Some(&mut strides), F32).view("x", false).unwrap_err(),
                tensor(&mut shape, None, int16).view(Arg::Item("outs", 3), false).unwrap_err(),
            )
        };
        assert!(layout.to_string().starts_with("x is of shape [2, 3, 4] with strides [4, 8, 1]"));
        assert!(dtype.to_string().starts_with("outs[3] has dtype int16"));
    }

    #[test]
    fn compatible_finds_an_older_table_in_the_chain() {
        let table = |major, prev_api| ExchangeApi {
            header: ExchangeHeader { version: DLPackVersion { major, minor: 0 }, prev_api },
            owning: [std::ptr::null_mut(); 3],
            dltensor_from_py_object_no_sync: None,
            current_work_stream: None,
        };
        let mut old = table(1, std::ptr::null_mut());
        let new = table(2, (&raw mut old).cast());
        // SAFETY: both tables outlive their use here.
        let (older, none) =
            unsafe { (ExchangeApi::compatible(&raw const new), ExchangeApi::compatible(std::ptr::null())) };
        assert_eq!(older.unwrap().header.version.major, 1);
        assert!(none.is_none());
    }
}
