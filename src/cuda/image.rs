//! The code that the driver loads: prebuilt machine code, or one entry of the PTX.
//!
//! The driver compiles PTX when it is loaded, which takes seconds for a whole module. Modules are therefore
//! also embedded as machine code, for the generations in [`Target`]. In other cases (a newer GPU, an older
//! driver, `CUDA_FORCE_PTX_JIT=1`), only the entry that is launched is extracted from the PTX and loaded.
//! Both are compressed, because the kernels of a module are similar and differ mostly in types.

use std::ffi::CStr;

use super::modules::Module;
use crate::error::Error;

/// A generation that machine code is built for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    /// Ada.
    Sm89,
    /// Hopper.
    Sm90,
    /// Data center Blackwell: compute capability 10.0 and others with the same major version.
    Sm100,
}

impl Target {
    /// Returns the target for a compute capability, or None if no machine code is built for it.
    pub(super) fn of(major: u32, minor: u32) -> Option<Self> {
        match (major, minor) {
            (8, 9) => Some(Self::Sm89),
            (9, _) => Some(Self::Sm90),
            (10, _) => Some(Self::Sm100),
            _ => None,
        }
    }
}

/// Returns whether the driver's environment variable that disables machine code is set.
pub(super) fn ptx_is_forced() -> bool {
    std::env::var_os("CUDA_FORCE_PTX_JIT").is_some_and(|value| !value.is_empty() && value != "0")
}

impl Module {
    /// Returns the module's machine code, or `None` if it does not decompress.
    pub(super) fn machine_code(&self, target: Target) -> Option<Vec<u8>> {
        unpacked(self.machine_code[target as usize])
    }

    /// Returns the module's PTX, or `None` if it does not decompress.
    pub(super) fn ptx(&self) -> Option<String> {
        String::from_utf8(unpacked(self.packed_ptx)?).ok()
    }
}

fn unpacked(mut packed: &[u8]) -> Option<Vec<u8>> {
    let mut code = Vec::new();
    lzma_rs::lzma_decompress(&mut packed, &mut code).ok().map(|()| code)
}

const ENTRY: &str = ".visible .entry ";

/// Splits a module's PTX into the declarations that all entries share, and the entries with their names.
fn parts(ptx: &str) -> (&str, impl Iterator<Item = (&str, &str)>) {
    let at = ptx.find(ENTRY).unwrap_or(ptx.len());
    let (shared, mut remaining) = ptx.split_at(at);
    let entries = std::iter::from_fn(move || {
        let after = remaining.strip_prefix(ENTRY)?;
        let end = after.find(ENTRY).map_or(remaining.len(), |at| at + ENTRY.len());
        let (entry, others) = remaining.split_at(end);
        remaining = others;
        Some((after.split('(').next().unwrap_or(after), entry))
    });
    (shared, entries)
}

/// Returns the PTX of one entry of a module, ending in NUL.
pub(super) fn one_entry(ptx: &str, name: &CStr) -> Result<Vec<u8>, Error> {
    let (shared, mut entries) = parts(ptx);
    let Some((_, entry)) = entries.find(|(entry_name, _)| entry_name.as_bytes() == name.to_bytes()) else {
        let message = format!("{} is not in its module", name.to_string_lossy());
        return Err(Error::Cuda { call: "module".into(), message });
    };
    Ok([shared.as_bytes(), entry.as_bytes(), b"\0"].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::{kernels, modules};

    /// Entries do not refer to each other, so that the shared declarations and one entry form a module.
    #[test]
    fn modules_consist_of_shared_declarations_and_independent_entries() {
        for module in modules() {
            let ptx = module.ptx().expect("it decompresses");
            let (shared, entries) = parts(&ptx);
            let whole: String = std::iter::once(shared).chain(entries.map(|(_, entry)| entry)).collect();
            assert!(whole == ptx, "{}", module.name);
            assert!(!shared.contains(".entry"), "{}", module.name);
            for word in [".func", "call", ".extern", ".alias"] {
                assert!(!ptx.split_whitespace().any(|w| w == word), "{}: {word}", module.name);
            }
            // All declarations come before the first entry.
            for (name, entry) in parts(&ptx).1 {
                let body = entry.find('{').map(|at| &entry[at..]).expect("an entry has a body");
                let (mut depth, mut closed) = (0, false);
                for line in body.lines() {
                    assert!(
                        !closed || line.trim().is_empty() || line.trim().starts_with("//"),
                        "{name}: {line}"
                    );
                    depth += line.matches('{').count() as i32 - line.matches('}').count() as i32;
                    closed = depth == 0;
                }
                assert!(closed, "{name}");
            }
        }
    }

    #[test]
    fn one_entry_extracts_each_kernel() {
        let mut all = kernels();
        all.sort_by_key(|kernel| kernel.module.name);
        for kernels in all.chunk_by(|a, b| std::ptr::eq(a.module, b.module)) {
            let ptx = kernels[0].module.ptx().expect("it decompresses");
            for kernel in kernels {
                assert_one_entry(&ptx, kernel.entry);
            }
            assert!(one_entry(&ptx, c"am").is_err());
        }
    }

    fn assert_one_entry(ptx: &str, entry: &CStr) {
        let cut = one_entry(ptx, entry).expect("it is there");
        let text = CStr::from_bytes_with_nul(&cut).expect("one NUL, at the end");
        let text = text.to_str().expect("ASCII");
        let name = entry.to_str().expect("ASCII");
        assert!(text.starts_with(".version "));
        assert_eq!(text.matches(".entry").count(), 1);
        assert!(text.contains(&format!(".entry {name}(")));
    }

    #[test]
    fn machine_code_contains_every_entry_for_every_target() {
        for module in modules() {
            let ptx = module.ptx().expect("it decompresses");
            for (target, flags) in [(Target::Sm89, 89), (Target::Sm90, 90), (Target::Sm100, 100)] {
                let code = module.machine_code(target).expect("it decompresses");
                assert_eq!(&code[..4], b"\x7fELF", "{}", module.name);
                // e_flags of the ELF header: the architecture, which is in the second byte for Blackwell and
                // newer.
                let architecture = if flags < 100 { code[48] } else { code[49] };
                assert_eq!(architecture, flags, "{}", module.name);
                for (name, _) in parts(&ptx).1 {
                    let section = format!(".text.{name}\0");
                    assert!(code.windows(section.len()).any(|w| w == section.as_bytes()), "{name}");
                }
            }
        }
    }

    #[test]
    fn target_depends_on_the_compute_capability() {
        let of = |major, minor| Target::of(major, minor);
        assert_eq!([of(8, 9), of(9, 0)], [Some(Target::Sm89), Some(Target::Sm90)]);
        assert_eq!([of(10, 0), of(10, 3)], [Some(Target::Sm100); 2]);
        assert_eq!([of(8, 6), of(11, 0), of(12, 0)], [None; 3]);
    }
}
