//! The fp32 scale rule: what an absolute maximum makes of a scale, and a scale of a code.

use super::Fp8Format;
use super::wide::NAN_BITS;

/// The smallest scale: 1 / scale is finite, and scale is a normal number.
pub const MIN_SCALE: f32 = f32::from_bits(0x0080_0000);

/// The largest scale (2^127), which only a margin can reach: rounding it up to a power of two stays finite.
pub const MAX_SCALE: f32 = f32::from_bits(0x7F00_0000);

/// How a scale is made from an absolute maximum.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ScaleRule {
    /// Round the scale up to a power of two.
    pub power_of_2: bool,
    /// The smallest absolute maximum that counts; finite, at least 0.
    pub amax_epsilon: f32,
    /// Multiplies the scale by 2^margin, -126 to 127 (headroom for delayed scaling).
    pub margin: i32,
}

impl ScaleRule {
    /// The scale for this absolute maximum, all in fp32 with IEEE division and subnormals:
    ///
    /// 1. not finite: NaN ([`NAN_BITS`]);
    /// 2. a = max(amax, `amax_epsilon`), so that a negative amax, which is none, counts as 0; where that is 0: 1;
    /// 3. s = (a / max) * 2^margin, two rounded operations in this order;
    /// 4. clamped to [2^-126, 2^127];
    /// 5. with `power_of_2`, rounded up to a power of two.
    #[must_use]
    pub fn scale(self, amax: f32, format: Fp8Format) -> f32 {
        if !amax.is_finite() {
            return f32::from_bits(NAN_BITS);
        }
        let amax = if amax > self.amax_epsilon { amax } else { self.amax_epsilon };
        if amax == 0.0 {
            return 1.0;
        }
        let margin = f32::from_bits(((self.margin + 127) as u32) << 23);
        let scale = (amax / format.max() * margin).clamp(MIN_SCALE, MAX_SCALE);
        if self.power_of_2 { round_up_to_power_of_2(scale) } else { scale }
    }
}

/// The factor that a scale quantizes with: code = encode(x * q).
#[must_use]
pub fn reciprocal(scale: f32) -> f32 {
    1.0 / scale
}

/// The smallest power of two that is not below a normal, positive `scale` of at most 2^127.
fn round_up_to_power_of_2(scale: f32) -> f32 {
    f32::from_bits((scale.to_bits() + 0x007F_FFFF) & 0x7F80_0000)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Fp8Format::{E4m3, E5m2};

    #[test]
    fn scale_is_amax_over_max_with_its_special_cases() {
        let rule = ScaleRule::default();
        assert_eq!(rule.scale(448.0, E4m3), 1.0);
        assert_eq!(rule.scale(3.0, E4m3), 3.0 / 448.0);
        assert_eq!(rule.scale(3.0, E5m2), 3.0 / 57344.0);
        assert_eq!(rule.scale(0.0, E4m3), 1.0);
        assert_eq!(rule.scale(f32::from_bits(1), E4m3), MIN_SCALE);
        assert_eq!(rule.scale(f32::INFINITY, E4m3).to_bits(), NAN_BITS);
        assert_eq!(rule.scale(-f32::NAN, E4m3).to_bits(), NAN_BITS);
    }

    #[test]
    fn a_negative_amax_counts_as_zero() {
        assert_eq!(ScaleRule::default().scale(-3.0, E4m3), 1.0);
        assert_eq!(ScaleRule { amax_epsilon: 448.0, ..Default::default() }.scale(-900.0, E4m3), 1.0);
        assert_eq!(ScaleRule::default().scale(f32::NEG_INFINITY, E4m3).to_bits(), NAN_BITS);
    }

    #[test]
    fn epsilon_margin_and_power_of_two() {
        let rule = ScaleRule { amax_epsilon: 448.0, ..Default::default() };
        assert_eq!(rule.scale(0.0, E4m3), 1.0);
        assert_eq!(rule.scale(f32::NAN, E4m3).to_bits(), NAN_BITS);
        assert_eq!(ScaleRule { margin: 2, ..Default::default() }.scale(448.0, E4m3), 4.0);
        assert_eq!(ScaleRule { margin: 127, ..Default::default() }.scale(f32::MAX, E4m3), MAX_SCALE);
        let rule = ScaleRule { power_of_2: true, ..Default::default() };
        assert_eq!(rule.scale(448.0, E4m3), 1.0);
        assert_eq!(rule.scale(448.1, E4m3), 2.0);
        assert_eq!(rule.scale(1e-44, E4m3), MIN_SCALE);
    }
}
