//! Rotary position embeddings.

use std::ops::Range;

use super::convert::Element;
use super::float_env::DefaultFloatEnv;
use super::groups::for_rows;
use super::simd::{Kernel, dispatch};
use super::types::with_element;
use crate::format::rotation::rotate_pair;
use crate::layout::{Matrix, ViewMut};
use crate::spec::Rotation;

/// Rotates rows.
struct RotationPiece<'a, T> {
    x: Matrix<'a>,
    cos: Matrix<'a>,
    sin: Matrix<'a>,
    back: bool,
    /// The output, contiguous.
    out: Matrix<'a>,
    rows: Range<usize>,
    buffer: Vec<T>,
}

impl<T: Element> Kernel for RotationPiece<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { x, cos, sin, back, out, rows, mut buffer } = self;
        let channels = cos.cols;
        let half = channels / 2;
        let mut cos_buffer = Vec::new();
        let mut sin_buffer = Vec::new();
        for row in rows {
            let position = row % cos.rows;
            // SAFETY: the elements of `x` are `T`.
            let xs = unsafe { x.row::<T>(row, 0..x.cols, &mut buffer) };
            // SAFETY: `ops` checks that both are fp32, contiguous and of the same shape.
            let cos = unsafe { cos.row::<f32>(position, 0..channels, &mut cos_buffer) };
            // SAFETY: as for the cosines.
            let sin = unsafe { sin.row::<f32>(position, 0..channels, &mut sin_buffer) };
            let (first_cos, second_cos) = cos.split_at(half);
            let (first_sin, second_sin) = sin.split_at(half);
            // SAFETY: the output is contiguous and has the dtype of `T`. No other piece has this row.
            let ys = unsafe { out.row_mut::<T>(row, 0..x.cols) };
            for (x_head, y_head) in xs.chunks_exact(channels).zip(ys.chunks_exact_mut(channels)) {
                let (first, second) = x_head.split_at(half);
                let (to_first, to_second) = y_head.split_at_mut(half);
                for i in 0..half {
                    let [y_first, y_second] = rotate_pair(
                        [first[i].widen(), second[i].widen()],
                        [first_cos[i], second_cos[i]],
                        [first_sin[i], second_sin[i]],
                        back,
                    );
                    to_first[i] = T::narrow(y_first);
                    to_second[i] = T::narrow(y_second);
                }
            }
        }
    }
}

/// See `ops::rotate`.
pub(crate) fn rotate(rotation: &Rotation, out: ViewMut) {
    let _env = DefaultFloatEnv::enter();
    let (x, cos, sin) = (rotation.x.matrix(), rotation.cos.matrix(), rotation.sin.matrix());
    let (back, out) = (rotation.back, out.matrix());
    with_element!(rotation.x.dtype(), T => {
        for_rows(x.rows, x.cols, |rows| {
            dispatch(RotationPiece::<T> { x, cos, sin, back, out, rows, buffer: Vec::new() });
        });
    });
}
