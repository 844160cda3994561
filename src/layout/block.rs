//! Shapes of blocks, and of their scales.

/// The shape of the blocks that share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Block {
    /// Rows of a block, or [`Block::ALL`].
    pub rows: usize,
    /// Columns of a block, or [`Block::ALL`].
    pub cols: usize,
}

impl Block {
    /// The whole extent of the matrix.
    pub const ALL: usize = usize::MAX;
    /// One block: a scale per tensor.
    pub const TENSOR: Self = Self { rows: Self::ALL, cols: Self::ALL };
    /// A scale per row.
    pub const ROW: Self = Self { rows: 1, cols: Self::ALL };

    /// How many blocks cover a matrix, along its rows and its columns. A short last block is a block; the
    /// whole extent is one block even if it is empty.
    #[must_use]
    pub fn grid(self, rows: usize, cols: usize) -> (usize, usize) {
        let blocks = |n: usize, block| if block == Self::ALL { 1 } else { n.div_ceil(block) };
        (blocks(rows, self.rows), blocks(cols, self.cols))
    }

    /// The grid of the blocks that the rows from `row_offset` on touch, of a matrix that `rows` of its rows are
    /// a part of. No rows touch no blocks, unless the whole extent is one.
    #[must_use]
    pub fn grid_from(self, row_offset: usize, rows: usize, cols: usize) -> (usize, usize) {
        let rows_before = if rows == 0 { 0 } else { self.rows_before(row_offset) };
        self.grid(rows_before + rows, cols)
    }

    /// How many rows of the block that `row_offset` lies in come before it.
    #[must_use]
    pub fn rows_before(self, row_offset: usize) -> usize {
        if self.rows == Self::ALL { 0 } else { row_offset % self.rows }
    }

    /// Whether a matrix of `rows` rows holds whole blocks only, so that blocks do not straddle it and one below it.
    #[must_use]
    pub(crate) const fn divides_rows(self, rows: usize) -> bool {
        self.rows != Self::ALL && rows.is_multiple_of(self.rows)
    }

    /// Whether a block has as many rows as columns, so that the transposed matrix has the transposed scales.
    #[must_use]
    pub const fn is_square(self) -> bool {
        self.rows == self.cols
    }

    /// The same blocks of the transposed matrix.
    #[must_use]
    pub const fn transposed(self) -> Self {
        Self { rows: self.cols, cols: self.rows }
    }
}

/// The packed form of block scales for Blackwell's GEMM: 128x4 tiles, row-major, 512 bytes each.
pub mod packed {
    /// Rows of a tile.
    pub const TILE_ROWS: usize = 128;
    /// Columns (blocks) of a tile.
    pub const TILE_COLS: usize = 4;
    /// Bytes of a tile.
    pub const TILE_BYTES: usize = TILE_ROWS * TILE_COLS;

    /// The padded shape for `rows` data rows with `cols` blocks each. It saturates.
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

    /// How many bytes `rows` data rows with `cols` blocks each take; [`isize::MAX`], which no memory has, where
    /// there are more.
    #[must_use]
    pub const fn bytes(rows: usize, cols: usize) -> usize {
        const MOST: usize = isize::MAX.cast_unsigned();
        let (rows, cols) = padded(rows, cols);
        let bytes = rows.saturating_mul(cols);
        if bytes < MOST { bytes } else { MOST }
    }

    /// Where the scale of data row `row`, block `col` lies, `cols` being the number of blocks a row.
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
    fn packed_index_follows_the_tile_definition() {
        assert_eq!(packed::padded(129, 5), (256, 8));
        assert_eq!(packed::index(0, 1, 8), 1);
        assert_eq!(packed::index(1, 0, 8), 16);
        assert_eq!(packed::index(32, 0, 8), 4);
        assert_eq!(packed::index(0, 4, 8), 512);
        assert_eq!(packed::index(128, 0, 5), 1024);
    }

    #[test]
    fn packed_sizes_do_not_wrap() {
        const MOST: usize = isize::MAX.cast_unsigned();
        assert_eq!(packed::bytes(129, 5), 2048);
        assert_eq!(packed::bytes(1 << 62, 0), 0);
        for (rows, cols) in
            [(1 << 61, 8), (1 << 62, 4), (MOST, 1), (1, MOST), (usize::MAX, 1), (1 << 57, 1 << 57)]
        {
            assert_eq!(packed::bytes(rows, cols), MOST, "{rows} x {cols}");
        }
    }
}
