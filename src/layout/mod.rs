//! The layout of elements in memory: element types, devices, 2-D views, block shapes and formats.

mod block;
mod formats;
mod view;

pub use crate::format::{DType, Device};
pub use block::{Block, packed};
pub use formats::{BlockFormat, FORMATS};
pub(crate) use formats::{block_extents, holds_whole_blocks, list, narrowest_block};
pub(crate) use view::{Matrices, Matrix, matrices};
pub use view::{View, ViewMut, collapse};
