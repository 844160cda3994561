//! 8-bit codes of `AdamW`'s moments, in blocks of [`BLOCK`] elements of a row.
//!
//! fp32 bits, read as an integer, grow with the logarithm of a magnitude: piecewise linearly, by 2^23 for each
//! factor of two. The codes of a block divide the distance between its smallest and its largest magnitude
//! into equal steps of these bits, counted down from the largest. A step is therefore a nearly constant factor.
//! Decoding is one integer multiplication, and encoding is one fp32 multiplication.
//!
//! - A block stores its [`Range`], two fp32. The largest magnitude is decoded exactly. A block that decays as a
//!   whole thus decays exactly, although a step with a `beta2` near 1 changes a value by much less than half the
//!   distance to the next code.
//! - Zeros have code 0, and no other second moment does, because an update divides by its square root. The first
//!   moment also has code 0 below half of the range's smallest magnitude.
//! - The smallest magnitude is at most [`Moment::binades`] factors of two below the largest. The first moment
//!   has 127 codes and a sign for 20 of them at most (a step is then a factor of 1.12), the second 255 codes for
//!   40, because updates use its square root.
//! - If a block contains Inf or NaN, all of its values become NaN, so that its next update is NaN.

/// The number of elements of a block.
pub(crate) const BLOCK: usize = 128;

/// The bits of a magnitude.
const MAGNITUDE: u32 = 0x7FFF_FFFF;

/// The distance between the bits of a magnitude and of its double.
const BINADE: u32 = 1 << 23;

/// Which moment codes stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moment {
    /// The largest code of a magnitude.
    pub(crate) top: u32,
    /// The largest ratio of two magnitudes of a block that codes distinguish, as a power of two.
    pub(crate) binades: u32,
    /// Whether the highest bit of a code is a sign. Small magnitudes then become 0.
    pub(crate) is_signed: bool,
}

/// The first moment: a sign and seven bits.
pub(crate) const FIRST: Moment = Moment { top: 127, binades: 20, is_signed: true };

/// The second moment: eight bits.
pub(crate) const SECOND: Moment = Moment { top: 255, binades: 40, is_signed: false };

/// The magnitudes that the codes of a block span. Both are 0 if all elements are 0, and NaN if one is not finite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Range {
    pub(crate) largest: f32,
    pub(crate) smallest: f32,
}

/// The values that encoding and decoding derive from a block's range, once for all of its elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid {
    /// The bits of the largest magnitude.
    largest: u32,
    /// The distance between the bits of adjacent codes.
    step: u32,
    /// 1 / `step`.
    per_step: f32,
    /// Smaller magnitudes have code 0.
    cut: u32,
}

impl Moment {
    /// Returns the range of the values of a block.
    #[inline(always)]
    #[must_use]
    pub(crate) fn range(self, values: &[f32]) -> Range {
        let mut largest = 0;
        // One less than the smallest magnitude that is not 0.
        let mut below_smallest = u32::MAX;
        for value in values {
            let magnitude = value.to_bits() & MAGNITUDE;
            largest = if magnitude > largest { magnitude } else { largest };
            let below = magnitude.wrapping_sub(1);
            below_smallest = if below < below_smallest { below } else { below_smallest };
        }
        if largest >= super::wide::INF_BITS {
            let nan = f32::from_bits(super::wide::NAN_BITS);
            return Range { largest: nan, smallest: nan };
        }
        let smallest = below_smallest.wrapping_add(1).max(largest.saturating_sub(self.binades * BINADE));
        Range { largest: f32::from_bits(largest), smallest: f32::from_bits(smallest) }
    }

    /// Returns the grid of a block's codes.
    #[inline(always)]
    #[must_use]
    pub(crate) fn grid(self, range: Range) -> Grid {
        let (largest, smallest) = (range.largest.to_bits(), range.smallest.to_bits());
        let step = (largest.saturating_sub(smallest) / (self.top - 1)).max(1);
        let cut = if self.is_signed { smallest.saturating_sub(BINADE) } else { 0 };
        Grid { largest, step, per_step: 1.0 / step as f32, cut: cut.max(1) }
    }

    /// Returns the code of a value of a block with this grid.
    #[inline(always)]
    #[must_use]
    pub(crate) fn encode(self, value: f32, grid: Grid) -> u8 {
        let bits = value.to_bits();
        let magnitude = bits & MAGNITUDE;
        let steps = grid.largest.wrapping_sub(magnitude) as i32 as f32 * grid.per_step;
        let last = (self.top - 1) as f32;
        let steps = if steps < last { steps } else { last };
        // 1.5 * 2^23, whose neighbours are the integers: the difference rounds to nearest, ties to even.
        let counted = (12_582_912.0 + self.top as f32) - steps;
        let code = if magnitude < grid.cut { 0 } else { counted.to_bits() & 0xFF };
        let code = if self.is_signed { code | bits >> 24 & 0x80 } else { code };
        // The values of a block that is not finite are all NaN.
        (if grid.largest >= super::wide::INF_BITS { self.top } else { code }) as u8
    }

    /// Returns the value of a code of a block with this grid.
    #[inline(always)]
    #[must_use]
    pub(crate) fn decode(self, code: u8, grid: Grid) -> f32 {
        let code = u32::from(code);
        let magnitude = code & self.top;
        let bits = grid.largest.wrapping_sub((self.top - magnitude).wrapping_mul(grid.step));
        let bits = if magnitude == 0 { 0 } else { bits };
        f32::from_bits(if self.is_signed { bits | (code & 0x80) << 24 } else { bits })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns the values after they were stored.
    fn stored(moment: Moment, values: &[f32]) -> Vec<f32> {
        let grid = moment.grid(moment.range(values));
        values.iter().map(|value| moment.decode(moment.encode(*value, grid), grid)).collect()
    }

    fn finite() -> impl Strategy<Value = f32> {
        let any = any::<u32>().prop_map(f32::from_bits).prop_filter("finite", |x| x.is_finite());
        prop_oneof![1 => Just(0.0_f32), 1 => Just(-0.0_f32), 4 => -2.0_f32..2.0, 4 => any]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn stored_values_are_within_half_a_step(values in prop::collection::vec(finite(), 1..=BLOCK)) {
            for moment in [FIRST, SECOND] {
                let of = |x: &f32| if moment.is_signed { *x } else { x.abs() };
                let values: Vec<f32> = values.iter().map(of).collect();
                let range = moment.range(&values);
                let grid = moment.grid(range);
                for (value, stored) in values.iter().zip(stored(moment, &values)) {
                    let [bits, stored_bits] = [*value, stored].map(|x| x.to_bits() & MAGNITUDE);
                    let smallest = range.smallest.to_bits();
                    if *value == 0.0 {
                        prop_assert_eq!(stored, 0.0);
                    } else if bits >= smallest {
                        // Codes end less than `top` bits above the smallest magnitude, and the product that
                        // counts steps has two roundings.
                        let bound = grid.step / 2 + moment.top + (grid.step >> 14);
                        prop_assert!(bits.abs_diff(stored_bits) <= bound, "{value} {stored} {range:?}");
                        prop_assert_eq!(*value < 0.0, stored < 0.0);
                    } else if moment.is_signed {
                        let limit = smallest + moment.top;
                        prop_assert!(stored == 0.0 || stored_bits <= limit, "{value} {stored} {range:?}");
                    } else {
                        prop_assert!(stored_bits >= smallest, "{value} {stored} {range:?}");
                    }
                }
            }
        }

        #[test]
        fn second_moments_other_than_0_stay_other_than_0(
            values in prop::collection::vec(any::<u32>(), 1..=BLOCK),
        ) {
            let values: Vec<f32> = values.iter().map(|bits| f32::from_bits(bits & MAGNITUDE)).collect();
            for (value, stored) in values.iter().zip(stored(SECOND, &values)) {
                prop_assert!((*value == 0.0) == (stored == 0.0) || stored.is_nan(), "{value} {stored}");
            }
        }

        #[test]
        fn stored_values_do_not_change_when_stored_again(
            values in prop::collection::vec(-2.0_f32..2.0, 1..=BLOCK),
        ) {
            // The range's smallest magnitude becomes the smallest stored one, so values change once more at most.
            for moment in [FIRST, SECOND] {
                let of = |x: &f32| if moment.is_signed { *x } else { x.abs() };
                let first = stored(moment, &values.iter().map(of).collect::<Vec<f32>>());
                let largest = |values: &[f32]| values.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
                let second = stored(moment, &first);
                prop_assert_eq!(largest(&first).to_bits(), largest(&second).to_bits());
            }
        }
    }

    #[test]
    fn zeros_are_exact() {
        for moment in [FIRST, SECOND] {
            assert_eq!(moment.range(&[0.0; BLOCK]), Range { largest: 0.0, smallest: 0.0 });
            assert_eq!(stored(moment, &[0.0; BLOCK]), [0.0; BLOCK]);
            assert_eq!(stored(moment, &[-0.0])[0], 0.0);
        }
    }

    #[test]
    fn constant_blocks_and_single_values_are_exact() {
        for value in [1.0, 3.3e-38, f32::from_bits(1), f32::from_bits(0x0012_3456), f32::MAX] {
            for moment in [FIRST, SECOND] {
                assert_eq!(stored(moment, &[value; BLOCK]), [value; BLOCK]);
                let mut one = [0.0; BLOCK];
                one[77] = value;
                assert_eq!(stored(moment, &one), one);
            }
            assert_eq!(stored(FIRST, &[-value, value]), [-value, value]);
        }
    }

    #[test]
    fn blocks_with_values_that_are_not_finite_become_nan() {
        for value in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for moment in [FIRST, SECOND] {
                let mut values = [0.5; BLOCK];
                values[0] = 0.0;
                values[3] = value;
                assert!(stored(moment, &values).iter().all(|x| x.to_bits() == super::super::wide::NAN_BITS));
            }
        }
    }

    #[test]
    fn ranges_are_bounded() {
        // 2^-30 is beyond the 20 binades of the first moment: it becomes 0. So does less than half of 2^-20.
        let values = [1.0, 2.0_f32.powi(-30), 0.49 * 2.0_f32.powi(-20), 0.6 * 2.0_f32.powi(-20)];
        let got = stored(FIRST, &values);
        assert_eq!(got[..3], [1.0, 0.0, 0.0]);
        assert!((got[3] / 2.0_f32.powi(-20) - 1.0).abs() < 1e-4, "{}", got[3]);
        // The second moment rounds up to the smallest code.
        let got = stored(SECOND, &[1.0, 2.0_f32.powi(-100)]);
        assert_eq!(got[0], 1.0);
        assert!((got[1] / 2.0_f32.powi(-40) - 1.0).abs() < 1e-3, "{}", got[1]);
    }

    #[test]
    fn a_block_that_decays_as_a_whole_decays_exactly() {
        let mut values: Vec<f32> = (0_u8..128).map(|i| 1.0 + f32::from(i) / 32.0).collect();
        let largest = values[127];
        let mut expected = largest;
        for _ in 0..1000 {
            values = stored(SECOND, &values).iter().map(|x| x * 0.999).collect();
            expected *= 0.999;
        }
        assert_eq!(values[127], expected);
        assert!((values[0] / values[127] / (1.0 / largest) - 1.0).abs() < 0.1, "{}", values[0] / values[127]);
    }
}
