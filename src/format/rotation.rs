//! Rotary position embeddings (`RoFormer`, arXiv:2104.09864), which rotate the two halves of a head.

use super::wide::canonical_nan;

/// Rotates an element of the first half of a head and the element of the second half at the same place. With
/// `back`, multiplies by the transposed matrix, which computes the gradient.
///
/// Each product and each sum is rounded to fp32, without fused multiply-add. Every NaN has the same bits.
#[inline(always)]
#[must_use]
pub(crate) fn rotate_pair(
    [first, second]: [f32; 2],
    [first_cos, second_cos]: [f32; 2],
    [first_sin, second_sin]: [f32; 2],
    back: bool,
) -> [f32; 2] {
    // The products with sines: of the other half.
    let (first_term, second_term) = if back {
        (second * second_sin, -(first * first_sin))
    } else {
        (-(second * first_sin), first * second_sin)
    };
    [canonical_nan(first * first_cos + first_term), canonical_nan(second * second_cos + second_term)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::wide::NAN_BITS;

    #[test]
    fn a_quarter_turn_exchanges_the_halves() {
        let (cos, sin) = ([0.0, 0.0], [1.0, 1.0]);
        assert_eq!(rotate_pair([3.0, 5.0], cos, sin, false), [-5.0, 3.0]);
        assert_eq!(rotate_pair([-5.0, 3.0], cos, sin, true), [3.0, 5.0]);
    }

    #[test]
    fn the_way_back_multiplies_by_the_transposed_matrix() {
        let (cos, sin) = ([0.5, 0.25], [2.0, -4.0]);
        let [column, other_column] = [[1.0, 0.0], [0.0, 1.0]].map(|unit| rotate_pair(unit, cos, sin, false));
        let x = [3.0, 5.0];
        let expected = [column, other_column].map(|column| x[0] * column[0] + x[1] * column[1]);
        assert_eq!(rotate_pair(x, cos, sin, true), expected);
    }

    #[test]
    fn nans_have_no_payload() {
        let [first, second] = rotate_pair([-f32::NAN, 1.0], [1.0; 2], [1.0; 2], false);
        assert_eq!([first.to_bits(), second.to_bits()], [NAN_BITS; 2]);
    }
}
