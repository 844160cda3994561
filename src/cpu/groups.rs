//! Bounds and quantization of groups of rows.

use std::marker::PhantomData;
use std::ops::Range;

use super::convert::{Codes, Element};
use super::float_env::DefaultFloatEnv;
use super::simd::{Kernel, dispatch};
use super::tensorwise::{PARALLEL, PIECE};
use super::tile::{COLS, Fill, by_tiles};
use super::types::{with_codes, with_element};
use super::{pool, rows};
use crate::error::{Arg, Error};
use crate::format::Fp8Format;
use crate::format::activation::Activation;
use crate::format::groups::{Bounds, bounds, end_of};
use crate::format::scale::reciprocal;
use crate::format::wide::canonical;
use crate::layout::{Matrix, View, ViewMut};
use crate::spec::{Gated, GroupCall, Groups, Routes, ScaleRule};

pub(crate) fn group_bounds(
    offs: View,
    rows: usize,
    ends: ViewMut,
    padded_ends: ViewMut,
) -> Result<(), Error> {
    let offs = offs.matrix();
    // SAFETY: validation checked that this is an int32 row.
    let offset = |i| unsafe { offs.read::<i32>(0, i) };
    let bounds = bounds((0..offs.cols).map(offset), rows);
    if let Some(group) = bounds.invalid {
        let least = group.checked_sub(1).map_or(0, |before| bounds.ends[before]);
        return Err(Error::Value {
            arg: Arg::Item("offs", group),
            got: offset(group).to_string(),
            expected: format!(
                "from {least} to {rows}: offs are the ends of groups, the cumulative sums of their sizes, and must not \
                 decrease or exceed the number of rows"
            )
            .into(),
        });
    }
    write_bounds(&bounds, ends, padded_ends);
    Ok(())
}

/// Writes bounds to int32 rows with an element per group.
fn write_bounds(bounds: &Bounds, ends: ViewMut, padded_ends: ViewMut) {
    for (out, values) in [(ends.matrix(), &bounds.ends), (padded_ends.matrix(), &bounds.padded_ends)] {
        for (i, value) in values.iter().enumerate() {
            // SAFETY: validation checked that these outputs are int32 rows with an element per group.
            unsafe { out.write(0, i, *value) };
        }
    }
}

pub(crate) fn route_rows(routes: Routes) -> Result<(), Error> {
    let Routes { row_experts, row_pairs, k, ends, padded_ends, row_tokens, token_rows } = routes;
    let (row_experts, row_pairs) = (row_experts.matrix(), row_pairs.matrix());
    let rows = row_pairs.cols;
    // SAFETY: validation checked that these are int64 rows with an element per row.
    let expert_of = |row| unsafe { row_experts.read::<i64>(0, row) };
    // SAFETY: as above.
    let pair_of = |row| unsafe { row_pairs.read::<i64>(0, row) };
    for row in 0..rows {
        let pair = pair_of(row);
        if usize::try_from(pair).is_ok_and(|pair| pair < rows) {
            continue;
        }
        return Err(Error::Value {
            arg: Arg::Item("row_pairs", row),
            got: pair.to_string(),
            expected: format!("from 0 to {}, because row_pairs is a permutation", rows - 1).into(),
        });
    }

    let ends_of_experts = (0..ends.cols()).map(|expert| end_of(expert as i64, rows, expert_of) as i32);
    write_bounds(&bounds(ends_of_experts, rows), ends, padded_ends);
    let (row_tokens, token_rows) = (row_tokens.matrix(), token_rows.matrix());
    for row in 0..rows {
        let pair = pair_of(row) as usize;
        // SAFETY: validation checked that these outputs are int64 rows with an element per row, and `pair` is
        // below the number of rows.
        unsafe {
            row_tokens.write(0, row, (pair / k) as i64);
            token_rows.write(0, pair, row as i64);
        }
    }
    Ok(())
}

pub(crate) fn zero_tail(out: ViewMut, ends: View) {
    let (out, ends) = (out.matrix(), ends.matrix());
    // SAFETY: validation checked that this is an int32 row.
    let end = if ends.cols == 0 { 0 } else { unsafe { ends.read::<i32>(0, ends.cols - 1) } };
    for row in end.max(0) as usize..out.rows {
        with_element!(out.dtype, T => {
            // SAFETY: the elements of a row are contiguous, and `T` is the type of the dtype.
            unsafe { out.row_mut::<T>(row, 0..out.cols) }.fill(T::narrow(0.0));
        });
    }
}

/// Computes rows of a gated activation or of its gradient.
struct GatedPiece<'a, T> {
    h: Matrix<'a>,
    dy: Option<Matrix<'a>>,
    activation: Activation,
    values: Matrix<'a>,
    rows: Range<usize>,
    buffers: [Vec<T>; 3],
}

impl<T: Element> Kernel for GatedPiece<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { h, dy, activation, values, rows, buffers: [mut first, mut second, mut third] } = self;
        let width = h.cols / 2;
        for row in rows {
            // SAFETY: the columns are the halves of `h`, whose elements are `T`.
            let (gates, ups) = unsafe {
                (h.row::<T>(row, 0..width, &mut first), h.row::<T>(row, width..h.cols, &mut second))
            };
            // SAFETY: the output is contiguous and has the dtype of `T`. No other piece has this row.
            let out = unsafe { values.row_mut::<T>(row, 0..values.cols) };
            let Some(dy) = dy else {
                for ((gate, up), out) in gates.iter().zip(ups).zip(out) {
                    *out = T::narrow(activation.gated(gate.widen(), up.widen()));
                }
                continue;
            };
            // SAFETY: `dy` has as many columns as the halves of `h`, and its dtype.
            let dys = unsafe { dy.row::<T>(row, 0..width, &mut third) };
            let (to_gates, to_ups) = out.split_at_mut(width);
            let inputs = gates.iter().zip(ups).zip(dys);
            for (((gate, up), dy), (to_gate, to_up)) in inputs.zip(to_gates.iter_mut().zip(to_ups)) {
                let (gate, up) = activation.gradients(gate.widen(), up.widen(), dy.widen());
                (*to_gate, *to_up) = (T::narrow(gate), T::narrow(up));
            }
        }
    }
}

pub(crate) fn quantize_gated(gated: &Gated, call: GroupCall) {
    let _env = DefaultFloatEnv::enter();
    let (h, values, activation) = (gated.h.matrix(), gated.values.matrix(), gated.activation);
    let dy = gated.dy.map(|dy| dy.matrix());
    let used = last_end(&call.groups, h.rows);
    for_rows(h.rows, h.cols, |rows| {
        let rows = rows.start.min(used)..rows.end.min(used);
        with_element!(h.dtype, T => dispatch(GatedPiece::<T> {
            h, dy, activation, values, rows, buffers: [Vec::new(), Vec::new(), Vec::new()],
        }));
    });
    quantize_groups(call);
}

/// Calls `f` with ranges of rows, in parallel if there are many elements.
pub(super) fn for_rows(rows: usize, cols: usize, f: impl Fn(Range<usize>) + Sync) {
    let lines = (PIECE / cols.max(1)).max(1);
    pool::for_each(rows.div_ceil(lines), rows * cols >= PARALLEL, |i| {
        f(i * lines..((i + 1) * lines).min(rows));
    });
}

/// Reads rows of `x` through the index.
struct Reader<'a, T> {
    x: Matrix<'a>,
    index: Option<Matrix<'a>>,
    buffer: Vec<T>,
}

impl<'a, T: Element> Reader<'a, T> {
    fn new(x: Matrix<'a>, index: Option<Matrix<'a>>) -> Self {
        Self { x, index, buffer: Vec::new() }
    }

    #[inline(always)]
    fn row(&mut self, row: usize, cols: Range<usize>) -> &[T] {
        // SAFETY: validation checked that the index is an int64 row with an element for each row.
        let row = self.index.map_or(row, |index| (unsafe { index.read::<i64>(0, row) }).max(0) as usize);
        // SAFETY: the row is clamped to the rows of `x`, whose elements are `T`.
        unsafe { self.x.row(row.min(self.x.rows - 1), cols, &mut self.buffer) }
    }
}

/// Returns the scale for fp32 bits of an absolute maximum, as [`rows::amax`] returns them.
fn scale_of(amax: u32, rule: ScaleRule, format: Fp8Format) -> f32 {
    rule.scale(f32::from_bits(canonical(amax)), format)
}

/// Quantizes rows with one scale per row.
struct RowPiece<'a, T, C> {
    reader: Reader<'a, T>,
    rows: Range<usize>,
    /// The number of rows that belong to a group.
    used: usize,
    rule: ScaleRule,
    codes: Matrix<'a>,
    scales: Matrix<'a>,
    format: PhantomData<C>,
}

impl<T: Element, C: Codes> Kernel for RowPiece<'_, T, C> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let cols = self.codes.cols;
        for row in self.rows.clone() {
            // SAFETY: the FP8 output is contiguous, and no other piece has this row.
            let codes = unsafe { self.codes.row_mut::<u8>(row, 0..cols) };
            let mut scale = 1.0;
            if row < self.used {
                let values = self.reader.row(row, 0..cols);
                scale = scale_of(rows::amax(values), self.rule, C::FORMAT);
                rows::cast::<T, C, false>(values, reciprocal(scale), codes);
            } else {
                codes.fill(0);
            }
            // SAFETY: the element is inside the fp32 output, and no other piece has this row.
            unsafe { self.scales.write(row, 0, scale) };
        }
    }
}

/// Quantizes columns of a group with one scale per column.
struct ColumnPiece<'a, T, C> {
    reader: Reader<'a, T>,
    group: usize,
    rows: Range<usize>,
    cols: Range<usize>,
    rule: ScaleRule,
    /// The group's columns of the codes, transposed: row 0 is the first row of the group.
    codes: Matrix<'a>,
    scales: Matrix<'a>,
    format: PhantomData<C>,
}

impl<T: Element, C: Codes> Kernel for ColumnPiece<'_, T, C> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let mut maxima = vec![T::Bits::default(); self.cols.len()];
        for row in self.rows.clone() {
            for (maximum, x) in maxima.iter_mut().zip(self.reader.row(row, self.cols.clone())) {
                *maximum = (*maximum).max(x.magnitude());
            }
        }
        let mut factors = vec![0.0; self.cols.len()];
        for ((col, maximum), factor) in self.cols.clone().zip(maxima).zip(&mut factors) {
            let scale = scale_of(T::widen_magnitude(maximum), self.rule, C::FORMAT);
            *factor = reciprocal(scale);
            // SAFETY: the element is inside the fp32 output, and no other piece has these columns of the
            // group.
            unsafe { self.scales.write(self.group, col, scale) };
        }
        let (first_row, first_col) = (self.rows.start, self.cols.start);
        let mut fill =
            CastColumns { reader: self.reader, first_row, first_col, factors, format: self.format };
        // SAFETY: no other piece has these columns of the group.
        unsafe { by_tiles(0..self.rows.len(), self.cols.clone(), &[self.codes], &mut fill) };
    }
}

struct CastColumns<'a, T, C> {
    reader: Reader<'a, T>,
    first_row: usize,
    first_col: usize,
    factors: Vec<f32>,
    format: PhantomData<C>,
}

impl<T: Element, C: Codes> Fill for CastColumns<'_, T, C> {
    #[inline(always)]
    fn fill(&mut self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        let factors = &self.factors[cols.start - self.first_col..];
        let values = self.reader.row(self.first_row + row, cols);
        for ((x, q), out) in values.iter().zip(factors).zip(out) {
            *out = C::encode(x.widen() * q);
        }
    }
}

/// Returns the rows of each group, and its first column in the columnwise codes. Bounds are clamped to the
/// rows and columns of the call, which does not change bounds from [`group_bounds`].
fn read_bounds(groups: &Groups, rows: usize, columns: usize) -> Vec<(Range<usize>, usize)> {
    let (ends, padded_ends) = (groups.ends.matrix(), groups.padded_ends.matrix());
    let (mut start, mut padded_start) = (0, 0);
    (0..ends.cols)
        .map(|i| {
            // SAFETY: validation checked that both are int32 rows with an element per group.
            let (end, padded) = unsafe { (ends.read::<i32>(0, i), padded_ends.read::<i32>(0, i)) };
            let most = rows.min(start + (columns - padded_start));
            let end = (end.max(0) as usize).clamp(start, most);
            let group = (start..end, padded_start);
            padded_start = (padded.max(0) as usize).clamp(padded_start + (end - start), columns);
            start = end;
            group
        })
        .collect()
}

/// Returns the number of rows that belong to groups.
fn last_end(groups: &Groups, rows: usize) -> usize {
    read_bounds(groups, rows, usize::MAX).last().map_or(0, |(rows, _)| rows.end)
}

pub(crate) fn quantize_groups(call: GroupCall) {
    let _env = DefaultFloatEnv::enter();
    let (rows, cols) = call.shape();
    let GroupCall { x, index, groups, rule, format, rowwise, columnwise } = call;
    let (x, index) = (x.matrix(), index.map(|index| index.matrix()));
    if let Some(plane) = rowwise {
        let (codes, scales) = (plane.codes.matrix(), plane.scales.matrix());
        let used = last_end(&groups, rows);
        for_rows(rows, cols, |rows| {
            with_element!(x.dtype, T => with_codes!(format, C => dispatch(RowPiece::<T, C> {
                reader: Reader::new(x, index), rows, used, rule, codes, scales, format: PhantomData,
            })));
        });
    }
    if let Some(plane) = columnwise {
        let (codes, scales) = (plane.codes.matrix(), plane.scales.matrix());
        let bounds = read_bounds(&groups, rows, codes.cols);
        zero_padding(codes, &bounds);
        let chunks = cols.div_ceil(COLS);
        pool::for_each(bounds.len() * chunks, rows * cols >= PARALLEL, |i| {
            let (group, chunk) = (i / chunks, i % chunks);
            let (rows, start) = bounds[group].clone();
            let cols = chunk * COLS..((chunk + 1) * COLS).min(cols);
            let codes = codes.columns(start..start + rows.len()).transposed();
            with_element!(x.dtype, T => with_codes!(format, C => dispatch(ColumnPiece::<T, C> {
                reader: Reader::new(x, index), group, rows, cols, rule, codes, scales, format: PhantomData,
            })));
        });
    }
}

/// Zeroes the columns that belong to no row.
fn zero_padding(codes: Matrix, bounds: &[(Range<usize>, usize)]) {
    let begins = [0].into_iter().chain(bounds.iter().map(|(rows, start)| start + rows.len()));
    let ends = bounds.iter().map(|(_, start)| *start).chain([codes.cols]);
    for gap in begins.zip(ends).map(|(from, to)| from..to) {
        for row in 0..codes.rows {
            // SAFETY: the FP8 output is contiguous, and nothing else writes to it yet.
            unsafe { codes.row_mut::<u8>(row, gap.clone()) }.fill(0);
        }
    }
}
