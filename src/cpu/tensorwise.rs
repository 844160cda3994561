//! Quantization with one scale per tensor.

use std::sync::atomic::{AtomicU32, Ordering};

use super::convert::{Codes, Element};
use super::float_env::DefaultFloatEnv;
use super::simd::{Kernel, dispatch};
use super::types::{with_codes, with_element};
use super::walk::{Cast, Piece, Walk};
use super::{pool, rows};
use crate::format::Fp8Format;
use crate::format::scale::reciprocal;
use crate::format::wide::{NAN_BITS, canonical};
use crate::layout::{Matrix, View, ViewMut};
use crate::spec::{ScaleRule, Scaling, TensorCall};

/// Number of elements per piece of work. It is large enough that scheduling costs nothing, and small enough
/// that the input of a piece is still in the L2 cache when it is read a second time.
pub(super) const PIECE: usize = 64 * 1024;

/// Number of elements below which a call runs on the caller's thread, because waking other threads takes
/// longer than the work.
pub(super) const PARALLEL: usize = 128 * 1024;

/// The work on one tensor of a call.
struct Task<'a> {
    walk: Walk<'a>,
    /// The format of the outputs. It is only used if there are outputs.
    format: Fp8Format,
    /// The factor that elements are multiplied by.
    q: f32,
    /// The absolute maximum so far, in the form that [`rows::amax`] returns.
    amax_bits: AtomicU32,
}

impl<'a> Task<'a> {
    /// Creates a task that only computes the absolute maximum.
    fn only_amax(x: &View<'a>) -> Self {
        Self::new(x, 1.0, None, None)
    }

    fn new(x: &View<'a>, scale: f32, rowwise: Option<&'a ViewMut>, columnwise: Option<&'a ViewMut>) -> Self {
        let format = rowwise.or(columnwise).and_then(|out| out.dtype().fp8()).unwrap_or(Fp8Format::E4m3);
        let sinks = rowwise.map(ViewMut::matrix).into_iter();
        let sinks = sinks.chain(columnwise.map(|out| out.matrix().transposed())).collect();
        let amax_bits = AtomicU32::new(0);
        Self { walk: Walk::new(x.matrix(), sinks), format, q: reciprocal(scale), amax_bits }
    }

    /// Returns the absolute maximum. A NaN is returned in canonical form.
    fn amax(&self) -> f32 {
        f32::from_bits(canonical(self.amax_bits.load(Ordering::Relaxed)))
    }

    fn run_piece(&self, piece: Piece, amax: bool) {
        let (walk, x, q) = (&self.walk, self.walk.source, self.q);
        let amax_bits = with_element!(x.dtype, T => if walk.sinks.is_empty() {
            dispatch(AmaxPiece::<T> { x, piece, buffer: Vec::new() })
        } else {
            with_codes!(self.format, C => if amax {
                dispatch(CastPiece { walk, piece, cast: Cast::<T, C, true>::new(x, q) })
            } else {
                dispatch(CastPiece { walk, piece, cast: Cast::<T, C, false>::new(x, q) })
            })
        });
        self.amax_bits.fetch_max(amax_bits, Ordering::Relaxed);
    }
}

struct AmaxPiece<'a, T> {
    x: Matrix<'a>,
    piece: Piece,
    buffer: Vec<T>,
}

impl<T: Element> Kernel for AmaxPiece<'_, T> {
    type Output = u32;

    #[inline(always)]
    fn run(mut self) -> u32 {
        let mut amax_bits = 0;
        for row in self.piece.rows {
            // SAFETY: pieces are parts of the input, and `T` is the type of its dtype.
            let xs = unsafe { self.x.row(row, self.piece.cols.clone(), &mut self.buffer) };
            amax_bits = amax_bits.max(rows::amax(xs));
        }
        amax_bits
    }
}

struct CastPiece<'a, T, C, const AMAX: bool> {
    walk: &'a Walk<'a>,
    piece: Piece,
    cast: Cast<'a, T, C, AMAX>,
}

impl<T: Element, C: Codes, const AMAX: bool> Kernel for CastPiece<'_, T, C, AMAX> {
    type Output = u32;

    #[inline(always)]
    fn run(mut self) -> u32 {
        self.walk.run(self.piece, &mut self.cast);
        self.cast.amax_bits
    }
}

/// Runs the pieces of all tasks together, so that many small tensors use as many threads as one large tensor.
fn run(tasks: &[Task], amax: bool) {
    let pieces: Vec<(&Task, Piece)> = tasks
        .iter()
        .flat_map(|task| task.walk.pieces(PIECE).into_iter().map(move |piece| (task, piece)))
        .collect();
    let elements: usize = tasks.iter().map(|task| task.walk.source.numel()).sum();
    pool::for_each(pieces.len(), elements >= PARALLEL, |i| {
        let (task, piece) = &pieces[i];
        task.run_piece(piece.clone(), amax);
    });
}

/// Raises `amax` to the maximum that the task found, if that is finite, and sets `scale_used`. If the current
/// amax is NaN, it is replaced, so that a history recovers.
///
/// # Safety
/// Each matrix must be fp32 with an element at this index, and no other code may access these elements at the
/// same time.
unsafe fn update_amax(task: &Task, scale: &Matrix, amax: &Matrix, scale_used: &Matrix, index: usize) {
    let largest = task.amax();
    // SAFETY: the caller guarantees exclusive access to these fp32 elements.
    unsafe {
        let scale: u32 = scale.read(0, index);
        if largest.is_finite() {
            let before: f32 = amax.read(0, index);
            amax.write(0, index, if before > largest { before } else { largest });
        }
        scale_used.write(0, index, if largest.is_finite() { scale } else { NAN_BITS });
    }
}

pub(crate) fn amax(x: View, out: ViewMut) {
    multi_amax(&[x], out);
}

pub(crate) fn multi_amax(xs: &[View], out: ViewMut) {
    let _env = DefaultFloatEnv::enter();
    let tasks: Vec<Task> = xs.iter().map(Task::only_amax).collect();
    run(&tasks, true);
    for (i, task) in tasks.iter().enumerate() {
        // SAFETY: `ops` checks that `out` has one fp32 element per tensor.
        unsafe { out.matrix().write(0, i, task.amax()) };
    }
}

pub(crate) fn scale_from_amax(amax: View, format: Fp8Format, rule: ScaleRule, scale_out: ViewMut) {
    let _env = DefaultFloatEnv::enter();
    let (amax, scale_out) = (amax.matrix(), scale_out.matrix());
    for row in 0..amax.rows {
        for col in 0..amax.cols {
            // SAFETY: `ops` checks that both are fp32 and have the same shape.
            unsafe { scale_out.write(row, col, rule.scale(amax.read(row, col), format)) };
        }
    }
}

/// See `ops::quantize`, `ops::quantize_delayed` and `ops::quantize_current`.
pub(crate) fn quantize(call: TensorCall) {
    let _env = DefaultFloatEnv::enter();
    let TensorCall { x, scaling, format, rowwise, columnwise } = call;
    let task = |scale| [Task::new(&x, scale, rowwise.as_ref(), columnwise.as_ref())];
    match scaling {
        // SAFETY: `ops` checks that the scale is one fp32 element.
        Scaling::Static(scale) => run(&task(unsafe { scale.matrix().read(0, 0) }), false),
        Scaling::Delayed { scale, amax, scale_used } => {
            let scale = scale.matrix();
            // SAFETY: `ops` checks that the scale is one fp32 element.
            let task = task(unsafe { scale.read(0, 0) });
            run(&task, true);
            // SAFETY: `ops` checks that each is one fp32 element and that outputs do not share memory with
            // other arguments.
            unsafe { update_amax(&task[0], &scale, &amax.matrix(), &scale_used.matrix(), 0) };
        }
        Scaling::Current { rule, scale_out } => {
            let measured = [Task::only_amax(&x)];
            run(&measured, true);
            let scale = rule.scale(measured[0].amax(), format);
            // SAFETY: `ops` checks that the output is one fp32 element.
            unsafe { scale_out.matrix().write(0, 0, scale) };
            run(&task(scale), false);
        }
    }
}

pub(crate) fn multi_quantize(xs: &[View], scales: View, outs: &[ViewMut]) {
    let _env = DefaultFloatEnv::enter();
    run(&tasks(xs, &scales.matrix(), outs), false);
}

pub(crate) fn multi_quantize_delayed(
    xs: &[View],
    scales: View,
    amaxes: ViewMut,
    scales_used: ViewMut,
    outs: &[ViewMut],
) {
    let _env = DefaultFloatEnv::enter();
    let tasks = tasks(xs, &scales.matrix(), outs);
    run(&tasks, true);
    for (i, task) in tasks.iter().enumerate() {
        // SAFETY: `ops` checks that each has one fp32 element per tensor and that outputs do not share memory
        // with other arguments.
        unsafe { update_amax(task, &scales.matrix(), &amaxes.matrix(), &scales_used.matrix(), i) };
    }
}

fn tasks<'a>(xs: &[View<'a>], scales: &Matrix, outs: &'a [ViewMut]) -> Vec<Task<'a>> {
    let lists = xs.iter().zip(outs).enumerate();
    // SAFETY: `ops` checks that `scales` has one fp32 element per tensor.
    lists.map(|(i, (x, out))| Task::new(x, unsafe { scales.read(0, i) }, Some(out), None)).collect()
}
