//! Operations on contiguous runs of elements. They must be called inside a [`super::simd::Kernel`], so that
//! their loops are compiled for its instruction set.

use super::convert::{Codes, Element};

/// Returns the fp32 bits of the absolute maximum. NaNs are the largest and keep a payload. Returns 0 without
/// elements.
#[inline(always)]
pub(crate) fn amax<T: Element>(xs: &[T]) -> u32 {
    let mut largest = T::Bits::default();
    for x in xs {
        largest = largest.max(x.magnitude());
    }
    T::widen_magnitude(largest)
}

/// Computes out = encode(x * q). With `AMAX`, returns the result of [`amax`]; otherwise returns 0.
#[inline(always)]
pub(crate) fn cast<T: Element, C: Codes, const AMAX: bool>(xs: &[T], q: f32, out: &mut [u8]) -> u32 {
    let mut largest = 0;
    for (x, out) in xs.iter().zip(out) {
        let x = x.widen();
        if AMAX {
            largest = largest.max(x.magnitude());
        }
        *out = C::encode(x * q);
    }
    largest
}

/// Computes out = narrow(decode(code) * scale).
#[inline(always)]
pub(crate) fn dequantize<C: Codes, T: Element>(codes: &[u8], scale: f32, out: &mut [T]) {
    for (code, out) in codes.iter().zip(out) {
        *out = T::narrow(C::decode(*code) * scale);
    }
}
