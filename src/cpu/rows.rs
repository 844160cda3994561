//! What is done to a contiguous run of elements. To be called inside a [`super::simd::Kernel`], whose
//! instruction set the loops take on.

use super::convert::{Codes, Element};

/// The fp32 bits of the absolute maximum; NaNs are the largest, and keep a payload; 0 for no elements.
#[inline(always)]
pub(crate) fn amax<T: Element>(xs: &[T]) -> u32 {
    let mut found = T::Bits::default();
    for x in xs {
        found = found.max(x.magnitude());
    }
    T::widen_magnitude(found)
}

/// out = encode(x * q). With `AMAX`, gives what [`amax`] gives; else 0.
#[inline(always)]
pub(crate) fn cast<T: Element, C: Codes, const AMAX: bool>(xs: &[T], q: f32, out: &mut [u8]) -> u32 {
    let mut found = 0;
    for (x, out) in xs.iter().zip(out) {
        let x = x.widen();
        if AMAX {
            found = found.max(x.magnitude());
        }
        *out = C::encode(x * q);
    }
    found
}

/// out = narrow(decode(code) * scale).
#[inline(always)]
pub(crate) fn dequantize<C: Codes, T: Element>(codes: &[u8], scale: f32, out: &mut [T]) {
    for (code, out) in codes.iter().zip(out) {
        *out = T::narrow(C::decode(*code) * scale);
    }
}
