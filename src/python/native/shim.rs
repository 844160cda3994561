//! The functions of torch's stable C interface that kernels use, looked up once.
//!
//! Written from `torch/csrc/stable/c/shim.h` and `torch/csrc/inductor/aoti_torch/c/shim.h` of torch 2.11.
//! Functions return 0, or an error code if they caught an exception.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use crate::layout::DType;

/// The torch version whose interface is declared below, 2.11.0, in the encoding of `torch_library_impl`.
const VERSION: u64 = 2 << 56 | 11 << 48;

/// An `at::Tensor` on torch's heap.
pub(super) type RawTensor = NonNull<c_void>;
/// An argument or result of a kernel.
pub(super) type Value = u64;
/// A kernel: (values, number of arguments, number of results). It may throw a C++ exception.
pub(super) type Kernel = unsafe extern "C-unwind" fn(*mut Value, u64, u64);
/// `CurrentWorkStream` of the DLPack exchange API.
pub(super) type CurrentStream = unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int;

type Out<T> = *mut T;

macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident = $symbol:literal: fn($($arg:ty),*) $(-> $result:ty)?;)*) => {
        /// Torch's functions and the numbers of its types.
        pub(super) struct Shim {
            $($(#[$doc])* pub(super) $name: unsafe extern "C" fn($($arg),*) $(-> $result)?,)*
            /// The number of each element type.
            dtypes: [(DType, i32); 8],
            /// The number of the CUDA device type.
            pub(super) cuda: i32,
            /// Returns the current stream of a CUDA device.
            pub(super) current_stream: CurrentStream,
            /// Frees the heap value of an optional argument.
            pub(super) delete_value: unsafe extern "C" fn(*mut c_void),
        }

        fn look_up(library: *mut c_void, current_stream: CurrentStream) -> Result<Shim, String> {
            // SAFETY: each symbol is a C function of the type that its header declares.
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
                        (DType::I32, number(c"aoti_torch_dtype_int32")?),
                        (DType::I64, number(c"aoti_torch_dtype_int64")?),
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
    /// (tensor, dimensions, sizes, strides, offset): creates another tensor over the same memory without
    /// calling an operator.
    reinterpret = c"aoti_torch__reinterpret_tensor":
        fn(RawTensor, i64, *const i64, *const i64, i64, Out<Option<RawTensor>>) -> i32;
    /// (destination, source, non-blocking)
    copy = c"aoti_torch_copy_": fn(RawTensor, RawTensor, i32) -> i32;
    list_size = c"torch_list_size": fn(*mut c_void, Out<usize>) -> i32;
    list_item = c"torch_list_get_item": fn(*mut c_void, usize, Out<Value>) -> i32;
    delete_list = c"torch_delete_list": fn(*mut c_void) -> i32;
    string_chars = c"torch_string_c_str": fn(*mut c_void, Out<*const c_char>) -> i32;
    delete_string = c"torch_delete_string": fn(*mut c_void) -> i32;
}

static SHIM: OnceLock<Shim> = OnceLock::new();

/// Looks up the functions on the first call.
pub(super) fn load(current_stream: CurrentStream) -> Result<&'static Shim, String> {
    if let Some(shim) = SHIM.get() {
        return Ok(shim);
    }
    let shim = look_up(loaded(c"libtorch_cpu.so")?, current_stream)?;
    Ok(SHIM.get_or_init(|| shim))
}

/// Returns the functions. Only kernels call this, and they are registered after [`load`].
pub(super) fn get() -> &'static Shim {
    SHIM.get().expect("loaded before a kernel is registered")
}

impl Shim {
    /// Returns a handle to the kernels of one dispatch key. The handle is never freed.
    pub(super) fn library(&self, key: &CStr) -> Result<*mut c_void, String> {
        let mut library = ptr::null_mut();
        // SAFETY: the strings live through the call, and torch copies them.
        let code = unsafe {
            (self.library_init)(c"fp8rs".as_ptr(), key.as_ptr(), c"fp8rs".as_ptr(), 0, &raw mut library)
        };
        if code == 0 {
            Ok(library)
        } else {
            Err(format!("torch failed to create a library for the dispatch key {key:?}"))
        }
    }

    /// Registers `kernel` for an operator.
    pub(super) fn implement(&self, library: *mut c_void, name: &CStr, kernel: Kernel) -> Result<(), String> {
        // SAFETY: the library handle is never freed. The kernel lives as long as the process, because Python
        // never unloads an extension module.
        let code = unsafe { (self.library_impl)(library, name.as_ptr(), kernel, VERSION) };
        if code == 0 { Ok(()) } else { Err(format!("torch failed to register a kernel for {name:?}")) }
    }

    /// Returns the element type with this number, or None if the crate does not support it.
    pub(super) fn dtype_of(&self, number: i32) -> Option<DType> {
        self.dtypes.iter().find(|(_, other)| *other == number).map(|(dtype, _)| *dtype)
    }

    /// Returns the number of an element type.
    pub(super) fn number(&self, dtype: DType) -> i32 {
        self.dtypes.iter().find(|(other, _)| *other == dtype).expect("every type has a number").1
    }
}

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// `RTLD_LAZY | RTLD_NOLOAD` of Linux.
const ONLY_IF_LOADED: c_int = 1 | 4;

/// Returns the handle of a library that this process has loaded.
pub(super) fn loaded(name: &CStr) -> Result<*mut c_void, String> {
    // SAFETY: `name` ends in NUL. The flags prevent loading, so no library code runs.
    let library = unsafe { dlopen(name.as_ptr(), ONLY_IF_LOADED) };
    if library.is_null() { Err(format!("{} is not loaded", name.to_string_lossy())) } else { Ok(library) }
}

/// Returns the `operator delete(void*)` that torch uses: from a preloaded allocator, or from torch's C++
/// library.
fn operator_delete(library: *mut c_void) -> Result<*mut c_void, String> {
    symbol(ptr::null_mut(), c"_ZdlPv").or_else(|_| symbol(library, c"_ZdlPv"))
}

/// Returns the address of a function in a library or its dependencies. With a null library, searches the
/// global scope.
pub(super) fn symbol(library: *mut c_void, name: &CStr) -> Result<*mut c_void, String> {
    // SAFETY: `library` is null or a loaded library, and `name` ends in NUL.
    let address = unsafe { dlsym(library, name.as_ptr()) };
    if address.is_null() { Err(format!("it has no {}", name.to_string_lossy())) } else { Ok(address) }
}
