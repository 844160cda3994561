//! Transposition of bytes in tiles that stay in the cache.
//!
//! A tile is written by rows and read by columns. Each row and each column of a tile is on a different page
//! of memory. Large tiles move more bytes per page and therefore cause fewer TLB misses.

use std::cell::Cell;
use std::ops::Range;

use crate::layout::Matrix;

/// Rows of a tile, which is also the number of bytes that are written at a time to a transposed row.
pub(super) const ROWS: usize = 128;

/// Columns of a tile.
pub(super) const COLS: usize = 512;

/// Distance in bytes between rows of a tile. It is not a power of two, because then the elements of a column
/// would map to few cache sets.
const PITCH: usize = COLS + 64;

/// Output size from which stores bypass the cache, because the reader of such an output would not find it in
/// the cache.
const STREAMING_BYTES: usize = 8 << 20;

/// Side of the squares that are transposed in registers.
const SIDE: usize = 16;

/// The codes of `ROWS` x `COLS` elements, before they are written to the outputs.
struct Tile {
    bytes: Box<[u8]>,
}

/// Computes the bytes of a part of a row. This is a trait rather than a closure because closures cannot be
/// marked `inline(always)`. Code that is not inlined is not compiled for the kernel's instruction set
/// (`simd`), which takes three times as long.
pub(super) trait Fill {
    fn fill(&mut self, row: usize, cols: Range<usize>, out: &mut [u8]);
}

/// Fills a part of a matrix tile by tile, and stores each tile to each of the outputs.
///
/// # Safety
/// No other code may access these elements of the outputs at the same time.
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
                // SAFETY: the caller guarantees exclusive access to these elements.
                unsafe { tile.store(sink, rows.clone(), cols.clone()) };
            }
        }
    }
    tile.put_back();
}

thread_local! {
    /// A tile that this thread has used before, so its memory is likely in the cache.
    static SPARE: Cell<Option<Tile>> = const { Cell::new(None) };
}

impl Tile {
    /// Takes the thread's tile. Its contents are left over from earlier use.
    fn take() -> Self {
        SPARE.take().unwrap_or_else(|| Self { bytes: vec![0; ROWS * PITCH].into() })
    }

    /// Returns the tile to the thread for the next use.
    fn put_back(self) {
        SPARE.set(Some(self));
    }

    /// Returns a part of a row.
    #[inline(always)]
    fn row(&self, row: usize, cols: usize) -> &[u8] {
        &self.bytes[row * PITCH..][..cols]
    }

    /// Returns a part of a row to fill.
    #[inline(always)]
    fn row_mut(&mut self, row: usize, cols: usize) -> &mut [u8] {
        &mut self.bytes[row * PITCH..][..cols]
    }

    /// Writes the tile to a part of a matrix of bytes that starts at row `rows.start` and column
    /// `cols.start`.
    ///
    /// # Safety
    /// No other code may access these elements at the same time.
    #[inline(always)]
    unsafe fn store(&self, sink: &Matrix, rows: Range<usize>, cols: Range<usize>) {
        if sink.col_stride == 1 {
            for (i, row) in rows.enumerate() {
                // SAFETY: the elements are contiguous, and the caller guarantees exclusive access.
                unsafe { sink.row_mut(row, cols.clone()) }.copy_from_slice(self.row(i, cols.len()));
            }
        } else if sink.row_stride == 1 {
            let out = sink.at(rows.start, cols.start);
            let streaming = sink.numel() >= STREAMING_BYTES;
            // SAFETY: the elements of a column are contiguous, and the caller guarantees exclusive access.
            unsafe { self.store_transposed(rows.len(), cols.len(), out, sink.col_stride, streaming) };
        } else {
            for (i, row) in rows.enumerate() {
                for (col, byte) in cols.clone().zip(self.row(i, cols.len())) {
                    // SAFETY: the caller guarantees exclusive access to the element.
                    unsafe { sink.write(row, col, *byte) };
                }
            }
        }
    }

    /// Writes the first `rows` bytes of each of the first `cols` columns contiguously to `out + column *
    /// stride`. With `streaming`, whole cache lines bypass the cache.
    ///
    /// # Safety
    /// These bytes must be writable, and no other code may access them at the same time.
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
                // SAFETY: these are `rows` bytes of an output column, and the caller guarantees exclusive
                // access.
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

/// Size of a cache line in bytes.
const LINE: usize = 64;

fn is_aligned(out: *mut u8) -> bool {
    (out as usize).is_multiple_of(LINE)
}

/// Copies bytes with stores that bypass the cache.
///
/// # Safety
/// `out` must be aligned to a cache line and writable for the length of `line`, a multiple of 16.
#[inline(always)]
unsafe fn stream(line: &[u8], out: *mut u8) {
    #[cfg(target_arch = "x86_64")]
    for (i, part) in line.chunks_exact(16).enumerate() {
        use std::arch::x86_64::{_mm_loadu_si128, _mm_stream_si128};
        // SAFETY: SSE2 is part of the architecture, and the caller guarantees that `out` is aligned and
        // writable.
        unsafe { _mm_stream_si128(out.add(16 * i).cast(), _mm_loadu_si128(part.as_ptr().cast())) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller guarantees that `out` is writable for this length.
    unsafe {
        std::ptr::copy_nonoverlapping(line.as_ptr(), out, line.len());
    }
}

/// Makes streamed stores visible before later stores of this thread.
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

/// Computes out[c][row + r] = square[r * PITCH + c] for r and c below 16.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn transpose_square(square: &[u8], row: usize, out: &mut [[u8; ROWS]; SIDE]) {
    use std::arch::x86_64::{_mm_loadu_si128, _mm_storeu_si128, _mm_unpackhi_epi8, _mm_unpacklo_epi8};

    // Spelled out, because the compiler would keep a loop over the lanes, and with it the lanes in memory.
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
    // SAFETY: SSE2 is part of the architecture, and the assertion above keeps loads and stores inside the
    // slices.
    unsafe {
        macro_rules! load {
            ($r:literal) => {
                _mm_loadu_si128(source.add($r * PITCH).cast())
            };
        }
        let mut lanes = each!(load);
        // Interleaving lane i with lane i + 8 moves the top bit of the row number below the column number.
        // Four rounds move all four bits.
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

/// Computes out[c][row + r] = square[r * PITCH + c] for r and c below 16.
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
    fn store_transposed_writes_exactly_the_given_part() {
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
