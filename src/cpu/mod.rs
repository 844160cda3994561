//! The CPU backend: vector code for the instruction set found at run time, on a pool of threads.
//!
//! - `types` compiles one source for each element type and format, `simd` for each instruction set; `convert`
//!   has the branch-free conversions, `rows` the loops over contiguous elements.
//! - `walk` takes a matrix of any strides through them, `tile` transposes bytes.
//! - `pool` splits work over threads, also in a forked process; `float_env` keeps a caller's flush-to-zero out.
//! - `tensorwise`, `blocks`, `codes`, `adamw`, `random` and `sum_rows` are the operations. They are called with validated arguments.

mod access;
mod adamw;
mod blocks;
mod codes;
mod convert;
mod float_env;
mod pool;
mod random;
mod rows;
mod simd;
mod sum_rows;
mod tensorwise;
mod tile;
mod types;
mod walk;

pub use simd::{Level, set_simd, simd};

pub(crate) use adamw::*;
pub(crate) use blocks::*;
pub(crate) use codes::*;
pub(crate) use random::*;
pub(crate) use sum_rows::*;
pub(crate) use tensorwise::*;
