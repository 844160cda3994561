//! The functions of torch's stable C interface that kernels use, looked up once.
//!
//! Written from `torch/csrc/stable/c/shim.h` and `torch/csrc/inductor/aoti_torch/c/shim.h`, as of torch 2.11. A
//! function gives 0, or an error code when it has caught an exception.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use crate::layout::DType;

/// The version of torch that the interface below is that of: 2.11.0, as `torch_library_impl` wants it.
const VERSION: u64 = 2 << 56 | 11 << 48;

/// An `at::Tensor` on torch's heap.
pub(super) type RawTensor = NonNull<c_void>;
/// An argument or result of a kernel.
pub(super) type Value = u64;
/// A kernel: the values, how many come in, how many go out. It may throw, as C++ does.
pub(super) type Kernel = unsafe extern "C-unwind" fn(*mut Value, u64, u64);
/// `CurrentWorkStream` of the DLPack exchange API.
pub(super) type CurrentStream = unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int;

type Out<T> = *mut T;

macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident = $symbol:literal: fn($($arg:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions, and what they say of torch's numbers.
        pub(super) struct Shim {
            $($(#[$doc])* pub(super) $name: unsafe extern "C" fn($($arg),*) $(-> $result)?,)*
            /// The number of each element type.
            dtypes: [(DType, i32); 6],
            /// The number of CUDA devices' type.
            pub(super) cuda: i32,
            /// The current stream of a CUDA device.
            pub(super) current_stream: CurrentStream,
            /// Frees a value that an optional argument is in.
            pub(super) delete_value: unsafe extern "C" fn(*mut c_void),
        }

        fn look_up(library: *mut c_void, current_stream: CurrentStream) -> Result<Shim, String> {
            // SAFETY: each symbol is a C function of the type that its header gives.
            unsafe {
                $(let $name = std::mem::transmute::<
                    *mut c_void, unsafe extern "C" fn($($arg),*) $(-> $result)?
                >(symbol(library, $symbol)?);)*
                let number = |name| symbol(library, name).map(|address| {
                    std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> i32>(address)()
                });
                Ok(Shim {
                    $($name,)*
                    dtypes: [
                        (DType::F32, number(c"aoti_torch_dtype_float32")?),
                        (DType::F16, number(c"aoti_torch_dtype_float16")?),
                        (DType::Bf16, number(c"aoti_torch_dtype_bfloat16")?),
                        (DType::E4m3, number(c"aoti_torch_dtype_float8_e4m3fn")?),
                        (DType::E5m2, number(c"aoti_torch_dtype_float8_e5m2")?),
                        (DType::E8m0, number(c"torch_dtype_float8_e8m0fnu")?),
                    ],
                    cuda: number(c"aoti_torch_device_type_cuda")?,
                    current_stream,
                    delete_value: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void)>(
                        operator_delete(library)?,
                    ),
                })
            }
        }
    };
}

functions! {
    library_init = c"aoti_torch_library_init_impl":
        fn(*const c_char, *const c_char, *const c_char, u32, Out<*mut c_void>) -> i32;
    library_impl = c"torch_library_impl": fn(*mut c_void, *const c_char, Kernel, u64) -> i32;
    delete_tensor = c"aoti_torch_delete_tensor_object": fn(RawTensor) -> i32;
    dtype = c"aoti_torch_get_dtype": fn(RawTensor, Out<i32>) -> i32;
    device_type = c"aoti_torch_get_device_type": fn(RawTensor, Out<i32>) -> i32;
    device_index = c"aoti_torch_get_device_index": fn(RawTensor, Out<i32>) -> i32;
    dim = c"aoti_torch_get_dim": fn(RawTensor, Out<i64>) -> i32;
    sizes = c"aoti_torch_get_sizes": fn(RawTensor, Out<*const i64>) -> i32;
    strides = c"aoti_torch_get_strides": fn(RawTensor, Out<*const i64>) -> i32;
    data = c"torch_get_const_data_ptr": fn(RawTensor, Out<*mut c_void>) -> i32;
    data_mut = c"torch_get_mutable_data_ptr": fn(RawTensor, Out<*mut c_void>) -> i32;
    empty_strided = c"aoti_torch_empty_strided":
        fn(i64, *const i64, *const i64, i32, i32, i32, Out<Option<RawTensor>>) -> i32;
    /// (of, dimensions, sizes, strides, offset): another tensor over the same memory; no operator is called.
    reinterpret = c"aoti_torch__reinterpret_tensor":
        fn(RawTensor, i64, *const i64, *const i64, i64, Out<Option<RawTensor>>) -> i32;
    /// (to, from, non-blocking)
    copy = c"aoti_torch_copy_": fn(RawTensor, RawTensor, i32) -> i32;
    list_size = c"torch_list_size": fn(*mut c_void, Out<usize>) -> i32;
    list_item = c"torch_list_get_item": fn(*mut c_void, usize, Out<Value>) -> i32;
    delete_list = c"torch_delete_list": fn(*mut c_void) -> i32;
    string_chars = c"torch_string_c_str": fn(*mut c_void, Out<*const c_char>) -> i32;
    delete_string = c"torch_delete_string": fn(*mut c_void) -> i32;
}

static SHIM: OnceLock<Shim> = OnceLock::new();

/// Looks the functions up, the first time.
pub(super) fn load(current_stream: CurrentStream) -> Result<&'static Shim, String> {
    if let Some(shim) = SHIM.get() {
        return Ok(shim);
    }
    let shim = look_up(loaded(c"libtorch_cpu.so")?, current_stream)?;
    Ok(SHIM.get_or_init(|| shim))
}

/// The functions; only kernels call it, which are registered after [`load`].
pub(super) fn get() -> &'static Shim {
    SHIM.get().expect("loaded before a kernel is registered")
}

impl Shim {
    /// A handle, kept for ever, to the kernels that one dispatch key has for our operators.
    pub(super) fn library(&self, key: &CStr) -> Result<*mut c_void, String> {
        let mut library = ptr::null_mut();
        // SAFETY: the strings live through the call; torch copies them.
        let code = unsafe {
            (self.library_init)(c"fp8rs".as_ptr(), key.as_ptr(), c"fp8rs".as_ptr(), 0, &raw mut library)
        };
        if code == 0 { Ok(library) } else { Err(format!("torch refused a library for {key:?}")) }
    }

    /// Makes `kernel` an operator's kernel.
    pub(super) fn implement(&self, library: *mut c_void, name: &CStr, kernel: Kernel) -> Result<(), String> {
        // SAFETY: a live library; the kernel lives as long as the process, as Python never unloads a module.
        let code = unsafe { (self.library_impl)(library, name.as_ptr(), kernel, VERSION) };
        if code == 0 { Ok(()) } else { Err(format!("torch refused a kernel for {name:?}")) }
    }

    /// The element type with this number, if it is one of ours.
    pub(super) fn known(&self, number: i32) -> Option<DType> {
        self.dtypes.iter().find(|(_, known)| *known == number).map(|(dtype, _)| *dtype)
    }

    /// The number of an element type.
    pub(super) fn number(&self, dtype: DType) -> i32 {
        self.dtypes.iter().find(|(known, _)| *known == dtype).expect("every type has a number").1
    }
}

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// `RTLD_LAZY | RTLD_NOLOAD` of Linux.
const ONLY_IF_LOADED: c_int = 1 | 4;

/// A library that this process has loaded, under its own name.
pub(super) fn loaded(name: &CStr) -> Result<*mut c_void, String> {
    // SAFETY: a string; nothing is loaded.
    let library = unsafe { dlopen(name.as_ptr(), ONLY_IF_LOADED) };
    if library.is_null() { Err(format!("{} is not loaded", name.to_string_lossy())) } else { Ok(library) }
}

/// `operator delete(void*)` as torch has it: a preloaded allocator's, or that of its C++ library.
fn operator_delete(library: *mut c_void) -> Result<*mut c_void, String> {
    symbol(ptr::null_mut(), c"_ZdlPv").or_else(|_| symbol(library, c"_ZdlPv"))
}

/// The address of a function in a library and what it links, or, of null, in what everybody sees.
pub(super) fn symbol(library: *mut c_void, name: &CStr) -> Result<*mut c_void, String> {
    // SAFETY: a loaded library, and a string.
    let address = unsafe { dlsym(library, name.as_ptr()) };
    if address.is_null() { Err(format!("it has no {}", name.to_string_lossy())) } else { Ok(address) }
}
