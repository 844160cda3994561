//! Rotary position embeddings.

use super::validate::{Call, Kind, contiguous, one_matrix, shape};
use crate::error::Error;
use crate::layout::{Device, ViewMut};
use crate::spec::{Rotation, Stream};
use crate::{cpu, cuda};

/// Rotates the heads of each token (`format::rotation`). `out` has the shape and dtype of `x` and is contiguous.
pub fn rotate(rotation: Rotation, out: ViewMut, stream: Stream) -> Result<(), Error> {
    let Rotation { x, cos, sin, .. } = &rotation;
    let mut call = Call::default();
    call.input("x", x, Kind::Wide)?;
    one_matrix("x", x.batch())?;
    for (arg, angles) in [("cos", cos), ("sin", sin)] {
        call.input(arg, angles, Kind::F32)?;
        contiguous(arg, angles.is_contiguous())?;
    }
    shape("sin", sin.shape(), cos.shape(), "the shape of cos")?;
    let (positions, channels) = cos.shape();
    if channels == 0 || !channels.is_multiple_of(2) || !x.cols().is_multiple_of(channels) {
        return Err(Error::Value {
            arg: "cos".into(),
            got: format!("of {channels} channels"),
            expected: format!("of an even number that divides the {} columns of x", x.cols()).into(),
        });
    }
    if x.rows() > 0 && (positions == 0 || !x.rows().is_multiple_of(positions)) {
        return Err(Error::Value {
            arg: "cos".into(),
            got: format!("of {positions} positions"),
            expected: format!("of a number that divides the {} rows of x", x.rows()).into(),
        });
    }
    call.output("out", &out, Kind::Is(x.dtype()))?;
    shape("out", out.shape(), x.shape(), "the shape of x")?;
    contiguous("out", out.is_contiguous())?;
    match call.finish()? {
        Device::Cpu => {
            cpu::rotate(&rotation, out);
            Ok(())
        }
        Device::Cuda(_) => cuda::rotate(&rotation, out, stream),
    }
}
