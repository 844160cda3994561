//! The high-precision element types: fp32, bf16, fp16.

use half::{bf16, f16};

use super::DType;

/// The only NaN in results, so that backends agree in every byte: quiet, positive, no payload.
pub(crate) const NAN_BITS: u32 = 0x7FC0_0000;

/// The bits of infinity. Larger bit patterns (without the sign) are NaN.
pub(crate) const INF_BITS: u32 = 0x7F80_0000;

/// Returns the fp32 bits of a magnitude, with [`NAN_BITS`] for any NaN.
#[inline(always)]
pub(crate) const fn canonical(magnitude: u32) -> u32 {
    if magnitude > INF_BITS { NAN_BITS } else { magnitude }
}

/// Returns a value, with [`NAN_BITS`] for any NaN.
#[inline(always)]
pub(crate) const fn canonical_nan(x: f32) -> f32 {
    if x.is_nan() { f32::from_bits(NAN_BITS) } else { x }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// A high-precision element type.
pub trait Wide: Copy + Send + Sync + 'static + sealed::Sealed {
    /// The element type as a [`DType`].
    const DTYPE: DType;

    /// Converts to fp32 exactly.
    fn to_f32(self) -> f32;

    /// Converts from fp32, rounding to nearest even. Overflow gives infinity, and NaN gives the positive
    /// quiet NaN without payload.
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

/// Returns the maximum of |x|, comparing the bits of |x| as integers, so that NaN > Inf > every number.
/// Returns 0 without elements. Any NaN is returned as [`NAN_BITS`], regardless of its payload.
#[cfg(test)]
pub(crate) fn amax<T: Wide>(xs: impl IntoIterator<Item = T>) -> f32 {
    let bits = xs.into_iter().map(|x| x.to_f32().to_bits() & 0x7FFF_FFFF).max().unwrap_or(0);
    f32::from_bits(canonical(bits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amax_orders_numbers_below_infinity_below_nan() {
        assert_eq!(amax::<f32>([]).to_bits(), 0);
        assert_eq!(amax([-3.0_f32, 2.0]), 3.0);
        assert_eq!(amax([f32::NEG_INFINITY, 2.0]), f32::INFINITY);
        assert_eq!(amax([f32::INFINITY, f32::from_bits(0xFFC0_1234)]).to_bits(), NAN_BITS);
    }
}
