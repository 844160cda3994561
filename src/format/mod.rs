//! Number formats. These scalar functions define the bytes that every backend is tested against.
//!
//! [`Fp8Format`] is E4M3 or E5M2. [`e8m0`] has the power-of-two scales of MX blocks, [`scale`] the fp32 scale
//! rule, and [`wide`] the high-precision types (fp32, bf16, fp16). [`adamw`] is an optimizer step, [`moments`]
//! the codes of its moments, [`random`] the random numbers for stochastic rounding, and `sum` (tests only) the
//! sums over ranks and over the rows of a token. [`groups`] has the bounds of experts' tokens, [`activation`] the
//! gated activations, and [`norm`] the norms. [`DType`] lists all element types, and [`Device`] the devices.

pub(crate) mod activation;
pub(crate) mod adamw;
mod dtype;
pub(crate) mod e8m0;
mod fp8;
pub(crate) mod groups;
pub(crate) mod moments;
pub(crate) mod norm;
pub(crate) mod random;
pub(crate) mod rotation;
pub(crate) mod scale;
#[cfg(test)]
pub(crate) mod sum;
pub(crate) mod wide;

pub use dtype::{DType, Device};
pub use fp8::Fp8Format;
