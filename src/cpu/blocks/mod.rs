//! Block formats on the CPU.
//!
//! A matrix is processed in strips of 128 rows, counted from the first row of the whole matrix, so that a
//! strip holds whole blocks of every format. A strip is processed in chunks of 512 columns. A chunk is 128
//! KiB of bf16, and stays in the L2 cache while maxima are computed and values are cast.
//!
//! - `plane` describes one direction of a quantization, `quantize` computes it, and `amax` computes maxima.
//! - `scales` packs scales. `rebase` rewrites codes for one scale per line.
//! - `definition` (tests only) implements the operations element by element, and `agreement` compares the two
//!   implementations.

#[cfg(test)]
mod agreement;
mod amax;
#[cfg(test)]
mod definition;
mod plane;
mod quantize;
mod rebase;
mod scales;

use std::ops::Range;

use super::tile;
use crate::layout::holds_whole_blocks;

pub(crate) use amax::block_amax;
pub(crate) use quantize::quantize_blocks;
pub(crate) use rebase::rebase;
pub(crate) use scales::pack_scales;

/// Rows of a strip: a multiple of the rows of every block.
const STRIP: usize = 128;

/// Columns of a chunk: a multiple of the columns of every block.
const CHUNK: usize = tile::COLS;

const _: () = assert!(holds_whole_blocks(STRIP, CHUNK));

/// Returns the number of strips for `rows` rows. `block_offset` rows of the first strip lie before row 0.
fn strips(rows: usize, block_offset: usize) -> usize {
    if rows == 0 { 0 } else { (block_offset + rows).div_ceil(STRIP) }
}

/// Returns the rows of a part of `size` rows (a strip or a row of blocks). `block_offset` rows of the first
/// part lie before row 0.
fn part(index: usize, size: usize, block_offset: usize, rows: usize) -> Range<usize> {
    let start = (index * size).saturating_sub(block_offset).min(rows);
    start..((index + 1) * size).saturating_sub(block_offset).min(rows)
}
