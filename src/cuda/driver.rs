//! The driver: contexts, modules, launches. Nothing here owns what torch owns.
//!
//! What holds:
//! - libcuda is opened, and `cuInit` called, by the first CUDA argument; never by loading this library (a
//!   forked `DataLoader` worker that uses the CPU alone must not have a context).
//! - A launch runs in the primary context of the argument's device, which is torch's too. The thread's current
//!   context is put back afterwards; a thread that has none (autograd's) keeps that of device 0, but no other's.
//! - Contexts and modules are kept for the life of the process and never dropped.
//! - A kernel is loaded at its first launch: its module's machine code where there is some for the device
//!   (milliseconds), else its own entry of the PTX alone, which the driver compiles (`code`).
//! - First uses load and allocate in relaxed capture mode ([`Relaxed`]): neither a capture on this stream nor
//!   another thread's is broken by one.

use std::ffi::{CStr, c_char, c_void};
use std::sync::{Mutex, OnceLock};

use cudarc::driver::sys;
use cudarc::driver::sys::CUdevice_attribute as Attribute;

use super::modules::{Kernel, MODULES};
use super::{MAX_DEVICES, image};
use crate::error::Error;
use crate::spec::Stream;

/// What is known of one device.
pub(super) struct DeviceState {
    ordinal: i32,
    context: usize,
    capability: (u32, u32),
    /// What machine code is taken; `None` where the driver compiles PTX.
    target: Option<image::Target>,
    /// Modules of machine code; `None` where there is none, or the driver refused it.
    modules: [OnceLock<Option<usize>>; MODULES.len()],
    /// Held while a kernel is loaded, so that two threads do not load it twice.
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
    let words = [sys::cuGetErrorString, sys::cuGetErrorName].map(|ask| describe(code, ask));
    let [message, name] = words;
    Err(Error::Driver { call: call.into(), message, code: code as u32, name })
}

/// What one of the driver's functions says of a code.
fn describe(
    code: sys::CUresult,
    ask: unsafe fn(sys::CUresult, *mut *const c_char) -> sys::CUresult,
) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the library is loaded, since it has returned `code`; `text` is a place to write to.
    let known = unsafe { ask(code, &raw mut text) } == sys::CUresult::CUDA_SUCCESS;
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
        ordinal,
        context: context as usize,
        capability: (major, minor),
        target: image::Target::of(major, minor).filter(|_| !image::ptx_is_forced()),
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
    // To the CUDA runtime a thread without a context (autograd's) is on device 0. So it keeps that device's, as after
    // any call of the runtime, and must not find itself on another.
    let keeps = current.is_null() && state.ordinal == 0;
    Ok(Restore((!keeps).then_some(current)))
}

/// Lets this thread load and allocate while a graph is captured, by whichever thread, until dropped.
///
/// In the default mode such calls fail while any thread captures, and invalidate its capture: they might wait for
/// what is only being recorded. Nothing here does.
pub(super) struct Relaxed(sys::CUstreamCaptureMode);

impl Relaxed {
    fn enter() -> Result<Self, Error> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the driver is initialised; the mode is a local, and gets the thread's former one.
        check("cuThreadExchangeStreamCaptureMode", unsafe {
            sys::cuThreadExchangeStreamCaptureMode(&raw mut mode)
        })?;
        Ok(Self(mode))
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: as above. A failure here has no remedy.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut self.0) };
    }
}

/// Loads an image: a cubin, or PTX that ends in NUL.
fn load(image: &[u8]) -> Result<usize, Error> {
    let mut module: sys::CUmodule = std::ptr::null_mut();
    // SAFETY: the image is whole, and PTX ends in NUL; the context is current.
    check("cuModuleLoadData", unsafe {
        sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast::<c_void>())
    })?;
    Ok(module as usize)
}

/// The kernel's function, loaded now; the device's context is current.
fn function(state: &DeviceState, kernel: &'static Kernel) -> Result<sys::CUfunction, Error> {
    let _relaxed = Relaxed::enter()?;
    let module = &MODULES[kernel.module as usize];
    module.needs.check(module.name, state.ordinal, state.capability)?;
    // An older driver than the assembler's may refuse the machine code, and then takes the PTX.
    let machine = || state.target.and_then(|target| load(&module.machine_code(target)?).ok());
    let loaded = match state.modules[kernel.module as usize].get_or_init(machine) {
        Some(loaded) => *loaded,
        None => load(&image::one_entry(&module.ptx().unwrap_or_default(), kernel.entry)?)?,
    };
    let mut function: sys::CUfunction = std::ptr::null_mut();
    let mut registers = 0;
    // SAFETY: the module stays loaded; the name ends in NUL. Asking for an attribute loads what the driver would
    // otherwise leave until the first launch, outside of this guard.
    unsafe {
        check(
            "cuModuleGetFunction",
            sys::cuModuleGetFunction(&raw mut function, loaded as sys::CUmodule, kernel.entry.as_ptr()),
        )?;
        check(
            "cuFuncGetAttribute",
            sys::cuFuncGetAttribute(
                &raw mut registers,
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS,
                function,
            ),
        )?;
    }
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
    let function = kernel.function(ordinal, &state.loading, || function(state, kernel))?;
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

/// Allocates zeroed device memory that is never freed: workspaces.
///
/// Possible while a graph is captured: the fill runs on a stream of its own, since the legacy stream and the
/// context may not be waited for then.
pub(super) fn workspace(ordinal: i32, bytes: usize) -> Result<*mut u8, Error> {
    let _restore = enter(device(ordinal)?)?;
    let _relaxed = Relaxed::enter()?;
    let mut at = 0;
    let mut stream: sys::CUstream = std::ptr::null_mut();
    let non_blocking = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
    // SAFETY: the context is current; the fill is over before the memory is handed out.
    unsafe {
        check("cuStreamCreate", sys::cuStreamCreate(&raw mut stream, non_blocking))?;
        let allocate = || check("cuMemAlloc", sys::cuMemAlloc_v2(&raw mut at, bytes));
        let filled = again_when_released(allocate, || RELEASE.get().copied())
            .and_then(|()| check("cuMemsetD8Async", sys::cuMemsetD8Async(at, 0, bytes, stream)))
            .and_then(|()| check("cuStreamSynchronize", sys::cuStreamSynchronize(stream)));
        let _ = sys::cuStreamDestroy_v2(stream);
        filled?;
    }
    Ok(at as *mut u8)
}

/// What makes others' allocators give back the device memory that they keep for later.
static RELEASE: OnceLock<fn()> = OnceLock::new();

/// Sets what is called where device memory lacks, before it is asked for once more.
pub(crate) fn when_memory_lacks(release: fn()) {
    let _ = RELEASE.set(release);
}

fn again_when_released(
    mut allocate: impl FnMut() -> Result<(), Error>,
    release: impl FnOnce() -> Option<fn()>,
) -> Result<(), Error> {
    match (allocate(), release()) {
        (Err(error), Some(release)) if error.is_out_of_memory() => {
            release();
            allocate()
        }
        (result, _) => result,
    }
}

/// The number of a stream, which no other stream of this process gets; a handle is used again when its stream is gone.
pub(super) fn stream_id(ordinal: i32, stream: Stream) -> Result<u64, Error> {
    let _restore = enter(device(ordinal)?)?;
    let mut id = 0;
    // SAFETY: the stream is torch's and alive.
    check("cuStreamGetId", unsafe { sys::cuStreamGetId(stream.0.cast(), &raw mut id) })?;
    Ok(id)
}

/// A graph that a stream's launches are captured in.
#[derive(Debug, Clone, Copy)]
pub(super) struct Capture {
    /// No other capture of this process has it.
    pub(super) id: u64,
    graph: sys::CUgraph,
}

/// The graph that the stream is captured in, if it is.
pub(super) fn capture(ordinal: i32, stream: Stream) -> Result<Option<Capture>, Error> {
    let _restore = enter(device(ordinal)?)?;
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let mut id = 0;
    let mut graph: sys::CUgraph = std::ptr::null_mut();
    // SAFETY: the stream is torch's and alive; what is not asked for is null.
    check("cuStreamGetCaptureInfo", unsafe {
        sys::cuStreamGetCaptureInfo_v2(
            stream.0.cast(),
            &raw mut status,
            &raw mut id,
            &raw mut graph,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
        )
    })?;
    let active = status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED {
        return check("graph capture", sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED).map(|()| None);
    }
    Ok(active.then_some(Capture { id, graph }))
}

/// Has `tell(data)` called once the captured graph, and all that was made of it, are destroyed and have run.
/// It is called by a thread of the driver's, and must not call the driver; also if this fails.
pub(super) fn when_destroyed(
    ordinal: i32,
    capture: Capture,
    tell: unsafe extern "C" fn(*mut c_void),
    data: *mut c_void,
) -> Result<(), Error> {
    let _restore = enter(device(ordinal)?)?;
    let mut object: sys::CUuserObject = std::ptr::null_mut();
    // The driver's only value for the flags: nobody waits for `tell`.
    let no_sync = sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32;
    let give_away = sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as u32;
    // SAFETY: `tell` takes `data`; the graph is being captured into, which allows this.
    unsafe {
        let made = sys::cuUserObjectCreate(&raw mut object, data, Some(tell), 1, no_sync);
        if let Err(error) = check("cuUserObjectCreate", made) {
            tell(data);
            return Err(error);
        }
        let retained = sys::cuGraphRetainUserObject(capture.graph, object, 1, give_away);
        check("cuGraphRetainUserObject", retained).inspect_err(|_| {
            let _ = sys::cuUserObjectRelease(object, 1);
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_asked_for_once_more_when_others_gave_theirs_back() {
        let refused = |code| {
            let words = String::new;
            Err(Error::Driver { call: "cuMemAlloc".into(), message: words(), code, name: words() })
        };
        let (out_of_memory, other) = (sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32, 700);
        for (code, release, expected) in
            [(out_of_memory, Some((|| ()) as fn()), 2), (out_of_memory, None, 1), (other, Some(|| ()), 1)]
        {
            let mut asked = 0;
            let result = again_when_released(
                || {
                    asked += 1;
                    if asked == 1 { refused(code) } else { Ok(()) }
                },
                || release,
            );
            assert_eq!((asked, result.is_ok()), (expected, expected == 2));
        }
    }
}
