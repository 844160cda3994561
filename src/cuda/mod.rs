//! The CUDA backend.
//!
//! Called with validated arguments, all on one CUDA device. What the CPU backend does to each byte holds
//! here, NaNs included: an amax, a scale or a dequantized value that is NaN is the positive quiet NaN without
//! payload (fp32 0x7FC00000, bf16 0x7FC0, fp16 0x7E00).
//!
//! - `driver`: contexts, loading, launches.
//! - `table`: the embedded modules and the kernels in them; `kernels/*.cu` are their sources, `ptx/*.ptx` and
//!   `cubin/*/*.lzma` what `tools/build_ptx.py` makes of them.
//! - `code`: what of a module the driver is given.
//! - `workspace`: where the blocks of one launch meet.
//! - `views`: what launches ask of views.
//! - the rest: an operation picks its kernel by how the views lie, and launches it. Nothing synchronizes.

#[cfg(feature = "cuda")]
mod blocks;
#[cfg(feature = "cuda")]
mod code;
#[cfg(feature = "cuda")]
mod codes;
#[cfg(feature = "cuda")]
mod driver;
#[cfg(feature = "cuda")]
mod table;
#[cfg(feature = "cuda")]
mod tensorwise;
#[cfg(feature = "cuda")]
mod views;
#[cfg(feature = "cuda")]
mod workspace;

#[cfg(feature = "cuda")]
pub(crate) use blocks::{block_amax, pack_scales, quantize_blocks, rebase, unpack_scales};
#[cfg(feature = "cuda")]
pub(crate) use codes::{dequantize, transpose};
#[cfg(feature = "cuda")]
pub(crate) use tensorwise::{
    amax, multi_amax, multi_quantize, multi_quantize_delayed, quantize, quantize_current, quantize_delayed,
    scale_from_amax,
};

#[cfg(not(feature = "cuda"))]
mod absent;
#[cfg(not(feature = "cuda"))]
pub(crate) use absent::*;

/// Every kernel that something launches.
#[cfg(all(test, feature = "cuda"))]
fn kernels() -> Vec<&'static table::Kernel> {
    [tensorwise::kernels(), codes::kernels(), blocks::kernels()].concat()
}
