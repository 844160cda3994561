//! Gated activations of two matrices, with quantization of their result and of their gradients.

use super::norm::outputs;
use super::validate::{Call, Kind, contiguous, one_matrix, shape};
use crate::error::Error;
use crate::layout::{Device, View, ViewMut};
use crate::spec::{Glu, Stream, TensorPlanes};
use crate::{cpu, cuda};

/// Computes activation(gate) * up in fp32, rounds it to the dtype of the gate, and quantizes it as
/// [`quantize_current`](super::quantize_current) or [`quantize_delayed`](super::quantize_delayed) does.
/// `values` is memory for the rounded values, with the shape and dtype of the gate, contiguous. On CUDA it may stay
/// as it is, because delayed scaling can cast them in the launch that computes them.
pub fn quantize_glu(glu: Glu, values: ViewMut, planes: TensorPlanes, stream: Stream) -> Result<(), Error> {
    let mut call = Call::default();
    inputs(&mut call, &glu)?;
    output_values(&mut call, "values", &values, &glu)?;
    let format = outputs(&mut call, glu.gate.shape(), &planes)?;
    match call.finish()? {
        Device::Cpu => {
            cpu::quantize_glu(&glu, values, format, &planes);
            Ok(())
        }
        Device::Cuda(_) => cuda::quantize_glu(&glu, values, format, &planes, stream),
    }
}

/// Computes the gradients of gate and up for the gradient `dy` of activation(gate) * up, rounds them to the
/// dtype of the gate, and quantizes each of them. Both have the same format and rule, and either both or neither
/// have delayed scaling. `values` and `up_values` are memory for the rounded gradients of gate and up, as in
/// [`quantize_glu`].
pub fn quantize_glu_backward(
    glu: Glu,
    dy: View,
    [values, up_values]: [ViewMut; 2],
    gate: TensorPlanes,
    up: TensorPlanes,
    stream: Stream,
) -> Result<(), Error> {
    let mut call = Call::default();
    inputs(&mut call, &glu)?;
    call.input("dy", &dy, Kind::Is(glu.gate.dtype()))?;
    shape("dy", dy.shape(), glu.gate.shape(), "the shape of gate")?;
    output_values(&mut call, "values", &values, &glu)?;
    output_values(&mut call, "up_values", &up_values, &glu)?;
    let format = outputs(&mut call, glu.gate.shape(), &gate)?;
    let up_format = outputs(&mut call, glu.gate.shape(), &up)?;
    if up_format != format {
        return Err(Error::Value {
            arg: "up_planes".into(),
            got: format!("of {up_format:?}"),
            expected: format!("of {format:?}, as the planes of gate are").into(),
        });
    }
    if gate.delayed.is_some() != up.delayed.is_some() {
        return Err(Error::Value {
            arg: "delayed scaling".into(),
            got: "given for one gradient".into(),
            expected: "given for both gradients or for neither".into(),
        });
    }
    match call.finish()? {
        Device::Cpu => {
            cpu::quantize_glu_backward(&glu, dy, [values, up_values], format, [&gate, &up]);
            Ok(())
        }
        Device::Cuda(_) => {
            cuda::quantize_glu_backward(&glu, dy, [values, up_values], format, [&gate, &up], stream)
        }
    }
}

fn inputs<'a>(call: &mut Call<'a>, glu: &Glu<'a>) -> Result<(), Error> {
    call.input("gate", &glu.gate, Kind::Wide)?;
    one_matrix("gate", glu.gate.batch())?;
    call.input("up", &glu.up, Kind::Is(glu.gate.dtype()))?;
    shape("up", glu.up.shape(), glu.gate.shape(), "the shape of gate")
}

fn output_values<'a>(
    call: &mut Call<'a>,
    arg: &'static str,
    values: &'a ViewMut,
    glu: &Glu,
) -> Result<(), Error> {
    call.output(arg, values, Kind::Is(glu.gate.dtype()))?;
    shape(arg, values.shape(), glu.gate.shape(), "the shape of gate")?;
    contiguous(arg, values.is_contiguous())
}
