//! The layout of elements in memory: element types, devices, 2-D views, block shapes and formats.

mod block;
#[cfg(any(feature = "python", test))]
mod collapse;
mod formats;
mod view;

pub use crate::format::{DType, Device};
pub use block::{Block, packed};
#[cfg(feature = "python")]
pub(crate) use collapse::collapse;
#[cfg(any(feature = "python", test))]
pub(crate) use collapse::{Matrices, matrices};
pub use formats::{BlockFormat, FORMATS};
pub(crate) use formats::{block_extents, holds_whole_blocks, list, narrowest_block};
pub(crate) use view::Matrix;
pub use view::{View, ViewMut};
