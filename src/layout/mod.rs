//! How elements lie in memory: element types, devices, 2-D views, block shapes.

mod block;
mod dtype;
mod view;

pub use block::{Block, packed};
pub use dtype::{DType, Device};
pub(crate) use view::Matrix;
pub use view::{View, ViewMut, collapse};
