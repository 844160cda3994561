//! Bounds and quantization of groups of rows.

use std::marker::PhantomData;
use std::ops::Range;

use super::convert::{Codes, Element};
use super::float_env::DefaultFloatEnv;
use super::simd::{Kernel, dispatch};
use super::tensorwise::PARALLEL;
use super::tile::{COLS, Fill, by_tiles};
use super::types::{with_codes, with_element};
use super::{pool, rows};
use crate::format::Fp8Format;
use crate::format::activation::Activation;
use crate::format::groups::bounds;
use crate::format::scale::reciprocal;
use crate::format::wide::{INF_BITS, NAN_BITS};
use crate::layout::{Matrix, View, ViewMut};
use crate::spec::{GroupCall, GroupSource, Groups, ScaleRule};

pub(crate) fn group_bounds(offsets: View, rows: usize, ends: ViewMut, padded_ends: ViewMut, error: ViewMut) {
    let (offsets, error) = (offsets.matrix(), error.matrix());
    // SAFETY: validation checked that this is an int32 row.
    let found = bounds((0..offsets.cols).map(|i| unsafe { offsets.read::<i32>(0, i) }), rows);
    for (out, values) in [(ends.matrix(), &found.ends), (padded_ends.matrix(), &found.padded_ends)] {
        for (i, value) in values.iter().enumerate() {
            // SAFETY: validation checked that these outputs are int32 rows with an element per group.
            unsafe { out.write(0, i, *value) };
        }
    }
    // SAFETY: validation checked that this output is one int32 element.
    unsafe { error.write(0, 0, i32::from(found.invalid)) };
}

/// The values of a call, by row.
#[derive(Clone, Copy)]
enum Source {
    Rows(Matrix, Option<Matrix>),
    Gated(Matrix, Activation),
    GatedGradient(Matrix, Matrix, Activation),
}

impl Source {
    fn new(source: &GroupSource) -> Self {
        match source {
            GroupSource::Rows { x, index } => Self::Rows(x.matrix(), index.map(|index| index.matrix())),
            GroupSource::Gated { h, activation } => Self::Gated(h.matrix(), *activation),
            GroupSource::GatedGradient { h, dy, activation } => {
                Self::GatedGradient(h.matrix(), dy.matrix(), *activation)
            }
        }
    }
}

/// Reads rows of a source whose dtype is `T`.
struct Reader<T> {
    source: Source,
    buffers: [Vec<T>; 3],
    values: Vec<T>,
}

impl<T: Element> Reader<T> {
    fn new(source: Source) -> Self {
        Self { source, buffers: [Vec::new(), Vec::new(), Vec::new()], values: Vec::new() }
    }

    /// Returns some columns of a row of the values.
    #[inline(always)]
    fn row(&mut self, row: usize, cols: Range<usize>) -> &[T] {
        let [first, second, third] = &mut self.buffers;
        match self.source {
            Source::Rows(x, index) => {
                // SAFETY: validation checked that the index is an int32 row with an element for each row.
                let row = index.map_or(row, |index| (unsafe { index.read::<i32>(0, row) }).max(0) as usize);
                // SAFETY: the row is clamped to those of `x`, whose dtype is that of `T`.
                unsafe { x.row(row.min(x.rows - 1), cols, first) }
            }
            Source::Gated(h, activation) => {
                let width = h.cols / 2;
                // SAFETY: the columns are inside the halves of `h`, whose dtype is that of `T`.
                let (gates, ups) = unsafe {
                    let ups = cols.start + width..cols.end + width;
                    (h.row::<T>(row, cols, first), h.row::<T>(row, ups, second))
                };
                let product = |(gate, up): (&T, &T)| T::narrow(activation.gated(gate.widen(), up.widen()));
                self.values.clear();
                self.values.extend(gates.iter().zip(ups).map(product));
                &self.values
            }
            Source::GatedGradient(h, dy, activation) => {
                let width = h.cols / 2;
                self.values.clear();
                for (half, is_gate) in [
                    (cols.start..cols.end.min(width), true),
                    (cols.start.max(width) - width..cols.end.max(width) - width, false),
                ] {
                    if half.is_empty() {
                        continue;
                    }
                    // SAFETY: the columns are inside the halves of `h` and inside `dy`, whose dtype is `T`'s.
                    let (gates, ups, dys) = unsafe {
                        let ups = half.start + width..half.end + width;
                        let gates = h.row::<T>(row, half.clone(), first);
                        (gates, h.row::<T>(row, ups, second), dy.row::<T>(row, half, third))
                    };
                    let inputs = gates.iter().zip(ups).zip(dys);
                    self.values.extend(inputs.map(|((gate, up), dy)| {
                        let (gate, up) = activation.gradients(gate.widen(), up.widen(), dy.widen());
                        T::narrow(if is_gate { gate } else { up })
                    }));
                }
                &self.values
            }
        }
    }
}

/// Returns the scale for fp32 bits of an absolute maximum, as [`rows::amax`] returns them.
fn scale_of(amax: u32, rule: ScaleRule, format: Fp8Format) -> f32 {
    rule.scale(f32::from_bits(if amax > INF_BITS { NAN_BITS } else { amax }), format)
}

/// Quantizes rows with a scale each.
struct RowPiece<T, C> {
    reader: Reader<T>,
    rows: Range<usize>,
    /// The number of rows that belong to a group.
    used: usize,
    rule: ScaleRule,
    codes: Matrix,
    scales: Matrix,
    format: PhantomData<C>,
}

impl<T: Element, C: Codes> Kernel for RowPiece<T, C> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let cols = self.codes.cols;
        let mut buffer = vec![0; cols];
        for row in self.rows.clone() {
            let mut scale = 1.0;
            if row < self.used {
                let values = self.reader.row(row, 0..cols);
                scale = scale_of(rows::amax(values), self.rule, C::FORMAT);
                rows::cast::<T, C, false>(values, reciprocal(scale), &mut buffer);
            } else {
                buffer.fill(0);
            }
            for (col, code) in buffer.iter().enumerate() {
                // SAFETY: the element is inside the FP8 output, and no other piece has this row.
                unsafe { self.codes.write(row, col, *code) };
            }
            // SAFETY: the element is inside the fp32 output, and no other piece has this row.
            unsafe { self.scales.write(row, 0, scale) };
        }
    }
}

/// Quantizes columns of a group with a scale each.
struct ColumnPiece<T, C> {
    reader: Reader<T>,
    group: usize,
    rows: Range<usize>,
    cols: Range<usize>,
    rule: ScaleRule,
    /// The group's columns of the codes, transposed: row 0 is the first row of the group.
    codes: Matrix,
    scales: Matrix,
    format: PhantomData<C>,
}

impl<T: Element, C: Codes> Kernel for ColumnPiece<T, C> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let mut maxima = vec![T::Bits::default(); self.cols.len()];
        for row in self.rows.clone() {
            for (found, x) in maxima.iter_mut().zip(self.reader.row(row, self.cols.clone())) {
                *found = (*found).max(x.magnitude());
            }
        }
        let mut factors = vec![0.0; self.cols.len()];
        for ((col, found), factor) in self.cols.clone().zip(maxima).zip(&mut factors) {
            let scale = scale_of(T::widen_magnitude(found), self.rule, C::FORMAT);
            *factor = reciprocal(scale);
            // SAFETY: the element is inside the fp32 output, and no other piece has these columns of the
            // group.
            unsafe { self.scales.write(self.group, col, scale) };
        }
        let (first_row, first_col) = (self.rows.start, self.cols.start);
        let mut fill = CastColumns { reader: self.reader, first_row, first_col, factors, format: self.format };
        // SAFETY: no other piece has these columns of the group.
        unsafe { by_tiles(0..self.rows.len(), self.cols.clone(), &[self.codes], &mut fill) };
    }
}

struct CastColumns<T, C> {
    reader: Reader<T>,
    first_row: usize,
    first_col: usize,
    factors: Vec<f32>,
    format: PhantomData<C>,
}

impl<T: Element, C: Codes> Fill for CastColumns<T, C> {
    #[inline(always)]
    fn fill(&mut self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        let factors = &self.factors[cols.start - self.first_col..];
        let values = self.reader.row(self.first_row + row, cols);
        for ((x, q), out) in values.iter().zip(factors).zip(out) {
            *out = C::encode(x.widen() * q);
        }
    }
}

/// Reads the bounds, and restricts them to the rows and columns of the call. The result of
/// [`group_bounds`] needs no restriction.
fn read_bounds(groups: &Groups, rows: usize, columns: usize) -> Vec<(Range<usize>, usize)> {
    let (ends, padded_ends) = (groups.ends.matrix(), groups.padded_ends.matrix());
    let (mut start, mut padded_start) = (0, 0);
    (0..ends.cols)
        .map(|i| {
            // SAFETY: validation checked that both are int32 rows with an element per group.
            let (end, padded) = unsafe { (ends.read::<i32>(0, i), padded_ends.read::<i32>(0, i)) };
            let end = (end.max(0) as usize).clamp(start, rows.min(start + (columns - padded_start)).max(start));
            let found = (start..end, padded_start);
            padded_start = (padded.max(0) as usize).clamp(padded_start + (end - start), columns);
            start = end;
            found
        })
        .collect()
}

pub(crate) fn quantize_groups(call: GroupCall) {
    let _env = DefaultFloatEnv::enter();
    let GroupCall { source, groups, rule, format, rowwise, columnwise } = call;
    let ((rows, cols), dtype) = (source.shape(), source.main().1.dtype());
    let source = Source::new(&source);
    let parallel = rows * cols >= PARALLEL;
    let columns = columnwise.as_ref().map_or(usize::MAX, |plane| plane.codes.cols());
    let bounds = read_bounds(&groups, rows, columns);
    if let Some(plane) = rowwise {
        let (codes, scales) = (plane.codes.matrix(), plane.scales.matrix());
        let used = bounds.last().map_or(0, |(group, _)| group.end);
        let lines = (PARALLEL / 2 / cols.max(1)).max(1);
        pool::for_each(rows.div_ceil(lines), parallel, |i| {
            let rows = i * lines..((i + 1) * lines).min(rows);
            with_element!(dtype, T => with_codes!(format, C => dispatch(RowPiece::<T, C> {
                reader: Reader::new(source), rows, used, rule, codes, scales, format: PhantomData,
            })));
        });
    }
    if let Some(plane) = columnwise {
        let (codes, scales) = (plane.codes.matrix(), plane.scales.matrix());
        zero_padding(codes, &bounds);
        let chunks = cols.div_ceil(COLS);
        pool::for_each(bounds.len() * chunks, parallel, |i| {
            let (group, chunk) = (i / chunks, i % chunks);
            let (rows, start) = bounds[group].clone();
            let cols = chunk * COLS..((chunk + 1) * COLS).min(cols);
            let codes = Matrix { ptr: codes.at(0, start), cols: rows.len(), ..codes }.transposed();
            with_element!(dtype, T => with_codes!(format, C => dispatch(ColumnPiece::<T, C> {
                reader: Reader::new(source), group, rows, cols, rule, codes, scales, format: PhantomData,
            })));
        });
    }
}

/// Zeroes the columns that belong to no row.
fn zero_padding(codes: Matrix, bounds: &[(Range<usize>, usize)]) {
    let starts = bounds.iter().map(|(_, start)| *start).skip(1).chain([codes.cols]);
    let begins = bounds.iter().map(|(rows, start)| start + rows.len());
    let gaps: Vec<_> = begins.zip(starts).collect();
    let gaps = if bounds.is_empty() { vec![(0, codes.cols)] } else { gaps };
    for row in 0..codes.rows {
        for col in gaps.iter().flat_map(|(from, to)| *from..*to) {
            // SAFETY: the element is inside the FP8 output, and nothing else writes yet.
            unsafe { codes.write(row, col, 0_u8) };
        }
    }
}
