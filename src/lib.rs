//! FP8 quantization for training: CUDA and CPU kernels that agree byte for byte.
//!
//! The operations are in [`ops`]. The crate does not depend on Python; the extension module is an optional
//! feature. A module imports only modules that are listed below it (`tools/check_arrows.py` checks this):
//!
//! ```text
//! python   the extension module `fp8rs._core` (feature "python")
//! dlpack   the DLPack ABI and its C exchange API
//! ops      one function per operation: validates all arguments, then dispatches by device
//! cpu      SIMD and threads          cuda   driver loading, module cache, launches
//! spec     argument types that ops, cpu and cuda share
//! layout   views, block shapes, the table of block formats
//! error    the error enum
//! format   E4M3, E5M2, E8M0, element types, the scale rule: defines the bytes
//! ```
//!
//! Glossary:
//!
//! - **scale**: the factor that recovers a value, `x ~ code * scale`. **amax**: the absolute maximum that a
//!   scale is computed from.
//! - **plane**: the codes and scales of one direction. The *rowwise* plane has the shape of `x`. The
//!   *columnwise* plane is the transpose, and its blocks run along the rows of the transpose.
//! - **block**: elements that share a scale. In the CUDA launch code, "block" also means a thread block where
//!   threads are mentioned. **grid**: the blocks of a matrix, and the shape of its scales. **line**: a row or
//!   a column that shares one scale.
//! - **row offset**: for a part of a matrix, the row of the whole matrix at which the part begins. **block
//!   offset**: the number of rows of the part's first block that lie before the part.
//! - **column scale**: one factor per column, multiplied into the rowwise plane only.
//! - **given**: a given amax or scale is an argument. Otherwise, the call computes it.
//! - **strip**, **chunk**, **piece** (CPU): a strip is 128 rows and holds whole blocks. A chunk is 512
//!   columns of a strip and stays in the cache. A piece is the work that a thread takes at a time. **tile**:
//!   a rectangle that is written by rows and read by columns. On CUDA, a tile is also the work of one thread
//!   block.
//! - **workspace**, **slot** (CUDA): memory that is zero between launches. The thread blocks of one launch
//!   use it to reduce values and to synchronize.
//!
//! ```
//! use fp8rs::{DType, ScaleRule, Stream, View, ViewMut, ops};
//!
//! let x = [1.0_f32, -2.0, 3.0, 448.0];
//! let (mut codes, mut scale) = ([0_u8; 4], [0_f32]);
//! ops::quantize_current(
//!     View::from_slice(&x, 2, 2)?,
//!     ScaleRule::default(),
//!     ViewMut::from_slice(&mut scale, 1, 1)?,
//!     Some(ViewMut::from_bytes(&mut codes, DType::E4m3, 2, 2)?),
//!     None,
//!     Stream::default(),
//! )?;
//! assert_eq!(scale, [1.0]);
//! assert_eq!(codes, [0x38, 0xC0, 0x44, 0x7E]);
//! # Ok::<(), fp8rs::Error>(())
//! ```

mod cpu;
mod cuda;
#[cfg(any(feature = "python", test))]
#[cfg_attr(not(feature = "python"), allow(dead_code, reason = "tests use a part of it"))]
mod dlpack;
mod error;
mod format;
mod layout;
pub mod ops;
mod spec;

#[cfg(feature = "python")]
mod python;

#[cfg(test)]
mod tests;

pub use error::{Arg, Error};
pub use format::Fp8Format;
pub use format::wide::Wide;
pub use layout::{Block, BlockFormat, DType, Device, FORMATS, View, ViewMut, packed};
pub use ops::{ScaleRule, Stream};
