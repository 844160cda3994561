//! The CUDA backend.
//!
//! Called with validated arguments, all on one CUDA device. What the CPU backend does to each byte holds
//! here, NaNs included: an amax, a scale or a dequantized value that is NaN is the positive quiet NaN without
//! payload (fp32 0x7FC00000, bf16 0x7FC0, fp16 0x7E00).
//!
//! - `driver`: contexts, loading, launches.
//! - `modules`: the embedded modules and the kernels in them; `kernels/*.cu` are their sources, `ptx/*.lzma` and
//!   `cubin/*/*.lzma` what `tools/build_ptx.py` makes of them.
//! - `image`: the part of a module that is loaded into the driver.
//! - `workspace`: what the blocks of one launch reduce in and wait at.
//! - `views`: what launches ask of views.
//! - the rest: an operation picks its kernel by how the views lie, and launches it. Nothing synchronizes.

#[cfg(feature = "cuda")]
mod adamw;
#[cfg(feature = "cuda")]
mod blocks;
#[cfg(feature = "cuda")]
mod codes;
#[cfg(feature = "cuda")]
mod driver;
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
    adamw::*, blocks::*, codes::*, driver::when_memory_lacks, random::*, sum_rows::*, tensorwise::*,
};

/// The number of CUDA devices of one process that fp8rs supports.
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

/// Every kernel that something launches.
#[cfg(all(test, feature = "cuda"))]
fn kernels() -> Vec<&'static modules::Kernel> {
    [
        adamw::kernels(),
        blocks::kernels(),
        codes::kernels(),
        random::kernels(),
        sum_rows::kernels(),
        tensorwise::kernels(),
    ]
    .concat()
}
