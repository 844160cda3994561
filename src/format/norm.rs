//! Norms over the rows of a matrix: `RMSNorm` and `LayerNorm`.
//!
//! All operations are fp32 with one rounding each, in the order that is written here, without fused
//! multiply-add. Sums have a fixed order, which the threads of a block can follow. Backends therefore agree in
//! every byte.

use super::wide::canonical_nan;

/// Number of partial sums of a row: 8 neighboring ones for each thread of 8 warps. Element i is added to
/// partial sum i mod `LANES`.
pub(crate) const LANES: usize = WARPS * THREADS * PER_THREAD;
const WARPS: usize = 8;
const THREADS: usize = 32;
const PER_THREAD: usize = 8;

/// Returns the sum of the partial sums: first of each thread, then over the threads of a warp, then over the
/// warps. Each step adds the upper half of the numbers to the lower half.
#[inline(always)]
pub(crate) fn sum_lanes(lanes: &[f32; LANES]) -> f32 {
    let mut warps = [0.0_f32; WARPS];
    for (warp, lanes) in warps.iter_mut().zip(lanes.as_chunks::<{ THREADS * PER_THREAD }>().0) {
        let mut threads = [0.0_f32; THREADS];
        for (thread, sums) in threads.iter_mut().zip(lanes.as_chunks::<PER_THREAD>().0) {
            *thread = sum_halves(*sums);
        }
        *warp = sum_halves(threads);
    }
    sum_halves(warps)
}

/// Adds the upper half of the numbers to the lower half until one is left.
#[inline(always)]
fn sum_halves<const N: usize>(mut numbers: [f32; N]) -> f32 {
    let mut half = N / 2;
    while half > 0 {
        let (lower, upper) = numbers.split_at_mut(half);
        for (sum, other) in lower.iter_mut().zip(upper) {
            *sum += *other;
        }
        half /= 2;
    }
    numbers[0]
}

/// Mean and reciprocal standard deviation of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct RowStats {
    /// The mean. 0 for `RMSNorm`, which does not subtract it.
    pub(crate) mean: f32,
    /// 1 / sqrt(mean square of x - mean, plus epsilon).
    pub(crate) rstd: f32,
}

impl RowStats {
    /// Computes the statistics of a row: sums in lanes, divided by the length. With `centered`, a first sum
    /// gives the mean, and squares are of the differences from it.
    #[cfg(test)]
    pub(crate) fn of(row: &[f32], centered: bool, eps: f32) -> Self {
        let sum = |term: &dyn Fn(f32) -> f32| {
            let mut lanes = [0.0_f32; LANES];
            for (i, x) in row.iter().enumerate() {
                lanes[i % LANES] += term(*x);
            }
            sum_lanes(&lanes)
        };
        let mean = if centered { sum(&|x| x) / row.len() as f32 } else { 0.0 };
        let squares = sum(&|x| if centered { (x - mean) * (x - mean) } else { x * x });
        Self::new(mean, squares, row.len(), eps)
    }

    /// Returns the statistics of a row of `cols` elements. A NaN becomes [`NAN_BITS`].
    #[inline(always)]
    pub(crate) fn new(mean: f32, sum_of_squares: f32, cols: usize, eps: f32) -> Self {
        let rstd = 1.0 / (sum_of_squares / cols as f32 + eps).sqrt();
        Self { mean: canonical_nan(mean), rstd: canonical_nan(rstd) }
    }

    /// Returns the normalized value of `x`, before it is rounded to the input's dtype.
    #[inline(always)]
    pub(crate) fn normalize<const CENTERED: bool>(self, x: f32) -> f32 {
        (if CENTERED { x - self.mean } else { x }) * self.rstd
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::wide::NAN_BITS;

    #[test]
    fn sums_follow_the_threads_of_a_block() {
        // 2^24 absorbs a 1 that is added to it alone. Elements 0 and 2048 share a lane, and elements 0 and 4
        // the first step within a thread.
        let big = 16_777_216.0;
        let sum_with = |places: &[usize]| {
            let mut row = vec![0.0; 5000];
            row[0] = big;
            for place in places {
                row[*place] = 1.0;
            }
            RowStats::of(&row, true, 0.0).mean * 5000.0
        };
        let mut lanes = [0.0; LANES];
        lanes[0] = big;
        (lanes[4], lanes[2], lanes[6]) = (1.0, 1.0, 1.0);
        assert_eq!(sum_lanes(&lanes), big + 2.0, "2 and 6 are added to each other first");
        (lanes[2], lanes[6]) = (0.0, 0.0);
        lanes[8 * 16] = 1.0;
        assert_eq!(sum_lanes(&lanes), big, "4, then thread 16");
        lanes[4] = 0.0;
        lanes[256 + 8 * 16] = 1.0;
        assert_eq!(sum_lanes(&lanes), big, "thread 16 of each warp, then the warps");
        (lanes[8 * 16], lanes[256 + 8 * 16]) = (0.0, 0.0);
        (lanes[256 * 2], lanes[256 * 6]) = (1.0, 1.0);
        assert_eq!(sum_lanes(&lanes), big + 2.0, "warps 2 and 6 are added to each other first");
        assert!((sum_with(&[2048, 4096]) - big).abs() < 4.0);
    }

    #[test]
    fn statistics_match_fp64() {
        let row: Vec<f32> = (0..1000_u32).map(|i| ((i * 7919) % 1013) as f32 / 500.0 - 0.7).collect();
        let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / 1000.0;
        let square = |mean: f64| row.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / 1000.0;
        for centered in [false, true] {
            let stats = RowStats::of(&row, centered, 1e-5);
            let mean = if centered { mean } else { 0.0 };
            assert!((f64::from(stats.mean) - mean).abs() < 1e-6);
            assert!((f64::from(stats.rstd) - 1.0 / (square(mean) + 1e-5).sqrt()).abs() < 1e-6);
        }
    }

    #[test]
    fn a_row_with_nan_or_infinity_has_a_nan_without_payload_or_zero() {
        let stats = RowStats::of(&[1.0, -f32::NAN], true, 1e-5);
        assert_eq!((stats.mean.to_bits(), stats.rstd.to_bits()), (NAN_BITS, NAN_BITS));
        let stats = RowStats::of(&[1.0, f32::INFINITY], false, 1e-5);
        assert_eq!(stats.rstd, 0.0);
        assert!(stats.normalize::<false>(f32::INFINITY).is_nan());
    }
}
