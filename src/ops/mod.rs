//! The operations. Each validates all arguments, then dispatches by device. If an operation returns an error,
//! nothing was written, except for driver errors ([`crate::Error::Cuda`]).
//!
//! These rules hold for all operations:
//! - Inputs are fp32, bf16 or fp16 views with any strides. Arithmetic is IEEE fp32 without flushing
//!   subnormals to zero.
//! - An output's dtype (E4M3 or E5M2) selects the format. `rowwise` has the shape of `x`. `columnwise` is the
//!   transpose, with the shape (cols, rows). One of them may be absent.
//! - If a scale or an amax is NaN, it is the positive quiet NaN without payload.
//! - Views may be batches of matrices. All arguments of a call then have the same number of matrices, and
//!   each matrix is processed by itself: scales and blocks never span two matrices. In a list, a batch counts
//!   as one entry per matrix.
//! - All arguments are on one device. On CUDA, the work is queued on `stream` without synchronization.
//!
//! An operation chooses its backend in one place, with an exhaustive `match` on the device at its end. There is
//! no trait for backends: its 23 signatures would be written three times, in the trait and in two
//! implementations, and the `match` would remain.

mod adamw;
mod blocks;
mod codes;
mod combine;
mod glu;
mod groups;
mod norm;
mod overlap;
mod random;
mod rotation;
mod rows;
mod tensorwise;
mod validate;

pub use crate::format::activation::Activation;
pub use crate::format::e8m0::Rounding;
pub use crate::spec::{
    AdamW, AdamWTensor, Axis, BlockInputs, BlockPlane, BlockScale, BlockSpec, Combine, CombineBackward,
    Gated, Glu, Groups, Hyper, Norm, Numbers, Rotation, Routes, ScaleRule, Stream, Target, TensorPlanes,
};
pub use adamw::*;
pub use blocks::*;
pub use codes::*;
pub use combine::*;
pub use glu::*;
pub use groups::*;
pub use norm::*;
pub use random::*;
pub use rotation::*;
pub use rows::*;
pub use tensorwise::*;

/// Sets a function to call when the allocation of a workspace runs out of device memory, before it is
/// retried. The function should release memory that another allocator of this process caches. Only the first
/// call has an effect.
pub fn when_device_memory_lacks(release: fn()) {
    crate::cuda::when_memory_lacks(release);
}
