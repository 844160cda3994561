//! Norms with quantization of their result.

use super::tensorwise::check_rule;
use super::validate::{Call, Kind, check_number, contiguous, one_matrix, shape};
use crate::error::Error;
use crate::format::Fp8Format;
use crate::layout::{Device, View, ViewMut};
use crate::spec::{Norm, Stream, TensorPlanes};
use crate::{cpu, cuda};

/// Computes a norm of each row (`format::norm`), rounds it to the dtype of `x`, and quantizes it as
/// [`quantize_current`](super::quantize_current) or [`quantize_delayed`](super::quantize_delayed) does. The
/// rounded values are not written. The statistics of the rows are outputs, for the backward.
pub fn quantize_norm(norm: Norm, planes: TensorPlanes, stream: Stream) -> Result<(), Error> {
    let Norm { x, weight, bias, centered, eps, mean, rstd } = &norm;
    let mut call = Call::default();
    call.input("x", x, Kind::Wide)?;
    one_matrix("x", x.batch())?;
    for (arg, vector) in [("weight", weight), ("bias", bias)] {
        let Some(vector) = vector else { continue };
        call.input(arg, vector, Kind::Is(x.dtype()))?;
        shape(arg, vector.shape(), (1, x.cols()), "one element for each column of x")?;
        contiguous(arg, vector.is_contiguous())?;
    }
    if bias.is_some() && weight.is_none() {
        return Err(Error::Value {
            arg: "bias".into(),
            got: "given without weight".into(),
            expected: "absent, unless weight is given".into(),
        });
    }
    check_number("eps", *eps, eps.is_finite() && *eps >= 0.0, "finite and at least 0")?;
    statistics(&mut call, "rstd", rstd, x)?;
    if let Some(mean) = mean {
        statistics(&mut call, "mean", mean, x)?;
    }
    debug_assert!(mean.is_some() == *centered);
    let format = outputs(&mut call, x.shape(), &planes)?;
    match call.finish()? {
        Device::Cpu => {
            cpu::quantize_norm(&norm, format, &planes);
            Ok(())
        }
        Device::Cuda(_) => cuda::quantize_norm(&norm, format, &planes, stream),
    }
}

fn statistics<'a>(call: &mut Call<'a>, arg: &'static str, out: &'a ViewMut, x: &View) -> Result<(), Error> {
    call.output(arg, out, Kind::F32)?;
    shape(arg, out.shape(), (x.rows(), 1), "one element for each row of x")?;
    contiguous(arg, out.is_contiguous())
}

/// Adds the outputs of a quantization of values of this shape. Returns the format.
pub(super) fn outputs<'a>(
    call: &mut Call<'a>,
    values: (usize, usize),
    planes: &'a TensorPlanes,
) -> Result<Fp8Format, Error> {
    if let Some((scale, amax)) = &planes.delayed {
        call.one_input("scale", scale)?;
        call.one_output("amax", amax)?;
    }
    check_rule(planes.rule)?;
    call.one_output("scale_out", &planes.scale)?;
    call.planes(values, planes.rowwise.as_ref(), planes.columnwise.as_ref())
}
