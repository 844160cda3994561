//! Sums over the rows of a matrix.

use super::validate::{Call, Kind, check_number, one_matrix, shape};
use crate::error::Error;
use crate::layout::{DType, Device, View, ViewMut};
use crate::spec::Stream;
use crate::{cpu, cuda};

/// Sums the rows of `x` (bf16) in fp32 from first to last, and divides by `divisor`
/// (`format::sum::divided_sum`). `out` is fp32, one row with an element for each column.
pub fn sum_rows(out: ViewMut, x: View, divisor: f32, stream: Stream) -> Result<(), Error> {
    let mut call = Call::default();
    call.output("out", &out, Kind::F32)?;
    call.input("x", &x, Kind::Is(DType::Bf16))?;
    shape("out", out.shape(), (1, x.cols()), "one element for each column of x")?;
    one_matrix("x", x.batch())?;
    if x.rows() == 0 {
        return Err(Error::Value {
            arg: "x".into(),
            got: "a matrix without rows".into(),
            expected: "a matrix with at least one row".into(),
        });
    }
    check_number("divisor", divisor, divisor.is_finite() && divisor != 0.0, "finite and not zero")?;
    match call.finish()? {
        Device::Cpu => {
            cpu::sum_rows(out, x, divisor);
            Ok(())
        }
        Device::Cuda(_) => cuda::sum_rows(out, x, divisor, stream),
    }
}
