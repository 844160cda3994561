//! The packed 128x4 layout of E8M0 scales, and its inverse.

use super::STRIP;
use crate::cpu::pool;
use crate::layout::{View, ViewMut, packed};

/// Below this many scales the work is not handed to other threads.
const PARALLEL: usize = 64 * 1024;

/// See [`crate::ops::pack_scales`].
pub(crate) fn pack_scales(scales: View, rows: usize, block_rows: usize, out: ViewMut) {
    let (scales, out) = (scales.matrix(), out.matrix());
    if out.numel() == 0 {
        return; // of rows without blocks there may be any number
    }
    let (padded, blocks) = packed::padded(rows, scales.cols);
    pool::for_each(padded / STRIP, padded * blocks >= PARALLEL, |tile_row| {
        for row in tile_row * STRIP..(tile_row + 1) * STRIP {
            for first in (0..blocks).step_by(packed::TILE_COLS) {
                let at = packed::index(row, first, scales.cols);
                for i in 0..packed::TILE_COLS {
                    let inside = row < rows && first + i < scales.cols;
                    // SAFETY: inside, and inside the packed layout, whose size `ops` has checked; this tile is
                    // this thread's.
                    unsafe {
                        let byte = if inside { scales.read(row / block_rows, first + i) } else { 0_u8 };
                        out.write(0, at + i, byte);
                    }
                }
            }
        }
    });
}

/// See [`crate::ops::unpack_scales`].
pub(crate) fn unpack_scales(packed: View, _rows: usize, block_rows: usize, out: ViewMut) {
    let (packed, out) = (packed.matrix(), out.matrix());
    if out.numel() == 0 {
        return;
    }
    pool::for_each(out.rows.div_ceil(STRIP), out.numel() >= PARALLEL, |part| {
        for row in part * STRIP..((part + 1) * STRIP).min(out.rows) {
            for first in (0..out.cols).step_by(packed::TILE_COLS) {
                let at = packed::index(row * block_rows, first, out.cols);
                for block in first..(first + packed::TILE_COLS).min(out.cols) {
                    // SAFETY: the same, the other way.
                    unsafe { out.write(row, block, packed.read::<u8>(0, at + block - first)) };
                }
            }
        }
    });
}
