//! The fp32 scale rule: scale from absolute maximum, and quantization factor from scale.

use super::Fp8Format;
use super::wide::NAN_BITS;

/// The smallest scale. It is a normal number, and 1 / scale is finite.
pub(crate) const MIN_SCALE: f32 = f32::from_bits(0x0080_0000);

/// The largest scale, 2^127. Rounding it up to a power of two stays finite. Only a margin can reach it.
pub(crate) const MAX_SCALE: f32 = f32::from_bits(0x7F00_0000);

/// How a scale is computed from an absolute maximum.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ScaleRule {
    /// Round the scale up to a power of two.
    pub power_of_2: bool,
    /// Lower bound for the absolute maximum; finite and >= 0.
    pub amax_epsilon: f32,
    /// Multiplies the scale by 2^margin, with margin in -126..=127 (headroom for delayed scaling).
    pub margin: i32,
}

impl ScaleRule {
    /// Returns the scale for an absolute maximum. All operations are fp32 with IEEE division and subnormals:
    ///
    /// 1. If amax is not finite, the scale is the positive quiet NaN without payload.
    /// 2. a = max(amax, `amax_epsilon`). A negative amax is invalid and counts as 0. If a is 0, the scale is
    ///    1.
    /// 3. s = (a / max) * 2^margin, two rounded operations in this order.
    /// 4. s is clamped to [2^-126, 2^127].
    /// 5. With `power_of_2`, s is rounded up to a power of two.
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

/// Returns the factor q to quantize with: code = encode(x * q). A call that divides ([`BlockSpec::divide`])
/// has code = encode(x / scale) instead, with IEEE division. The two differ in few codes, because the factor is
/// rounded.
///
/// [`BlockSpec::divide`]: crate::spec::BlockSpec::divide
#[must_use]
pub(crate) fn reciprocal(scale: f32) -> f32 {
    1.0 / scale
}

/// Returns the smallest power of two that is at least `scale`, which must be normal, positive and at most
/// 2^127.
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
