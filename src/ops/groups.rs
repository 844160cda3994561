//! Rows that are divided into groups, one for each expert: their bounds, and their quantization.

use super::tensorwise::check_rule_without_margin;
use super::validate::{Call, Kind, contiguous, no_plane, one_matrix, shape};
use crate::error::Error;
use crate::format::Fp8Format;
use crate::format::groups::padded_columns;
use crate::layout::{DType, Device, View, ViewMut};
use crate::spec::{
    BlockPlane, Gated, GroupCall, Groups, Routes, ScaleRule, Stream, gated_shape, indexed_shape,
};
use crate::{cpu, cuda};

/// Computes the bounds of groups from untrusted offsets into `rows` rows (`format::groups::bounds`).
/// `offs`, `ends` and `padded_ends` are int32 with one element per group, so `padded_columns(rows, groups)`
/// must fit int32.
///
/// An invalid offset is an error. On the CPU, nothing is written then. On CUDA, the device replaces the offset
/// and sets a flag, which stays set until the host finds it. This call, every later one and
/// [`check_offsets`] return [`Error::Offsets`] if they find the flag set, and clear it.
pub fn group_bounds(
    offs: View,
    rows: usize,
    ends: ViewMut,
    padded_ends: ViewMut,
    stream: Stream,
) -> Result<(), Error> {
    let mut call = Call::default();
    call.input("offs", &offs, Kind::Is(DType::I32))?;
    one_matrix("offs", offs.batch())?;
    for (arg, out) in [("ends", &ends), ("padded_ends", &padded_ends)] {
        call.output(arg, out, Kind::Is(DType::I32))?;
        shape(arg, out.shape(), (1, offs.cols()), "one element for each group")?;
        contiguous(arg, out.is_contiguous())?;
    }
    contiguous("offs", offs.is_contiguous())?;
    shape("offs", offs.shape(), (1, offs.cols()), "a vector with one element for each group")?;
    padded_ends_fit(rows, offs.cols())?;
    match call.finish()? {
        Device::Cpu => cpu::group_bounds(offs, rows, ends, padded_ends),
        Device::Cuda(_) => cuda::group_bounds(offs, rows, ends, padded_ends, stream),
    }
}

/// Checks that the padded ends of groups fit int32.
fn padded_ends_fit(rows: usize, groups: usize) -> Result<(), Error> {
    if i32::try_from(padded_columns(rows, groups)).is_ok() {
        return Ok(());
    }
    let expected = "below 2^31 even if each group is padded to a multiple of 16 rows; split the rows".into();
    Err(Error::Value { arg: "rows".into(), got: rows.to_string(), expected })
}

/// Computes the ends of experts (`format::groups::end_of`, `format::groups::bounds`), the token of each row and
/// the row of each pair. Rows of an expert that is not a group are after the last end.
///
/// `row_pairs` must be a permutation of all pairs. If a pair is not below the number of rows, the call returns
/// an error on the CPU, and nothing is written. On CUDA, which does not wait for the device, a row with such a
/// pair has the token 0. The rows of pairs that are missing are not written.
pub fn route_rows(routes: Routes, stream: Stream) -> Result<(), Error> {
    let Routes { row_experts, row_pairs, k, ends, padded_ends, row_tokens, token_rows } = &routes;
    let (rows, groups) = (row_experts.cols(), ends.cols());
    let mut call = Call::default();
    for (arg, view) in [("row_experts", row_experts), ("row_pairs", row_pairs)] {
        call.input(arg, view, Kind::Is(DType::I64))?;
        one_matrix(arg, view.batch())?;
        shape(arg, view.shape(), (1, rows), "a vector with one element for each row")?;
        contiguous(arg, view.is_contiguous())?;
    }
    for (arg, out) in [("ends", ends), ("padded_ends", padded_ends)] {
        call.output(arg, out, Kind::Is(DType::I32))?;
        shape(arg, out.shape(), (1, groups), "one element for each expert")?;
        contiguous(arg, out.is_contiguous())?;
    }
    for (arg, out) in [("row_tokens", row_tokens), ("token_rows", token_rows)] {
        call.output(arg, out, Kind::Is(DType::I64))?;
        shape(arg, out.shape(), (1, rows), "one element for each row")?;
        contiguous(arg, out.is_contiguous())?;
    }
    if *k == 0 && rows > 0 {
        let expected = "at least 1, because each row is a pair of a token and one of its k experts".into();
        return Err(Error::Value { arg: "k".into(), got: "0".into(), expected });
    }
    padded_ends_fit(rows, groups)?;
    match call.finish()? {
        Device::Cpu => cpu::route_rows(routes),
        Device::Cuda(_) => cuda::route_rows(routes, stream),
    }
}

/// Returns [`Error::Offsets`] if a device found an invalid offset since the last check, and clears its flag.
/// This reads host memory, and does not wait for queued work.
pub fn check_offsets() -> Result<(), Error> {
    cuda::check_offsets()
}

/// Sets the rows after the last group to 0. `ends` is int32 with one element per group. `out` is fp32, bf16 or
/// fp16, and the elements of a row are contiguous. Other rows are neither read nor written.
pub fn zero_tail(out: ViewMut, ends: View, stream: Stream) -> Result<(), Error> {
    let mut call = Call::default();
    call.output("out", &out, Kind::Wide)?;
    one_matrix("out", out.batch())?;
    contiguous("out", out.cols() <= 1 || out.col_stride() == 1)?;
    call.input("ends", &ends, Kind::Is(DType::I32))?;
    one_matrix("ends", ends.batch())?;
    shape("ends", ends.shape(), (1, ends.cols()), "a vector with one element for each group")?;
    contiguous("ends", ends.is_contiguous())?;
    match call.finish()? {
        Device::Cpu => {
            cpu::zero_tail(out, ends);
            Ok(())
        }
        Device::Cuda(_) => cuda::zero_tail(out, ends, stream),
    }
}

/// Quantizes groups of rows in one or both directions. Row `i` is row `index[i]` of `x`, or row `i` without an
/// index. `index` is int64, and an index outside of `x` is replaced by the nearest row.
///
/// Rowwise, each row has a scale: codes (rows, cols), scales (rows, 1). Rows that belong to no group have
/// codes 0 and scale 1, and are not read.
///
/// Columnwise, each column of each group has a scale: codes (cols, `padded_columns`), scales (groups,
/// cols). Row i of group g is column `padded_ends[g - 1] + i` of the codes. All other columns are 0. A group
/// without rows has scales of 1.
///
/// Scales follow [`ScaleRule::scale`], whose margin must be 0. Codes are encode(x * (1 / scale)). Outputs are
/// contiguous.
pub fn quantize_groups(
    x: View,
    index: Option<View>,
    groups: Groups,
    rule: ScaleRule,
    rowwise: Option<BlockPlane>,
    columnwise: Option<BlockPlane>,
    stream: Stream,
) -> Result<(), Error> {
    let mut call = Call::default();
    call.input("x", &x, Kind::Wide)?;
    one_matrix("x", x.batch())?;
    let (rows, cols) = indexed_shape(&x, index.as_ref());
    if let Some(index) = &index {
        call.input("index", index, Kind::Is(DType::I64))?;
        shape("index", index.shape(), (1, rows), "a vector with one element for each row")?;
        contiguous("index", index.is_contiguous())?;
        if x.rows() == 0 && rows > 0 {
            let expected = "a matrix with at least one row, because index selects rows".into();
            return Err(Error::Value { arg: "x".into(), got: "a matrix without rows".into(), expected });
        }
    }
    let format = outputs(&mut call, (rows, cols), &groups, rule, [rowwise.as_ref(), columnwise.as_ref()])?;
    let device = call.finish()?;
    let call = GroupCall { x, index, groups, rule, format, rowwise, columnwise };
    match device {
        Device::Cpu => {
            cpu::quantize_groups(call);
            Ok(())
        }
        Device::Cuda(_) => cuda::quantize_groups(call, stream),
    }
}

/// Computes a gated activation or its gradient, and quantizes it as [`quantize_groups`] does.
pub fn quantize_gated(
    gated: Gated,
    groups: Groups,
    rule: ScaleRule,
    rowwise: Option<BlockPlane>,
    columnwise: Option<BlockPlane>,
    stream: Stream,
) -> Result<(), Error> {
    let Gated { h, dy, values, .. } = &gated;
    let cols = h.cols();
    let mut call = Call::default();
    call.input("h", h, Kind::Wide)?;
    one_matrix("h", h.batch())?;
    if cols % 2 != 0 {
        return Err(Error::Value {
            arg: "h".into(),
            got: format!("a matrix with {cols} columns"),
            expected: "an even number of columns: the gate's, then as many of `up`".into(),
        });
    }
    if let Some(dy) = dy {
        call.input("dy", dy, Kind::Is(h.dtype()))?;
        shape("dy", dy.shape(), gated_shape(h.shape(), false), "half the columns of h")?;
    }
    let expected = gated_shape(h.shape(), dy.is_some());
    call.output("values", values, Kind::Is(h.dtype()))?;
    shape("values", values.shape(), expected, "the shape of the values")?;
    contiguous("values", values.is_contiguous())?;
    let format = outputs(&mut call, expected, &groups, rule, [rowwise.as_ref(), columnwise.as_ref()])?;
    let device = call.finish()?;
    // The backend writes the values before it reads them.
    let x = values.read();
    let call = GroupCall { x, index: None, groups, rule, format, rowwise, columnwise };
    match device {
        Device::Cpu => {
            cpu::quantize_gated(&gated, call);
            Ok(())
        }
        Device::Cuda(_) => cuda::quantize_gated(&gated, call, stream),
    }
}

/// Adds the groups and the outputs of a quantization of values of this shape. Returns the format.
fn outputs<'a>(
    call: &mut Call<'a>,
    values: (usize, usize),
    groups: &Groups<'a>,
    rule: ScaleRule,
    [rowwise, columnwise]: [Option<&'a BlockPlane>; 2],
) -> Result<Fp8Format, Error> {
    let count = groups.count();
    for (arg, view) in [("ends", groups.ends), ("padded_ends", groups.padded_ends)] {
        call.input(arg, &view, Kind::Is(DType::I32))?;
        shape(arg, view.shape(), (1, count), "one element for each group")?;
        contiguous(arg, view.is_contiguous())?;
    }
    let mut format = None;
    let [rowwise_shape, columnwise_shape] = groups.plane_shapes(values);
    for (names, plane, expected_shape) in [
        (["rowwise", "rowwise_scale"], rowwise, rowwise_shape),
        (["columnwise", "columnwise_scale"], columnwise, columnwise_shape),
    ] {
        let Some(plane) = plane else { continue };
        let expected = format.map_or(Kind::Fp8, |format: Fp8Format| Kind::Is(format.into()));
        call.output(names[0], &plane.codes, expected)?;
        format = plane.codes.dtype().fp8();
        shape(names[0], plane.codes.shape(), expected_shape.codes, "the shape of the plane")?;
        contiguous(names[0], plane.codes.is_contiguous())?;
        call.output(names[1], &plane.scales, Kind::F32)?;
        shape(names[1], plane.scales.shape(), expected_shape.scales, "one element for each line")?;
        contiguous(names[1], plane.scales.is_contiguous())?;
    }
    check_rule_without_margin(rule, "0 for groups")?;
    format.ok_or_else(no_plane)
}
