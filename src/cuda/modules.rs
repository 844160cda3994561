//! The table of modules and kernels: the embedded code, and the argument struct of each entry.
//!
//! A module is a row of [`MODULES`]. `tools/build_ptx.py` builds its PTX from `kernels/NAME.cu` and its
//! machine code from the PTX; both are checked in. All modules support every device that has FP8 conversions.
//!
//! A kernel is a static that is defined with [`kernel!`] or [`by_types!`] next to the code that launches it.
//! It takes one struct by value. A test compares the size of every entry's parameter with the size of that
//! struct.

use std::ffi::CStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

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
}

macro_rules! machine_code {
    ($target:literal, $name:literal) => {
        include_bytes!(concat!("cubin/", $target, "/", $name, ".lzma"))
    };
}

macro_rules! modules {
    ($($id:ident = $name:literal;)*) => {
        /// A row of [`MODULES`].
        #[derive(Debug, Clone, Copy)]
        pub(super) enum ModuleId { $($id),* }

        /// All modules.
        pub(super) static MODULES: [Module; [$(ModuleId::$id),*].len()] = [
            $(Module {
                #[cfg(test)]
                name: $name,
                packed_ptx: include_bytes!(concat!("ptx/", $name, ".lzma")),
                machine_code: [
                    machine_code!("sm_89", $name),
                    machine_code!("sm_90", $name),
                    machine_code!("sm_100", $name),
                ],
            }),*
        ];
    };
}

modules! {
    AdamW = "adamw";
    AdamWBlocks = "adamw_blocks";
    Amax = "amax";
    BlockAmax = "block_amax";
    BlockLines = "block_lines";
    BlockSquare = "block_square";
    Cast = "cast";
    CastTranspose = "cast_transpose";
    Codes = "codes";
    Combine = "combine";
    Groups = "groups";
    Multi = "multi";
    MxLines = "mx_lines";
    MxRebase = "mx_rebase";
    MxRow = "mx_row";
    MxScales = "mx_scales";
    MxSquare = "mx_square";
    Random = "random";
    Row = "row";
    RowBoth = "row_both";
    Strided = "strided";
    SumRows = "sum_rows";
}

/// One entry of a module.
pub(super) struct Kernel {
    pub(super) module: ModuleId,
    pub(super) entry: &'static CStr,
    /// The size of the kernel's argument struct.
    pub(super) args_size: usize,
    functions: [AtomicUsize; MAX_DEVICES],
}

impl Kernel {
    pub(super) const fn new(module: ModuleId, entry: &'static [u8], args_size: usize) -> Self {
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
        let known =
            || Some(slot.load(Ordering::Acquire)).filter(|at| *at != 0).map(|at| at as sys::CUfunction);
        if let Some(function) = known() {
            return Ok(function);
        }
        let _guard = loading.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = known() {
            return Ok(function);
        }
        let function = find()?;
        slot.store(function as usize, Ordering::Release);
        Ok(function)
    }
}

/// `kernel!(Module, "entry", Args)` defines one kernel.
macro_rules! kernel {
    ($module:ident, $entry:expr, $args:ty) => {
        $crate::cuda::modules::Kernel::new(
            $crate::cuda::modules::ModuleId::$module,
            concat!($entry, "\0").as_bytes(),
            size_of::<$args>(),
        )
    };
}

/// `by_input!(Module, "name", Args)` defines a kernel for each input type, `name_f32` and so on.
macro_rules! by_input {
    ($module:ident, $name:expr, $args:ty) => {
        [
            $crate::cuda::modules::kernel!($module, concat!($name, "_f32"), $args),
            $crate::cuda::modules::kernel!($module, concat!($name, "_bf16"), $args),
            $crate::cuda::modules::kernel!($module, concat!($name, "_f16"), $args),
        ]
    };
}

/// `by_types!(Module, "name", Args)` defines a kernel for each input type and format, `name_f32_e4m3` and so
/// on.
macro_rules! by_types {
    ($module:ident, $name:expr, $args:ty) => {
        [
            [
                $crate::cuda::modules::kernel!($module, concat!($name, "_f32_e4m3"), $args),
                $crate::cuda::modules::kernel!($module, concat!($name, "_f32_e5m2"), $args),
            ],
            [
                $crate::cuda::modules::kernel!($module, concat!($name, "_bf16_e4m3"), $args),
                $crate::cuda::modules::kernel!($module, concat!($name, "_bf16_e5m2"), $args),
            ],
            [
                $crate::cuda::modules::kernel!($module, concat!($name, "_f16_e4m3"), $args),
                $crate::cuda::modules::kernel!($module, concat!($name, "_f16_e5m2"), $args),
            ],
        ]
    };
}

pub(super) use {by_input, by_types, kernel};

/// Kernels for each input type.
pub(super) type ByInput = [Kernel; 3];
/// Kernels for each input type and format.
pub(super) type ByTypes = [[Kernel; 2]; 3];

/// Returns the index of an input type in [`ByInput`] and [`ByTypes`].
pub(super) fn input_index(dtype: DType) -> usize {
    match dtype {
        DType::Bf16 => 1,
        DType::F16 => 2,
        _ => 0,
    }
}

/// Returns the index of a format in [`ByTypes`].
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
        static KERNEL: Kernel = kernel!(Amax, "amax", u64);
        let (loading, loads, barrier) = (Mutex::new(()), AtomicUsize::new(0), std::sync::Barrier::new(8));
        let load = || {
            let at = loads.fetch_add(1, Ordering::Relaxed) + 1;
            std::thread::sleep(std::time::Duration::from_millis(20));
            Ok(at as sys::CUfunction)
        };
        let found = std::thread::scope(|scope| {
            let launch = || {
                barrier.wait();
                KERNEL.function(0, &loading, load).map(|f| f as usize)
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(launch)).collect();
            threads.into_iter().map(|t| t.join().expect("no panic").expect("it loads")).collect::<Vec<_>>()
        });
        assert_eq!((found, loads.into_inner()), (vec![1; 8], 1));
    }

    /// Returns `(entry, size of its parameter in bytes)` for each entry of a module's PTX.
    fn entries(module: &Module) -> Vec<(String, usize)> {
        let ptx = module.ptx().expect("it decompresses");
        let mut found = Vec::new();
        for part in ptx.split(".entry ").skip(1) {
            let (name, rest) = part.split_once('(').expect("an entry has parameters");
            let (parameters, _) = rest.split_once(')').expect("parameters end");
            let mut sizes = parameters.split(".param").skip(1).map(|p| {
                let (_, size) = p.split_once('[').expect("a struct by value is a byte array");
                size.split_once(']').expect("an array's size ends").0.parse::<usize>().expect("a number")
            });
            let size = sizes.next().expect("one parameter");
            assert_eq!(sizes.next(), None, "{name} takes more than one parameter");
            found.push((name.trim().to_owned(), size));
        }
        found
    }

    #[test]
    fn parameter_size_of_every_entry_matches_its_struct() {
        let kernels = crate::cuda::kernels();
        let entries: Vec<_> = MODULES.iter().map(entries).collect();
        for (slot, module) in MODULES.iter().enumerate() {
            for (entry, size) in &entries[slot] {
                let kernel = kernels
                    .iter()
                    .find(|k| k.module as usize == slot && k.entry.to_str() == Ok(entry))
                    .unwrap_or_else(|| panic!("{}: nothing launches {entry}", module.name));
                assert_eq!(kernel.args_size, *size, "{}: {entry}", module.name);
            }
        }
        for kernel in kernels {
            let name = kernel.entry.to_str().expect("ASCII");
            let there = &entries[kernel.module as usize];
            assert!(there.iter().any(|(e, _)| e == name), "{:?}: no entry {name}", kernel.module);
        }
    }
}
