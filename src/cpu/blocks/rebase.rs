//! Rebase of MXFP8 planes to one power-of-two scale per line.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};

use super::{CHUNK, STRIP, part, strips};
use crate::cpu::convert::Codes;
use crate::cpu::float_env::DefaultFloatEnv;
use crate::cpu::pool;
use crate::cpu::simd::{Kernel, dispatch};
use crate::cpu::tensorwise::PARALLEL;
use crate::cpu::tile::{Fill, by_tiles};
use crate::cpu::types::with_codes;
use crate::format::{Fp8Format, e8m0};
use crate::layout::{Block, Matrix, View, ViewMut};
use crate::spec::Axis;

/// Columns of a block.
const BLOCK: usize = 32;

/// See [`crate::ops::rebase`].
pub(crate) fn rebase(codes: View, scales: View, block: Block, axis: Axis, out: ViewMut, scale_out: ViewMut) {
    let _env = DefaultFloatEnv::enter();
    let format = codes.dtype().fp8().expect("validated");
    let scale_out = scale_out.matrix();
    let (codes, scales) = (codes.matrix(), scales.matrix());
    let lines = (0..scale_out.rows).map(|_| AtomicU8::new(0)).collect();
    // SAFETY: the scales are E8M0, and `r` and `c` are inside the matrix.
    let byte = |r, c| unsafe { scales.read::<u8>(r, c) };
    let largest = match axis {
        Axis::Rows => (0..scales.rows).map(|r| base((0..scales.cols).map(|c| byte(r, c)))).collect(),
        Axis::Columns => (0..scales.cols).map(|c| base((0..scales.rows).map(|r| byte(r, c)))).collect(),
    };
    let job = Job { codes, scales, block, axis, out: out.matrix(), largest, lines };
    let parallel = codes.rows * codes.cols >= PARALLEL;
    pool::for_each(strips(codes.rows, 0), parallel, |index| {
        with_codes!(format, C => dispatch(Strip::<C> { job: &job, index, format: PhantomData }));
    });
    for (line, nonzero) in job.lines.iter().enumerate() {
        let largest = match axis {
            Axis::Rows => job.largest[line / block.rows],
            Axis::Columns => job.largest[line / BLOCK],
        };
        let scale = if nonzero.load(Ordering::Relaxed) == 0 { 1.0 } else { e8m0::decode(largest) };
        // SAFETY: the output is fp32 with one row per line.
        unsafe { scale_out.write(line, 0, scale) };
    }
}

/// Returns the largest byte that is not NaN, but at least 1, which is 2^-126.
fn base(bytes: impl Iterator<Item = u8>) -> u8 {
    bytes.filter(|&byte| byte != e8m0::NAN).max().unwrap_or(0).max(1)
}

struct Job<'a> {
    codes: Matrix<'a>,
    scales: Matrix<'a>,
    block: Block,
    axis: Axis,
    out: Matrix<'a>,
    /// The base of each row or column of blocks.
    largest: Vec<u8>,
    /// Whether a line has a code that is neither zero nor NaN, in a block that is not NaN.
    lines: Vec<AtomicU8>,
}

impl Job<'_> {
    /// Returns the output in the orientation of the codes.
    fn sink(&self) -> Matrix<'_> {
        if self.axis == Axis::Columns { self.out.transposed() } else { self.out }
    }
}

struct Strip<'a, C> {
    job: &'a Job<'a>,
    index: usize,
    format: PhantomData<C>,
}

impl<C: Codes> Kernel for Strip<'_, C> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let job = self.job;
        let rows = part(self.index, STRIP, 0, job.codes.rows);
        for start in (0..job.codes.cols).step_by(CHUNK) {
            let cols = start..(start + CHUNK).min(job.codes.cols);
            let mut fill = Chunk::<C> { job, nonzero: [0; CHUNK], buffer: Vec::new(), format: PhantomData };
            // SAFETY: only this strip writes the outputs for these rows of the input.
            unsafe { by_tiles(rows.clone(), cols.clone(), &[job.sink()], &mut fill) };
            if job.axis == Axis::Columns {
                for (line, nonzero) in job.lines[cols].iter().zip(fill.nonzero) {
                    line.fetch_or(nonzero, Ordering::Relaxed);
                }
            }
        }
    }
}

/// Rewrites the codes of a strip in a chunk of columns.
struct Chunk<'a, C> {
    job: &'a Job<'a>,
    /// Whether a column has a code that is neither zero nor NaN.
    nonzero: [u8; CHUNK],
    buffer: Vec<u8>,
    format: PhantomData<C>,
}

impl<C: Codes> Fill for Chunk<'_, C> {
    #[inline(always)]
    fn fill(&mut self, row: usize, cols: Range<usize>, line: &mut [u8]) {
        let Job { codes, scales, block, axis, largest, lines, .. } = self.job;
        // SAFETY: this is a part of a row of the input, whose elements are bytes.
        let codes = unsafe { codes.row::<u8>(row, cols.clone(), &mut self.buffer) };
        let r = row / block.rows;
        let mut any = 0;
        for (i, ((codes, out), nonzero)) in
            codes.chunks(BLOCK).zip(line.chunks_mut(BLOCK)).zip(self.nonzero.chunks_mut(BLOCK)).enumerate()
        {
            let c = cols.start / BLOCK + i;
            // SAFETY: `ops` checks that there is a scale for each block.
            let byte = unsafe { scales.read::<u8>(r, c) };
            if byte == e8m0::NAN {
                out.fill(Fp8Format::NAN);
                continue;
            }
            let base = if *axis == Axis::Rows { largest[r] } else { largest[c] };
            // With a factor below 2^-64, every code would become zero as well.
            let factor = e8m0::decode(127 - (base - byte).min(64));
            for ((code, out), nonzero) in codes.iter().zip(out).zip(nonzero) {
                let value = C::decode(*code);
                let counts = u8::from(value.abs() > 0.0);
                *nonzero |= counts;
                any |= counts;
                *out = C::encode(value * factor);
            }
        }
        if *axis == Axis::Rows {
            lines[row].fetch_or(any, Ordering::Relaxed);
        }
    }
}
