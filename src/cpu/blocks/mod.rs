//! Block formats on the CPU.
//!
//! A matrix is taken in strips of 128 rows, counted from the first row of the whole matrix, so that a strip
//! holds whole blocks of every format, and in chunks of 512 columns: 128 KiB of bf16, which stay in the
//! second-level cache while maxima are found and values are cast.
//!
//! - `plane` is what is to be made of one direction, `quantize` makes it; `amax` finds maxima.
//! - `scales` packs and unpacks, `rebase` rewrites codes for a scale a row.
//! - `definition` (tests only) is all of that element by element, `agreement` compares the two.

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

pub(crate) use amax::block_amax;
pub(crate) use quantize::quantize_blocks;
pub(crate) use rebase::rebase;
pub(crate) use scales::{pack_scales, unpack_scales};

/// Rows of a strip: a multiple of the rows of every block.
const STRIP: usize = 128;

/// Columns of a chunk: a multiple of the columns of every block.
const CHUNK: usize = tile::COLS;

/// How many strips there are for `rows` rows, `rows_before` rows of the first strip being absent.
fn strips(rows: usize, rows_before: usize) -> usize {
    if rows == 0 { 0 } else { (rows_before + rows).div_ceil(STRIP) }
}

/// The rows of a part of `size` rows (a strip, a row of blocks), `rows_before` rows being absent before row 0.
fn part(index: usize, size: usize, rows_before: usize, rows: usize) -> Range<usize> {
    let start = (index * size).saturating_sub(rows_before).min(rows);
    start..((index + 1) * size).saturating_sub(rows_before).min(rows)
}
