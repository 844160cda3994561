//! FP8 quantization for training: CUDA and CPU kernels that agree byte for byte.
//!
//! The crate is usable from Rust alone; Python is a feature of it. Arrows point down only (`tools/check_arrows.py`):
//!
//! ```text
//! python   the extension module `fp8rs._core` (feature "python")
//! dlpack   the DLPack ABI and the C exchange API
//! ops      one function an operation: validate everything, then dispatch by device
//! cpu      SIMD and threads          cuda   driver loading, module cache, launches
//! spec     what a call asks for: the words that the three above share
//! layout   views, block shapes
//! error    one enum
//! format   E4M3, E5M2, E8M0, element types, the scale rule: the definition
//! ```
//!
//! Words that mean one thing throughout:
//!
//! - **scale**: the factor that recovers the value, `x ~ code * scale`. **amax**: the absolute maximum that it is made of.
//! - **plane**: the codes and scales of one direction. The *rowwise* one has the shape of `x`; the *columnwise* one is the
//!   transpose, and its blocks run along the rows of the transpose.
//! - **block**: elements that share a scale; in the CUDA launches also a thread block, where "threads" stands near.
//!   **grid**: the blocks of a matrix, and the shape of its scales. **line**: a row or a column that shares one scale.
//! - **row offset**: the row of the whole matrix that a part of it begins with. **rows before**: those of the part's first
//!   block that lie before the part.
//! - **fold**: factors of the columns that are multiplied into the rowwise plane alone.
//! - **found**: an amax that was found in this call, as opposed to **given**.
//! - **strip**, **chunk**, **piece** (CPU): 128 rows that hold whole blocks; the 512 columns of it that stay in the cache;
//!   what one thread takes at a time. **tile**: a rectangle that is written as rows and read as columns; on CUDA also what
//!   one thread block takes.
//! - **workspace**, **slot** (CUDA): memory that is zero between launches, by which the thread blocks of one reduce and
//!   wait for each other.
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

pub mod cpu;
pub mod cuda;
pub mod dlpack;
pub mod error;
pub mod format;
pub mod layout;
pub mod ops;
mod spec;

#[cfg(feature = "python")]
mod python;

pub use error::Error;
pub use format::Fp8Format;
pub use layout::{Block, DType, Device, View, ViewMut};
pub use ops::{ScaleRule, Stream};
