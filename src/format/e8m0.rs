//! E8M0: the power-of-two scales of MX blocks (OCP Microscaling Formats, version 1.0). Byte b is 2^(b - 127),
//! and 255 is NaN. All functions use integer arithmetic on bit patterns, never exp2 or log2.

use super::Fp8Format;
use super::wide::{INF_BITS, NAN_BITS};

/// The byte for a block that holds a NaN or an infinity.
pub(crate) const NAN: u8 = 255;

/// How the exponent of a block's scale is computed from its absolute maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Rounding {
    /// The smallest e with amax <= max * 2^e, so that nothing saturates.
    #[default]
    Ceil,
    /// e = floor(log2(amax)) - emax: the rule of the OCP specification.
    Floor,
}

/// Returns the scale byte for a block's absolute maximum: e + 127, with e in [-127, 127]. The byte is 0 if
/// amax is 0, and 255 if amax is not finite. A negative amax is invalid and counts as 0.
#[must_use]
pub(crate) fn from_amax(amax: f32, format: Fp8Format, rounding: Rounding) -> u8 {
    let bits = amax.to_bits() & 0x7FFF_FFFF;
    if bits >= INF_BITS {
        return NAN;
    }
    let bits = if amax.is_sign_negative() { 0 } else { bits };
    match rounding {
        // Let max = m * 2^emax. amax / 2^emax rounds up to the next exponent exactly if its mantissa is
        // greater than the mantissa of max. If amax is subnormal, its exponent field is 0 and the addition
        // carries into it at most once. The result is then below emax, and clamps to 0.
        Rounding::Ceil => {
            let mantissa_of_max = format.max().to_bits() & 0x007F_FFFF;
            let rounded_up = (bits + (0x007F_FFFF - mantissa_of_max)) >> 23;
            (rounded_up as i32 - format.emax()).max(0) as u8
        }
        Rounding::Floor => ((bits >> 23) as i32 - format.emax()).max(0) as u8,
    }
}

/// Returns the value of a scale byte, 2^(byte - 127). It is exact (byte 0 is subnormal), and NaN for 255.
#[must_use]
pub(crate) fn decode(byte: u8) -> f32 {
    f32::from_bits(match byte {
        0 => 0x0040_0000,
        NAN => NAN_BITS,
        byte => u32::from(byte) << 23,
    })
}

/// Returns the factor to quantize with, 2^(127 - byte). It is exact (byte 254 is subnormal), and NaN for 255.
#[must_use]
pub(crate) fn reciprocal(byte: u8) -> f32 {
    match byte {
        NAN => f32::from_bits(NAN_BITS),
        byte => decode(254 - byte),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Fp8Format::{E4m3, E5m2};

    /// Evaluates the definition by a search in f64.
    fn ceil_by_search(amax: f32, format: Fp8Format) -> u8 {
        if amax == 0.0 {
            return 0;
        }
        let e = (-127..=127).find(|&e| f64::from(amax) <= f64::from(format.max()) * 2.0_f64.powi(e));
        (e.unwrap() + 127) as u8
    }

    #[test]
    fn from_amax_matches_the_definition_for_every_exponent() {
        for format in [E4m3, E5m2] {
            for exponent in 0..255_u32 {
                for mantissa in [0, 1, 0x5F_FFFF, 0x60_0000, 0x60_0001, 0x6F_FFFF, 0x70_0000, 0x7F_FFFF] {
                    let amax = f32::from_bits(exponent << 23 | mantissa);
                    assert_eq!(
                        from_amax(amax, format, Rounding::Ceil),
                        ceil_by_search(amax, format),
                        "{amax:e}"
                    );
                    let floor = if amax == 0.0 { -999.0 } else { f64::from(amax).log2().floor() };
                    let floor = (floor as i32 - format.emax()).clamp(-127, 127) + 127;
                    assert_eq!(from_amax(amax, format, Rounding::Floor), floor as u8, "{amax:e}");
                }
            }
            assert_eq!(from_amax(f32::NEG_INFINITY, format, Rounding::Ceil), NAN);
            assert_eq!(from_amax(f32::NAN, format, Rounding::Floor), NAN);
            assert_eq!(from_amax(-3.0, format, Rounding::Ceil), from_amax(0.0, format, Rounding::Ceil));
            assert_eq!(from_amax(-0.0, format, Rounding::Floor), 0);
        }
    }

    #[test]
    fn decode_and_reciprocal_are_exact() {
        for byte in 0..255_u8 {
            assert_eq!(f64::from(decode(byte)), 2.0_f64.powi(i32::from(byte) - 127));
            assert_eq!(f64::from(reciprocal(byte)), 2.0_f64.powi(127 - i32::from(byte)));
        }
        assert!(decode(NAN).is_nan() && reciprocal(NAN).is_nan());
    }
}
