//! Branch-free versions of the conversions in `format`. They use fp32 and integer arithmetic, so that the
//! compiler vectorizes loops over them. Tests compare them with the definitions for every bf16, fp16 and
//! code, and for a sample of fp32 values.

use half::{bf16, f16};

use crate::format::Fp8Format;
use crate::format::wide::{INF_BITS, NAN_BITS, Wide};

const MAGNITUDE: u32 = 0x7FFF_FFFF;
const EXPONENT: u32 = 0x7F80_0000;

/// Rounds a finite magnitude, given as fp32 bits, to a format with `MANTISSA` stored mantissa bits and the
/// smallest normal exponent `EMIN`; ties to even. Returns the magnitude's code. Codes enumerate the format's
/// values upwards from zero.
///
/// Let e be the exponent of the value. After adding 2^(e + 23 - `MANTISSA`), fp32 values are 2^(e -
/// `MANTISSA`) apart. The addition therefore rounds as the format does, and the low bits of the sum count the
/// steps.
#[inline(always)]
const fn round_to<const MANTISSA: u32, const EMIN: i32>(magnitude: u32) -> u32 {
    let smallest = ((EMIN + 127) as u32) << 23;
    let exponent = magnitude & EXPONENT;
    let exponent = if exponent > smallest { exponent } else { smallest };
    let magic = exponent.wrapping_add((23 - MANTISSA) << 23);
    let sum = f32::from_bits(magnitude) + f32::from_bits(magic);
    let steps = sum.to_bits().wrapping_sub(magic);
    steps.wrapping_add(exponent.wrapping_sub(smallest) >> (23 - MANTISSA))
}

/// Returns the fp32 bits of a magnitude's code in a format with `MANTISSA` stored mantissa bits and the
/// smallest normal exponent `EMIN`. Codes of infinities and NaNs are treated as if they were numbers.
///
/// A subnormal is decoded with an implicit one, which is then subtracted. This is exact and produces no fp32
/// subnormals, which are slow on some CPUs.
#[inline(always)]
const fn expand<const MANTISSA: u32, const EMIN: i32>(code: u32) -> u32 {
    let smallest = ((EMIN + 127) as u32) << 23;
    let shifted = code << (23 - MANTISSA);
    let normal = shifted.wrapping_add(smallest - (1 << 23));
    let subnormal = f32::from_bits(shifted.wrapping_add(smallest)) - f32::from_bits(smallest);
    if code < 1 << MANTISSA { subnormal.to_bits() } else { normal }
}

/// An FP8 format that is known at compile time.
pub(crate) trait Codes: Copy + Send + Sync + 'static {
    const FORMAT: Fp8Format;

    /// [`Fp8Format::encode`].
    fn encode(x: f32) -> u8;

    /// [`Fp8Format::encode_stochastic`].
    fn encode_stochastic(x: f32, random: u32) -> u8;

    /// [`Fp8Format::decode`], except for the sign of a NaN.
    fn decode(code: u8) -> f32;
}

#[derive(Clone, Copy)]
pub(crate) struct E4m3;

#[derive(Clone, Copy)]
pub(crate) struct E5m2;

#[inline(always)]
fn encode<const MANTISSA: u32, const EMIN: i32>(x: f32, max: f32) -> u8 {
    let bits = x.to_bits();
    let magnitude = bits & MAGNITUDE;
    let code = round_to::<MANTISSA, EMIN>(magnitude.min(max.to_bits())) | (bits >> 24 & 0x80);
    (if magnitude > INF_BITS { u32::from(Fp8Format::NAN) } else { code }) as u8
}

/// Expresses a magnitude in steps of the format. The integer part is the mantissa of the code, and the
/// fraction is the position between this code and the next. All operations are exact except the truncation of
/// the fraction to 24 bits.
#[inline(always)]
fn encode_stochastic<const MANTISSA: u32, const EMIN: i32>(x: f32, max: f32, random: u32) -> u8 {
    let smallest = ((EMIN + 127) as u32) << 23;
    let bits = x.to_bits();
    let magnitude = bits & MAGNITUDE;
    let clamped = magnitude.min(max.to_bits());
    let exponent = clamped & EXPONENT;
    let exponent = if exponent > smallest { exponent } else { smallest };
    // 2^(MANTISSA - exponent), where the exponent is at most 15.
    let steps = f32::from_bits(clamped) * f32::from_bits(((254 + MANTISSA) << 23) - exponent);
    // SAFETY: the value is finite and at most 2^(MANTISSA + 1).
    let whole = unsafe { steps.to_int_unchecked::<i32>() };
    // SAFETY: the value is below 2^24.
    let fraction = unsafe { ((steps - whole as f32) * 16_777_216.0).to_int_unchecked::<i32>() };
    let up = i32::from(((random >> 8) as i32) < fraction);
    let code = (whole + up) as u32 + ((exponent - smallest) >> (23 - MANTISSA));
    let code = code | (bits >> 24 & 0x80);
    (if magnitude > INF_BITS { u32::from(Fp8Format::NAN) } else { code }) as u8
}

impl Codes for E4m3 {
    const FORMAT: Fp8Format = Fp8Format::E4m3;

    #[inline(always)]
    fn encode(x: f32) -> u8 {
        encode::<3, -6>(x, const { Self::FORMAT.max() })
    }

    #[inline(always)]
    fn encode_stochastic(x: f32, random: u32) -> u8 {
        encode_stochastic::<3, -6>(x, const { Self::FORMAT.max() }, random)
    }

    #[inline(always)]
    fn decode(code: u8) -> f32 {
        let code = u32::from(code);
        let magnitude = code & 0x7F;
        let bits = expand::<3, -6>(magnitude);
        let bits = if magnitude == 0x7F { NAN_BITS } else { bits };
        f32::from_bits(bits | (code & 0x80) << 24)
    }
}

impl Codes for E5m2 {
    const FORMAT: Fp8Format = Fp8Format::E5m2;

    #[inline(always)]
    fn encode(x: f32) -> u8 {
        encode::<2, -14>(x, const { Self::FORMAT.max() })
    }

    #[inline(always)]
    fn encode_stochastic(x: f32, random: u32) -> u8 {
        encode_stochastic::<2, -14>(x, const { Self::FORMAT.max() }, random)
    }

    #[inline(always)]
    fn decode(code: u8) -> f32 {
        let code = u32::from(code);
        let magnitude = code & 0x7F;
        let bits = expand::<2, -14>(magnitude);
        let bits = if magnitude >= 0x7C { INF_BITS } else { bits };
        let bits = if magnitude > 0x7C { NAN_BITS } else { bits };
        f32::from_bits(bits | (code & 0x80) << 24)
    }
}

/// fp32, bf16 or fp16, with conversions that vectorize.
pub(crate) trait Element: Wide {
    /// The unsigned integer of the same size.
    type Bits: Copy + Ord + Default;

    /// Returns the bits of |self|. They are ordered as the magnitudes are, with NaNs above infinity.
    fn magnitude(self) -> Self::Bits;

    /// Returns the fp32 bits of a magnitude.
    fn widen_magnitude(bits: Self::Bits) -> u32;

    /// [`Wide::to_f32`], except for the payload of a NaN.
    fn widen(self) -> f32;

    /// [`Wide::from_f32`].
    fn narrow(x: f32) -> Self;
}

impl Element for f32 {
    type Bits = u32;

    #[inline(always)]
    fn magnitude(self) -> u32 {
        self.to_bits() & MAGNITUDE
    }

    #[inline(always)]
    fn widen_magnitude(bits: u32) -> u32 {
        bits
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(x: f32) -> Self {
        let nan = x.to_bits() & MAGNITUDE > INF_BITS;
        Self::from_bits(if nan { NAN_BITS } else { x.to_bits() })
    }
}

impl Element for bf16 {
    type Bits = u16;

    #[inline(always)]
    fn magnitude(self) -> u16 {
        self.to_bits() & 0x7FFF
    }

    #[inline(always)]
    fn widen_magnitude(bits: u16) -> u32 {
        u32::from(bits) << 16
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(x: f32) -> Self {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
        let nan = bits & MAGNITUDE > INF_BITS;
        Self::from_bits((if nan { NAN_BITS >> 16 } else { rounded }) as u16)
    }
}

impl Element for f16 {
    type Bits = u16;

    #[inline(always)]
    fn magnitude(self) -> u16 {
        self.to_bits() & 0x7FFF
    }

    #[inline(always)]
    fn widen_magnitude(bits: u16) -> u32 {
        let code = u32::from(bits);
        let value = expand::<10, -14>(code);
        // Infinity and NaN have the largest exponent of fp16, which becomes the largest exponent of fp32.
        if code >= 0x7C00 { value | EXPONENT } else { value }
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        let sign = u32::from(self.to_bits() & 0x8000) << 16;
        f32::from_bits(Self::widen_magnitude(self.magnitude()) | sign)
    }

    #[inline(always)]
    fn narrow(x: f32) -> Self {
        let bits = x.to_bits();
        let magnitude = bits & MAGNITUDE;
        // 65520 and above round to infinity, whose code is one above the code of the largest number.
        let code = round_to::<10, -14>(magnitude.min(65536.0_f32.to_bits())) | (bits >> 16 & 0x8000);
        Self::from_bits((if magnitude > INF_BITS { 0x7E00 } else { code }) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_encode_matches(x: f32) {
        assert_eq!(E4m3::encode(x), Fp8Format::E4m3.encode(x), "{x:e}");
        assert_eq!(E5m2::encode(x), Fp8Format::E5m2.encode(x), "{x:e}");
    }

    #[test]
    fn conversion_matches_the_definition_for_every_bf16_and_fp16() {
        for bits in 0..=u16::MAX {
            let (b, h) = (bf16::from_bits(bits), f16::from_bits(bits));
            assert_encode_matches(b.widen());
            assert_encode_matches(h.widen());
            assert_eq!(b.widen().to_bits(), Wide::to_f32(b).to_bits());
            if h.is_nan() {
                assert!(h.widen().is_nan());
            } else {
                assert_eq!(h.widen().to_bits(), Wide::to_f32(h).to_bits());
                assert_eq!(f16::widen_magnitude(h.magnitude()), h.widen().to_bits() & MAGNITUDE);
            }
        }
    }

    #[test]
    fn decode_matches_the_definition_for_every_code() {
        for code in 0..=u8::MAX {
            for (fast, defined) in [
                (E4m3::decode(code), Fp8Format::E4m3.decode(code)),
                (E5m2::decode(code), Fp8Format::E5m2.decode(code)),
            ] {
                assert!(
                    fast.to_bits() == defined.to_bits() || fast.is_nan() && defined.is_nan(),
                    "{code:#x}"
                );
            }
        }
    }

    #[test]
    fn encode_matches_the_definition_around_every_midpoint() {
        for format in [Fp8Format::E4m3, Fp8Format::E5m2] {
            for code in 0..format.max_code() {
                let midpoint = f32::midpoint(format.decode(code), format.decode(code + 1));
                for bits in midpoint.to_bits() - 2..=midpoint.to_bits() + 2 {
                    assert_encode_matches(f32::from_bits(bits));
                    assert_encode_matches(-f32::from_bits(bits));
                }
            }
        }
    }

    /// Checks values in and around each interval between two codes, with random words near each value's
    /// position in the interval.
    #[test]
    fn stochastic_rounding_matches_the_definition() {
        let agrees = |x: f32, word: u32| {
            for x in [x, -x] {
                assert_eq!(
                    E4m3::encode_stochastic(x, word),
                    Fp8Format::E4m3.encode_stochastic(x, word),
                    "{x:e}"
                );
                assert_eq!(
                    E5m2::encode_stochastic(x, word),
                    Fp8Format::E5m2.encode_stochastic(x, word),
                    "{x:e}"
                );
            }
        };
        for exponent in 0..=255_u32 {
            for mantissa in (0..0x0080_0000_u32).step_by(0x3_FF1) {
                let x = f32::from_bits(exponent << 23 | mantissa);
                for position in [0, mantissa << 4, mantissa << 3, mantissa, u32::MAX >> 8] {
                    for word in [
                        position << 8,
                        (position << 8).wrapping_sub(1),
                        (position << 8) + 0xFF,
                        position.wrapping_mul(0x9E37_79B9),
                    ] {
                        agrees(x, word);
                    }
                }
            }
        }
        for code in 0..=u8::MAX {
            agrees(Fp8Format::E4m3.decode(code), u32::from(code) << 24);
            agrees(Fp8Format::E5m2.decode(code), u32::from(code) << 24);
        }
    }

    #[test]
    fn narrow_matches_the_definition() {
        // Around each value of bf16 and fp16, and around the midpoint to the next value.
        for bits in 0..=u16::MAX {
            for wide in [Wide::to_f32(bf16::from_bits(bits)), Wide::to_f32(f16::from_bits(bits))] {
                for low in [0_u32, 1, 0x7FFF, 0x8000, 0x8001, 0x0FFF, 0x1000, 0x1001] {
                    let x = f32::from_bits(wide.to_bits().wrapping_add(low));
                    assert_eq!(bf16::narrow(x).to_bits(), <bf16 as Wide>::from_f32(x).to_bits(), "{x:e}");
                    assert_eq!(f16::narrow(x).to_bits(), <f16 as Wide>::from_f32(x).to_bits(), "{x:e}");
                    assert_eq!(f32::narrow(x).to_bits(), <f32 as Wide>::from_f32(x).to_bits(), "{x:e}");
                }
            }
        }
    }

    /// Checks all 2^32 values. Takes minutes in a release build: `cargo test --release -- --ignored
    /// every_fp32`.
    #[test]
    #[ignore = "takes minutes"]
    fn encode_matches_the_definition_for_every_fp32() {
        for bits in 0..=u32::MAX {
            assert_encode_matches(f32::from_bits(bits));
        }
    }
}
