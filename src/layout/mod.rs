//! The layout of elements in memory: element types, devices, 2-D views, block shapes.

mod block;
mod view;

pub use crate::format::{DType, Device};
pub use block::{Block, packed};
pub(crate) use view::{Matrices, Matrix, matrices};
pub use view::{View, ViewMut, collapse};
