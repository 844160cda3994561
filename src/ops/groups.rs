//! Rows that are divided into groups, one for each expert: their bounds, and their quantization.

use super::tensorwise::check_rule;
use super::validate::{Call, Kind, one_matrix, shape};
use crate::error::Error;
use crate::format::groups::padded_columns;
use crate::layout::{DType, View, ViewMut};
use crate::spec::{BlockPlane, GroupCall, GroupSource, Groups, ScaleRule, Stream};
use crate::{cpu, cuda};

/// Computes the bounds of groups from untrusted offsets into `rows` rows ([`crate::format::groups::bounds`]).
/// `offsets`, `ends` and `padded_ends` are int32 with one element per group. `error` (int32, one element) is 1
/// if an offset is invalid, and 0 otherwise.
pub fn group_bounds(
    offsets: View,
    rows: usize,
    ends: ViewMut,
    padded_ends: ViewMut,
    error: ViewMut,
    stream: Stream,
) -> Result<(), Error> {
    let mut call = Call::default();
    call.input("offsets", &offsets, Kind::Is(DType::I32))?;
    one_matrix("offsets", offsets.batch())?;
    for (arg, out) in [("ends", &ends), ("padded_ends", &padded_ends)] {
        call.output(arg, out, Kind::Is(DType::I32))?;
        shape(arg, out.shape(), (1, offsets.cols()), "one element for each group")?;
    }
    call.output("error", &error, Kind::Is(DType::I32))?;
    shape("error", error.shape(), (1, 1), "one element")?;
    shape("offsets", offsets.shape(), (1, offsets.cols()), "a vector with one element for each group")?;
    on!(call.finish()?, stream, cpu: cpu::group_bounds(offsets, rows, ends, padded_ends, error), cuda: cuda::group_bounds(offsets, rows, ends, padded_ends, error, stream))
}

/// Quantizes groups of rows in one or both directions.
///
/// Rowwise, each row has a scale: codes (rows, cols), scales (rows, 1). Rows that belong to no group have
/// codes 0 and scale 1, and are not read.
///
/// Columnwise, each column of each group has a scale: codes (cols, [`padded_columns`]), scales (groups,
/// cols). Row i of group g is column `padded_ends[g - 1] + i` of the codes. All other columns are 0. A group
/// without rows has scales of 1.
///
/// Scales follow [`ScaleRule::scale`], whose margin must be 0. Codes are encode(x * (1 / scale)).
pub fn quantize_groups(
    source: GroupSource,
    groups: Groups,
    rule: ScaleRule,
    rowwise: Option<BlockPlane>,
    columnwise: Option<BlockPlane>,
    stream: Stream,
) -> Result<(), Error> {
    let mut call = Call::default();
    let (name, values) = source.main();
    call.input(name, values, Kind::Wide)?;
    one_matrix(name, values.batch())?;
    check_source(&mut call, &source)?;
    let ((rows, cols), count) = (source.shape(), groups.count());
    for (arg, view) in [("ends", groups.ends), ("padded_ends", groups.padded_ends)] {
        call.input(arg, &view, Kind::Is(DType::I32))?;
        shape(arg, view.shape(), (1, count), "one element for each group")?;
    }
    let mut format = None;
    let columns = padded_columns(rows, count);
    for (names, plane, codes, scales) in [
        (["rowwise", "rowwise_scale"], &rowwise, (rows, cols), (rows, 1)),
        (["columnwise", "columnwise_scale"], &columnwise, (cols, columns), (count, cols)),
    ] {
        let Some(plane) = plane else { continue };
        let expected = format.map_or(Kind::Fp8, |format| Kind::Is(DType::from(format)));
        call.output(names[0], &plane.codes, expected)?;
        format = plane.codes.dtype().fp8();
        shape(names[0], plane.codes.shape(), codes, "the shape of the plane")?;
        call.output(names[1], &plane.scales, Kind::F32)?;
        shape(names[1], plane.scales.shape(), scales, "one element for each line")?;
    }
    let Some(format) = format else {
        return Err(Error::Value {
            arg: "rowwise".into(),
            got: "absent, and so is columnwise".into(),
            expected: "given, unless columnwise is".into(),
        });
    };
    check_rule(rule)?;
    if rule.margin != 0 {
        return Err(Error::Value {
            arg: "margin".into(),
            got: rule.margin.to_string(),
            expected: "0 for groups".into(),
        });
    }
    let device = call.finish()?;
    let call = GroupCall { source, groups, rule, format, rowwise, columnwise };
    on!(device, stream, cpu: cpu::quantize_groups(call), cuda: cuda::quantize_groups(call, stream))
}

/// Adds the other arguments of a source.
fn check_source(call: &mut Call, source: &GroupSource) -> Result<(), Error> {
    match source {
        GroupSource::Rows { index: None, .. } => Ok(()),
        GroupSource::Rows { x, index: Some(index) } => {
            call.input("index", index, Kind::Is(DType::I32))?;
            shape("index", index.shape(), (1, index.cols()), "a vector with one element for each row")?;
            if x.rows() > 0 || index.cols() == 0 {
                return Ok(());
            }
            let expected = "a matrix with at least one row, because index selects rows".into();
            Err(Error::Value { arg: "x".into(), got: "a matrix without rows".into(), expected })
        }
        GroupSource::Gated { h, .. } | GroupSource::GatedGradient { h, .. } if h.cols() % 2 != 0 => {
            let expected = "an even number of columns, the gate's and then as many of the factor's";
            Err(Error::Value {
                arg: "h".into(),
                got: format!("a matrix with {} columns", h.cols()),
                expected: expected.into(),
            })
        }
        GroupSource::Gated { .. } => Ok(()),
        GroupSource::GatedGradient { h, dy, .. } => {
            call.input("dy", dy, Kind::Is(h.dtype()))?;
            shape("dy", dy.shape(), (h.rows(), h.cols() / 2), "half the columns of h")
        }
    }
}
