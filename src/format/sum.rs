//! The sum of what ranks have sent to each other: fp32, in the order of ranks.

use super::wide::NAN_BITS;

/// The sum of `values` from the first to the last, each addition rounded to fp32, divided by `divisor` (IEEE division,
/// rounded once; by 1 it changes nothing). Of zeros that are all negative it is the negative one. What fp32 addition
/// makes infinite or NaN comes out so; a NaN as [`NAN_BITS`].
#[must_use]
pub fn divided_sum(values: impl IntoIterator<Item = f32>, divisor: f32) -> f32 {
    // Adding to -0 changes no value; adding to +0 would change -0.
    let sum = values.into_iter().fold(-0.0, |sum: f32, value| sum + value);
    let result = sum / divisor;
    if result.is_nan() { f32::from_bits(NAN_BITS) } else { result }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_is_that_of_the_values() {
        let big = f32::from_bits(0x4B80_0000); // 2^24: adding 1 to it is lost
        assert_eq!(divided_sum([1.0, 1.0, big], 1.0), big + 2.0);
        assert_eq!(divided_sum([big, 1.0, 1.0], 1.0), big);
    }

    #[test]
    fn zeros_keep_their_sign_and_nothing_is_flushed() {
        assert_eq!(divided_sum([-0.0, -0.0], 2.0).to_bits(), (-0.0_f32).to_bits());
        assert_eq!(divided_sum([-0.0, 0.0], 2.0).to_bits(), 0);
        assert_eq!(divided_sum([f32::MIN_POSITIVE; 2], 4.0).to_bits(), 0x0040_0000);
    }

    #[test]
    fn what_is_not_finite_stays_visible() {
        assert_eq!(divided_sum([f32::MAX, f32::MAX, -f32::MAX], 4.0), f32::INFINITY);
        assert_eq!(divided_sum([f32::INFINITY, f32::NEG_INFINITY], 1.0).to_bits(), NAN_BITS);
        assert_eq!(divided_sum([1.0, f32::from_bits(0xFFC1_2345)], 1.0).to_bits(), NAN_BITS);
    }

    #[test]
    fn the_division_is_rounded_once() {
        // Not the product with the rounded reciprocal.
        assert_eq!(divided_sum([2.0, 3.0], 3.0), 5.0 / 3.0);
        assert_ne!(divided_sum([2.0, 3.0], 3.0), 5.0 * (1.0 / 3.0));
    }
}
