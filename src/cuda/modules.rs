//! Modules and kernels: the embedded code, and the argument struct of each entry.
//!
//! A module is a static that is defined with [`module!`] next to its kernels. `tools/build_ptx.py` builds its PTX
//! from `kernels/NAME.cu` and its machine code from the PTX; both are checked in. All modules support every device
//! that has FP8 conversions.
//!
//! A kernel is a static that is defined with [`kernel!`] or [`by_types!`] next to the code that launches it.
//! It takes one struct by value. A test compares the size of every entry's parameter with the size of that
//! struct.

use std::ffi::CStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use cudarc::driver::sys;

use super::MAX_DEVICES;
use crate::error::Error;
use crate::format::Fp8Format;
use crate::layout::DType;

/// Embedded PTX and machine code.
pub(super) struct Module {
    /// The name of the source, `kernels/NAME.cu`.
    #[cfg(test)]
    pub(super) name: &'static str,
    /// The PTX, compressed (LZMA). Launches read it through `ptx()`.
    pub(super) packed_ptx: &'static [u8],
    /// Machine code for each [`Target`](super::image::Target), compressed (LZMA).
    pub(super) machine_code: [&'static [u8]; 3],
    /// The machine code that each device loaded. `None` if there is no machine code for the device, or if the
    /// driver rejected it.
    pub(super) loaded: [OnceLock<Option<usize>>; MAX_DEVICES],
}

/// Returns the slots of a module that no device has loaded.
pub(super) const fn not_loaded() -> [OnceLock<Option<usize>>; MAX_DEVICES] {
    [const { OnceLock::new() }; MAX_DEVICES]
}

/// `embedded!("folder", "name")` is a built file of a module.
macro_rules! embedded {
    ($folder:literal, $name:literal) => {
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda/", $folder, "/", $name, ".lzma"))
    };
}

/// `module!("name")` defines the module of `kernels/name.cu`.
macro_rules! module {
    ($name:literal) => {
        $crate::cuda::modules::Module {
            #[cfg(test)]
            name: $name,
            packed_ptx: $crate::cuda::modules::embedded!("ptx", $name),
            machine_code: [
                $crate::cuda::modules::embedded!("cubin/sm_89", $name),
                $crate::cuda::modules::embedded!("cubin/sm_90", $name),
                $crate::cuda::modules::embedded!("cubin/sm_100", $name),
            ],
            loaded: $crate::cuda::modules::not_loaded(),
        }
    };
}

/// One entry of a module.
pub(super) struct Kernel {
    pub(super) module: &'static Module,
    pub(super) entry: &'static CStr,
    /// The size of the kernel's argument struct.
    pub(super) args_size: usize,
    functions: [AtomicUsize; MAX_DEVICES],
}

impl Kernel {
    pub(super) const fn new(module: &'static Module, entry: &'static [u8], args_size: usize) -> Self {
        let Ok(entry) = CStr::from_bytes_with_nul(entry) else { panic!("the name must end in NUL") };
        Self { module, entry, args_size, functions: [const { AtomicUsize::new(0) }; MAX_DEVICES] }
    }

    /// Returns the function on a device. The first call loads it with `find`, holding the device's `loading`
    /// lock. If two threads launch a kernel for the first time, one waits and uses the function that the
    /// other loaded.
    pub(super) fn function(
        &self,
        ordinal: i32,
        loading: &Mutex<()>,
        find: impl FnOnce() -> Result<sys::CUfunction, Error>,
    ) -> Result<sys::CUfunction, Error> {
        let slot = &self.functions[ordinal as usize];
        let loaded = || match slot.load(Ordering::Acquire) {
            0 => None,
            address => Some(address as sys::CUfunction),
        };
        if let Some(function) = loaded() {
            return Ok(function);
        }
        let _guard = loading.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = loaded() {
            return Ok(function);
        }
        let function = find()?;
        slot.store(function as usize, Ordering::Release);
        Ok(function)
    }
}

/// `kernel!(MODULE, "entry", Args)` defines one kernel.
macro_rules! kernel {
    ($module:ident, $entry:expr, $args:ty) => {
        $crate::cuda::modules::Kernel::new(&$module, concat!($entry, "\0").as_bytes(), size_of::<$args>())
    };
}

/// `by_input!(MODULE, "name", Args)` defines a kernel for each input type, `name_f32` and so on.
macro_rules! by_input {
    ($module:ident, $name:expr, $args:ty) => {
        [
            $crate::cuda::modules::kernel!($module, concat!($name, "_f32"), $args),
            $crate::cuda::modules::kernel!($module, concat!($name, "_bf16"), $args),
            $crate::cuda::modules::kernel!($module, concat!($name, "_f16"), $args),
        ]
    };
}

/// `by_types!(MODULE, "name", Args)` defines a kernel for each input type and format, `name_f32_e4m3` and so
/// on.
macro_rules! by_types {
    ($module:ident, $name:expr, $args:ty) => {
        [
            $crate::cuda::modules::by_format!($module, concat!($name, "_f32"), $args),
            $crate::cuda::modules::by_format!($module, concat!($name, "_bf16"), $args),
            $crate::cuda::modules::by_format!($module, concat!($name, "_f16"), $args),
        ]
    };
}

/// `by_format!(MODULE, "name", Args)` defines a kernel for each format, `name_e4m3` and so on.
macro_rules! by_format {
    ($module:ident, $name:expr, $args:ty) => {
        [
            $crate::cuda::modules::kernel!($module, concat!($name, "_e4m3"), $args),
            $crate::cuda::modules::kernel!($module, concat!($name, "_e5m2"), $args),
        ]
    };
}

pub(super) use {by_format, by_input, by_types, embedded, kernel, module};

/// Kernels for each input type.
pub(super) type ByInput = [Kernel; 3];
/// Kernels for each format.
pub(super) type ByFormat = [Kernel; 2];
/// Kernels for each input type and format.
pub(super) type ByTypes = [ByFormat; 3];

/// Returns the index of an input type in [`ByInput`] and [`ByTypes`].
pub(super) fn input_index(dtype: DType) -> usize {
    match dtype {
        DType::Bf16 => 1,
        DType::F16 => 2,
        _ => 0,
    }
}

/// Returns the index of a format in [`ByFormat`].
pub(super) fn format_index(format: Fp8Format) -> usize {
    match format {
        Fp8Format::E4m3 => 0,
        Fp8Format::E5m2 => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concurrent_first_launches_load_a_kernel_once() {
        static MODULE: Module = module!("amax");
        static KERNEL: Kernel = kernel!(MODULE, "amax", u64);
        let (loading, loads, barrier) = (Mutex::new(()), AtomicUsize::new(0), std::sync::Barrier::new(8));
        let load = || {
            let at = loads.fetch_add(1, Ordering::Relaxed) + 1;
            std::thread::sleep(std::time::Duration::from_millis(20));
            Ok(at as sys::CUfunction)
        };
        let functions = std::thread::scope(|scope| {
            let launch = || {
                barrier.wait();
                KERNEL.function(0, &loading, load).map(|f| f as usize)
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(launch)).collect();
            threads.into_iter().map(|t| t.join().expect("no panic").expect("it loads")).collect::<Vec<_>>()
        });
        assert_eq!((functions, loads.into_inner()), (vec![1; 8], 1));
    }

    /// Returns `(entry, size of its parameter in bytes)` for each entry of a module's PTX.
    fn entries(module: &Module) -> Vec<(String, usize)> {
        let ptx = module.ptx().expect("it decompresses");
        let mut entries = Vec::new();
        for part in ptx.split(".entry ").skip(1) {
            let (name, declaration) = part.split_once('(').expect("an entry has parameters");
            let (parameters, _) = declaration.split_once(')').expect("parameters end");
            let mut sizes = parameters.split(".param").skip(1).map(|p| {
                let (_, size) = p.split_once('[').expect("a struct by value is a byte array");
                size.split_once(']').expect("an array's size ends").0.parse::<usize>().expect("a number")
            });
            let size = sizes.next().expect("one parameter");
            assert_eq!(sizes.next(), None, "{name} takes more than one parameter");
            entries.push((name.trim().to_owned(), size));
        }
        entries
    }

    #[test]
    fn parameter_size_of_every_entry_matches_its_struct() {
        let kernels = crate::cuda::kernels();
        for module in crate::cuda::modules() {
            let launched: Vec<_> =
                kernels.iter().filter(|kernel| std::ptr::eq(kernel.module, module)).collect();
            let entries = entries(module);
            for (entry, size) in &entries {
                let kernel = launched
                    .iter()
                    .find(|kernel| kernel.entry.to_str() == Ok(entry))
                    .unwrap_or_else(|| panic!("{}: nothing launches {entry}", module.name));
                assert_eq!(kernel.args_size, *size, "{}: {entry}", module.name);
            }
            for kernel in launched {
                let name = kernel.entry.to_str().expect("ASCII");
                assert!(entries.iter().any(|(entry, _)| entry == name), "{}: no entry {name}", module.name);
            }
        }
    }

    #[test]
    fn every_source_is_a_module_with_kernels() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda/kernels");
        let mut sources = Vec::new();
        for file in std::fs::read_dir(folder).expect("the folder of the kernels") {
            let path = file.expect("a file").path();
            if path.extension().is_some_and(|extension| extension == "cu") {
                sources.push(path.file_stem().expect("a name").to_string_lossy().into_owned());
            }
        }
        sources.sort_unstable();
        let modules: Vec<_> = crate::cuda::modules().iter().map(|module| module.name).collect();
        assert_eq!(modules, sources);
    }
}
