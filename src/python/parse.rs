//! Parsing of numbers and strings, for functions and kernels.

use pyo3::PyErr;
use pyo3::exceptions::PyValueError;

use crate::format::e8m0::Rounding;
use crate::layout::Block;
use crate::ops::{Activation, Axis, ScaleRule};

/// The message for an invalid argument (Python: `ValueError`).
#[derive(Debug)]
pub(super) struct Refused(pub(super) String);

impl From<Refused> for PyErr {
    fn from(Refused(message): Refused) -> Self {
        PyValueError::new_err(message)
    }
}

/// Converts `value` to fp32, rounding to nearest even. The result does not depend on whether the calling
/// thread flushes subnormals (`torch.set_flush_denormal`).
pub(super) fn narrowed(value: f64) -> f32 {
    if value.is_nan() || value.abs() >= f64::from(f32::MIN_POSITIVE) {
        return value as f32;
    }
    // Count in units of the smallest fp32 subnormal. Multiplying by 2^149 avoids fp64 subnormals.
    let units = (value.abs() * f64::from_bits((1023 + 149) << 52)).round_ties_even() as u32;
    f32::from_bits(units).copysign(if value.is_sign_negative() { -1.0 } else { 1.0 })
}

/// Clamps a margin to i32. Every clamped value is also outside the range that operations accept, so the
/// operation reports it.
pub(super) fn margin(margin: i64) -> i32 {
    margin.clamp(i32::MIN.into(), i32::MAX.into()) as i32
}

/// Returns the rule for fp32 scales.
pub(super) fn scale_rule(power_of_2: bool, amax_epsilon: f64, margin: i64) -> ScaleRule {
    ScaleRule { power_of_2, amax_epsilon: narrowed(amax_epsilon), margin: self::margin(margin) }
}

/// Parses a size of a block, where -1 is the whole extent.
pub(super) fn extent(block: i64) -> Result<usize, Refused> {
    match block {
        -1 => Ok(Block::ALL),
        1.. => Ok(block.unsigned_abs() as usize),
        _ => Err(Refused(format!(
            "block has the size {block}; it must be at least 1, or -1 for the whole extent"
        ))),
    }
}

/// Parses both sizes of a block.
pub(super) fn block(rows: i64, cols: i64) -> Result<Block, Refused> {
    Ok(Block { rows: extent(rows)?, cols: extent(cols)? })
}

/// Parses a nonnegative number.
pub(super) fn count(name: &str, value: i64) -> Result<usize, Refused> {
    usize::try_from(value).map_err(|_| Refused(format!("{name} is {value}; it must be at least 0")))
}

/// Parses an unsigned 32-bit number.
pub(super) fn number(name: &str, value: i64) -> Result<u32, Refused> {
    let expected = "it must be at least 0 and below 4294967296";
    u32::try_from(value).map_err(|_| Refused(format!("{name} is {value}; {expected}")))
}

/// Parses the rounding mode of E8M0 scales.
pub(super) fn rounding(rounding: &str) -> Result<Rounding, Refused> {
    match rounding {
        "ceil" => Ok(Rounding::Ceil),
        "floor" => Ok(Rounding::Floor),
        _ => Err(Refused(format!("rounding is {rounding:?}; it must be \"ceil\" or \"floor\""))),
    }
}

/// Parses the axis whose lines share a scale.
pub(super) fn axis(axis: i64) -> Result<Axis, Refused> {
    match axis {
        0 => Ok(Axis::Rows),
        1 => Ok(Axis::Columns),
        _ => Err(Refused(format!("axis is {axis}; it must be 0 or 1"))),
    }
}

/// Parses an activation.
pub(super) fn activation(activation: &str) -> Result<Activation, Refused> {
    match activation {
        "silu" => Ok(Activation::Silu),
        "gelu_tanh" => Ok(Activation::GeluTanh),
        _ => Err(Refused(format!("activation is {activation:?}; it must be \"silu\" or \"gelu_tanh\""))),
    }
}
