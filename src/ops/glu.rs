//! Gated activations of two matrices, with quantization of their result and of their gradients.

use super::norm::outputs;
use super::validate::{Call, Kind, one_matrix, shape};
use crate::error::Error;
use crate::layout::{Device, View};
use crate::spec::{Glu, Stream, TensorPlanes};
use crate::{cpu, cuda};

/// Computes activation(gate) * up in fp32, rounds it to the dtype of the gate, and quantizes it as
/// [`quantize_current`](super::quantize_current) or [`quantize_delayed`](super::quantize_delayed) does. The
/// rounded values are not written.
pub fn quantize_glu(glu: Glu, planes: TensorPlanes, stream: Stream) -> Result<(), Error> {
    let mut call = Call::default();
    inputs(&mut call, &glu)?;
    let format = outputs(&mut call, glu.gate.shape(), &planes)?;
    match call.finish()? {
        Device::Cpu => {
            cpu::quantize_glu(&glu, format, &planes);
            Ok(())
        }
        Device::Cuda(_) => cuda::quantize_glu(&glu, format, &planes, stream),
    }
}

/// Computes the gradients of gate and up for the gradient `dy` of activation(gate) * up, rounds them to the
/// dtype of the gate, and quantizes each of them. Both have the same format. The rounded values are not
/// written.
pub fn quantize_glu_backward(
    glu: Glu,
    dy: View,
    gate: TensorPlanes,
    up: TensorPlanes,
    stream: Stream,
) -> Result<(), Error> {
    let mut call = Call::default();
    inputs(&mut call, &glu)?;
    call.input("dy", &dy, Kind::Is(glu.gate.dtype()))?;
    shape("dy", dy.shape(), glu.gate.shape(), "the shape of gate")?;
    let format = outputs(&mut call, glu.gate.shape(), &gate)?;
    let up_format = outputs(&mut call, glu.gate.shape(), &up)?;
    if up_format != format {
        return Err(Error::Value {
            arg: "up_planes".into(),
            got: format!("of {up_format:?}"),
            expected: format!("of {format:?}, as the planes of gate are").into(),
        });
    }
    match call.finish()? {
        Device::Cpu => {
            cpu::quantize_glu_backward(&glu, dy, format, [&gate, &up]);
            Ok(())
        }
        Device::Cuda(_) => cuda::quantize_glu_backward(&glu, dy, format, [&gate, &up], stream),
    }
}

fn inputs<'a>(call: &mut Call<'a>, glu: &Glu<'a>) -> Result<(), Error> {
    call.input("gate", &glu.gate, Kind::Wide)?;
    one_matrix("gate", glu.gate.batch())?;
    call.input("up", &glu.up, Kind::Is(glu.gate.dtype()))?;
    shape("up", glu.up.shape(), glu.gate.shape(), "the shape of gate")
}
