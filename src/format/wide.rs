//! The high-precision element types: fp32, bf16, fp16.

use half::{bf16, f16};

use super::DType;

/// The one NaN that results carry, so that backends agree in every byte: quiet, positive, no payload.
pub const NAN_BITS: u32 = 0x7FC0_0000;

/// The bits of infinity: larger ones (without the sign) are NaN.
pub const INF_BITS: u32 = 0x7F80_0000;

/// `value` as an fp32, rounded to nearest even, also where the caller flushes subnormals, as
/// `torch.set_flush_denormal` has it: an argument means the same to all who give it.
#[must_use]
pub fn narrowed(value: f64) -> f32 {
    if value.is_nan() || value.abs() >= f64::from(f32::MIN_POSITIVE) {
        return value as f32;
    }
    // In units of the least subnormal; 2^149 takes it to where fp64 has no subnormals.
    let units = (value.abs() * f64::from_bits((1023 + 149) << 52)).round_ties_even() as u32;
    f32::from_bits(units).copysign(if value.is_sign_negative() { -1.0 } else { 1.0 })
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// A high-precision element type.
pub trait Wide: Copy + Send + Sync + 'static + sealed::Sealed {
    /// Its name in the layout.
    const DTYPE: DType;

    /// Exact.
    fn to_f32(self) -> f32;

    /// Round to nearest even; overflow gives infinity; NaN gives the positive quiet NaN without payload.
    fn from_f32(x: f32) -> Self;
}

impl Wide for f32 {
    const DTYPE: DType = DType::F32;

    fn to_f32(self) -> f32 {
        self
    }

    fn from_f32(x: f32) -> Self {
        if x.is_nan() { Self::from_bits(NAN_BITS) } else { x }
    }
}

impl Wide for bf16 {
    const DTYPE: DType = DType::Bf16;

    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    fn from_f32(x: f32) -> Self {
        if x.is_nan() { Self::NAN } else { Self::from_f32(x) }
    }
}

impl Wide for f16 {
    const DTYPE: DType = DType::F16;

    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }

    fn from_f32(x: f32) -> Self {
        if x.is_nan() { Self::NAN } else { Self::from_f32(x) }
    }
}

/// max of |x| as integers over the bits of |x|, so that NaN > Inf > every number; 0 for no elements. Any NaN
/// is reported as [`NAN_BITS`], whatever its payload.
#[must_use]
pub fn amax<T: Wide>(xs: impl IntoIterator<Item = T>) -> f32 {
    let bits = xs.into_iter().map(|x| x.to_f32().to_bits() & 0x7FFF_FFFF).max().unwrap_or(0);
    f32::from_bits(if bits > INF_BITS { NAN_BITS } else { bits })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amax_orders_nan_over_inf_over_numbers() {
        assert_eq!(amax::<f32>([]).to_bits(), 0);
        assert_eq!(amax([-3.0_f32, 2.0]), 3.0);
        assert_eq!(amax([f32::NEG_INFINITY, 2.0]), f32::INFINITY);
        assert_eq!(amax([f32::INFINITY, f32::from_bits(0xFFC0_1234)]).to_bits(), NAN_BITS);
    }
}
