//! E8M0: the power-of-two scales of MX blocks (OCP Microscaling Formats, version 1.0). Byte b is 2^(b - 127),
//! 255 is NaN. By integer arithmetic on bit patterns, never exp2 or log2.

use super::Fp8Format;
use super::wide::{INF_BITS, NAN_BITS};

/// The byte that says: this block holds a NaN or an infinity.
pub const NAN: u8 = 255;

/// How the exponent of a block's scale is found from its absolute maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Rounding {
    /// The smallest e with amax <= max * 2^e, so that nothing saturates.
    #[default]
    Ceil,
    /// e = floor(log2(amax)) - emax: the rule of the OCP specification.
    Floor,
}

/// The scale byte for a block's absolute maximum: e + 127, e in [-127, 127]; 0 for amax 0; 255 for an amax
/// that is not finite. A negative amax, which is none, counts as 0.
#[must_use]
pub fn from_amax(amax: f32, format: Fp8Format, rounding: Rounding) -> u8 {
    let bits = amax.to_bits() & 0x7FFF_FFFF;
    if bits >= INF_BITS {
        return NAN;
    }
    let bits = if amax.is_sign_negative() { 0 } else { bits };
    match rounding {
        // max = m * 2^emax with the mantissa bits of the format's largest value: amax / 2^emax rounds up to the
        // next exponent exactly when its own mantissa is above them. In a subnormal amax the exponent field
        // is 0 or the sum carries into it at most once; the result is then below emax, which clamps to 0.
        Rounding::Ceil => {
            let mantissa_of_max = format.max().to_bits() & 0x007F_FFFF;
            let rounded_up = (bits + (0x007F_FFFF - mantissa_of_max)) >> 23;
            (rounded_up as i32 - format.emax()).max(0) as u8
        }
        Rounding::Floor => ((bits >> 23) as i32 - format.emax()).max(0) as u8,
    }
}

/// The value of a scale byte: 2^(byte - 127), exact (byte 0 is subnormal), NaN for 255.
#[must_use]
pub fn decode(byte: u8) -> f32 {
    f32::from_bits(match byte {
        0 => 0x0040_0000,
        NAN => NAN_BITS,
        byte => u32::from(byte) << 23,
    })
}

/// The factor that a scale byte quantizes with: 2^(127 - byte), exact (byte 254 is subnormal), NaN for 255.
#[must_use]
pub fn reciprocal(byte: u8) -> f32 {
    match byte {
        NAN => f32::from_bits(NAN_BITS),
        byte => decode(254 - byte),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Fp8Format::{E4m3, E5m2};

    /// The definition, searched for in f64.
    fn ceil_by_search(amax: f32, format: Fp8Format) -> u8 {
        if amax == 0.0 {
            return 0;
        }
        let e = (-127..=127).find(|&e| f64::from(amax) <= f64::from(format.max()) * 2.0_f64.powi(e));
        (e.unwrap() + 127) as u8
    }

    #[test]
    fn every_exponent_and_the_mantissas_around_the_maximum() {
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
