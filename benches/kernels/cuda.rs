//! The first CUDA device, through the driver: the primary context, which is the library's too, one stream of
//! its own, and events for the time.
//!
//! What holds:
//! - The context is made current on the thread that opens the machine, and criterion runs everything there.
//! - Memory comes from the driver, which aligns it to 256 bytes: what the fastest kernels want.
//! - Rounds are queued one after the other without waiting, between two events. So a kernel that takes less
//!   time than its launch (some microseconds) shows the launch.

use std::ffi::{CStr, c_int};
use std::time::Duration;

use cudarc::driver::sys;
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use fp8rs::{DType, Device, Stream};

use crate::machine::{Case, Machine, Plan};

const SHAPE: (usize, usize) = (8192, 8192);
/// The tokens of two long sequences by the hidden size of Llama-3-8B's feed-forward layer.
const LARGE: (usize, usize) = (16384, 14336);

pub(crate) struct Cuda {
    stream: sys::CUstream,
    begin: sys::CUevent,
    end: sys::CUevent,
}

/// The driver's words for a code that is not success.
fn check(call: &str, code: sys::CUresult) -> Result<(), String> {
    if code == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: the library is loaded, since it has returned `code`; `text` is a place to write to.
    let known = unsafe { sys::cuGetErrorString(code, &raw mut text) } == sys::CUresult::CUDA_SUCCESS;
    if !known || text.is_null() {
        return Err(format!("{call}: error {}", code as u32));
    }
    // SAFETY: the driver's string is static and ends in NUL.
    Err(format!("{call}: {}", unsafe { CStr::from_ptr(text) }.to_string_lossy()))
}

/// Fails the benchmark: what the driver refuses here is a mistake of the benchmark, or a full device.
fn must(call: &str, code: sys::CUresult) {
    if let Err(message) = check(call, code) {
        panic!("{message}");
    }
}

impl Cuda {
    /// The first device, or why there is none that runs the kernels.
    pub(crate) fn open() -> Result<Self, String> {
        // SAFETY: only asks whether the library can be opened.
        if !unsafe { sys::is_culib_present() } {
            return Err("there is no CUDA driver on this machine".into());
        }
        let (mut count, mut device): (c_int, sys::CUdevice) = (0, 0);
        // SAFETY: the library is there; both pointers are to locals that outlive the calls.
        unsafe {
            check("cuInit", sys::cuInit(0))?;
            check("cuDeviceGetCount", sys::cuDeviceGetCount(&raw mut count))?;
            if count == 0 {
                return Err("the CUDA driver shows no device".into());
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
            return Err(format!("the device has compute capability {major}.{minor}, and FP8 takes 8.9"));
        }
        let mut context = std::ptr::null_mut();
        let (mut stream, mut begin, mut end) =
            (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
        let apart = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let timed = sys::CUevent_flags::CU_EVENT_DEFAULT as u32;
        // SAFETY: every pointer is to a local that outlives the call; the stream and the events are made in
        // the context that is current by then. All four live as long as the process.
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
        // SAFETY: a stream of this device, which lives as long as the benchmark.
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
        // SAFETY: the events and the stream are alive, and of the current context.
        must("cuEventRecord", unsafe { sys::cuEventRecord(self.begin, self.stream) });
        for _ in 0..rounds {
            round();
        }
        // SAFETY: as above; both events have been recorded, and the later one has come to pass, when the time
        // between them is asked for.
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
        // SAFETY: the context is current; the fill is of the memory just made, and done when this returns.
        unsafe {
            must("cuMemAlloc", sys::cuMemAlloc_v2(&raw mut at, bytes.max(1)));
            must("cuMemsetD8Async", sys::cuMemsetD8Async(at, 0, bytes, self.stream));
            must("cuStreamSynchronize", sys::cuStreamSynchronize(self.stream));
        }
        at as *mut u8
    }

    unsafe fn free(&self, at: *mut u8, _: usize) {
        // SAFETY: the caller says that `at` is from `allocate`; nothing on the stream uses it any more.
        unsafe {
            must("cuStreamSynchronize", sys::cuStreamSynchronize(self.stream));
            must("cuMemFree", sys::cuMemFree_v2(at as u64));
        }
    }

    unsafe fn write(&self, to: *mut u8, from: &[u8]) {
        // SAFETY: the caller says that there is room; the slice is alive until the copy is done.
        unsafe {
            let code = sys::cuMemcpyHtoDAsync_v2(to as u64, from.as_ptr().cast(), from.len(), self.stream);
            must("cuMemcpyHtoDAsync", code);
            must("cuStreamSynchronize", sys::cuStreamSynchronize(self.stream));
        }
    }

    unsafe fn copy(&self, to: *mut u8, from: *const u8, bytes: usize) {
        // SAFETY: the caller says that both are there, and do not overlap.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(to as u64, from as u64, bytes, self.stream) };
        must("cuMemcpyDtoDAsync", code);
    }
}
