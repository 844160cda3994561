//! The CUDA backend.
//!
//! Arguments have been validated and are on one CUDA device. Results are byte-identical to the CPU backend's,
//! NaNs included: an amax, a scale or a dequantized value that is NaN is the positive quiet NaN without
//! payload (fp32 0x7FC00000, bf16 0x7FC0, fp16 0x7E00).
//!
//! - `driver`: contexts, loading, launches.
//! - `modules`: the types of modules and kernels, which are declared next to the code that launches them. The
//!   sources are `kernels/*.cu`. `tools/build_ptx.py` builds `ptx/*.lzma` and `cubin/*/*.lzma` from them.
//! - `image`: the part of a module that the driver loads.
//! - `workspace`: memory in which the blocks of one launch reduce values and synchronize.
//! - `views`: alignment and layout checks for launches.
//! - The other modules implement the operations. An operation selects a kernel for the layout of its views
//!   and launches it, without synchronization.

mod adamw;
mod blocks;
mod codes;
mod combine;
mod driver;
mod glu;
mod groups;
mod image;
mod modules;
mod norm;
mod random;
mod rotation;
mod sum_rows;
mod tensorwise;
mod views;
mod workspace;

pub(crate) use {
    adamw::*, blocks::*, codes::*, combine::*, driver::when_memory_lacks, glu::*, groups::*, norm::*,
    random::*, rotation::*, sum_rows::*, tensorwise::*,
};

/// The number of CUDA devices per process that fp8rs supports.
const MAX_DEVICES: usize = 64;

/// Returns every kernel that is launched anywhere.
#[cfg(test)]
fn kernels() -> Vec<&'static modules::Kernel> {
    [
        adamw::kernels(),
        blocks::kernels(),
        codes::kernels(),
        combine::kernels(),
        glu::kernels(),
        groups::kernels(),
        norm::kernels(),
        random::kernels(),
        rotation::kernels(),
        sum_rows::kernels(),
        tensorwise::kernels(),
    ]
    .concat()
}

/// Returns the modules of these kernels, sorted by name.
#[cfg(test)]
fn modules() -> Vec<&'static modules::Module> {
    let mut modules: Vec<_> = kernels().into_iter().map(|kernel| kernel.module).collect();
    modules.sort_by_key(|module| module.name);
    modules.dedup_by_key(|module| module.name);
    modules
}
