//! Decides whether matrices share memory. The test is exact per element, not per range: columns of one buffer
//! have overlapping ranges but share no element.

use crate::layout::Matrix;

/// The limit on search steps. Beyond it, two matrices whose ranges overlap count as sharing memory. Real
/// tensors take a few steps; only contrived strides reach the limit.
const MAX_STEPS: usize = 10_000;

/// Returns whether two elements of a matrix share memory. Elements have one size and their addresses are
/// multiples of it apart, so two elements overlap only if their addresses are equal: `i * row_stride == j *
/// col_stride` for some (i, j) other than (0, 0).
pub(super) fn overlaps_itself(m: &Matrix) -> bool {
    if m.numel() < 2 {
        return false;
    }
    let (down, across) = (m.row_stride.unsigned_abs(), m.col_stride.unsigned_abs());
    if m.rows == 1 || m.cols == 1 {
        return if m.rows == 1 { across == 0 } else { down == 0 };
    }
    if down == 0 || across == 0 {
        return true;
    }
    let common = gcd(down, across);
    across / common < m.rows && down / common < m.cols
}

/// The memory of `batch` matrices whose first elements are `batch_stride` elements apart. No two of them share
/// memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Region<'a> {
    pub(super) matrix: Matrix<'a>,
    pub(super) batch: usize,
    batch_stride: isize,
}

impl Region<'_> {
    /// Returns the number of elements.
    pub(super) fn numel(&self) -> usize {
        self.batch * self.matrix.numel()
    }

    /// Returns the first byte that the elements touch and the byte after the last one, or None without
    /// elements.
    pub(super) fn extent(&self) -> Option<(usize, usize)> {
        let (low, high) = self.matrix.extent().filter(|_| self.batch > 0)?;
        let size = self.matrix.dtype.size() as isize;
        let last = (self.batch as isize - 1).wrapping_mul(self.batch_stride).wrapping_mul(size);
        Some((low.wrapping_add_signed(last.min(0)), high.wrapping_add_signed(last.max(0))))
    }
}

/// Returns the memory of a batch: one region, or one for each matrix if the matrices may interleave. `matrix` is
/// the first of the batch.
pub(super) fn regions(matrix: Matrix, batch: usize, batch_stride: isize) -> impl Iterator<Item = Region> {
    let stride = batch_stride.wrapping_mul(matrix.dtype.size() as isize);
    let apart = matrix.extent().is_none_or(|(low, high)| stride.unsigned_abs() >= high.wrapping_sub(low));
    let (count, batch) = if batch <= 1 || apart { (1, batch) } else { (batch, 1) };
    (0..count).map(move |i| Region {
        matrix: matrix.shifted(batch_stride.wrapping_mul(i as isize)),
        batch,
        batch_stride,
    })
}

/// Returns whether an element of one region shares memory with an element of the other.
pub(super) fn overlap(a: &Region, b: &Region) -> bool {
    if a.numel() == 0 || b.numel() == 0 {
        return false;
    }
    let (a, b, batches) = (&a.matrix, &b.matrix, [(a.batch, a.batch_stride), (b.batch, b.batch_stride)]);
    // Two elements overlap if start_a + (steps of a) and start_b + (steps of b) are less than an element
    // apart. With all steps counted upwards, this means that a sum of steps lies between `low` and `high`.
    let (size_a, size_b) = (a.dtype.size() as i128, b.dtype.size() as i128);
    let mut target = (b.ptr.addr() as i128) - (a.ptr.addr() as i128);
    let mut steps: Vec<Step> = Vec::with_capacity(6);
    for (count, stride) in [
        (a.rows, a.row_stride as i128 * size_a),
        (a.cols, a.col_stride as i128 * size_a),
        (batches[0].0, batches[0].1 as i128 * size_a),
        (b.rows, -(b.row_stride as i128) * size_b),
        (b.cols, -(b.col_stride as i128) * size_b),
        (batches[1].0, -(batches[1].1 as i128) * size_b),
    ] {
        let most = count as i128 - 1;
        if most == 0 || stride == 0 {
            continue;
        }
        if stride < 0 {
            // Count from the other end.
            target -= stride * most;
        }
        let size = stride.abs();
        match steps.iter_mut().find(|step| step.size == size) {
            Some(step) => step.most += most,
            None => steps.push(Step { size, most }),
        }
    }
    steps.sort_by_key(|step| std::cmp::Reverse(step.size));
    let (low, high) = (target - size_a + 1, target + size_b - 1);
    let mut budget = MAX_STEPS;
    reaches(&steps, low, high, &mut budget)
}

/// Up to `most` steps of `size` bytes each.
#[derive(Debug, Clone, Copy)]
struct Step {
    size: i128,
    most: i128,
}

/// Returns whether a sum of steps lies between `low` and `high`. Returns true if the search takes more than
/// `budget` tries.
fn reaches(steps: &[Step], low: i128, high: i128, budget: &mut usize) -> bool {
    let span: i128 = steps.iter().map(|step| step.size * step.most).sum();
    if high < 0 || low > span {
        return false;
    }
    let Some((first, others)) = steps.split_first() else { return true };
    // All sums are multiples of the greatest common divisor of the sizes.
    let common = steps.iter().fold(0, |common, step| gcd(common, step.size as usize)) as i128;
    if low.max(0).div_euclid(common) == high.div_euclid(common) && low.max(0).rem_euclid(common) != 0 {
        return false;
    }
    let others_span = span - first.size * first.most;
    let fewest = (low - others_span).max(0);
    let (from, to) = ((fewest + first.size - 1) / first.size, (high / first.size).min(first.most));
    for count in from..=to {
        if *budget == 0 {
            return true;
        }
        *budget -= 1;
        if reaches(others, low - count * first.size, high - count * first.size, budget) {
            return true;
        }
    }
    false
}

fn gcd(a: usize, b: usize) -> usize {
    let (mut a, mut b) = (a, b);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;
    use crate::layout::{DType, Device};

    fn matrix(start: usize, dtype: DType, shape: (usize, usize), strides: (isize, isize)) -> Matrix<'static> {
        Matrix::new(std::ptr::without_provenance_mut(start), dtype, Device::Cpu, shape, strides)
    }

    fn elements(m: &Matrix) -> Vec<isize> {
        let offset = |r: usize, c: usize| {
            (r as isize * m.row_stride + c as isize * m.col_stride) * m.dtype.size() as isize
        };
        (0..m.rows)
            .flat_map(|r| (0..m.cols).map(move |c| (r, c)))
            .map(|(r, c)| m.ptr.addr() as isize + offset(r, c))
            .collect()
    }

    fn bytes(m: &Matrix) -> HashSet<isize> {
        elements(m).into_iter().flat_map(|at| at..at + m.dtype.size() as isize).collect()
    }

    fn any_matrix() -> impl Strategy<Value = Matrix<'static>> {
        let dtype = prop::sample::select(vec![DType::F32, DType::Bf16, DType::E4m3]);
        (1000..1064_usize, dtype, (0..6_usize, 0..6_usize), (-9..10_isize, -9..10_isize))
            .prop_map(|(start, dtype, shape, strides)| matrix(start, dtype, shape, strides))
    }

    fn one(matrix: Matrix<'static>) -> Region<'static> {
        Region { matrix, batch: 1, batch_stride: 0 }
    }

    fn any_batch() -> impl Strategy<Value = (Matrix<'static>, usize, isize)> {
        (any_matrix(), 0..4_usize, -40..41_isize)
    }

    fn bytes_of_batch((m, batch, stride): (Matrix, usize, isize)) -> HashSet<isize> {
        let shift = stride * m.dtype.size() as isize;
        (0..batch).flat_map(|i| bytes(&m).into_iter().map(move |at| at + i as isize * shift)).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..Default::default() })]

        #[test]
        fn matrices_overlap_if_they_share_a_byte(a in any_matrix(), b in any_matrix()) {
            let (first, second) = (one(a), one(b));
            prop_assert_eq!(overlap(&first, &second), !bytes(&a).is_disjoint(&bytes(&b)));
            prop_assert_eq!(overlap(&second, &first), overlap(&first, &second));
        }

        #[test]
        fn batches_overlap_if_two_of_their_regions_do(a in any_batch(), b in any_batch()) {
            let parts = |(matrix, batch, stride)| regions(matrix, batch, stride).collect::<Vec<_>>();
            let (first, second) = (parts(a), parts(b));
            let overlapping = first.iter().any(|a| second.iter().any(|b| overlap(a, b)));
            prop_assert_eq!(overlapping, !bytes_of_batch(a).is_disjoint(&bytes_of_batch(b)));
            for region in first {
                let all = bytes_of_batch((region.matrix, region.batch, region.batch_stride));
                let range = all.iter().min().map(|low| (*low as usize, *all.iter().max().unwrap() as usize + 1));
                prop_assert_eq!(region.extent(), range);
                let size = region.matrix.dtype.size();
                let least = if overlaps_itself(&region.matrix) { 0 } else { region.numel() * size };
                prop_assert!(all.len() >= least, "no two matrices of a region share memory");
            }
        }

        #[test]
        fn matrix_overlaps_itself_if_two_elements_share_an_address(m in any_matrix()) {
            let places: HashSet<isize> = elements(&m).into_iter().collect();
            prop_assert_eq!(overlaps_itself(&m), places.len() < m.numel());
        }
    }

    #[test]
    fn matrices_of_a_batch_are_one_region_unless_they_interleave() {
        let rows = matrix(4096, DType::E4m3, (24, 64), (64, 1));
        assert_eq!(regions(rows, 128, 64 * 32).count(), 1);
        assert_eq!(regions(rows, 128, 64 * 24).count(), 1);
        let columns = matrix(4096, DType::E4m3, (24, 4), (512, 1));
        assert_eq!(regions(columns, 128, 4).count(), 128);
    }

    #[test]
    fn large_tensors_take_few_steps() {
        let million = 1 << 20;
        let column =
            |c: usize| one(matrix(4096 + 4 * c, DType::F32, (1, million), (2 * million as isize, 2)));
        assert!(!overlap(&column(0), &column(1)));
        assert!(overlap(&column(0), &column(2)));
        let half = |c: usize| one(matrix(4096 + 4 * c, DType::F32, (million, 512), (1024, 1)));
        assert!(!overlap(&half(0), &half(512)));
        assert!(overlap(&half(0), &half(511)));
    }

    #[test]
    fn matrices_count_as_overlapping_beyond_the_step_limit() {
        let odd = |start, strides| one(matrix(start, DType::E4m3, (1 << 20, 1 << 20), strides));
        let (a, b) = (odd(1 << 40, (1_000_003, 999_983)), odd((1 << 40) + 1, (1_000_033, 999_979)));
        assert!(overlap(&a, &b));
    }
}
