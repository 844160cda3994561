//! The table of block formats, which Python compares with its own.

use pyo3::prelude::*;

use crate::layout::{Block, FORMATS};

functions!(block_formats);

/// A row of the table. In Python it is a dictionary.
#[derive(IntoPyObject)]
struct BlockFormat {
    name: &'static str,
    block: (i64, i64),
    scale_dtype: String,
    scales_by_columns: bool,
    in_adamw: bool,
}

/// Returns the table of block formats. A size of -1 is the whole extent of the matrix.
#[pyfunction]
fn block_formats() -> Vec<BlockFormat> {
    let extent = |size: usize| if size == Block::ALL { -1 } else { size as i64 };
    let row = |format: &crate::layout::BlockFormat| BlockFormat {
        name: format.name,
        block: (extent(format.block.rows), extent(format.block.cols)),
        scale_dtype: format.scale_dtype.to_string(),
        scales_by_columns: format.scales_by_columns,
        in_adamw: format.in_adamw,
    };
    FORMATS.iter().map(row).collect()
}
