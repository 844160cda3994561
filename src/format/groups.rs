//! Groups of rows: the rows of one expert are consecutive, and an offset for each expert says where they end.

/// Groups in the columnwise plane start at multiples of this number of columns. Grouped GEMMs require this
/// alignment of the contracted dimension.
pub(crate) const ALIGNMENT: usize = 16;

/// The bounds of all groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// The row after the last one of each group. It is monotone and at most the number of rows.
    pub ends: Vec<i32>,
    /// The ends with each group's length rounded up to a multiple of [`ALIGNMENT`].
    pub padded_ends: Vec<i32>,
    /// The first group whose offset was negative, above the number of rows, or below the offset before it.
    pub invalid: Option<usize>,
}

/// Returns the bounds for untrusted offsets into `rows` rows. An invalid offset is replaced by the nearest
/// valid one, so that no kernel reads outside of the rows. Rows after the last group belong to no group.
/// [`padded_columns`] must fit int32.
#[must_use]
pub(crate) fn bounds(offsets: impl IntoIterator<Item = i32>, rows: usize) -> Bounds {
    let rows = i32::try_from(rows).unwrap_or(i32::MAX);
    let mut group_bounds = Bounds { ends: Vec::new(), padded_ends: Vec::new(), invalid: None };
    let (mut end, mut padded) = (0, 0);
    for (group, offset) in offsets.into_iter().enumerate() {
        let next = offset.clamp(end, rows);
        if next != offset {
            group_bounds.invalid.get_or_insert(group);
        }
        padded += (next - end + ALIGNMENT as i32 - 1) / ALIGNMENT as i32 * ALIGNMENT as i32;
        end = next;
        group_bounds.ends.push(end);
        group_bounds.padded_ends.push(padded);
    }
    group_bounds
}

/// Returns the number of rows whose expert is at most `expert`, which is the row after the last one of that
/// expert. `expert_of` returns the experts of rows, in ascending order.
#[must_use]
pub(crate) fn end_of(expert: i64, rows: usize, expert_of: impl Fn(usize) -> i64) -> usize {
    let (mut first, mut last) = (0, rows);
    while first < last {
        let middle = usize::midpoint(first, last);
        if expert_of(middle) <= expert {
            first = middle + 1;
        } else {
            last = middle;
        }
    }
    first
}

/// Returns the largest number of columns that the columnwise plane of `rows` rows in `groups` groups can
/// need. It depends on shapes only, so that no size is read from the device.
#[must_use]
pub(crate) const fn padded_columns(rows: usize, groups: usize) -> usize {
    let with_rows = if groups < rows { groups } else { rows };
    (rows + with_rows * (ALIGNMENT - 1)) / ALIGNMENT * ALIGNMENT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_offsets_are_kept_and_lengths_are_padded() {
        let group_bounds = bounds([3, 3, 20, 36], 40);
        assert_eq!(
            group_bounds,
            Bounds { ends: vec![3, 3, 20, 36], padded_ends: vec![16, 16, 48, 64], invalid: None }
        );
    }

    #[test]
    fn invalid_offsets_are_clamped_and_reported() {
        assert_eq!(bounds([-4, 5], 8).ends, [0, 5]);
        assert_eq!(bounds([5, 3, 9], 8).ends, [5, 5, 8]);
        for (offsets, group) in [([-1, 2], 0), ([5, 4], 1), ([2, 9], 1), ([9, -1], 0)] {
            assert_eq!(bounds(offsets, 8).invalid, Some(group), "{offsets:?}");
        }
    }

    #[test]
    fn rows_of_other_experts_are_after_the_last_end() {
        let experts = [-1, 0, 0, 2, 2, 5];
        let ends = [0, 1, 2, 3].map(|expert| end_of(expert, experts.len(), |row| experts[row]));
        assert_eq!(ends, [3, 3, 5, 5]);
        assert_eq!(end_of(0, 0, |_| unreachable!()), 0);
    }

    #[test]
    fn padded_columns_are_enough_for_any_groups() {
        for (rows, groups) in [(0, 4), (3, 0), (1, 1), (17, 3), (64, 4), (5, 100), (1000, 7)] {
            // The worst case: groups of one row, and the rest in the last group.
            let offsets = (1..=groups).map(|i| if i == groups { rows } else { i.min(rows) } as i32);
            let needed = bounds(offsets, rows).padded_ends.last().copied().unwrap_or(0);
            assert!(needed as usize <= padded_columns(rows, groups), "{rows} rows in {groups} groups");
        }
    }
}
