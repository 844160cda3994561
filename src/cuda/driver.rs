//! The driver: contexts, modules, launches. Nothing here owns what torch owns.
//!
//! What holds:
//! - libcuda is opened, and `cuInit` called, by the first CUDA argument; never by loading this library (a
//!   forked `DataLoader` worker that uses the CPU alone must not have a context).
//! - A launch runs in the primary context of the argument's device, which is torch's too. The thread's current
//!   context is put back afterwards; a thread that has none (autograd's) keeps the primary one.
//! - Contexts and modules are kept for the life of the process and never dropped.
//! - Modules are loaded whole at the first use of one of their kernels: use each operation once before its
//!   launches are captured in a graph.

use std::ffi::{CStr, c_void};
use std::sync::{Mutex, OnceLock};

use cudarc::driver::sys;
use cudarc::driver::sys::CUdevice_attribute as Attribute;

use super::table::{Kernel, MODULES};
use crate::error::Error;
use crate::ops::Stream;

/// Devices of one machine that can be used.
pub(super) const MAX_DEVICES: usize = 64;

/// What is known of one device.
pub(super) struct DeviceState {
    context: usize,
    modules: [OnceLock<usize>; MODULES.len()],
    /// Held while a module is loaded, so that two threads do not load it twice.
    loading: Mutex<()>,
    /// Streaming multiprocessors.
    pub(super) multiprocessors: u32,
}

static DEVICES: [OnceLock<DeviceState>; MAX_DEVICES] = [const { OnceLock::new() }; MAX_DEVICES];
static STARTING: Mutex<()> = Mutex::new(());

pub(super) fn check(call: &'static str, code: sys::CUresult) -> Result<(), Error> {
    if code == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(Error::Cuda { call: call.into(), message: describe(code) })
}

fn describe(code: sys::CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the library is loaded, since it has returned `code`; `text` is a place to write to.
    let known = unsafe { sys::cuGetErrorString(code, &raw mut text) } == sys::CUresult::CUDA_SUCCESS;
    if known && !text.is_null() {
        // SAFETY: the driver's string is static and ends in NUL.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    } else {
        format!("error {}", code as u32)
    }
}

/// The state of a device; its primary context is retained at the first call.
pub(super) fn device(ordinal: i32) -> Result<&'static DeviceState, Error> {
    let slot = usize::try_from(ordinal).ok().and_then(|i| DEVICES.get(i)).ok_or_else(|| Error::Value {
        arg: "device".into(),
        got: format!("cuda:{ordinal}"),
        expected: format!("cuda:0 to cuda:{}", MAX_DEVICES - 1).into(),
    })?;
    if let Some(state) = slot.get() {
        return Ok(state);
    }
    let _guard = STARTING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if slot.get().is_none() {
        let state = start(ordinal)?;
        // Nobody else sets it while the lock is held.
        let _ = slot.set(state);
    }
    slot.get().ok_or_else(|| Error::Cuda {
        call: "device".into(),
        message: format!("cuda:{ordinal} did not start"),
    })
}

fn start(ordinal: i32) -> Result<DeviceState, Error> {
    // SAFETY: only asks whether the library can be opened.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::Cuda {
            call: "libcuda".into(),
            message: "the driver library cannot be opened on this machine".into(),
        });
    }
    let mut device: sys::CUdevice = 0;
    // SAFETY: the library is there; every pointer is to a local that outlives the call.
    unsafe {
        check("cuInit", sys::cuInit(0))?;
        check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, ordinal))?;
    }
    let attribute = |which| -> Result<u32, Error> {
        let mut value = 0;
        // SAFETY: as above.
        check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, device) })?;
        Ok(value as u32)
    };
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    if (major, minor) < (8, 9) {
        return Err(Error::Unsupported {
            what: "FP8 conversion on CUDA".into(),
            reason: format!("cuda:{ordinal} has compute capability {major}.{minor}, and it takes 8.9").into(),
            instead: "use CPU tensors, or a GPU of the Ada, Hopper or a newer generation".into(),
        });
    }
    let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    // Last, so that a device that is refused is left without a context that nobody would release.
    let mut context: sys::CUcontext = std::ptr::null_mut();
    // SAFETY: as above.
    check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) })?;
    Ok(DeviceState {
        context: context as usize,
        modules: [const { OnceLock::new() }; MODULES.len()],
        loading: Mutex::new(()),
        multiprocessors,
    })
}

/// Puts the thread's context back.
struct Restore(Option<sys::CUcontext>);

impl Drop for Restore {
    fn drop(&mut self) {
        if let Some(previous) = self.0 {
            // SAFETY: `previous` was current when the guard was made. A failure here has no remedy.
            let _ = unsafe { sys::cuCtxSetCurrent(previous) };
        }
    }
}

/// Makes the device's primary context current until the guard is dropped.
fn enter(state: &DeviceState) -> Result<Restore, Error> {
    let wanted = state.context as sys::CUcontext;
    let mut current: sys::CUcontext = std::ptr::null_mut();
    // SAFETY: the driver is initialised: there is a device state.
    check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&raw mut current) })?;
    if current == wanted {
        return Ok(Restore(None));
    }
    // SAFETY: `wanted` is retained for the life of the process.
    check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(wanted) })?;
    // A thread that had none (autograd's) keeps the primary one, as after any call of the CUDA runtime.
    Ok(Restore((!current.is_null()).then_some(current)))
}

fn function(state: &DeviceState, kernel: &'static Kernel) -> Result<sys::CUfunction, Error> {
    let slot = kernel.module as usize;
    let module = if let Some(module) = state.modules[slot].get() {
        *module
    } else {
        let _guard = state.loading.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(module) = state.modules[slot].get() {
            *module
        } else {
            let mut module: sys::CUmodule = std::ptr::null_mut();
            let image = MODULES[slot].ptx.as_ptr().cast::<c_void>();
            // SAFETY: the image ends in NUL (`table` appends it); the context is current.
            check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut module, image) })?;
            let _ = state.modules[slot].set(module as usize);
            module as usize
        }
    };
    let mut function: sys::CUfunction = std::ptr::null_mut();
    // SAFETY: the module stays loaded; the name ends in NUL.
    check("cuModuleGetFunction", unsafe {
        sys::cuModuleGetFunction(&raw mut function, module as sys::CUmodule, kernel.entry.as_ptr())
    })?;
    Ok(function)
}

/// A launch's shape.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    pub(super) blocks: u64,
    pub(super) threads: u32,
}

/// A kernel takes one struct by value: this marks those structs.
///
/// # Safety
///
/// The type is `repr(C)`, without padding that the kernel would lay out in another way, and is the struct that
/// the kernel declares; its size is compared with the PTX by a test.
pub(super) unsafe trait Args: Copy {}

/// Queues a kernel on `stream` of the device. An empty grid is no launch.
pub(super) fn launch<A: Args>(
    ordinal: i32,
    stream: Stream,
    kernel: &'static Kernel,
    grid: Grid,
    args: &A,
) -> Result<(), Error> {
    if grid.blocks == 0 {
        return Ok(());
    }
    let blocks = i32::try_from(grid.blocks).map(|b| b as u32).map_err(|_| Error::Value {
        arg: "x".into(),
        got: format!("a tensor that needs {} thread blocks", grid.blocks),
        expected: "one that needs fewer than 2^31".into(),
    })?;
    debug_assert_eq!(size_of::<A>(), kernel.args_size, "{:?}", kernel.entry);
    let state = device(ordinal)?;
    let _restore = enter(state)?;
    let function = kernel.function(ordinal, || function(state, kernel))?;
    let mut parameters = [std::ptr::from_ref(args).cast_mut().cast::<c_void>()];
    // SAFETY: the kernel takes one struct of this type and size; its pointers are those of validated views,
    // which the caller keeps alive on the stream.
    check("cuLaunchKernel", unsafe {
        sys::cuLaunchKernel(
            function,
            blocks,
            1,
            1,
            grid.threads,
            1,
            1,
            // Kernels declare their shared memory.
            0,
            stream.0.cast(),
            parameters.as_mut_ptr(),
            std::ptr::null_mut(),
        )
    })
}

/// Queues a fill with zero bytes.
pub(super) fn zero(ordinal: i32, stream: Stream, at: *mut u8, bytes: usize) -> Result<(), Error> {
    if bytes == 0 {
        return Ok(());
    }
    let _restore = enter(device(ordinal)?)?;
    // SAFETY: `at` is an output (or a workspace) of at least `bytes` bytes on this device.
    check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(at as u64, 0, bytes, stream.0.cast()) })
}

/// Allocates zeroed device memory that is never freed: workspaces, made once a device and stream.
pub(super) fn workspace(ordinal: i32, bytes: usize) -> Result<*mut u8, Error> {
    let _restore = enter(device(ordinal)?)?;
    let mut at = 0;
    // SAFETY: the context is current; the memset is ordered before later use by its synchronous return.
    unsafe {
        check("cuMemAlloc", sys::cuMemAlloc_v2(&raw mut at, bytes))?;
        check("cuMemsetD8", sys::cuMemsetD8_v2(at, 0, bytes))?;
        check("cuCtxSynchronize", sys::cuCtxSynchronize())?;
    }
    Ok(at as *mut u8)
}

/// Whether the stream is being captured in a graph.
pub(super) fn capturing(ordinal: i32, stream: Stream) -> Result<bool, Error> {
    let _restore = enter(device(ordinal)?)?;
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the stream is torch's and alive.
    check("cuStreamIsCapturing", unsafe { sys::cuStreamIsCapturing(stream.0.cast(), &raw mut status) })?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}
