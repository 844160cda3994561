//! The table of block formats. Checks, messages, tests and benchmarks derive their lists of blocks from it.

use super::{Block, DType};

/// A way to scale the blocks of a matrix: the shape of a block, and the type of its scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockFormat {
    /// The name, as in the Python table (`quantize/formats.py`).
    pub name: &'static str,
    /// The shape of a block.
    pub block: Block,
    /// The type of a scale: fp32 or E8M0.
    pub scale_dtype: DType,
    /// Whether scales are stored by columns, so that the scales of adjacent rows are adjacent. The GEMM of the
    /// format requires this.
    pub scales_by_columns: bool,
    /// Whether an `AdamW` step updates and quantizes codes of this format in one pass.
    pub in_adamw: bool,
}

/// All block formats, one row each.
pub const FORMATS: [BlockFormat; 5] = [
    BlockFormat {
        name: "row",
        block: Block::ROW,
        scale_dtype: DType::F32,
        scales_by_columns: false,
        in_adamw: true,
    },
    BlockFormat {
        name: "1x128",
        block: Block { rows: 1, cols: 128 },
        scale_dtype: DType::F32,
        scales_by_columns: true,
        in_adamw: false,
    },
    BlockFormat {
        name: "128x128",
        block: Block { rows: 128, cols: 128 },
        scale_dtype: DType::F32,
        scales_by_columns: false,
        in_adamw: true,
    },
    BlockFormat {
        name: "1x32",
        block: Block { rows: 1, cols: 32 },
        scale_dtype: DType::E8m0,
        scales_by_columns: false,
        in_adamw: false,
    },
    BlockFormat {
        name: "32x32",
        block: Block { rows: 32, cols: 32 },
        scale_dtype: DType::E8m0,
        scales_by_columns: false,
        in_adamw: true,
    },
];

impl BlockFormat {
    /// Returns the format with this block and type of scale, or None if there is none.
    #[must_use]
    pub fn find(block: Block, scale_dtype: DType) -> Option<&'static Self> {
        FORMATS.iter().find(|format| format.block == block && format.scale_dtype == scale_dtype)
    }

    /// Lists the blocks of the formats that satisfy a condition, for error messages: "(1, 32) or (32, 32)".
    pub(crate) fn list_blocks(condition: impl Fn(&Self) -> bool) -> String {
        let selected = FORMATS.iter().filter(|format| condition(format));
        list(selected.map(|format| format.block.to_string()).collect())
    }
}

/// Returns the extents that blocks have, in ascending order. [`Block::ALL`] is the last one.
pub(crate) fn block_extents() -> Vec<usize> {
    let mut extents: Vec<usize> =
        FORMATS.iter().flat_map(|format| [format.block.rows, format.block.cols]).collect();
    extents.sort_unstable();
    extents.dedup();
    extents
}

/// Returns the number of columns of the narrowest block.
pub(crate) const fn narrowest_block() -> usize {
    let mut narrowest = Block::ALL;
    let mut i = 0;
    while i < FORMATS.len() {
        if FORMATS[i].block.cols < narrowest {
            narrowest = FORMATS[i].block.cols;
        }
        i += 1;
    }
    narrowest
}

/// Returns whether a rectangle of this size holds whole blocks of every format. Extents of the whole matrix are
/// exempt.
pub(crate) const fn holds_whole_blocks(rows: usize, cols: usize) -> bool {
    let mut i = 0;
    while i < FORMATS.len() {
        let block = FORMATS[i].block;
        let rows_fit = block.rows == Block::ALL || rows.is_multiple_of(block.rows);
        let cols_fit = block.cols == Block::ALL || cols.is_multiple_of(block.cols);
        if !(rows_fit && cols_fit) {
            return false;
        }
        i += 1;
    }
    true
}

/// Joins alternatives for a message: "a, b or c".
pub(crate) fn list(alternatives: Vec<String>) -> String {
    match alternatives.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        Some((last, _)) => last.clone(),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_blocks_are_read_from_the_table() {
        assert_eq!(
            BlockFormat::list_blocks(|format| format.scale_dtype == DType::E8m0),
            "(1, 32) or (32, 32)"
        );
        assert_eq!(BlockFormat::list_blocks(|format| format.name == "row"), "(1, all)");
        assert_eq!(narrowest_block(), 32);
        assert!(holds_whole_blocks(128, 512) && !holds_whole_blocks(128, 64));
    }

    #[test]
    fn extents_of_blocks_are_those_of_the_table_in_ascending_order() {
        let extents = block_extents();
        assert!(extents.is_sorted_by(|smaller, larger| smaller < larger));
        for format in &FORMATS {
            assert!(extents.contains(&format.block.rows) && extents.contains(&format.block.cols));
        }
        for extent in extents {
            assert!(FORMATS.iter().any(|format| [format.block.rows, format.block.cols].contains(&extent)));
        }
    }

    #[test]
    fn formats_have_distinct_names_and_blocks() {
        for (i, format) in FORMATS.iter().enumerate() {
            assert_eq!(BlockFormat::find(format.block, format.scale_dtype), Some(format));
            assert!(FORMATS[..i].iter().all(|other| other.name != format.name));
        }
    }
}
