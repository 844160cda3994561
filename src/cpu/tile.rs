//! Transposing bytes in tiles that stay in the cache.
//!
//! A tile is written as rows and read as columns. It is large because each row and each column of it is another
//! page of memory: the more bytes of one page are moved at a time, the fewer address translations are missed.

use std::cell::Cell;
use std::ops::Range;

use crate::layout::Matrix;

/// Rows of a tile, and so the bytes that are written at a time to one transposed row.
pub(super) const ROWS: usize = 128;

/// Columns of a tile.
pub(super) const COLS: usize = 512;

/// From a row of the tile to the next. Not a power of two: the rows of a column would share a few cache sets.
const PITCH: usize = COLS + 64;

/// From this size on an output is not expected to be found in the cache by its reader, and is written past it.
const STREAMING_BYTES: usize = 8 << 20;

/// The side of the squares that are transposed in registers.
const SIDE: usize = 16;

/// Codes of `ROWS` x `COLS` elements, before they are written to the outputs.
struct Tile {
    bytes: Box<[u8]>,
}

/// Makes the bytes of a part of a row. A trait and no closure: closures cannot be told to be inlined, and what is not
/// takes on no instruction set (`simd`), which costs three times the time.
pub(super) trait Fill {
    fn fill(&mut self, row: usize, cols: Range<usize>, out: &mut [u8]);
}

/// Fills a part of a matrix tile by tile, and gives each tile to each of the outputs.
///
/// # Safety
/// Nobody else may use these elements of the outputs meanwhile.
#[inline(always)]
pub(super) unsafe fn by_tiles(
    rows: Range<usize>,
    cols: Range<usize>,
    sinks: &[Matrix],
    fill: &mut impl Fill,
) {
    let mut tile = Tile::take();
    for first_row in rows.clone().step_by(ROWS) {
        for first_col in cols.clone().step_by(COLS) {
            let rows = first_row..(first_row + ROWS).min(rows.end);
            let cols = first_col..(first_col + COLS).min(cols.end);
            for row in rows.clone() {
                fill.fill(row, cols.clone(), tile.row_mut(row - first_row, cols.len()));
            }
            for sink in sinks {
                // SAFETY: the caller's promise.
                unsafe { tile.store(sink, rows.clone(), cols.clone()) };
            }
        }
    }
    tile.put_back();
}

thread_local! {
    /// A tile that the thread has used before: its memory is in the cache.
    static SPARE: Cell<Option<Tile>> = const { Cell::new(None) };
}

impl Tile {
    /// The thread's tile; what is in it is left from earlier.
    fn take() -> Self {
        SPARE.take().unwrap_or_else(|| Self { bytes: vec![0; ROWS * PITCH].into() })
    }

    /// Leaves it to the thread's next user.
    fn put_back(self) {
        SPARE.set(Some(self));
    }

    /// A part of a row.
    #[inline(always)]
    fn row(&self, row: usize, cols: usize) -> &[u8] {
        &self.bytes[row * PITCH..][..cols]
    }

    /// A part of a row, to fill.
    #[inline(always)]
    fn row_mut(&mut self, row: usize, cols: usize) -> &mut [u8] {
        &mut self.bytes[row * PITCH..][..cols]
    }

    /// Writes the tile to a part of a matrix of bytes; its first row and column belong to the first of these.
    ///
    /// # Safety
    /// Nobody else may use these elements meanwhile.
    #[inline(always)]
    unsafe fn store(&self, sink: &Matrix, rows: Range<usize>, cols: Range<usize>) {
        if sink.col_stride == 1 {
            for (i, row) in rows.enumerate() {
                // SAFETY: the elements are contiguous; the caller vouches that they are ours.
                unsafe { sink.row_mut(row, cols.clone()) }.copy_from_slice(self.row(i, cols.len()));
            }
        } else if sink.row_stride == 1 {
            let out = sink.at(rows.start, cols.start);
            let streaming = sink.numel() >= STREAMING_BYTES;
            // SAFETY: the elements of a column are contiguous; the caller vouches that they are ours.
            unsafe { self.store_transposed(rows.len(), cols.len(), out, sink.col_stride, streaming) };
        } else {
            for (i, row) in rows.enumerate() {
                for (col, byte) in cols.clone().zip(self.row(i, cols.len())) {
                    // SAFETY: the caller vouches that the element is ours.
                    unsafe { sink.write(row, col, *byte) };
                }
            }
        }
    }

    /// Writes the first `rows` of each of the first `cols` columns, contiguous, at `out + column * stride`; with
    /// `streaming`, past the cache where whole cache lines are written.
    ///
    /// # Safety
    /// These bytes must be writable, and nobody else may use them meanwhile.
    #[inline(always)]
    unsafe fn store_transposed(
        &self,
        rows: usize,
        cols: usize,
        out: *mut u8,
        stride: isize,
        streaming: bool,
    ) {
        let streaming =
            streaming && rows.is_multiple_of(LINE) && is_aligned(out) && stride % LINE as isize == 0;
        let mut lines = Lines([[0; ROWS]; SIDE]);
        for first in (0..cols).step_by(SIDE) {
            for row in (0..rows).step_by(SIDE) {
                let square = &self.bytes[row * PITCH + first..][..(SIDE - 1) * PITCH + SIDE];
                transpose_square(square, row, &mut lines.0);
            }
            let columns = SIDE.min(cols - first);
            for (i, line) in lines.0.iter().enumerate().take(columns) {
                let out = out.wrapping_offset((first + i) as isize * stride);
                // SAFETY: `rows` bytes of an output column, for which the caller vouches.
                unsafe {
                    if streaming {
                        stream(&line[..rows], out);
                    } else {
                        std::ptr::copy_nonoverlapping(line.as_ptr(), out, rows);
                    }
                }
            }
        }
        if streaming {
            fence();
        }
    }
}

/// Bytes of a cache line.
const LINE: usize = 64;

fn is_aligned(out: *mut u8) -> bool {
    (out as usize).is_multiple_of(LINE)
}

/// Copies past the cache.
///
/// # Safety
/// `out` must be aligned to a cache line and writable for the length of `line`, a multiple of 16.
#[inline(always)]
unsafe fn stream(line: &[u8], out: *mut u8) {
    #[cfg(target_arch = "x86_64")]
    for (i, part) in line.chunks_exact(16).enumerate() {
        use std::arch::x86_64::{_mm_loadu_si128, _mm_stream_si128};
        // SAFETY: SSE2 is part of the architecture; the caller vouches for `out`.
        unsafe { _mm_stream_si128(out.add(16 * i).cast(), _mm_loadu_si128(part.as_ptr().cast())) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller vouches for `out`.
    unsafe {
        std::ptr::copy_nonoverlapping(line.as_ptr(), out, line.len());
    }
}

/// Makes streamed bytes visible to whoever sees what this thread does next.
#[inline(always)]
fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of the architecture.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[repr(align(64))]
struct Lines([[u8; ROWS]; SIDE]);

/// out[c][row + r] = square[r * PITCH + c] for r and c below 16.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn transpose_square(square: &[u8], row: usize, out: &mut [[u8; ROWS]; SIDE]) {
    use std::arch::x86_64::{_mm_loadu_si128, _mm_storeu_si128, _mm_unpackhi_epi8, _mm_unpacklo_epi8};

    // Spelled out, because the compiler keeps a loop over the lanes as a loop, and then the lanes in memory.
    macro_rules! each {
        ($each:ident) => {
            [
                $each!(0),
                $each!(1),
                $each!(2),
                $each!(3),
                $each!(4),
                $each!(5),
                $each!(6),
                $each!(7),
                $each!(8),
                $each!(9),
                $each!(10),
                $each!(11),
                $each!(12),
                $each!(13),
                $each!(14),
                $each!(15),
            ]
        };
    }
    assert!(square.len() == (SIDE - 1) * PITCH + SIDE && row + SIDE <= ROWS);
    let source = square.as_ptr();
    // SAFETY: SSE2 is part of the architecture; loads and stores are inside the slices.
    unsafe {
        macro_rules! load {
            ($r:literal) => {
                _mm_loadu_si128(source.add($r * PITCH).cast())
            };
        }
        let mut lanes = each!(load);
        // Interleaving lane i with lane i + 8 moves the top bit of the row number under the column number; four
        // rounds move all of it.
        macro_rules! interleave {
            ($i:literal) => {
                if $i % 2 == 0 {
                    _mm_unpacklo_epi8(lanes[$i / 2], lanes[$i / 2 + 8])
                } else {
                    _mm_unpackhi_epi8(lanes[$i / 2], lanes[$i / 2 + 8])
                }
            };
        }
        lanes = each!(interleave);
        lanes = each!(interleave);
        lanes = each!(interleave);
        lanes = each!(interleave);
        macro_rules! store {
            ($c:literal) => {
                _mm_storeu_si128(out[$c].as_mut_ptr().add(row).cast(), lanes[$c])
            };
        }
        each!(store);
    }
}

/// out[c][row + r] = square[r * PITCH + c] for r and c below 16.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn transpose_square(square: &[u8], row: usize, out: &mut [[u8; ROWS]; SIDE]) {
    for r in 0..SIDE {
        for c in 0..SIDE {
            out[c][row + r] = square[r * PITCH + c];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_part_of_a_tile_is_transposed_and_nothing_else_written() {
        let mut tile = Tile::take();
        let byte = |r: usize, c: usize| (r * 7 + c * 13 + c / 256 + r / 256) as u8;
        for r in 0..ROWS {
            tile.row_mut(r, COLS).iter_mut().enumerate().for_each(|(c, out)| *out = byte(r, c));
        }
        for (rows, cols) in [(ROWS, COLS), (64, 512), (64, 17), (1, 1), (15, 16), (33, 100)] {
            for (stride, streaming) in [(rows + 3, false), ((rows + 1).next_multiple_of(LINE), true)] {
                let mut memory = vec![0xAA_u8; stride * cols + LINE];
                let start = memory.as_ptr().align_offset(LINE);
                let out = &mut memory[start..][..stride * cols];
                // SAFETY: `out` holds `cols` columns of `rows` bytes, `stride` apart.
                unsafe {
                    tile.store_transposed(rows, cols, out.as_mut_ptr(), stride as isize, streaming);
                }
                for (i, got) in out.iter().enumerate() {
                    let (c, r) = (i / stride, i % stride);
                    assert_eq!(*got, if r < rows { byte(r, c) } else { 0xAA });
                }
            }
        }
    }
}
