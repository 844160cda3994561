//! Packing of E8M0 scales to the 128x4 layout.

use super::STRIP;
use crate::cpu::pool;
use crate::layout::{View, ViewMut, packed};

/// Number of scales below which the work is not distributed over threads.
const PARALLEL: usize = 64 * 1024;

/// See [`crate::ops::pack_scales`].
pub(crate) fn pack_scales(scales: View, rows: usize, block_rows: usize, out: ViewMut) {
    let (scales, out) = (scales.matrix(), out.matrix());
    if out.numel() == 0 {
        return; // without blocks, the number of rows is unlimited
    }
    let (padded, blocks) = packed::padded(rows, scales.cols);
    pool::for_each(padded / STRIP, padded * blocks >= PARALLEL, |tile_row| {
        for row in tile_row * STRIP..(tile_row + 1) * STRIP {
            for first in (0..blocks).step_by(packed::TILE_COLS) {
                let at = packed::index(row, first, scales.cols);
                for i in 0..packed::TILE_COLS {
                    let inside = row < rows && first + i < scales.cols;
                    // SAFETY: `inside` checks the scale's position. `at + i` is inside the packed layout,
                    // whose size `ops` checks, and only this thread writes this tile.
                    unsafe {
                        let byte = if inside { scales.read(row / block_rows, first + i) } else { 0_u8 };
                        out.write(0, at + i, byte);
                    }
                }
            }
        }
    });
}
