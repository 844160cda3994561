//! Sums in fp32, in a defined order: of values received from all ranks, and of the rows of a token.

use super::wide::NAN_BITS;

/// Adds `values` from first to last, rounding each addition to fp32, and divides by `divisor` (IEEE division,
/// rounded once). The sum of zeros that are all negative is -0. Infinities and NaNs of fp32 addition are
/// kept; a NaN is returned as [`NAN_BITS`].
#[must_use]
pub(crate) fn divided_sum(values: impl IntoIterator<Item = f32>, divisor: f32) -> f32 {
    // Starting from -0 changes no value. Starting from +0 would turn -0 into +0.
    let sum = values.into_iter().fold(-0.0, |sum: f32, value| sum + value);
    let result = sum / divisor;
    if result.is_nan() { f32::from_bits(NAN_BITS) } else { result }
}

/// Adds weight * value for each `(value, weight)` from first to last to a sum that starts from 0. Each product
/// and each addition is rounded to fp32, without fused multiply-add. A weight of 1 changes no value, so the sum
/// without weights is the sum with weights of 1. A NaN is returned as [`NAN_BITS`].
#[must_use]
pub(crate) fn weighted_sum(terms: impl IntoIterator<Item = (f32, f32)>) -> f32 {
    let sum = terms.into_iter().fold(0.0, |sum: f32, (value, weight)| sum + weight * value);
    if sum.is_nan() { f32::from_bits(NAN_BITS) } else { sum }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weighted_terms_are_rounded_and_added_in_order() {
        let (big, third) = (f32::from_bits(0x4B80_0000), 1.0 / 3.0);
        assert_eq!(weighted_sum([(1.0, 1.0), (1.0, 1.0), (big, 1.0)]), big + 2.0);
        assert_eq!(weighted_sum([(big, 1.0), (1.0, 1.0), (1.0, 1.0)]), big);
        // A fused multiply-add would not round 3 * (1 / 3) to 1.
        assert_eq!(weighted_sum([(-1.0, 1.0), (3.0, third)]), 0.0);
        assert_ne!(3.0_f32.mul_add(third, -1.0), 0.0);
        assert_eq!(weighted_sum([]).to_bits(), 0);
        assert_eq!(weighted_sum([(-0.0, 1.0)]).to_bits(), 0);
        assert_eq!(weighted_sum([(f32::INFINITY, 0.0)]).to_bits(), NAN_BITS);
    }

    #[test]
    fn values_are_added_in_order() {
        let big = f32::from_bits(0x4B80_0000); // 2^24, where adding 1 has no effect
        assert_eq!(divided_sum([1.0, 1.0, big], 1.0), big + 2.0);
        assert_eq!(divided_sum([big, 1.0, 1.0], 1.0), big);
    }

    #[test]
    fn negative_zeros_and_subnormals_are_kept() {
        assert_eq!(divided_sum([-0.0, -0.0], 2.0).to_bits(), (-0.0_f32).to_bits());
        assert_eq!(divided_sum([-0.0, 0.0], 2.0).to_bits(), 0);
        assert_eq!(divided_sum([f32::MIN_POSITIVE; 2], 4.0).to_bits(), 0x0040_0000);
    }

    #[test]
    fn infinity_and_nan_are_kept() {
        assert_eq!(divided_sum([f32::MAX, f32::MAX, -f32::MAX], 4.0), f32::INFINITY);
        assert_eq!(divided_sum([f32::INFINITY, f32::NEG_INFINITY], 1.0).to_bits(), NAN_BITS);
        assert_eq!(divided_sum([1.0, f32::from_bits(0xFFC1_2345)], 1.0).to_bits(), NAN_BITS);
    }

    #[test]
    fn division_is_rounded_once() {
        // Multiplying by the rounded reciprocal would give another result.
        assert_eq!(divided_sum([2.0, 3.0], 3.0), 5.0 / 3.0);
        assert_ne!(divided_sum([2.0, 3.0], 3.0), 5.0 * (1.0 / 3.0));
    }
}
