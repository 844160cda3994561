//! The operations. Each validates all arguments, then dispatches by device. Nothing is written on an error other than
//! the driver's ([`crate::Error::Cuda`]).
//!
//! These rules hold for all operations:
//! - Inputs are fp32, bf16 or fp16 views with any strides; fp32 arithmetic, IEEE, no flush to zero.
//! - An output's dtype (E4M3 or E5M2) names the format. `rowwise` has the shape of `x`, `columnwise` is the
//!   transpose, with the shape (cols, rows). Either may be absent, not both.
//! - A scale that comes out NaN is the positive quiet NaN without payload, and so is an amax.
//! - Views may be batches of matrices. All arguments of a call then have the same number of matrices, and each matrix is
//!   processed by itself: scales and blocks never span two of them. A list takes a batch as so many entries.
//! - All arguments are on one device. On CUDA the work is queued on `stream`, and nothing synchronizes.

/// Calls the backend of a device, which takes views of one matrix each.
macro_rules! on {
    ($device:expr, $stream:expr, cpu: $cpu:expr, cuda: $cuda:expr) => {
        match $device {
            $crate::layout::Device::Cpu => {
                $cpu;
                Ok(())
            }
            #[cfg(feature = "cuda")]
            $crate::layout::Device::Cuda(_) => $cuda,
            #[cfg(not(feature = "cuda"))]
            $crate::layout::Device::Cuda(_) => cuda::absent($stream),
        }
    };
}

mod adamw;
mod blocks;
mod codes;
mod overlap;
mod random;
mod rows;
mod tensorwise;
mod validate;

pub use crate::spec::{
    AdamW, AdamWTensor, Axis, BlockPlane, BlockScale, BlockSpec, Given, Hyper, Numbers, ScaleRule, Stream,
    Target,
};
pub use adamw::*;
pub use blocks::*;
pub use codes::*;
pub use random::*;
pub use rows::*;
pub use tensorwise::*;

/// Sets what is called where the driver has no memory left for a workspace, before it is asked once more: what gives back
/// memory that another allocator of this process keeps for later. The first call counts.
pub fn when_device_memory_lacks(release: fn()) {
    #[cfg(feature = "cuda")]
    crate::cuda::when_memory_lacks(release);
    #[cfg(not(feature = "cuda"))]
    let _ = release;
}
