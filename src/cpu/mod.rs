//! The CPU backend: vector code for the instruction set that is detected at run time, on a thread pool.
//!
//! - `types` compiles a kernel for each element type and format, and `simd` for each instruction set.
//!   `convert` has the branch-free conversions, and `rows` the loops over contiguous elements.
//! - `walk` iterates over a matrix of any strides, and `tile` transposes bytes.
//! - `pool` distributes work over threads, also in a forked process. `float_env` disables a caller's
//!   flush-to-zero.
//! - `tensorwise`, `blocks`, `groups`, `norm`, `glu`, `rotation`, `combine`, `codes`, `adamw`, `random` and
//!   `sum_rows` implement the operations. Their arguments have been validated.

mod access;
mod adamw;
mod blocks;
mod codes;
mod combine;
mod convert;
mod float_env;
mod glu;
mod groups;
mod norm;
mod pool;
mod random;
mod rotation;
mod rows;
mod simd;
mod sum_rows;
mod tensorwise;
mod tile;
mod types;
mod walk;

#[cfg(test)]
pub(crate) use simd::on_each_level;
#[cfg(feature = "python")]
pub(crate) use simd::{Level, set_simd, simd};

pub(crate) use adamw::*;
pub(crate) use blocks::*;
pub(crate) use codes::*;
pub(crate) use combine::*;
pub(crate) use glu::*;
pub(crate) use groups::*;
pub(crate) use norm::*;
pub(crate) use random::*;
pub(crate) use rotation::*;
pub(crate) use sum_rows::*;
pub(crate) use tensorwise::*;
