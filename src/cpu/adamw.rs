//! The `AdamW` step over a list of tensors.
//!
//! Elements are processed [`CHUNK`] at a time. Inputs are widened to fp32, the update is one loop over fp32,
//! and outputs are narrowed. With one scale per block, new values are kept until the maxima of their blocks
//! are known, and then encoded.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use super::convert::{Codes, Element};
use super::float_env::DefaultFloatEnv;
use super::random::Buffer;
use super::simd::{Kernel, dispatch};
use super::tensorwise::{PARALLEL, PIECE};
use super::types::{with_codes, with_element};
use super::{pool, rows};
use crate::format::adamw::{Factors, Hyper};
use crate::format::moments::{self, FIRST, Moment, SECOND};
use crate::format::random::Words;
use crate::format::scale::reciprocal;
use crate::format::wide::{NAN_BITS, canonical};
use crate::format::{DType, Fp8Format, e8m0};
use crate::layout::{Block, Matrix, ViewMut, holds_whole_blocks, narrowest_block};
use crate::spec::{AdamWCall, AdamWTensor, BlockScale, Target};

/// Number of elements that are updated together. It is a multiple of the columns of every square block.
const CHUNK: usize = 512;
const _: () = assert!(holds_whole_blocks(CHUNK, CHUNK));
// Pieces and chunks start where blocks of moments start.
const _: () = assert!(CHUNK.is_multiple_of(moments::BLOCK) && PIECE.is_multiple_of(CHUNK));

/// A moment in memory, flattened to one row.
#[derive(Clone, Copy)]
struct Stored<'a> {
    moment: Moment,
    /// fp32, bf16, or codes.
    elements: Matrix<'a>,
    /// The ranges of codes: two elements per block.
    ranges: Option<Matrix<'a>>,
}

impl<'a> Stored<'a> {
    fn new(moment: Moment, elements: &'a ViewMut, ranges: Option<&'a ViewMut>) -> Self {
        let elements = elements.matrix().flat();
        Self { moment, elements, ranges: ranges.map(|ranges| ranges.matrix().flat()) }
    }

    /// Loads elements as fp32. If they are codes, the range has whole blocks.
    ///
    /// # Safety
    /// The elements must exist, and no other code may write to them at the same time.
    #[inline(always)]
    unsafe fn load(&self, at: Range<usize>, to: &mut [f32]) {
        let Some(ranges) = self.ranges else {
            // SAFETY: the caller guarantees that the elements exist.
            return unsafe { load(&self.elements, at, to) };
        };
        let mut unused = Vec::new();
        // SAFETY: the caller guarantees that the elements exist, and codes are bytes.
        let codes = unsafe { self.elements.row::<u8>(0, at.clone(), &mut unused) };
        let blocks = to.chunks_mut(moments::BLOCK).zip(codes.chunks(moments::BLOCK));
        for (i, (to, codes)) in blocks.enumerate() {
            let first = 2 * (at.start / moments::BLOCK + i);
            // SAFETY: `ops` checks that each block has a range, of two fp32 elements.
            let (largest, smallest) = unsafe { (ranges.read(0, first), ranges.read(0, first + 1)) };
            let grid = self.moment.grid(moments::Range { largest, smallest });
            for (to, code) in to.iter_mut().zip(codes) {
                *to = self.moment.decode(*code, grid);
            }
        }
    }

    /// Stores fp32 values, rounding to nearest. If elements are codes, the range has whole blocks.
    ///
    /// # Safety
    /// The elements must exist, and no other code may access them at the same time.
    #[inline(always)]
    unsafe fn store(&self, from: &[f32], at: Range<usize>) {
        let Some(ranges) = self.ranges else {
            // SAFETY: the caller guarantees exclusive access to the elements.
            return unsafe { store(from, &self.elements, at) };
        };
        // SAFETY: the caller guarantees exclusive access to the elements, and codes are bytes.
        let codes = unsafe { self.elements.row_mut::<u8>(0, at.clone()) };
        let blocks = codes.chunks_mut(moments::BLOCK).zip(from.chunks(moments::BLOCK));
        for (i, (codes, from)) in blocks.enumerate() {
            let range = self.moment.range(from);
            let grid = self.moment.grid(range);
            for (code, from) in codes.iter_mut().zip(from) {
                *code = self.moment.encode(*from, grid);
            }
            let first = 2 * (at.start / moments::BLOCK + i);
            // SAFETY: `ops` checks that each block has a range, of two fp32 elements. The caller guarantees
            // exclusive access to the block.
            unsafe {
                ranges.write(0, first, range.largest);
                ranges.write(0, first + 1, range.smallest);
            }
        }
    }
}

/// The work on one tensor of a call. Each view is flattened to one row.
struct Task<'a> {
    grad: Matrix<'a>,
    moments: [Stored<'a>; 2],
    param: Matrix<'a>,
    master: Option<Matrix<'a>>,
    scale: Option<Matrix<'a>>,
    new_scale: f32,
    /// Rows and columns of the parameter.
    shape: (usize, usize),
    factors: Factors,
    words: Option<Words>,
    offset: u64,
    target: Target,
    /// The absolute maximum so far, in the form that [`rows::amax`] returns.
    amax_bits: AtomicU32,
}

impl<'a> Task<'a> {
    fn new(call: &AdamWCall, hyper: &Hyper, grad_scale: Option<f32>, tensor: &'a AdamWTensor) -> Self {
        // SAFETY: `ops` checks that `step` is one fp32 element.
        let step: f32 = unsafe { tensor.step.matrix().read(0, 0) };
        let words = |seed| Words { seed, stream: tensor.stream, step: step as u32 };
        Self {
            grad: tensor.grad.matrix().flat(),
            moments: [
                Stored::new(FIRST, &tensor.exp_avg, tensor.ranges.as_ref().map(|ranges| &ranges[0])),
                Stored::new(SECOND, &tensor.exp_avg_sq, tensor.ranges.as_ref().map(|ranges| &ranges[1])),
            ],
            param: tensor.param.matrix().flat(),
            master: tensor.master.as_ref().map(|master| master.matrix().flat()),
            scale: tensor.scale.as_ref().map(|scale| scale.matrix().flat()),
            // SAFETY: `ops` checks that `new_scale` is one fp32 element.
            new_scale: tensor.new_scale.as_ref().map_or(1.0, |scale| unsafe { scale.matrix().read(0, 0) }),
            shape: tensor.param.shape(),
            factors: hyper.factors(step, grad_scale),
            words: call.shared.stochastic.map(words),
            offset: tensor.offset,
            target: call.shared.target,
            amax_bits: AtomicU32::new(0),
        }
    }

    /// Returns the absolute maximum. A NaN is returned in canonical form.
    fn amax(&self) -> f32 {
        f32::from_bits(canonical(self.amax_bits.load(Ordering::Relaxed)))
    }

    /// Splits the work into pieces for threads: ranges of elements, or rows of blocks.
    fn pieces(&self) -> Vec<Range<usize>> {
        let step = |n: usize, step| (0..n).step_by(step).map(move |at| at..(at + step).min(n)).collect();
        match self.target {
            _ if self.param.numel() == 0 && !matches!(self.target, Target::Blocks(..)) => Vec::new(),
            Target::Blocks(block, _) => step(self.shape.0, block.rows),
            _ => step(self.param.numel(), PIECE),
        }
    }

    fn run(&self, piece: Range<usize>) {
        let format = self.param.dtype.fp8().unwrap_or(Fp8Format::E4m3);
        with_codes!(format, C => match self.target {
            Target::Blocks(..) => dispatch(Blocks::<C> { task: self, rows: piece, format: std::marker::PhantomData }),
            _ => dispatch(Elements::<C> { task: self, range: piece, format: std::marker::PhantomData }),
        });
    }

    /// Returns the value of a scale.
    ///
    /// # Safety
    /// A scale with this index must exist, and no other code may write to it at the same time.
    unsafe fn scale_at(&self, index: usize) -> f32 {
        let Some(scale) = self.scale else { return 1.0 };
        // SAFETY: the caller guarantees that the scale exists, and `ops` checks that scales are E8M0 or fp32.
        unsafe {
            if scale.dtype == DType::E8m0 { e8m0::decode(scale.read(0, index)) } else { scale.read(0, index) }
        }
    }
}

/// Loads contiguous elements as fp32.
///
/// # Safety
/// The elements must exist, and no other code may write to them at the same time.
#[inline(always)]
unsafe fn load(from: &Matrix, at: Range<usize>, to: &mut [f32]) {
    with_element!(from.dtype, T => {
        let mut unused = Vec::new();
        // SAFETY: the caller guarantees that the elements exist, and `T` is the type of the dtype.
        let from = unsafe { from.row::<T>(0, at, &mut unused) };
        for (to, from) in to.iter_mut().zip(from) {
            *to = from.widen();
        }
    });
}

/// Stores fp32 values to contiguous elements, rounding to nearest.
///
/// # Safety
/// The elements must exist, and no other code may access them at the same time.
#[inline(always)]
unsafe fn store(from: &[f32], to: &Matrix, at: Range<usize>) {
    with_element!(to.dtype, T => {
        // SAFETY: the caller guarantees exclusive access to the elements, and `T` is the type of the dtype.
        let to = unsafe { to.row_mut::<T>(0, at) };
        for (to, from) in to.iter_mut().zip(from) {
            *to = T::narrow(*from);
        }
    });
}

/// Buffers for the update of [`CHUNK`] elements.
struct Scratch {
    grad: [f32; CHUNK],
    moments: [[f32; CHUNK]; 2],
    words: Buffer,
}

impl Scratch {
    const fn new() -> Self {
        Self { grad: [0.0; CHUNK], moments: [[0.0; CHUNK]; 2], words: Buffer::new() }
    }

    /// Computes the new values of at most [`CHUNK`] elements. With `keep`, also stores their moments and
    /// masters. Codes are decoded with one scale for each `width` of them.
    ///
    /// # Safety
    /// The elements must exist, and no other code may access them at the same time.
    #[inline(always)]
    unsafe fn update<C: Codes>(
        &mut self,
        task: &Task,
        at: Range<usize>,
        (scales, width): (&[f32], usize),
        keep: bool,
        values: &mut [f32],
    ) {
        let n = at.len();
        let [exp_avg, exp_avg_sq] = &mut self.moments;
        let (grad, exp_avg, exp_avg_sq) = (&mut self.grad[..n], &mut exp_avg[..n], &mut exp_avg_sq[..n]);
        let values = &mut values[..n];
        // SAFETY: the caller guarantees that the elements exist and are not accessed by other code.
        unsafe {
            load(&task.grad, at.clone(), grad);
            task.moments[0].load(at.clone(), exp_avg);
            task.moments[1].load(at.clone(), exp_avg_sq);
            match task.master {
                Some(master) => load(&master, at.clone(), values),
                None if task.target == Target::Plain => load(&task.param, at.clone(), values),
                None => {
                    let mut unused = Vec::new();
                    let codes = task.param.row::<u8>(0, at.clone(), &mut unused);
                    let parts = values.chunks_mut(width).zip(codes.chunks(width));
                    for ((values, codes), scale) in parts.zip(scales) {
                        for (value, code) in values.iter_mut().zip(codes) {
                            *value = C::decode(*code) * *scale;
                        }
                    }
                }
            }
        }
        let factors = task.factors;
        for i in 0..n {
            (exp_avg[i], exp_avg_sq[i], values[i]) =
                factors.update(grad[i], exp_avg[i], exp_avg_sq[i], values[i]);
        }
        if keep {
            // SAFETY: the caller guarantees that the elements exist and are not accessed by other code.
            unsafe {
                task.moments[0].store(exp_avg, at.clone());
                task.moments[1].store(exp_avg_sq, at.clone());
                if let Some(master) = task.master {
                    store(values, &master, at);
                }
            }
        }
    }

    /// Encodes at most [`CHUNK`] values, with one factor for each `width` of them.
    ///
    /// # Safety
    /// The elements must exist, and no other code may access them at the same time.
    #[inline(always)]
    unsafe fn encode<C: Codes>(
        &mut self,
        task: &Task,
        at: Range<usize>,
        values: &[f32],
        (factors, width): (&[f32], usize),
    ) {
        // SAFETY: the caller guarantees exclusive access to the elements, and codes are bytes.
        let out = unsafe { task.param.row_mut::<u8>(0, at.clone()) };
        let parts = out.chunks_mut(width).zip(values.chunks(width)).zip(factors);
        let Some(words) = task.words else {
            for ((out, values), q) in parts {
                rows::cast::<f32, C, false>(values, *q, out);
            }
            return;
        };
        let words = self.words.words(words, task.offset.wrapping_add(at.start as u64), at.len());
        for (((out, values), q), words) in parts.zip(words.chunks(width)) {
            for ((out, value), word) in out.iter_mut().zip(values).zip(words) {
                *out = C::encode_stochastic(*value * *q, *word);
            }
        }
    }
}

/// A range of elements that share one scale or have no scale.
struct Elements<'a, C> {
    task: &'a Task<'a>,
    range: Range<usize>,
    format: std::marker::PhantomData<C>,
}

impl<C: Codes> Kernel for Elements<'_, C> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let (task, mut scratch, mut values) = (self.task, Scratch::new(), [0.0; CHUNK]);
        let keep = task.target != Target::Measure;
        let q = reciprocal(task.new_scale);
        // SAFETY: a tensor without blocks has one scale. It is written after all pieces are done.
        let scale = unsafe { task.scale_at(0) };
        let mut amax_bits = 0;
        for start in self.range.clone().step_by(CHUNK) {
            let at = start..(start + CHUNK).min(self.range.end);
            let values = &mut values[..at.len()];
            // SAFETY: no other piece contains these elements.
            unsafe {
                scratch.update::<C>(task, at.clone(), (&[scale], CHUNK), keep, values);
                match task.target {
                    Target::Plain => store(values, &task.param, at),
                    Target::Tensor => scratch.encode::<C>(task, at, values, (&[q], CHUNK)),
                    Target::Measure | Target::Blocks(..) => {}
                }
            }
            amax_bits = amax_bits.max(rows::amax(values));
        }
        task.amax_bits.fetch_max(amax_bits, Ordering::Relaxed);
    }
}

/// The rows of one row of blocks.
struct Blocks<'a, C> {
    task: &'a Task<'a>,
    rows: Range<usize>,
    format: std::marker::PhantomData<C>,
}

/// Writes a block's scale and returns the factor to quantize with.
///
/// # Safety
/// A scale with this index must exist, and no other code may access it at the same time.
unsafe fn rescale<C: Codes>(scales: &Matrix, index: usize, kind: BlockScale, amax: f32) -> f32 {
    match kind {
        BlockScale::F32(rule) => {
            let scale = rule.scale(amax, C::FORMAT);
            // SAFETY: the caller guarantees exclusive access to the scale, and scales of this kind are fp32.
            unsafe { scales.write(0, index, scale) };
            reciprocal(scale)
        }
        BlockScale::E8m0(rounding) => {
            let byte = e8m0::from_amax(amax, C::FORMAT, rounding);
            // SAFETY: the caller guarantees exclusive access to the scale, and scales of this kind are bytes.
            unsafe { scales.write(0, index, byte) };
            e8m0::reciprocal(byte)
        }
    }
}

impl<C: Codes> Kernel for Blocks<'_, C> {
    type Output = ();

    /// Processes the columns in stretches. A stretch has as many whole square blocks as fit in a chunk, or is
    /// the whole row.
    #[inline(always)]
    fn run(self) {
        let (task, mut scratch) = (self.task, Scratch::new());
        let (Target::Blocks(block, kind), Some(scales)) = (task.target, task.scale) else { return };
        let columns = task.shape.1;
        let across = block.grid(1, columns).1;
        if across == 0 {
            return;
        }
        let (stretch, width) =
            if block.cols == Block::ALL { (columns.max(1), CHUNK) } else { (CHUNK, block.cols) };
        let mut values = vec![0.0_f32; self.rows.len() * stretch.min(columns)];
        for start in (0..columns.max(1)).step_by(stretch) {
            let cols = start..(start + stretch).min(columns);
            let blocks = if block.cols == Block::ALL { 1 } else { cols.len().div_ceil(width) };
            let first = self.rows.start / block.rows * across + start / block.cols;
            let mut factors = [0.0_f32; CHUNK / narrowest_block()];
            for (i, factor) in factors[..blocks].iter_mut().enumerate() {
                // SAFETY: no other piece contains these blocks and their scales.
                *factor = unsafe { task.scale_at(first + i) };
            }
            // The largest magnitude in each column of a chunk.
            let mut largest = [0_u32; CHUNK];
            for (i, row) in self.rows.clone().enumerate() {
                for col in cols.clone().step_by(CHUNK) {
                    let at = row * columns + col..row * columns + (col + CHUNK).min(cols.end);
                    let from = i * cols.len() + col - start;
                    let values = &mut values[from..from + at.len()];
                    // SAFETY: no other piece contains the elements of these blocks.
                    unsafe { scratch.update::<C>(task, at, (&factors, width), true, values) };
                    for (largest, value) in largest.iter_mut().zip(values) {
                        *largest = (*largest).max(value.magnitude());
                    }
                }
            }
            for (i, (factor, largest)) in factors[..blocks].iter_mut().zip(largest.chunks(width)).enumerate()
            {
                let bits = largest.iter().fold(0, |before, bits| before.max(*bits));
                // SAFETY: no other piece contains the scales of these blocks.
                *factor = unsafe { rescale::<C>(&scales, first + i, kind, f32::from_bits(bits)) };
            }
            for (i, row) in self.rows.clone().enumerate() {
                for col in cols.clone().step_by(CHUNK) {
                    let at = row * columns + col..row * columns + (col + CHUNK).min(cols.end);
                    let from = i * cols.len() + col - start;
                    let values = &values[from..from + at.len()];
                    // SAFETY: no other piece contains the codes of these blocks.
                    unsafe { scratch.encode::<C>(task, at, values, (&factors, width)) };
                }
            }
        }
    }
}

pub(crate) fn adamw(call: AdamWCall) {
    let _env = DefaultFloatEnv::enter();
    let shared = &call.shared;
    // SAFETY: `ops` checks that each is one fp32 element.
    let [lr, grad_scale, found_inf] = [shared.lr, shared.grad_scale, shared.found_inf]
        .map(|view| view.map(|view| unsafe { view.matrix().read::<f32>(0, 0) }));
    if found_inf.is_some_and(|value| value != 0.0) {
        return;
    }
    let hyper = Hyper { lr: lr.map_or(shared.hyper.lr, f64::from), ..shared.hyper };
    let task = |tensor| Task::new(&call, &hyper, grad_scale, tensor);
    let tasks: Vec<Task> = call.tensors.iter().map(task).collect();
    let pieces: Vec<(&Task, Range<usize>)> =
        tasks.iter().flat_map(|task| task.pieces().into_iter().map(move |piece| (task, piece))).collect();
    let elements: usize = tasks.iter().map(|task| task.param.numel()).sum();
    pool::for_each(pieces.len(), elements >= PARALLEL, |i| {
        let (task, piece) = &pieces[i];
        task.run(piece.clone());
    });
    for (task, tensor) in tasks.iter().zip(&call.tensors) {
        let largest = task.amax();
        let has_new_scale = shared.target == Target::Tensor;
        // SAFETY: `ops` checks that each is one fp32 element and that outputs do not share memory with other
        // arguments.
        unsafe {
            if let Some(amax) = &tensor.amax {
                let amax = amax.matrix();
                if !has_new_scale {
                    amax.write(0, 0, largest);
                } else if largest.is_finite() {
                    let before: f32 = amax.read(0, 0);
                    amax.write(0, 0, if before > largest { before } else { largest });
                }
            }
            if let (true, Some(scale), Some(new)) = (has_new_scale, &tensor.scale, &tensor.new_scale) {
                let bits: u32 = new.matrix().read(0, 0);
                scale.matrix().write(0, 0, if largest.is_finite() { bits } else { NAN_BITS });
            }
        }
    }
}
