//! Gated activations, with quantization of their result and of their gradients.

use std::ops::Range;

use super::convert::Element;
use super::float_env::DefaultFloatEnv;
use super::groups::for_rows;
use super::simd::{Kernel, dispatch};
use super::types::with_element;
use crate::format::Fp8Format;
use crate::layout::{Matrix, View, ViewMut};
use crate::spec::{Glu, TensorPlanes};

/// Computes rows of a gated activation, or of the gradients of gate and up if `dy` is given.
struct GluPiece<'a, T> {
    glu: &'a Glu<'a>,
    dy: Option<Matrix<'a>>,
    /// The result, or the gradients of gate and up; contiguous.
    values: &'a [Matrix<'a>],
    rows: Range<usize>,
    buffers: [Vec<T>; 3],
}

impl<T: Element> Kernel for GluPiece<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { glu, dy, values, rows, buffers: [mut first, mut second, mut third] } = self;
        let (gate, up, activation) = (glu.gate.matrix(), glu.up.matrix(), glu.activation);
        let cols = 0..gate.cols;
        for row in rows {
            // SAFETY: both have these elements, which are `T`.
            let (gates, ups) = unsafe {
                (gate.row::<T>(row, cols.clone(), &mut first), up.row::<T>(row, cols.clone(), &mut second))
            };
            // SAFETY: the outputs are contiguous and have the dtype of `T`. No other piece has this row.
            let out = unsafe { values[0].row_mut::<T>(row, cols.clone()) };
            let Some(dy) = dy else {
                for ((gate, up), out) in gates.iter().zip(ups).zip(out) {
                    *out = T::narrow(activation.gated(gate.widen(), up.widen()));
                }
                continue;
            };
            // SAFETY: `dy` has the shape and dtype of the gate.
            let dys = unsafe { dy.row::<T>(row, cols.clone(), &mut third) };
            // SAFETY: as for the first output.
            let to_ups = unsafe { values[1].row_mut::<T>(row, cols.clone()) };
            let inputs = gates.iter().zip(ups).zip(dys);
            for (((gate, up), dy), (to_gate, to_up)) in inputs.zip(out.iter_mut().zip(to_ups)) {
                let (gate, up) = activation.gradients(gate.widen(), up.widen(), dy.widen());
                *to_gate = T::narrow(gate);
                *to_up = T::narrow(up);
            }
        }
    }
}

/// Computes the values and quantizes each into its planes: the result, or the gradients of gate and up.
fn quantize(glu: &Glu, dy: Option<View>, values: &[ViewMut], format: Fp8Format, planes: &[&TensorPlanes]) {
    let _env = DefaultFloatEnv::enter();
    let (rows, cols) = glu.gate.shape();
    let dy = dy.map(|dy| dy.matrix());
    let matrices: Vec<Matrix> = values.iter().map(ViewMut::matrix).collect();
    with_element!(glu.gate.dtype(), T => {
        for_rows(rows, cols, |rows| {
            let buffers = [Vec::new(), Vec::new(), Vec::new()];
            dispatch(GluPiece::<T> { glu, dy, values: &matrices, rows, buffers });
        });
    });
    for (values, planes) in values.iter().zip(planes) {
        super::quantize(planes.call(values.read(), format));
    }
}

/// See `ops::quantize_glu`.
pub(crate) fn quantize_glu(glu: &Glu, values: ViewMut, format: Fp8Format, planes: &TensorPlanes) {
    quantize(glu, None, &[values], format, &[planes]);
}

/// See `ops::quantize_glu_backward`.
pub(crate) fn quantize_glu_backward(
    glu: &Glu,
    dy: View,
    values: [ViewMut; 2],
    format: Fp8Format,
    planes: [&TensorPlanes; 2],
) {
    quantize(glu, Some(dy), &values, format, &planes);
}
