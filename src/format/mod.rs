//! Number formats: the definition that every backend is tested against, byte for byte.
//!
//! Scalar and obvious. [`Fp8Format`] is E4M3 or E5M2, [`e8m0`] the power-of-two scales of MX blocks,
//! [`scale`] the fp32 scale rule, [`wide`] the high-precision types (fp32, bf16, fp16), [`adamw`] an optimizer's step,
//! [`random`] the numbers that stochastic rounding takes, [`sum`] the sum over ranks. [`DType`] names all element
//! types, [`Device`] where they are.

pub mod adamw;
mod dtype;
pub mod e8m0;
mod fp8;
pub mod random;
pub mod scale;
pub mod sum;
pub mod wide;

pub use dtype::{DType, Device};
pub use fp8::Fp8Format;
