//! Counter-based random numbers. The number of an element depends on a seed and on the element's position
//! only, not on the order of evaluation or the number of threads.
//!
//! Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011).

/// Computes the ten rounds of Philox4x32: four random words for a counter and a key.
#[inline(always)]
#[must_use]
pub(crate) const fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut a, mut b, mut c, mut d], [mut k, mut l]) = (counter, key);
    let mut round = 0;
    while round < 10 {
        let (x, y) = (a as u64 * 0xD251_1F53, c as u64 * 0xCD9E_8D57);
        (a, b, c, d) = ((y >> 32) as u32 ^ b ^ k, y as u32, (x >> 32) as u32 ^ d ^ l, x as u32);
        (k, l) = (k.wrapping_add(0x9E37_79B9), l.wrapping_add(0xBB67_AE85));
        round += 1;
    }
    [a, b, c, d]
}

/// The random words of one tensor at one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Words {
    /// The key.
    pub seed: u64,
    /// The number of the tensor, which is the third word of the counter.
    pub stream: u32,
    /// The number of the step, which is the fourth word of the counter.
    pub step: u32,
}

impl Words {
    /// Returns the four words of elements 4 * `block` to 4 * `block` + 3.
    #[inline(always)]
    #[must_use]
    pub(crate) const fn block(self, block: u64) -> [u32; 4] {
        let counter = [block as u32, (block >> 32) as u32, self.stream, self.step];
        philox(counter, [self.seed as u32, (self.seed >> 32) as u32])
    }

    /// Returns the word of an element, by its index in the whole tensor.
    #[cfg(test)]
    pub(crate) const fn of(self, index: u64) -> u32 {
        self.block(index >> 2)[(index & 3) as usize]
    }
}

/// Converts a word to a number in [0, 1). It uses the upper 24 bits, so every value is exact in fp32.
#[inline(always)]
#[must_use]
pub(crate) const fn unit(word: u32) -> f32 {
    (word >> 8) as f32 * f32::from_bits(0x3380_0000)
}

/// Converts a word to a number between `low` and `high`: low + unit * (high - low), three rounded fp32
/// operations. The result can equal `low`, and equals `high` only due to rounding.
#[inline(always)]
#[must_use]
pub(crate) const fn between(word: u32, low: f32, high: f32) -> f32 {
    low + unit(word) * (high - low)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of the authors' library (Random123, `kat_vectors`).
    #[test]
    fn philox_matches_the_known_answers() {
        for (counter, key, words) in [
            ([0; 4], [0; 2], [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]),
            (
                [0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344],
                [0xA409_3822, 0x299F_31D0],
                [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1],
            ),
        ] {
            assert_eq!(philox(counter, key), words);
        }
    }

    #[test]
    fn word_of_an_element_is_taken_from_its_block() {
        let words = Words { seed: 0x0123_4567_89AB_CDEF, stream: 3, step: 7 };
        for index in [0, 1, 2, 3, 4, 7, u64::from(u32::MAX) * 4 + 5, u64::MAX] {
            let block = index >> 2;
            let counter = [block as u32, (block >> 32) as u32, 3, 7];
            let expected = philox(counter, [0x89AB_CDEF, 0x0123_4567])[(index % 4) as usize];
            assert_eq!(words.of(index), expected);
        }
    }

    #[test]
    fn numbers_stay_within_low_and_high() {
        assert_eq!(unit(0), 0.0);
        assert_eq!(unit(u32::MAX), 1.0 - 2.0_f32.powi(-24));
        assert_eq!(between(0, -3.0, 5.0), -3.0);
        assert_eq!(between(1 << 31, -3.0, 5.0), 1.0);
        assert!(between(u32::MAX, -3.0, 5.0) <= 5.0);
    }
}
