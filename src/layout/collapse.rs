//! Matrices from the sizes and strides of tensors.

use crate::error::{Arg, Error};

/// Collapses a tensor's shape and strides (in elements) into a matrix: (rows, cols, row stride, column
/// stride). The number of rows is the product of the leading dimensions. A 0-d tensor is 1x1, a 1-d tensor is
/// 1xN. Returns None if one row stride cannot describe the leading dimensions; the caller then has to copy
/// the tensor.
#[must_use]
pub(crate) fn collapse(shape: &[i64], strides: &[i64]) -> Option<(usize, usize, isize, isize)> {
    let (Some((&cols, leading)), Some((&col_stride, leading_strides))) =
        (shape.split_last(), strides.split_last())
    else {
        return Some((1, 1, 1, 1));
    };
    let rows: i64 = leading.iter().product();
    if rows == 0 || cols == 0 {
        return Some((rows as usize, cols as usize, cols.max(1) as isize, 1));
    }
    // From the innermost dimension out, each stride must equal the span of the dimensions inside it.
    let mut row_stride = cols * col_stride;
    let mut span: Option<i64> = None;
    for (&n, &stride) in leading.iter().zip(leading_strides).rev().filter(|(n, _)| **n != 1) {
        match span {
            None => row_stride = stride,
            Some(span) if span != stride => return None,
            Some(_) => {}
        }
        span = Some(n * stride);
    }
    Some((rows as usize, cols as usize, row_stride as isize, col_stride as isize))
}

/// Shape and strides of a matrix, then the number of matrices and their stride.
pub(crate) type Matrices = ((usize, usize), (isize, isize), (usize, isize));

/// Collapses a tensor's shape and strides (in elements) into one matrix or, if `batch` is set, into a matrix for
/// each index of the first dimension. If that is not possible, the error calls the tensor `arg`.
pub(crate) fn matrices(arg: Arg, shape: &[i64], strides: &[i64], batch: bool) -> Result<Matrices, Error> {
    let first = usize::from(batch && !shape.is_empty());
    let (rows, cols, row_stride, col_stride) =
        collapse(&shape[first..], &strides[first..]).ok_or_else(|| Error::Value {
            arg,
            got: format!("of shape {shape:?} with strides {strides:?}, which cannot be viewed as 2-d"),
            expected: "contiguous".into(),
        })?;
    let matrices = if first == 1 { (shape[0] as usize, strides[0] as isize) } else { (1, 0) };
    Ok(((rows, cols), (row_stride, col_stride), matrices))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collapse_requires_one_row_stride() {
        assert_eq!(collapse(&[], &[]), Some((1, 1, 1, 1)));
        assert_eq!(collapse(&[5], &[3]), Some((1, 5, 15, 3)));
        assert_eq!(collapse(&[2, 3, 4], &[12, 4, 1]), Some((6, 4, 4, 1)));
        assert_eq!(collapse(&[4, 6], &[1, 4]), Some((4, 6, 1, 4)));
        assert_eq!(collapse(&[2, 3, 4], &[24, 8, 1]), Some((6, 4, 8, 1)));
        assert_eq!(collapse(&[2, 1, 4], &[24, 77, 1]), Some((2, 4, 24, 1)));
        assert_eq!(collapse(&[2, 3, 4], &[0, 0, 1]), Some((6, 4, 0, 1)));
        assert_eq!(collapse(&[2, 3, 4], &[4, 8, 1]), None);
        assert_eq!(collapse(&[2, 0, 4], &[4, 8, 1]), Some((0, 4, 4, 1)));
    }
}
