//! Quantization with block scales.

use std::marker::PhantomData;
use std::ops::Range;

use super::amax::{maxima, raise_maxima};
use super::plane::{Plane, largest};
use super::{CHUNK, STRIP, part, strips};
use crate::cpu::convert::{Codes, Element};
use crate::cpu::float_env::DefaultFloatEnv;
use crate::cpu::simd::{Kernel, dispatch};
use crate::cpu::tensorwise::PARALLEL;
use crate::cpu::tile::{Fill, by_tiles};
use crate::cpu::types::{with_codes, with_element};
use crate::cpu::{pool, rows};
use crate::format::Fp8Format;
use crate::layout::{Block, DType, Device, Matrix, narrowest_block};
use crate::spec::BlockCall;

/// Columns of the narrowest block.
const NARROWEST: usize = narrowest_block();

/// See [`crate::ops::quantize_blocks`].
pub(crate) fn quantize_blocks(call: BlockCall) {
    let _env = DefaultFloatEnv::enter();
    let job = Job::new(&call);
    for plane in [&job.along, &job.across].into_iter().flatten().filter(|plane| plane.packed) {
        zero(&plane.scales);
    }
    let x = job.x;
    let across = x.cols.div_ceil(CHUNK);
    let parallel = x.rows * x.cols >= PARALLEL;
    pool::for_each(strips(x.rows, job.block_offset) * across, parallel, |i| {
        job.run(i / across, i % across * CHUNK);
    });
}

fn zero(packed: &Matrix) {
    for i in 0..packed.cols {
        // SAFETY: `i` is inside the output, whose elements are bytes.
        unsafe { packed.write(0, i, 0_u8) };
    }
}

/// The quantization of x, or of its transpose if that has the contiguous rows. The "walked matrix" is the one
/// of the two that is read.
struct Job<'a> {
    x: Matrix<'a>,
    format: Fp8Format,
    /// The plane with blocks along the rows of the walked matrix. Codes keep their positions.
    along: Option<Plane<'a>>,
    /// The plane with blocks down the columns of the walked matrix. Codes are written transposed.
    across: Option<Plane<'a>>,
    /// Rows of the first block that lie before the walked matrix.
    block_offset: usize,
    /// With one scale per line: the factors of the rows and of the columns of the walked matrix, for `along`
    /// and `across`.
    lines: [Vec<f32>; 2],
    column_scale: Option<Vec<f32>>,
}

impl<'a> Job<'a> {
    fn new(call: &'a BlockCall) -> Self {
        let (x, format) = (call.x.matrix(), call.format);
        let [rowwise, columnwise] = Plane::of(call);
        let any = rowwise.or(columnwise).expect("validated: at least one output");
        let block_offset =
            rowwise.map_or(0, |p| p.block_offset.0).max(columnwise.map_or(0, |p| p.block_offset.1));
        // SAFETY: `ops` checks that the column scale is fp32 with one element for each column of x.
        let read = |column_scale: &Matrix, c| unsafe { column_scale.read(0, c) };
        let column_scale = rowwise
            .and_then(|p| p.column_scale)
            .map(|column_scale| (0..x.cols).map(|c| read(&column_scale, c)).collect());
        let mut job = Self {
            x,
            format,
            along: rowwise,
            across: columnwise,
            block_offset,
            lines: Default::default(),
            column_scale,
        };
        let divides = rowwise.is_some_and(|plane| plane.divide); // only planes along rows divide
        if x.prefers_columns() && block_offset == 0 && job.column_scale.is_none() && !divides {
            (job.x, job.along, job.across) = (x.transposed(), columnwise, rowwise);
        }
        if any.block == Block::ROW {
            let column_scale = job.column_scale.as_deref();
            let along = job.along.as_ref().map(|plane| line_factors(plane, job.x, column_scale, Block::ROW));
            let across =
                job.across.as_ref().map(|plane| line_factors(plane, job.x, None, Block::ROW.transposed()));
            job.lines = [along.unwrap_or_default(), across.unwrap_or_default()];
        }
        job
    }

    fn run(&self, strip: usize, start: usize) {
        let (job, cols) = (self, start..(start + CHUNK).min(self.x.cols));
        with_element!(self.x.dtype, T => with_codes!(self.format, C => {
            dispatch(Part::<T, C> { job, strip, cols, types: PhantomData });
        }));
    }
}

/// Writes the scales of a plane with one scale per row, and returns the factors. `block` is the shape of a
/// line of the walked matrix.
fn line_factors(plane: &Plane, x: Matrix, column_scale: Option<&[f32]>, block: Block) -> Vec<f32> {
    let lines = plane.x.rows;
    let mut block_maxima = vec![0_u32; lines];
    if plane.amax.is_none() {
        let grid = block.grid(x.rows, x.cols);
        let out = Matrix::new(
            block_maxima.as_mut_ptr().cast(),
            DType::F32,
            Device::Cpu,
            grid,
            (grid.1 as isize, 1),
        );
        maxima(x, column_scale, block, 0, &out);
    }
    let mut factors = vec![0.0; lines];
    plane.finish(|line| (line, 0), &mut block_maxima, &mut factors);
    factors
}

/// One chunk of one strip.
struct Part<'a, T, C> {
    job: &'a Job<'a>,
    strip: usize,
    cols: Range<usize>,
    types: PhantomData<(T, C)>,
}

/// The factors of a chunk's elements.
struct Factors {
    /// For `along`, by row of the strip and block.
    along: Box<[[f32; CHUNK / NARROWEST]; STRIP]>,
    /// For `across`, by row of blocks in the strip and column.
    across: Box<[[f32; CHUNK]; STRIP / NARROWEST]>,
}

impl<T: Element, C: Codes> Kernel for Part<'_, T, C> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let job = self.job;
        let mut factors = Factors {
            along: Box::new([[0.0; CHUNK / NARROWEST]; STRIP]),
            across: Box::new([[0.0; CHUNK]; STRIP / NARROWEST]),
        };
        let mut buffer = Vec::new();
        let block = job.along.or(job.across).expect("one is there").block;
        if block == Block::ROW {
            self.take_lines(&mut factors);
        } else if block.is_square() {
            self.find_square(block.rows, &mut factors, &mut buffer);
        } else {
            if let Some(plane) = &job.along {
                self.find_along(plane, &mut factors, &mut buffer);
            }
            if let Some(plane) = &job.across {
                self.find_across(plane, &mut factors, &mut buffer);
            }
        }
        if let Some(plane) = &job.along {
            self.cast_along(plane, &factors, &mut buffer);
        }
        if let Some(plane) = &job.across {
            self.cast_across(plane, &factors, &mut buffer);
        }
    }
}

impl<T: Element, C: Codes> Part<'_, T, C> {
    /// Returns the rows of the strip.
    fn rows(&self) -> Range<usize> {
        part(self.strip, STRIP, self.job.block_offset, self.job.x.rows)
    }

    /// Returns the index of a row in the strip.
    fn in_strip(&self, row: usize) -> usize {
        row + self.job.block_offset - self.strip * STRIP
    }

    /// Iterates over the rows of blocks in the strip that are not empty. A block has `size` rows. Yields the
    /// index of the block in the matrix, and its rows.
    fn row_blocks(&self, size: usize) -> impl Iterator<Item = (usize, Range<usize>)> + use<T, C> {
        let (block_offset, rows) = (self.job.block_offset, self.job.x.rows);
        let per_strip = STRIP / size;
        (self.strip * per_strip..(self.strip + 1) * per_strip)
            .map(move |block| (block, part(block, size, block_offset, rows)))
            .filter(|(_, rows)| !rows.is_empty())
    }

    #[inline(always)]
    fn take_lines(&self, factors: &mut Factors) {
        let [along, across] = &self.job.lines;
        if !along.is_empty() {
            for row in self.rows() {
                factors.along[self.in_strip(row)][0] = along[row];
            }
        }
        if !across.is_empty() {
            factors.across[0][..self.cols.len()].copy_from_slice(&across[self.cols.clone()]);
        }
    }

    #[inline(always)]
    fn find_along(&self, plane: &Plane, factors: &mut Factors, buffer: &mut Vec<T>) {
        let size = plane.block.cols;
        let first = self.cols.start / size;
        for row in self.rows() {
            // SAFETY: this is a part of a row of the input, and `T` is the type of its dtype.
            let xs = unsafe { self.job.x.row::<T>(row, self.cols.clone(), buffer) };
            let to = &mut factors.along[self.in_strip(row)];
            let mut block_maxima = [0; CHUNK / NARROWEST];
            if plane.amax.is_none() {
                match size {
                    NARROWEST => maxima_of::<T, NARROWEST>(xs, &mut block_maxima),
                    128 => maxima_of::<T, 128>(xs, &mut block_maxima),
                    _ => unreachable!("no instance for blocks of {size} columns"),
                }
            }
            let blocks = xs.len().div_ceil(size);
            plane.finish(|i| (row, first + i), &mut block_maxima[..blocks], &mut to[..blocks]);
        }
    }

    #[inline(always)]
    fn column_maxima(&self, rows: Range<usize>, buffer: &mut Vec<T>) -> [T::Bits; CHUNK] {
        let mut columns = [T::Bits::default(); CHUNK];
        for row in rows {
            // SAFETY: this is a part of a row of the input, and `T` is the type of its dtype.
            raise_maxima(&mut columns, unsafe { self.job.x.row::<T>(row, self.cols.clone(), buffer) });
        }
        columns
    }

    #[inline(always)]
    fn find_across(&self, plane: &Plane, factors: &mut Factors, buffer: &mut Vec<T>) {
        let size = plane.block.cols;
        for (block, rows) in self.row_blocks(size) {
            let columns = if plane.amax.is_some() {
                [T::Bits::default(); CHUNK]
            } else {
                self.column_maxima(rows, buffer)
            };
            let to = &mut factors.across[block % (STRIP / size)];
            let mut block_maxima = columns.map(T::widen_magnitude);
            let (first, count) = (self.cols.start, self.cols.len());
            plane.finish(|i| (first + i, block), &mut block_maxima[..count], &mut to[..count]);
        }
    }

    #[inline(always)]
    fn find_square(&self, size: usize, factors: &mut Factors, buffer: &mut Vec<T>) {
        let Job { along, across, .. } = self.job;
        let has_amaxes = along.or(*across).is_some_and(|plane| plane.amax.is_some());
        for (block, rows) in self.row_blocks(size) {
            let columns = if has_amaxes {
                [T::Bits::default(); CHUNK]
            } else {
                self.column_maxima(rows.clone(), buffer)
            };
            let mut block_maxima = [0; CHUNK / NARROWEST];
            let mut factor = [0.0; CHUNK / NARROWEST];
            let blocks = self.cols.len().div_ceil(size);
            for (columns, amax) in columns[..self.cols.len()].chunks(size).zip(&mut block_maxima) {
                *amax = largest::<T>(columns);
            }
            let first = self.cols.start / size;
            if let Some(plane) = along {
                plane.finish(|i| (block, first + i), &mut block_maxima[..blocks], &mut factor[..blocks]);
                for row in rows {
                    factors.along[self.in_strip(row)] = factor;
                }
            }
            if let Some(plane) = across {
                plane.finish(|i| (first + i, block), &mut block_maxima[..blocks], &mut factor[..blocks]);
                let to = &mut factors.across[block % (STRIP / size)];
                for (to, factor) in to.chunks_mut(size).zip(factor) {
                    to.fill(factor);
                }
            }
        }
    }

    #[inline(always)]
    fn cast_along(&self, plane: &Plane, factors: &Factors, buffer: &mut Vec<T>) {
        let size = plane.block.cols.min(CHUNK);
        let column_scale =
            self.job.column_scale.as_ref().map(|column_scale| &column_scale[self.cols.clone()]);
        let contiguous = plane.codes.col_stride == 1;
        let mut line = [0_u8; CHUNK];
        for row in self.rows() {
            // SAFETY: this is a part of a row of the input, and `T` is the type of its dtype.
            let xs = unsafe { self.job.x.row::<T>(row, self.cols.clone(), buffer) };
            let out = if contiguous {
                // SAFETY: the elements of the output are contiguous, and only this part writes to them.
                unsafe { plane.codes.row_mut::<u8>(row, self.cols.clone()) }
            } else {
                &mut line[..self.cols.len()]
            };
            let along = &factors.along[self.in_strip(row)];
            if plane.divide {
                cast_divided::<T, C>(xs, column_scale, along[0], out);
            } else {
                match (column_scale, size) {
                    (Some(column_scale), _) => cast_column_scaled::<T, C>(xs, column_scale, along[0], out),
                    (None, NARROWEST) => cast_blocks::<T, C, NARROWEST>(xs, along, out),
                    (None, 128) => cast_blocks::<T, C, 128>(xs, along, out),
                    // Blocks of whole rows.
                    (None, CHUNK) => {
                        rows::cast::<T, C, false>(xs, along[0], out);
                    }
                    _ => unreachable!("no instance for blocks of {size} columns"),
                }
            }
            if !contiguous {
                for (col, code) in self.cols.clone().zip(line) {
                    // SAFETY: this is an element of the output, and only this part writes to it.
                    unsafe { plane.codes.write(row, col, code) };
                }
            }
        }
    }

    #[inline(always)]
    fn cast_across(&self, plane: &Plane, factors: &Factors, buffer: &mut Vec<T>) {
        let mut fill = Across { part: self, size: plane.block.cols.min(STRIP), factors, buffer };
        // `codes` is the transposed matrix, so its rows are the columns of the walked matrix.
        let sink = plane.codes.transposed();
        // SAFETY: only this part writes the codes of these elements.
        unsafe { by_tiles(self.rows(), self.cols.clone(), &[sink], &mut fill) };
    }
}

/// Casts with one factor per column, which covers `size` rows.
struct Across<'a, T, C> {
    part: &'a Part<'a, T, C>,
    size: usize,
    factors: &'a Factors,
    buffer: &'a mut Vec<T>,
}

impl<T: Element, C: Codes> Fill for Across<'_, T, C> {
    #[inline(always)]
    fn fill(&mut self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        // SAFETY: this is a part of a row of the input, and `T` is the type of its dtype.
        let xs = unsafe { self.part.job.x.row::<T>(row, cols, self.buffer) };
        cast_each::<T, C>(xs, &self.factors.across[self.part.in_strip(row) / self.size], out);
    }
}

/// Computes the absolute maxima of blocks of N elements, as fp32 bits. The constant length lets the compiler
/// vectorize short loops well.
#[inline(always)]
fn maxima_of<T: Element, const N: usize>(xs: &[T], block_maxima: &mut [u32]) {
    let (blocks, tail) = xs.as_chunks::<N>();
    for (block, amax) in blocks.iter().zip(&mut *block_maxima) {
        *amax = rows::amax(block);
    }
    if !tail.is_empty() {
        block_maxima[blocks.len()] = rows::amax(tail);
    }
}

/// Computes out = encode(x * factor), with one factor for each block of N elements.
#[inline(always)]
fn cast_blocks<T: Element, C: Codes, const N: usize>(xs: &[T], factors: &[f32], out: &mut [u8]) {
    let (blocks, tail) = xs.as_chunks::<N>();
    let (out_blocks, out_rest) = out.as_chunks_mut::<N>();
    for ((block, out), factor) in blocks.iter().zip(out_blocks).zip(factors) {
        rows::cast::<T, C, false>(block, *factor, out);
    }
    if !tail.is_empty() {
        rows::cast::<T, C, false>(tail, factors[blocks.len()], out_rest);
    }
}

/// Computes out = encode(x * factor), with one factor for each element.
#[inline(always)]
fn cast_each<T: Element, C: Codes>(xs: &[T], factors: &[f32], out: &mut [u8]) {
    for ((x, factor), out) in xs.iter().zip(factors).zip(out) {
        *out = C::encode(x.widen() * factor);
    }
}

/// Computes out = encode((x * `column_scale`) * factor).
#[inline(always)]
fn cast_column_scaled<T: Element, C: Codes>(xs: &[T], column_scale: &[f32], factor: f32, out: &mut [u8]) {
    for ((x, column_scale), out) in xs.iter().zip(column_scale).zip(out) {
        *out = C::encode(x.widen() * column_scale * factor);
    }
}

/// Computes out = encode(x / scale), or encode((x * `column_scale`) / scale).
#[inline(always)]
fn cast_divided<T: Element, C: Codes>(xs: &[T], column_scale: Option<&[f32]>, scale: f32, out: &mut [u8]) {
    let Some(column_scale) = column_scale else {
        for (x, out) in xs.iter().zip(out) {
            *out = C::encode(x.widen() / scale);
        }
        return;
    };
    for ((x, column_scale), out) in xs.iter().zip(column_scale).zip(out) {
        *out = C::encode(x.widen() * column_scale / scale);
    }
}
