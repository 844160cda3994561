//! The first CUDA device, through the driver API: the primary context, which the library uses as well, a
//! separate stream, and events to measure time.
//!
//! Invariants:
//! - The context is made current on the thread that opens the machine, and criterion runs everything on that
//!   thread.
//! - The driver aligns memory to 256 bytes, which the fastest kernels require.
//! - Rounds are queued one after the other without waiting, between two events. If a kernel takes less time
//!   than its launch (some microseconds), the launch is measured.

use std::ffi::{CStr, c_int};
use std::time::Duration;

use cudarc::driver::sys;
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use fp8rs::{DType, Device, Stream};

use crate::machine::{Case, Machine, Plan};

const SHAPE: (usize, usize) = (8192, 8192);
/// The number of tokens of two long sequences by the hidden size of Llama-3-8B's feed-forward layer.
const LARGE: (usize, usize) = (16384, 14336);

pub(crate) struct Cuda {
    stream: sys::CUstream,
    begin: sys::CUevent,
    end: sys::CUevent,
}

/// Returns the driver's message for an error code.
fn check(call: &str, code: sys::CUresult) -> Result<(), String> {
    if code == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: the library is loaded, since it returned `code`. `text` is a valid place for the result.
    let known = unsafe { sys::cuGetErrorString(code, &raw mut text) } == sys::CUresult::CUDA_SUCCESS;
    if !known || text.is_null() {
        return Err(format!("{call}: error {}", code as u32));
    }
    // SAFETY: the driver's string is static and ends in NUL.
    Err(format!("{call}: {}", unsafe { CStr::from_ptr(text) }.to_string_lossy()))
}

/// Fails the benchmark. A driver error here is a bug of the benchmark, or the device is out of memory.
fn must(call: &str, code: sys::CUresult) {
    if let Err(message) = check(call, code) {
        panic!("{message}");
    }
}

impl Cuda {
    /// Opens the first device, or returns the reason why the kernels cannot run.
    pub(crate) fn open() -> Result<Self, String> {
        // SAFETY: the call only checks whether the library can be opened.
        if !unsafe { sys::is_culib_present() } {
            return Err("there is no CUDA driver on this machine".into());
        }
        let (mut count, mut device): (c_int, sys::CUdevice) = (0, 0);
        // SAFETY: the library is loaded, and both pointers are to locals that outlive the calls.
        unsafe {
            check("cuInit", sys::cuInit(0))?;
            check("cuDeviceGetCount", sys::cuDeviceGetCount(&raw mut count))?;
            if count == 0 {
                return Err("the CUDA driver reports no device".into());
            }
            check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, 0))?;
        }
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: the driver is initialized, and `value` outlives the call.
            let code = unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, device) };
            check("cuDeviceGetAttribute", code).map(|()| value)
        };
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if (major, minor) < (8, 9) {
            return Err(format!("the device has compute capability {major}.{minor}, and FP8 requires 8.9"));
        }
        let mut context = std::ptr::null_mut();
        let (mut stream, mut begin, mut end) =
            (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
        let apart = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let timed = sys::CUevent_flags::CU_EVENT_DEFAULT as u32;
        // SAFETY: every pointer is to a local that outlives the call. The stream and the events are created
        // in the context that was made current before. All four live as long as the process.
        unsafe {
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&raw mut context, device))?;
            check("cuCtxSetCurrent", sys::cuCtxSetCurrent(context))?;
            check("cuStreamCreate", sys::cuStreamCreate(&raw mut stream, apart))?;
            check("cuEventCreate", sys::cuEventCreate(&raw mut begin, timed))?;
            check("cuEventCreate", sys::cuEventCreate(&raw mut end, timed))?;
        }
        Ok(Self { stream, begin, end })
    }
}

impl Machine for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn device(&self) -> Device {
        Device::Cuda(0)
    }

    fn stream(&self) -> Stream {
        // SAFETY: the stream belongs to this device and lives as long as the benchmark.
        unsafe { Stream::from_raw(self.stream.cast()) }
    }

    fn plan(&self) -> Plan {
        let of = |dtype, shape| Case { dtype, shape };
        let usual = of(DType::Bf16, SHAPE);
        let both = vec![usual, of(DType::Bf16, LARGE)];
        let types = [of(DType::F32, SHAPE), of(DType::F16, SHAPE)];
        Plan {
            tensorwise: vec![usual],
            lists: vec![of(DType::Bf16, LARGE)],
            basic: both.iter().copied().chain(types).collect(),
            blocks: vec![usual],
            mx: both,
            warm_up: Duration::from_millis(200),
            measurement: Duration::from_millis(300),
        }
    }

    fn time(&self, rounds: u64, round: &mut dyn FnMut()) -> Duration {
        let mut milliseconds = 0.0;
        // SAFETY: the event and the stream are alive and belong to the current context.
        must("cuEventRecord", unsafe { sys::cuEventRecord(self.begin, self.stream) });
        for _ in 0..rounds {
            round();
        }
        // SAFETY: the events and the stream are alive and belong to the current context. Both events were
        // recorded, and the later one is complete, when the time between them is read.
        unsafe {
            must("cuEventRecord", sys::cuEventRecord(self.end, self.stream));
            must("cuEventSynchronize", sys::cuEventSynchronize(self.end));
            let code = sys::cuEventElapsedTime(&raw mut milliseconds, self.begin, self.end);
            must("cuEventElapsedTime", code);
        }
        Duration::from_secs_f64(f64::from(milliseconds) / 1e3)
    }

    fn allocate(&self, bytes: usize) -> *mut u8 {
        let mut at = 0;
        // SAFETY: the context is current. The fill covers the new memory and is complete when this returns.
        unsafe {
            must("cuMemAlloc", sys::cuMemAlloc_v2(&raw mut at, bytes.max(1)));
            must("cuMemsetD8Async", sys::cuMemsetD8Async(at, 0, bytes, self.stream));
            must("cuStreamSynchronize", sys::cuStreamSynchronize(self.stream));
        }
        at as *mut u8
    }

    unsafe fn free(&self, at: *mut u8, _: usize) {
        // SAFETY: the caller guarantees that `at` comes from `allocate`. After the synchronization, no work
        // uses it.
        unsafe {
            must("cuStreamSynchronize", sys::cuStreamSynchronize(self.stream));
            must("cuMemFree", sys::cuMemFree_v2(at as u64));
        }
    }

    unsafe fn write(&self, to: *mut u8, from: &[u8]) {
        // SAFETY: the caller guarantees that `to` has space for the bytes. The slice is alive until the copy
        // is complete.
        unsafe {
            let code = sys::cuMemcpyHtoDAsync_v2(to as u64, from.as_ptr().cast(), from.len(), self.stream);
            must("cuMemcpyHtoDAsync", code);
            must("cuStreamSynchronize", sys::cuStreamSynchronize(self.stream));
        }
    }

    unsafe fn copy(&self, to: *mut u8, from: *const u8, bytes: usize) {
        // SAFETY: the caller guarantees that both ranges are valid and do not overlap.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(to as u64, from as u64, bytes, self.stream) };
        must("cuMemcpyDtoDAsync", code);
    }
}
