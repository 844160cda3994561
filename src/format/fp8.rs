//! E4M3 and E5M2 (OCP 8-bit floating point, revision 1.0). Casts round as the GPU instruction
//! `cvt.rn.satfinite` does.

use std::fmt;

/// An 8-bit floating-point element format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fp8Format {
    /// 4 exponent bits, 3 mantissa bits, largest value 448, no infinities (`float8_e4m3fn`).
    E4m3,
    /// 5 exponent bits, 2 mantissa bits, largest value 57344 (`float8_e5m2`).
    E5m2,
}

impl Fp8Format {
    /// The code that a NaN is cast to in both formats. The sign of the NaN is dropped.
    pub const NAN: u8 = 0x7F;

    /// Returns the largest finite value.
    #[must_use]
    pub const fn max(self) -> f32 {
        match self {
            Self::E4m3 => 448.0,
            Self::E5m2 => 57344.0,
        }
    }

    /// Returns the exponent of the largest finite value (`emax` in the MX specification).
    #[must_use]
    pub const fn emax(self) -> i32 {
        match self {
            Self::E4m3 => 8,
            Self::E5m2 => 15,
        }
    }

    /// Returns the number of stored mantissa bits.
    #[must_use]
    pub const fn mantissa_bits(self) -> u32 {
        match self {
            Self::E4m3 => 3,
            Self::E5m2 => 2,
        }
    }

    /// Returns the exponent of the smallest normal value.
    #[must_use]
    pub const fn emin(self) -> i32 {
        match self {
            Self::E4m3 => -6,
            Self::E5m2 => -14,
        }
    }

    /// Returns the code of the largest finite value.
    #[must_use]
    pub const fn max_code(self) -> u8 {
        match self {
            Self::E4m3 => 0x7E,
            Self::E5m2 => 0x7B,
        }
    }

    /// Casts to the nearest code, ties to even. Overflow and infinity become the largest finite value of the
    /// same sign, and any NaN becomes 0x7F.
    #[must_use]
    pub fn encode(self, x: f32) -> u8 {
        if x.is_nan() {
            return Self::NAN;
        }
        let sign = if x.is_sign_negative() { 0x80 } else { 0 };
        let magnitude = x.abs();
        if magnitude >= self.max() {
            return sign | self.max_code();
        }
        // Around x, the format's values are 2^(e - mantissa bits) apart, where e is the exponent of x, or
        // emin if x is subnormal in the format. Dividing by such a power of two is exact in f64.
        let exponent = exponent_of(magnitude).max(self.emin());
        let spacing = 2.0_f64.powi(exponent - self.mantissa_bits() as i32);
        let steps = (f64::from(magnitude) / spacing).round_ties_even() as u32;
        // Codes enumerate the format's values upwards from zero, so a carry out of the mantissa yields the
        // right code.
        let code = steps + (((exponent - self.emin()) as u32) << self.mantissa_bits());
        sign | (code as u8).min(self.max_code())
    }

    /// Casts to one of the two codes around `x`. It rounds up in magnitude with the probability that makes
    /// the mean equal to `x`: if the upper 24 bits of `random`, as a fraction of 2^24, are less than the
    /// position of `x` between the two codes, truncated to 24 bits. The position is exact if `x` is normal in
    /// the format. Overflow, infinity and NaN are cast as by [`Self::encode`].
    #[must_use]
    pub fn encode_stochastic(self, x: f32, random: u32) -> u8 {
        let magnitude = x.abs();
        if x.is_nan() || magnitude >= self.max() {
            return self.encode(x);
        }
        let exponent = exponent_of(magnitude).max(self.emin());
        let spacing = 2.0_f64.powi(exponent - self.mantissa_bits() as i32);
        let steps = f64::from(magnitude) / spacing;
        let fraction = ((steps - steps.floor()) * f64::from(1 << 24)) as u32;
        let up = u32::from(random >> 8 < fraction);
        let code = steps.floor() as u32 + up + (((exponent - self.emin()) as u32) << self.mantissa_bits());
        code as u8 | if x.is_sign_negative() { 0x80 } else { 0 }
    }

    /// Returns the exact value of a code. In E4M3, 0x7F and 0xFF are NaN. In E5M2, 0x7C and 0xFC are infinity
    /// and larger magnitudes are NaN. A NaN is returned as the positive quiet NaN without
    /// payload.
    #[must_use]
    pub fn decode(self, code: u8) -> f32 {
        let magnitude = u32::from(code & 0x7F);
        let value = match self {
            Self::E4m3 if magnitude == 0x7F => return f32::NAN,
            Self::E5m2 if magnitude > 0x7C => return f32::NAN,
            Self::E5m2 if magnitude == 0x7C => f32::INFINITY,
            _ => {
                let bits = self.mantissa_bits();
                let (field, mantissa) = (magnitude >> bits, magnitude & ((1 << bits) - 1));
                let steps = if field == 0 { mantissa } else { mantissa | (1 << bits) };
                steps as f32 * 2.0_f32.powi(field.max(1) as i32 - 1 + self.emin() - bits as i32)
            }
        };
        if code & 0x80 == 0 { value } else { -value }
    }
}

impl fmt::Display for Fp8Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::E4m3 => "float8_e4m3fn",
            Self::E5m2 => "float8_e5m2",
        })
    }
}

/// Returns floor(log2(x)) for finite x >= 0. fp32 subnormals and zero give -127, which is below every `emin`.
fn exponent_of(x: f32) -> i32 {
    (x.to_bits() >> 23) as i32 - 127
}

#[cfg(test)]
mod tests {
    use super::Fp8Format::{E4m3, E5m2};

    #[test]
    fn encode_matches_the_specification() {
        for (x, code) in [
            (0.0, 0x00),
            (-0.0, 0x80),
            (1.0, 0x38),
            (448.0, 0x7E),
            (464.0, 0x7E),
            (1e30, 0x7E),
            (f32::NEG_INFINITY, 0xFE),
            (2.0_f32.powi(-6), 0x08),
            (2.0_f32.powi(-9), 0x01),
            (2.0_f32.powi(-10), 0x00),
            (1.5 * 2.0_f32.powi(-9), 0x02),
            (-f32::NAN, 0x7F),
        ] {
            assert_eq!(E4m3.encode(x), code, "{x}");
        }
        for (x, code) in [
            (1.0, 0x3C),
            (57344.0, 0x7B),
            (61440.0, 0x7B),
            (f32::INFINITY, 0x7B),
            (2.0_f32.powi(-14), 0x04),
            (2.0_f32.powi(-16), 0x01),
            (f32::NAN, 0x7F),
        ] {
            assert_eq!(E5m2.encode(x), code, "{x}");
        }
    }

    /// Checks every code at each sixteenth of the distance to the next code: of evenly spread random words,
    /// the same fraction rounds up.
    #[test]
    fn stochastic_rounding_probability_matches_the_position_between_codes() {
        for format in [E4m3, E5m2] {
            for code in 0..format.max_code() {
                let (low, high) = (format.decode(code), format.decode(code + 1));
                for sixteenth in 0..16_u8 {
                    let x = low + (high - low) * (f32::from(sixteenth) / 16.0);
                    for (sign, x) in [(0, x), (0x80, -x)] {
                        let codes: Vec<u8> = (0..32_u32)
                            .map(|word| format.encode_stochastic(x, word << 27 | 0x07FF_FFFF))
                            .collect();
                        let count =
                            |wanted| codes.iter().map(|got| usize::from(*got == wanted)).sum::<usize>();
                        let (up, down) = (count(sign | (code + 1)), count(sign | code));
                        assert_eq!((up, down), (usize::from(sixteenth) * 2, 32 - usize::from(sixteenth) * 2));
                    }
                }
            }
        }
    }

    #[test]
    fn stochastic_rounding_keeps_representable_values() {
        for format in [E4m3, E5m2] {
            for word in [0, 1 << 31, u32::MAX] {
                for code in (0..=255_u8).filter(|code| format.decode(*code).is_finite()) {
                    assert_eq!(format.encode_stochastic(format.decode(code), word), code);
                }
                for x in [f32::INFINITY, -f32::INFINITY, f32::NAN, -f32::NAN, 1e30, format.max() + 1.0] {
                    assert_eq!(format.encode_stochastic(x, word), format.encode(x), "{x}");
                }
            }
        }
    }

    #[test]
    fn every_finite_code_round_trips() {
        for format in [E4m3, E5m2] {
            for code in 0..=255_u8 {
                let value = format.decode(code);
                if value.is_finite() {
                    assert_eq!(format.encode(value), code);
                }
            }
        }
    }
}
