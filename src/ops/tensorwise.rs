//! Quantization with one scale per tensor.

use super::validate::{Call, Kind, check_number, length, one_each, one_matrix, same_batch, shape};
use crate::error::{Arg, Error};
use crate::format::Fp8Format;
use crate::layout::{Device, View, ViewMut};
use crate::spec::{ScaleRule, Scaling, Stream, TensorCall};
use crate::{cpu, cuda};

/// Computes the absolute maximum of each matrix of `x`, into `out` (fp32, one element per matrix). The bits
/// of |x| are compared as integers, so a NaN or an infinity is never lost. If `x` is empty, the maximum is 0.
pub fn amax(x: View, out: ViewMut, stream: Stream) -> Result<(), Error> {
    let mut call = Call::default();
    call.input("x", &x, Kind::Wide)?;
    call.one_output("out", &out)?;
    let device = call.finish()?;
    (0..x.batch()).try_for_each(|i| {
        let (x, out) = (x.at(i), out.at(i));
        match device {
            Device::Cpu => {
                cpu::amax(x, out);
                Ok(())
            }
            Device::Cuda(_) => cuda::amax(x, out, stream),
        }
    })
}

/// Computes the absolute maximum of each matrix of a list, into `out` (fp32, 1xN). Tensors may have different
/// dtypes.
pub fn multi_amax(xs: &[View], out: ViewMut, stream: Stream) -> Result<(), Error> {
    let mut call = Call::default();
    call.output("out", &out, Kind::F32)?;
    one_matrix("out", out.batch())?;
    one_each("out", out.shape(), count(xs), "xs")?;
    for (i, x) in xs.iter().enumerate() {
        call.input(Arg::Item("xs", i), x, Kind::Wide)?;
    }
    let device = call.finish()?;
    let xs = &matrices(xs)[..];
    match device {
        Device::Cpu => {
            cpu::multi_amax(xs, out);
            Ok(())
        }
        Device::Cuda(_) => cuda::multi_amax(xs, out, stream),
    }
}

/// Computes the scale for each absolute maximum ([`ScaleRule::scale`]), into `scale_out` of the same shape;
/// fp32.
///
/// No amax may be negative. This is not checked, because reading the values would synchronize with the
/// device. The result for a negative amax differs between devices.
pub fn scale_from_amax(
    amax: View,
    format: Fp8Format,
    rule: ScaleRule,
    scale_out: ViewMut,
    stream: Stream,
) -> Result<(), Error> {
    check_rule(rule)?;
    let mut call = Call::default();
    call.input("amax", &amax, Kind::F32)?;
    call.output("scale_out", &scale_out, Kind::F32)?;
    shape("scale_out", scale_out.shape(), amax.shape(), "the shape of amax")?;
    let device = call.finish()?;
    (0..amax.batch()).try_for_each(|i| {
        let (amax, scale_out) = (amax.at(i), scale_out.at(i));
        match device {
            Device::Cpu => {
                cpu::scale_from_amax(amax, format, rule, scale_out);
                Ok(())
            }
            Device::Cuda(_) => cuda::scale_from_amax(amax, format, rule, scale_out, stream),
        }
    })
}

/// Quantizes with a given scale (fp32, one element per matrix): code = encode(x * (1 / scale)).
pub fn quantize(
    x: View,
    scale: View,
    rowwise: Option<ViewMut>,
    columnwise: Option<ViewMut>,
    stream: Stream,
) -> Result<(), Error> {
    quantize_tensor(x, Scaling::Static(scale), rowwise, columnwise, stream)
}

/// Quantizes with a given scale and records the absolute maximum from the same read (delayed scaling).
///
/// - `amax` (fp32, one element) is raised to the absolute maximum of `x` if that is finite.
/// - `scale_used` (fp32, one element) becomes `scale`, or NaN if `x` holds a NaN or an infinity. The codes
///   are written in both cases.
pub fn quantize_delayed(
    x: View,
    scale: View,
    amax: ViewMut,
    scale_used: ViewMut,
    rowwise: Option<ViewMut>,
    columnwise: Option<ViewMut>,
    stream: Stream,
) -> Result<(), Error> {
    let scaling = Scaling::Delayed { scale, amax, scale_used };
    quantize_tensor(x, scaling, rowwise, columnwise, stream)
}

/// Quantizes with current scaling: computes the absolute maximum, computes the scale from it into `scale_out`
/// (fp32, one element), and quantizes with that scale.
pub fn quantize_current(
    x: View,
    rule: ScaleRule,
    scale_out: ViewMut,
    rowwise: Option<ViewMut>,
    columnwise: Option<ViewMut>,
    stream: Stream,
) -> Result<(), Error> {
    check_rule(rule)?;
    quantize_tensor(x, Scaling::Current { rule, scale_out }, rowwise, columnwise, stream)
}

fn quantize_tensor(
    x: View,
    scaling: Scaling,
    rowwise: Option<ViewMut>,
    columnwise: Option<ViewMut>,
    stream: Stream,
) -> Result<(), Error> {
    let mut call = Call::default();
    call.input("x", &x, Kind::Wide)?;
    match &scaling {
        Scaling::Static(scale) => call.one_input("scale", scale)?,
        Scaling::Delayed { scale, amax, scale_used } => {
            call.one_input("scale", scale)?;
            call.one_output("amax", amax)?;
            call.one_output("scale_used", scale_used)?;
        }
        Scaling::Current { scale_out, .. } => call.one_output("scale_out", scale_out)?,
    }
    let format = call.planes(x.shape(), rowwise.as_ref(), columnwise.as_ref())?;
    let device = call.finish()?;
    (0..x.batch()).try_for_each(|i| {
        let call = TensorCall {
            x: x.at(i),
            scaling: scaling.at(i),
            format,
            rowwise: rowwise.as_ref().map(|codes| codes.at(i)),
            columnwise: columnwise.as_ref().map(|codes| codes.at(i)),
        };
        match device {
            Device::Cpu => {
                cpu::quantize(call);
                Ok(())
            }
            Device::Cuda(_) => cuda::quantize(call, stream),
        }
    })
}

/// Quantizes each matrix of a list with its own given scale. `scales` is fp32, 1xN. Each of `outs` has the
/// shape of its tensor. Tensors may have different dtypes, and outputs different formats.
pub fn multi_quantize(xs: &[View], scales: View, outs: &[ViewMut], stream: Stream) -> Result<(), Error> {
    let mut call = Call::default();
    call.input("scales", &scales, Kind::F32)?;
    one_matrix("scales", scales.batch())?;
    one_each("scales", scales.shape(), count(xs), "xs")?;
    check_lists(&mut call, xs, outs)?;
    let device = call.finish()?;
    let (xs, outs) = (&matrices(xs)[..], &matrices_mut(outs)[..]);
    match device {
        Device::Cpu => {
            cpu::multi_quantize(xs, scales, outs);
            Ok(())
        }
        Device::Cuda(_) => cuda::multi_quantize(xs, scales, outs, stream),
    }
}

/// Quantizes each matrix of a list as [`quantize_delayed`] does, rowwise only. `scales`, `amaxes` and
/// `scales_used` are fp32, 1xN.
pub fn multi_quantize_delayed(
    xs: &[View],
    scales: View,
    amaxes: ViewMut,
    scales_used: ViewMut,
    outs: &[ViewMut],
    stream: Stream,
) -> Result<(), Error> {
    let mut call = Call::default();
    call.input("scales", &scales, Kind::F32)?;
    one_matrix("scales", scales.batch())?;
    one_each("scales", scales.shape(), count(xs), "xs")?;
    call.output("amaxes", &amaxes, Kind::F32)?;
    one_matrix("amaxes", amaxes.batch())?;
    one_each("amaxes", amaxes.shape(), count(xs), "xs")?;
    call.output("scales_used", &scales_used, Kind::F32)?;
    one_matrix("scales_used", scales_used.batch())?;
    one_each("scales_used", scales_used.shape(), count(xs), "xs")?;
    check_lists(&mut call, xs, outs)?;
    let device = call.finish()?;
    let (xs, outs) = (&matrices(xs)[..], &matrices_mut(outs)[..]);
    match device {
        Device::Cpu => {
            cpu::multi_quantize_delayed(xs, scales, amaxes, scales_used, outs);
            Ok(())
        }
        Device::Cuda(_) => cuda::multi_quantize_delayed(xs, scales, amaxes, scales_used, outs, stream),
    }
}

fn check_lists<'a>(call: &mut Call<'a>, xs: &[View<'a>], outs: &'a [ViewMut]) -> Result<(), Error> {
    length("outs", outs.len(), xs.len(), "xs")?;
    for (i, (x, out)) in xs.iter().zip(outs).enumerate() {
        call.input(Arg::Item("xs", i), x, Kind::Wide)?;
        call.output(Arg::Item("outs", i), out, Kind::Fp8)?;
        if out.shape() != x.shape() {
            shape(Arg::Item("outs", i), out.shape(), x.shape(), &format!("the shape of xs[{i}]"))?;
        }
        same_batch(Arg::Item("outs", i), out.batch(), x.batch(), Arg::Item("xs", i))?;
    }
    Ok(())
}

/// Returns the number of matrices in a list.
fn count(xs: &[View]) -> usize {
    xs.iter().map(View::batch).sum()
}

/// Returns the matrices of a list, one view each.
fn matrices<'a>(xs: &[View<'a>]) -> Vec<View<'a>> {
    xs.iter().flat_map(|x| (0..x.batch()).map(|i| x.at(i))).collect()
}

/// Returns the matrices of a list of outputs, one view each.
fn matrices_mut<'a>(outs: &'a [ViewMut]) -> Vec<ViewMut<'a>> {
    outs.iter().flat_map(|out| (0..out.batch()).map(|i| out.at(i))).collect()
}

pub(super) fn check_rule(rule: ScaleRule) -> Result<(), Error> {
    let ScaleRule { amax_epsilon, margin, .. } = rule;
    let epsilon_works = amax_epsilon.is_finite() && amax_epsilon >= 0.0;
    check_number("amax_epsilon", amax_epsilon, epsilon_works, "finite and at least 0")?;
    check_number("margin", margin, (-126..=127).contains(&margin), "between -126 and 127")
}

/// Returns an error unless the rule is valid and its margin is 0.
pub(super) fn check_rule_without_margin(rule: ScaleRule, expected: &'static str) -> Result<(), Error> {
    check_rule(rule)?;
    check_number("margin", rule.margin, rule.margin == 0, expected)
}
