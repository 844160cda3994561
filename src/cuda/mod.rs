//! The CUDA backend.
//!
//! Arguments have been validated and are on one CUDA device. Results are byte-identical to the CPU backend's,
//! NaNs included: an amax, a scale or a dequantized value that is NaN is the positive quiet NaN without
//! payload (fp32 0x7FC00000, bf16 0x7FC0, fp16 0x7E00).
//!
//! - `driver`: contexts, loading, launches.
//! - `modules`: the embedded modules and their kernels. The sources are `kernels/*.cu`. `tools/build_ptx.py`
//!   builds `ptx/*.lzma` and `cubin/*/*.lzma` from them.
//! - `image`: the part of a module that the driver loads.
//! - `workspace`: memory in which the blocks of one launch reduce values and synchronize.
//! - `views`: alignment and layout checks for launches.
//! - The other modules implement the operations. An operation selects a kernel for the layout of its views
//!   and launches it, without synchronization.

#[cfg(feature = "cuda")]
mod adamw;
#[cfg(feature = "cuda")]
mod blocks;
#[cfg(feature = "cuda")]
mod codes;
#[cfg(feature = "cuda")]
mod combine;
#[cfg(feature = "cuda")]
mod driver;
#[cfg(feature = "cuda")]
mod groups;
#[cfg(feature = "cuda")]
mod image;
#[cfg(feature = "cuda")]
mod modules;
#[cfg(feature = "cuda")]
mod random;
#[cfg(feature = "cuda")]
mod sum_rows;
#[cfg(feature = "cuda")]
mod tensorwise;
#[cfg(feature = "cuda")]
mod views;
#[cfg(feature = "cuda")]
mod workspace;

#[cfg(feature = "cuda")]
pub(crate) use {
    adamw::*, blocks::*, codes::*, combine::*, driver::when_memory_lacks, groups::*, random::*, sum_rows::*,
    tensorwise::*,
};

/// The number of CUDA devices per process that fp8rs supports.
#[cfg(feature = "cuda")]
const MAX_DEVICES: usize = 64;

/// Replaces every operation in a build without CUDA.
#[cfg(not(feature = "cuda"))]
pub(crate) fn absent(_: crate::spec::Stream) -> Result<(), crate::Error> {
    Err(crate::Error::Unsupported {
        what: "CUDA".into(),
        reason: "this build has no CUDA backend".into(),
        instead: "use a CPU tensor, or build with the feature \"cuda\"".into(),
    })
}

/// Returns every kernel that is launched anywhere.
#[cfg(all(test, feature = "cuda"))]
fn kernels() -> Vec<&'static modules::Kernel> {
    [
        adamw::kernels(),
        blocks::kernels(),
        codes::kernels(),
        combine::kernels(),
        groups::kernels(),
        random::kernels(),
        sum_rows::kernels(),
        tensorwise::kernels(),
    ]
    .concat()
}
