//! The CUDA driver: contexts, modules, launches. This module does not own anything that torch owns.
//!
//! Invariants:
//! - The first CUDA argument opens libcuda and calls `cuInit`. Loading this library does not, because a
//!   forked `DataLoader` worker that only uses the CPU must not have a context.
//! - A launch runs in the primary context of the argument's device, which torch uses as well. The thread's
//!   current context is restored afterwards. A thread without a context (autograd's threads) keeps the
//!   context of device 0, but not the context of another device.
//! - Contexts and modules are kept for the lifetime of the process.
//! - A kernel is loaded at its first launch. If its module has machine code for the device, that is loaded
//!   (milliseconds). Otherwise the driver compiles the kernel's entry of the PTX (`image`).
//! - The first use of a kernel or a workspace loads or allocates in relaxed capture mode ([`Relaxed`]), which
//!   does not invalidate a capture on this stream or in another thread.

use std::ffi::{CStr, c_void};
use std::sync::atomic::AtomicU32;
use std::sync::{Mutex, OnceLock};

use cudarc::driver::result::stream::StreamKind;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use cudarc::driver::sys::CUdevice_attribute as Attribute;

use super::modules::Kernel;
use super::{MAX_DEVICES, image};
use crate::error::Error;
use crate::spec::Stream;

/// State of one device.
pub(super) struct DeviceState {
    ordinal: i32,
    context: usize,
    /// The target whose machine code is loaded; `None` if the driver compiles PTX.
    target: Option<image::Target>,
    /// Held while a kernel is loaded, so that two threads do not load it twice.
    loading: Mutex<()>,
    /// Number of streaming multiprocessors.
    pub(super) multiprocessors: u32,
}

static DEVICES: [OnceLock<DeviceState>; MAX_DEVICES] = [const { OnceLock::new() }; MAX_DEVICES];
static STARTING: Mutex<()> = Mutex::new(());

/// Names the driver's function in its error.
pub(super) fn check<T>(call: &'static str, result: Result<T, DriverError>) -> Result<T, Error> {
    result.map_err(|error| {
        let code = error.0 as u32;
        // A driver has no text for the codes of newer drivers.
        let text = |text: Result<&CStr, DriverError>| {
            text.map_or_else(|_| format!("error {code}"), |text| text.to_string_lossy().into_owned())
        };
        let (message, name) = (text(error.error_string()), text(error.error_name()));
        Error::Driver { call: call.into(), message, code, name }
    })
}

/// Returns the state of a device. The first call retains its primary context.
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
    if let Some(state) = slot.get() {
        return Ok(state);
    }
    let state = start(ordinal)?;
    Ok(slot.get_or_init(|| state))
}

fn start(ordinal: i32) -> Result<DeviceState, Error> {
    // SAFETY: the call only checks whether the library can be opened.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::Cuda {
            call: "libcuda".into(),
            message: "the driver library cannot be opened on this machine; install the NVIDIA driver".into(),
        });
    }
    check("cuInit", result::init())?;
    let device = check("cuDeviceGet", result::device::get(ordinal))?;
    let attribute = |which| -> Result<u32, Error> {
        // SAFETY: the driver returned this device.
        let value = unsafe { result::device::get_attribute(device, which) };
        Ok(check("cuDeviceGetAttribute", value)? as u32)
    };
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    if (major, minor) < (8, 9) {
        return Err(Error::Unsupported {
            what: "FP8 conversion on CUDA".into(),
            reason: format!(
                "cuda:{ordinal} has compute capability {major}.{minor}, and 8.9 or newer is required"
            )
            .into(),
            instead: "use CPU tensors, or a GPU of the Ada, Hopper or a newer generation".into(),
        });
    }
    let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    // Retain the context last, so that an unsupported device is not left with a context that is never
    // released.
    // SAFETY: the driver returned this device.
    let context = check("cuDevicePrimaryCtxRetain", unsafe { result::primary_ctx::retain(device) })?;
    Ok(DeviceState {
        ordinal,
        context: context as usize,
        target: image::Target::of(major, minor).filter(|_| !image::ptx_is_forced()),
        loading: Mutex::new(()),
        multiprocessors,
    })
}

/// Restores the thread's context when dropped.
struct Restore(Option<sys::CUcontext>);

impl Drop for Restore {
    fn drop(&mut self) {
        if let Some(previous) = self.0 {
            // SAFETY: `previous` was current when the guard was created. A failure here cannot be handled.
            let _ = unsafe { result::ctx::set_current(previous) };
        }
    }
}

/// Makes the device's primary context current until the guard is dropped.
fn enter(state: &DeviceState) -> Result<Restore, Error> {
    let wanted = state.context as sys::CUcontext;
    let current = check("cuCtxGetCurrent", result::ctx::get_current())?;
    if current == Some(wanted) {
        return Ok(Restore(None));
    }
    // SAFETY: `wanted` is retained for the lifetime of the process.
    check("cuCtxSetCurrent", unsafe { result::ctx::set_current(wanted) })?;
    // The CUDA runtime treats a thread without a context (autograd's threads) as being on device 0. The
    // thread therefore keeps device 0's context, as after any runtime call, but must not end up on another
    // device.
    let keeps = current.is_none() && state.ordinal == 0;
    Ok(Restore((!keeps).then_some(current.unwrap_or(std::ptr::null_mut()))))
}

/// Allows this thread to load and allocate while any thread captures a graph, until dropped.
///
/// In the default mode, such calls fail while any thread captures, and invalidate its capture, because they
/// might wait for work that is only being recorded. The calls in this module do not wait for captured work.
pub(super) struct Relaxed(sys::CUstreamCaptureMode);

impl Relaxed {
    fn enter() -> Result<Self, Error> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the driver is initialized. `mode` is a local that receives the thread's previous mode.
        let code = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
        check("cuThreadExchangeStreamCaptureMode", code.result())?;
        Ok(Self(mode))
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: the driver is initialized, and the pointer is to a field that outlives the call. A failure
        // here cannot be handled.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut self.0) };
    }
}

/// Loads an image: a cubin, or PTX that ends in NUL.
fn load(image: &[u8]) -> Result<usize, Error> {
    // SAFETY: the image is complete, PTX ends in NUL, and a context is current.
    let module =
        check("cuModuleLoadData", unsafe { result::module::load_data(image.as_ptr().cast::<c_void>()) })?;
    Ok(module as usize)
}

/// Returns None if the driver rejected machine code, as a driver that is older than the assembler may do. The
/// PTX is loaded then, from that time on. A lack of memory passes, so it remains an error.
fn accepted(loaded: Result<usize, Error>) -> Result<Option<usize>, Error> {
    match loaded {
        Err(error) if error.is_out_of_memory() => Err(error),
        loaded => Ok(loaded.ok()),
    }
}

/// Loads and returns the kernel's function. The device's context must be current.
fn function(state: &DeviceState, kernel: &'static Kernel) -> Result<sys::CUfunction, Error> {
    let _relaxed = Relaxed::enter()?;
    let module = kernel.module;
    let slot = &module.loaded[state.ordinal as usize];
    if slot.get().is_none() {
        let code = state.target.and_then(|target| module.machine_code(target));
        let loaded = code.map_or(Ok(None), |code| accepted(load(&code)))?;
        // The device's lock is held, so no other thread sets the slot.
        let _ = slot.set(loaded);
    }
    let loaded = match slot.get() {
        Some(Some(loaded)) => *loaded,
        _ => load(&image::one_entry(&module.ptx().unwrap_or_default(), kernel.entry)?)?,
    };
    let registers = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS;
    // SAFETY: the module stays loaded, and the driver returned the function.
    unsafe {
        let function = result::module::get_function(loaded as sys::CUmodule, kernel.entry.to_owned());
        let function = check("cuModuleGetFunction", function)?;
        // Reading an attribute forces the driver to load the function now, rather than at the first launch,
        // when `_relaxed` is gone.
        check("cuFuncGetAttribute", result::function::get_function_attribute(function, registers))?;
        Ok(function)
    }
}

/// The shape of a launch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    pub(super) blocks: u64,
    pub(super) threads: u32,
}

/// Marker for structs that a kernel takes as its only parameter, by value.
///
/// # Safety
///
/// The type must be `repr(C)` and have the fields of the struct that the kernel declares.
/// `tests/kernel_arguments.rs` compares the fields, and a test of `modules` compares the size with the PTX.
pub(super) unsafe trait Args: Copy {}

/// Marks structs as [`Args`].
macro_rules! args {
    ($($name:ident $(<const $size:ident: usize>)?),+) => {$(
        // SAFETY: tests/kernel_arguments.rs checks that each struct in a list of this macro is `repr(C)`, and
        // compares its fields with the kernel's struct.
        unsafe impl$(<const $size: usize>)? $crate::cuda::driver::Args for $name$(<$size>)? {}
    )+};
}
pub(super) use args;

/// Queues a kernel on `stream` of the device. Does nothing if the grid is empty.
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
        expected: "a tensor that needs fewer than 2^31; split it".into(),
    })?;
    debug_assert_eq!(size_of::<A>(), kernel.args_size, "{:?}", kernel.entry);
    let state = device(ordinal)?;
    let _restore = enter(state)?;
    let function = kernel.function(ordinal, &state.loading, || function(state, kernel))?;
    let mut parameters = [std::ptr::from_ref(args).cast_mut().cast::<c_void>()];
    // SAFETY: the kernel takes one struct of this type and size. Its pointers come from validated views,
    // which the caller keeps alive until the work on the stream is done.
    let launched = unsafe {
        let (grid, threads) = ((blocks, 1, 1), (grid.threads, 1, 1));
        // Kernels declare their shared memory statically.
        result::launch_kernel(function, grid, threads, 0, stream.0.cast(), &mut parameters)
    };
    check("cuLaunchKernel", launched)
}

/// Queues a fill with zero bytes.
pub(super) fn zero(ordinal: i32, stream: Stream, at: *mut u8, bytes: usize) -> Result<(), Error> {
    if bytes == 0 {
        return Ok(());
    }
    let _restore = enter(device(ordinal)?)?;
    // SAFETY: `at` is an output or a workspace of at least `bytes` bytes on this device.
    check("cuMemsetD8Async", unsafe { result::memset_d8_async(at as u64, 0, bytes, stream.0.cast()) })
}

/// Allocates zeroed device memory for a workspace. It is never freed.
///
/// This works while a graph is captured. The fill runs on a separate stream, because waiting for the legacy
/// stream or the context is not allowed during a capture.
pub(super) fn workspace(ordinal: i32, bytes: usize) -> Result<*mut u8, Error> {
    let _restore = enter(device(ordinal)?)?;
    let _relaxed = Relaxed::enter()?;
    let stream = check("cuStreamCreate", result::stream::create(StreamKind::NonBlocking))?;
    let allocate = || {
        // SAFETY: the context is current. The memory is filled below before it is read.
        check("cuMemAlloc", unsafe { result::malloc_sync(bytes) })
    };
    let fill = |at| {
        // SAFETY: the memory at `at` has this size, and the stream is alive.
        unsafe {
            check("cuMemsetD8Async", result::memset_d8_async(at, 0, bytes, stream))?;
            check("cuStreamSynchronize", result::stream::synchronize(stream))?;
        }
        Ok(at as *mut u8)
    };
    let filled = retry_after_release(allocate, || RELEASE.get().copied()).and_then(fill);
    // SAFETY: the stream is not used again. A failure here leaves a stream behind, which does no harm.
    let _ = unsafe { result::stream::destroy(stream) };
    filled
}

/// Allocates a word of host memory that kernels of all devices can write to. It starts as 0 and is never
/// freed. The allocation works while a graph is captured.
pub(super) fn host_word(ordinal: i32) -> Result<&'static AtomicU32, Error> {
    let _restore = enter(device(ordinal)?)?;
    let _relaxed = Relaxed::enter()?;
    let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
    // SAFETY: the context is current. The memory is aligned to a page, and nothing else refers to it yet.
    // With unified addressing, kernels use its address on the host.
    unsafe {
        let at = check("cuMemHostAlloc", result::malloc_host(size_of::<u32>(), flags))?;
        at.cast::<u32>().write(0);
        Ok(AtomicU32::from_ptr(at.cast()))
    }
}

/// A function that releases device memory that other allocators cache.
static RELEASE: OnceLock<fn()> = OnceLock::new();

/// Sets the function that is called if the device is out of memory, before the allocation is retried.
pub(crate) fn when_memory_lacks(release: fn()) {
    let _ = RELEASE.set(release);
}

fn retry_after_release<T>(
    mut allocate: impl FnMut() -> Result<T, Error>,
    release: impl FnOnce() -> Option<fn()>,
) -> Result<T, Error> {
    match (allocate(), release()) {
        (Err(error), Some(release)) if error.is_out_of_memory() => {
            release();
            allocate()
        }
        (result, _) => result,
    }
}

/// Returns the ID of a stream, which is unique in this process. A handle is not: it may be reused after its
/// stream is destroyed.
pub(super) fn stream_id(ordinal: i32, stream: Stream) -> Result<u64, Error> {
    let _restore = enter(device(ordinal)?)?;
    let mut id = 0;
    // SAFETY: the stream is alive, because the caller queues work on it.
    let code = unsafe { sys::cuStreamGetId(stream.0.cast(), &raw mut id) };
    check("cuStreamGetId", code.result())?;
    Ok(id)
}

/// A graph that captures a stream's launches.
#[derive(Debug, Clone, Copy)]
pub(super) struct Capture {
    /// The ID of the capture, which is unique in this process.
    pub(super) id: u64,
    graph: sys::CUgraph,
}

/// Returns the graph that captures the stream, or None if the stream is not being captured.
pub(super) fn capture(ordinal: i32, stream: Stream) -> Result<Option<Capture>, Error> {
    let _restore = enter(device(ordinal)?)?;
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let mut id = 0;
    let mut graph: sys::CUgraph = std::ptr::null_mut();
    // SAFETY: the stream is alive, because the caller queues work on it. Null pointers are allowed for
    // results that are not needed.
    let code = unsafe {
        sys::cuStreamGetCaptureInfo_v2(
            stream.0.cast(),
            &raw mut status,
            &raw mut id,
            &raw mut graph,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
        )
    };
    check("cuStreamGetCaptureInfo", code.result())?;
    match status {
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(None),
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE => Ok(Some(Capture { id, graph })),
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED => {
            let invalidated = sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
            check("graph capture", Err(DriverError(invalidated)))
        }
    }
}

/// Registers `notify(data)` to be called once the captured graph and everything instantiated from it has run
/// and is destroyed. A thread of the driver calls it, and it must not call the driver. If this function
/// fails, `notify(data)` is called as well.
pub(super) fn when_destroyed(
    ordinal: i32,
    capture: Capture,
    notify: unsafe extern "C" fn(*mut c_void),
    data: *mut c_void,
) -> Result<(), Error> {
    let _restore = enter(device(ordinal)?)?;
    let mut object: sys::CUuserObject = std::ptr::null_mut();
    // The only value that the driver accepts: graph destruction does not wait for `notify`.
    let no_sync = sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32;
    let give_away = sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as u32;
    // SAFETY: `notify` accepts `data`. The graph is being captured into, which allows retaining objects.
    unsafe {
        let created = sys::cuUserObjectCreate(&raw mut object, data, Some(notify), 1, no_sync);
        if let Err(error) = check("cuUserObjectCreate", created.result()) {
            notify(data);
            return Err(error);
        }
        let retained = sys::cuGraphRetainUserObject(capture.graph, object, 1, give_away);
        check("cuGraphRetainUserObject", retained.result()).inspect_err(|_| {
            let _ = sys::cuUserObjectRelease(object, 1);
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUT_OF_MEMORY: u32 = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32;

    fn refused<T>(code: u32) -> Result<T, Error> {
        let words = String::new;
        Err(Error::Driver { call: "cuMemAlloc".into(), message: words(), code, name: words() })
    }

    #[test]
    fn only_rejected_machine_code_is_replaced_by_ptx() {
        let no_binary = sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU as u32;
        assert_eq!((accepted(Ok(7)), accepted(refused(no_binary))), (Ok(Some(7)), Ok(None)));
        assert!(accepted(refused(OUT_OF_MEMORY)).is_err());
    }

    #[test]
    fn allocation_is_retried_once_after_releasing_memory() {
        let other = 700;
        for (code, release, expected) in
            [(OUT_OF_MEMORY, Some((|| ()) as fn()), 2), (OUT_OF_MEMORY, None, 1), (other, Some(|| ()), 1)]
        {
            let mut attempts = 0;
            let result = retry_after_release(
                || {
                    attempts += 1;
                    if attempts == 1 { refused(code) } else { Ok(()) }
                },
                || release,
            );
            assert_eq!((attempts, result.is_ok()), (expected, expected == 2));
        }
    }
}
