//! Random numbers that depend on an element's position only.

use super::validate::{Call, Kind, check_number, one_matrix};
use crate::error::Error;
use crate::layout::{Device, ViewMut};
use crate::spec::{Numbers, Stream};
use crate::{cpu, cuda};

/// Fills `x` with random numbers between `low` and `high` (`format::random::between`, rounded to the
/// dtype of `x`). Element i in row-major order gets the number with index `numbers.offset` + i.
pub fn random_uniform(
    x: ViewMut,
    numbers: Numbers,
    (low, high): (f32, f32),
    stream: Stream,
) -> Result<(), Error> {
    let mut call = Call::default();
    call.output("x", &x, Kind::Wide)?;
    one_matrix("x", x.batch())?;
    if let Some(step) = &numbers.step {
        call.one_input("step", step)?;
    }
    for (arg, value) in [("low", low), ("high", high)] {
        check_number(arg, value, value.is_finite(), "finite")?;
    }
    if high < low || !(high - low).is_finite() {
        let expected = format!("at least low ({low}), and high - low must be finite").into();
        return Err(Error::Value { arg: "high".into(), got: high.to_string(), expected });
    }
    match call.finish()? {
        Device::Cpu => {
            cpu::random_uniform(x, numbers, (low, high));
            Ok(())
        }
        Device::Cuda(_) => cuda::random_uniform(x, numbers, (low, high), stream),
    }
}
