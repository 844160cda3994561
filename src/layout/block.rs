//! Shapes of blocks and of their scales.

use std::borrow::Cow;
use std::fmt;

use crate::error::Error;

/// The shape of a block, whose elements share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Block {
    /// Rows of a block, or [`Block::ALL`].
    pub rows: usize,
    /// Columns of a block, or [`Block::ALL`].
    pub cols: usize,
}

impl Block {
    /// As rows or cols: the whole extent of the matrix.
    pub const ALL: usize = usize::MAX;
    /// One block, so one scale per tensor.
    pub const TENSOR: Self = Self { rows: Self::ALL, cols: Self::ALL };
    /// One scale per row.
    pub const ROW: Self = Self { rows: 1, cols: Self::ALL };

    /// Returns the number of blocks that cover a matrix, along its rows and its columns. A short last block
    /// counts. A block of the whole extent counts as one even if the extent is 0.
    #[must_use]
    pub fn grid(self, rows: usize, cols: usize) -> (usize, usize) {
        let blocks = |n: usize, block| if block == Self::ALL { 1 } else { n.div_ceil(block) };
        (blocks(rows, self.rows), blocks(cols, self.cols))
    }

    /// Returns the grid of blocks that `rows` rows touch, starting at row `row_offset` of the whole matrix.
    /// Zero rows touch no blocks, unless a block has all rows.
    #[must_use]
    pub fn grid_from(self, row_offset: usize, rows: usize, cols: usize) -> (usize, usize) {
        let block_offset = if rows == 0 { 0 } else { self.block_offset(row_offset) };
        self.grid(block_offset + rows, cols)
    }

    /// Returns the number of rows before `row_offset` in the block that contains it.
    #[must_use]
    pub fn block_offset(self, row_offset: usize) -> usize {
        if self.rows == Self::ALL { 0 } else { row_offset % self.rows }
    }

    /// Returns whether `rows` rows are whole blocks. If so, and if matrices of that height are stacked, no
    /// block spans two of them.
    #[must_use]
    pub(crate) const fn divides_rows(self, rows: usize) -> bool {
        self.rows != Self::ALL && rows.is_multiple_of(self.rows)
    }

    /// Returns whether a block is square, so that the scales of the transposed matrix are the transposed
    /// scales.
    #[must_use]
    pub const fn is_square(self) -> bool {
        self.rows == self.cols
    }

    /// Returns the error of an operation that does not support this block shape.
    pub(crate) fn unsupported(self, expected: impl Into<Cow<'static, str>>) -> Error {
        Error::Value { arg: "block".into(), got: self.to_string(), expected: expected.into() }
    }

    /// Returns the name of an extent in messages.
    pub(crate) fn extent_name(extent: usize) -> String {
        if extent == Self::ALL { "all".to_owned() } else { extent.to_string() }
    }

    /// Returns the block shape for the transposed matrix.
    #[must_use]
    pub const fn transposed(self) -> Self {
        Self { rows: self.cols, cols: self.rows }
    }
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}, {})", Self::extent_name(self.rows), Self::extent_name(self.cols))
    }
}

/// The packed layout of block scales for Blackwell's GEMM: tiles of 128x4 scales, row-major, 512 bytes each.
pub mod packed {
    /// Rows of a tile.
    pub const TILE_ROWS: usize = 128;
    /// Columns of a tile, one for each block.
    pub const TILE_COLS: usize = 4;
    /// Bytes of a tile.
    pub const TILE_BYTES: usize = TILE_ROWS * TILE_COLS;

    /// Returns the padded shape for `rows` data rows with `cols` blocks each. Saturates instead of
    /// overflowing.
    #[must_use]
    pub const fn padded(rows: usize, cols: usize) -> (usize, usize) {
        const fn up(size: usize, tile: usize) -> usize {
            match size.checked_next_multiple_of(tile) {
                Some(padded) => padded,
                None => usize::MAX,
            }
        }
        (up(rows, TILE_ROWS), up(cols, TILE_COLS))
    }

    /// Returns the number of bytes for `rows` data rows with `cols` blocks each. Saturates at [`isize::MAX`],
    /// which no allocation reaches.
    #[must_use]
    pub const fn bytes(rows: usize, cols: usize) -> usize {
        const MAX: usize = isize::MAX.cast_unsigned();
        let (rows, cols) = padded(rows, cols);
        let bytes = rows.saturating_mul(cols);
        if bytes < MAX { bytes } else { MAX }
    }

    /// Returns the index of the scale of data row `row`, block `col`, where each row has `cols` blocks.
    #[must_use]
    pub const fn index(row: usize, col: usize, cols: usize) -> usize {
        let tile = row / TILE_ROWS * cols.div_ceil(TILE_COLS) + col / TILE_COLS;
        let (r, c) = (row % TILE_ROWS, col % TILE_COLS);
        tile * TILE_BYTES + r % 32 * 16 + r / 32 * 4 + c
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_index_matches_the_128x4_layout() {
        assert_eq!(packed::padded(129, 5), (256, 8));
        assert_eq!(packed::index(0, 1, 8), 1);
        assert_eq!(packed::index(1, 0, 8), 16);
        assert_eq!(packed::index(32, 0, 8), 4);
        assert_eq!(packed::index(0, 4, 8), 512);
        assert_eq!(packed::index(128, 0, 5), 1024);
    }

    #[test]
    fn packed_sizes_saturate() {
        const MAX: usize = isize::MAX.cast_unsigned();
        assert_eq!(packed::bytes(129, 5), 2048);
        assert_eq!(packed::bytes(1 << 62, 0), 0);
        for (rows, cols) in
            [(1 << 61, 8), (1 << 62, 4), (MAX, 1), (1, MAX), (usize::MAX, 1), (1 << 57, 1 << 57)]
        {
            assert_eq!(packed::bytes(rows, cols), MAX, "{rows} x {cols}");
        }
    }
}
