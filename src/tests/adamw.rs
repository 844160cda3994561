//! The `AdamW` step and random numbers on the CPU. Results match the definition byte for byte, on every
//! instruction set and for every kind of parameter, and invalid calls return errors.

use super::common::{self, Layout, Owned, on_each_level};
use crate::format::adamw::Hyper;
use crate::format::e8m0::{self, Rounding};
use crate::format::moments::{BLOCK, FIRST, Moment, Range, SECOND};
use crate::format::random::{Words, between};
use crate::format::wide::{self, NAN_BITS, Wide};
use crate::ops::{AdamW, AdamWTensor, BlockScale, Target};
use crate::{Block, BlockFormat, DType, Error, FORMATS, ScaleRule, Stream, View, ops};
use half::{bf16, f16};
use proptest::prelude::*;

/// One tensor of a call, with its memory.
#[derive(Debug, Clone)]
struct Tensor {
    grad: Owned,
    moments: [Owned; 2],
    ranges: Option<[Owned; 2]>,
    param: Owned,
    master: Option<Owned>,
    step: f32,
    scale: Option<Owned>,
    new_scale: Option<f32>,
    amax: Option<Owned>,
    offset: u64,
    stream: u32,
}

fn put(to: &mut Owned, row: usize, col: usize, value: f32) {
    match to.dtype {
        DType::F32 => to.set(row, col, <f32 as Wide>::from_f32(value)),
        DType::Bf16 => to.set(row, col, <bf16 as Wide>::from_f32(value)),
        DType::F16 => to.set(row, col, <f16 as Wide>::from_f32(value)),
        other => unreachable!("{other}"),
    }
}

const MOMENTS: [Moment; 2] = [FIRST, SECOND];

/// Returns a moment's value according to the format definitions.
fn moment_value(tensor: &Tensor, i: usize, row: usize, col: usize) -> f32 {
    let Some(ranges) = &tensor.ranges else { return tensor.moments[i].value(row, col) };
    let [largest, smallest] = [0, 1].map(|end| ranges[i].get(row, 2 * (col / BLOCK) + end));
    let grid = MOMENTS[i].grid(Range { largest, smallest });
    MOMENTS[i].decode(tensor.moments[i].get(row, col), grid)
}

/// Stores all values of a moment according to the format definitions.
fn put_moment(tensor: &mut Tensor, i: usize, values: &[f32]) {
    let (rows, cols) = tensor.param.shape;
    for row in 0..rows {
        for start in (0..cols).step_by(BLOCK) {
            let block = start..(start + BLOCK).min(cols);
            let in_block = &values[row * cols + block.start..row * cols + block.end];
            let Some(ranges) = &mut tensor.ranges else {
                block.zip(in_block).for_each(|(col, value)| put(&mut tensor.moments[i], row, col, *value));
                continue;
            };
            let range = MOMENTS[i].range(in_block);
            ranges[i].set(row, 2 * (start / BLOCK), range.largest);
            ranges[i].set(row, 2 * (start / BLOCK) + 1, range.smallest);
            let grid = MOMENTS[i].grid(range);
            for (col, value) in block.zip(in_block) {
                tensor.moments[i].set(row, col, MOMENTS[i].encode(*value, grid));
            }
        }
    }
}

/// Performs the call as the definition specifies.
fn defined(shared: &Shared, target: Target, tensors: &mut [Tensor]) {
    if shared.found_inf.is_some_and(|found| found != 0.0) {
        return;
    }
    for tensor in tensors {
        let lr = shared.lr.map_or(shared.hyper.lr, f64::from);
        let factors = Hyper { lr, ..shared.hyper }.factors(tensor.step, shared.grad_scale);
        let format = tensor.param.dtype.fp8();
        let words = shared.seed.map(|seed| Words { seed, stream: tensor.stream, step: tensor.step as u32 });
        let block = if let Target::Blocks(block, _) = target { block } else { Block::TENSOR };
        let (rows, cols) = tensor.param.shape;
        let before = tensor.clone();
        let scale_of = |row: usize, col: usize| {
            before.scale.as_ref().map_or(1.0, |scale| scale.value(row / block.rows, col / block.cols))
        };
        let mut values = Vec::new();
        let mut new_moments = [Vec::new(), Vec::new()];
        for (row, col) in tensor.param.cells() {
            let start = match &before.master {
                Some(master) => master.value(row, col),
                None => before.param.value(row, col) * scale_of(row, col),
            };
            let [m, v] = [0, 1].map(|i| moment_value(&before, i, row, col));
            let (m, v, w) = factors.update(before.grad.value(row, col), m, v, start);
            values.push(w);
            if target == Target::Measure {
                continue;
            }
            new_moments[0].push(m);
            new_moments[1].push(v);
            if let Some(master) = &mut tensor.master {
                put(master, row, col, w);
            }
            if target == Target::Plain {
                put(&mut tensor.param, row, col, w);
            }
        }
        if target != Target::Measure {
            for i in [0, 1] {
                put_moment(tensor, i, &new_moments[i]);
            }
        }
        let at = |row: usize, col: usize| values[row * cols + col];
        let mut encode = |row: usize, col: usize, q: f32| {
            let (value, index) = (at(row, col) * q, tensor.offset + (row * cols + col) as u64);
            let code = match (format, words) {
                (Some(format), Some(words)) => format.encode_stochastic(value, words.of(index)),
                (Some(format), None) => format.encode(value),
                (None, _) => unreachable!(),
            };
            tensor.param.set(row, col, code);
        };
        match target {
            Target::Plain | Target::Measure => {
                if let Some(amax) = &mut tensor.amax {
                    amax.set(0, 0, wide::amax(values.iter().copied()));
                }
            }
            Target::Tensor => {
                let new = before.new_scale.unwrap();
                (0..rows).for_each(|row| (0..cols).for_each(|col| encode(row, col, 1.0 / new)));
                let found = wide::amax(values.iter().copied());
                if let Some(amax) = &mut tensor.amax
                    && found.is_finite()
                {
                    let was = amax.value(0, 0);
                    amax.set(0, 0, if was > found { was } else { found });
                }
                let used = if found.is_finite() { new } else { f32::from_bits(NAN_BITS) };
                tensor.scale.as_mut().unwrap().set(0, 0, used);
            }
            Target::Blocks(block, kind) => {
                let (down, across) = block.grid(rows, cols);
                for (r, c) in (0..down).flat_map(|r| (0..across).map(move |c| (r, c))) {
                    let of = |i: usize, size: usize, n: usize| {
                        i.saturating_mul(size)..(i + 1).saturating_mul(size).min(n)
                    };
                    let (in_rows, in_cols) = (of(r, block.rows, rows), of(c, block.cols, cols));
                    let cells: Vec<_> =
                        in_rows.flat_map(|row| in_cols.clone().map(move |col| (row, col))).collect();
                    let amax = wide::amax(cells.iter().map(|(row, col)| at(*row, *col)));
                    let scales = tensor.scale.as_mut().unwrap();
                    let q = match kind {
                        BlockScale::F32(rule) => {
                            let scale = rule.scale(amax, format.unwrap());
                            scales.set(r, c, scale);
                            1.0 / scale
                        }
                        BlockScale::E8m0(rounding) => {
                            let byte = e8m0::from_amax(amax, format.unwrap(), rounding);
                            scales.set(r, c, byte);
                            e8m0::reciprocal(byte)
                        }
                    };
                    for (row, col) in cells {
                        encode(row, col, q);
                    }
                }
            }
        }
    }
}

/// The arguments that all tensors share, with their memory.
#[derive(Debug, Clone, Copy)]
struct Shared {
    hyper: Hyper,
    lr: Option<f32>,
    grad_scale: Option<f32>,
    found_inf: Option<f32>,
    seed: Option<u64>,
}

fn one(value: &f32) -> View<'_> {
    View::from_slice(std::slice::from_ref(value), 1, 1).unwrap()
}

fn run(shared: &Shared, target: Target, tensors: &mut [Tensor]) -> Result<(), Error> {
    let call = AdamW {
        hyper: shared.hyper,
        lr: shared.lr.as_ref().map(one),
        grad_scale: shared.grad_scale.as_ref().map(one),
        found_inf: shared.found_inf.as_ref().map(one),
        stochastic: shared.seed,
        target,
    };
    let tensors = tensors.iter_mut().map(|tensor| {
        let [exp_avg, exp_avg_sq] = &mut tensor.moments;
        AdamWTensor {
            grad: tensor.grad.view(),
            exp_avg: exp_avg.view_mut(),
            exp_avg_sq: exp_avg_sq.view_mut(),
            ranges: tensor.ranges.as_mut().map(|ranges| ranges.each_mut().map(Owned::view_mut)),
            param: tensor.param.view_mut(),
            master: tensor.master.as_mut().map(Owned::view_mut),
            step: one(&tensor.step),
            scale: tensor.scale.as_mut().map(Owned::view_mut),
            new_scale: tensor.new_scale.as_ref().map(one),
            amax: tensor.amax.as_mut().map(Owned::view_mut),
            offset: tensor.offset,
            stream: tensor.stream,
        }
    });
    ops::adamw(call, tensors.collect(), Stream::default())
}

fn memory(tensors: &[Tensor]) -> Vec<Vec<u64>> {
    let of = |tensor: &Tensor| {
        let parts = [&tensor.grad, &tensor.param, &tensor.moments[0], &tensor.moments[1]];
        let others = [&tensor.master, &tensor.scale, &tensor.amax].into_iter().flatten();
        let others = others.chain(tensor.ranges.iter().flatten());
        parts.into_iter().chain(others).map(|owned| owned.bytes.clone()).collect::<Vec<_>>()
    };
    tensors.iter().flat_map(of).collect()
}

fn target() -> impl Strategy<Value = Target> {
    let formats: Vec<BlockFormat> = FORMATS.into_iter().filter(|format| format.in_adamw).collect();
    let rule = (any::<bool>(), prop_oneof![Just(0.0_f32), Just(3.0)])
        .prop_map(|(power_of_2, amax_epsilon)| ScaleRule { power_of_2, amax_epsilon, margin: 0 });
    let rounding = prop_oneof![Just(Rounding::Ceil), Just(Rounding::Floor)];
    let blocks = (proptest::sample::select(formats), rule, rounding).prop_map(|(format, rule, rounding)| {
        let scale = match format.scale_dtype {
            DType::E8m0 => BlockScale::E8m0(rounding),
            _ => BlockScale::F32(rule),
        };
        Target::Blocks(format.block, scale)
    });
    prop_oneof![1 => Just(Target::Plain), 1 => Just(Target::Measure), 1 => Just(Target::Tensor), 2 => blocks]
}

fn shared() -> impl Strategy<Value = Shared> {
    let hyper = (0.0_f64..2.0, prop_oneof![Just(0.9), Just(0.3), Just(0.0)], 0.0_f64..2.0, any::<bool>())
        .prop_map(|(lr, beta1, weight_decay, maximize)| Hyper {
            lr,
            beta1,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay,
            maximize,
        });
    let scales = (prop::option::of(0.0_f32..1.0), prop::option::of(0.01_f32..3000.0));
    let found = prop_oneof![3 => Just(None), 1 => Just(Some(0.0_f32)), 1 => Just(Some(1.0))];
    (hyper, scales, found, any::<Option<u64>>()).prop_map(|(hyper, (lr, grad_scale), found_inf, seed)| {
        Shared { hyper, lr, grad_scale, found_inf, seed }
    })
}

/// Properties of a tensor: shape, dtype of the gradient, whether moments are bf16, dtype of a plain parameter, dtype of
/// codes.
type Kinds = ((usize, usize), DType, bool, DType, DType);
/// Numbers of a tensor: scale, seed, step, tensor number, and number of elements before it in memory.
type Numbers = (f32, u64, u32, u32, usize);

/// Returns the ranges of the blocks of a moment: two magnitudes each, in descending order.
fn ranges((rows, cols): (usize, usize), seed: u64) -> Owned {
    let mut ranges = Owned::dense(DType::F32, (rows, 2 * (cols / BLOCK))).random(seed);
    for (row, col) in ranges.cells().filter(|(_, col)| col % 2 == 0) {
        let [a, b] = [0, 1].map(|end| ranges.get::<u32>(row, col + end) & 0x7FFF_FFFF);
        ranges.set(row, col, a.max(b));
        ranges.set(row, col + 1, a.min(b));
    }
    ranges
}

fn tensors(target: Target) -> impl Strategy<Value = Vec<Tensor>> {
    let tensor = (
        (common::shape(), common::wide_dtype(), any::<bool>(), common::wide_dtype(), common::fp8_dtype()),
        (common::scale(), any::<u64>(), 0_u32..9, any::<u32>(), 0_usize..3),
    );
    let list = prop::collection::vec(tensor, 0..4);
    let fp8_state = prop_oneof![2 => Just(false), 1 => Just(true)];
    (list, any::<bool>(), any::<bool>(), fp8_state).prop_map(move |(list, master, amax, fp8_state)| {
        let make = |(kinds, numbers): (Kinds, Numbers)| {
            let ((shape, grad, bf16_state, plain, codes), (number, seed, step, stream, start)) =
                (kinds, numbers);
            // Codes of moments have whole blocks.
            let shape = if fp8_state { (shape.0, shape.1 % 5 * BLOCK) } else { shape };
            let owned = |dtype, salt| Owned::new(dtype, shape, Layout::Dense, start).random(seed ^ salt);
            let state = match (fp8_state, bf16_state) {
                (true, _) => DType::U8,
                (false, true) => DType::Bf16,
                (false, false) => DType::F32,
            };
            let is_plain = target == Target::Plain;
            let scale = match target {
                Target::Plain => None,
                Target::Blocks(block, kind) => {
                    let mut scales =
                        Owned::dense(kind.dtype(), block.grid(shape.0, shape.1)).random(seed ^ 9);
                    if scales.dtype == DType::E8m0 {
                        scales.cells().for_each(|(r, c)| {
                            let byte: u8 = scales.get(r, c);
                            scales.set(r, c, if byte == 255 { 255 } else { 110 + byte % 30 });
                        });
                    }
                    Some(scales)
                }
                _ => {
                    let mut one = Owned::dense(DType::F32, (1, 1));
                    one.set(0, 0, number);
                    Some(one)
                }
            };
            Tensor {
                grad: owned(grad, 1),
                moments: [owned(state, 2), owned(state, 3)],
                ranges: fp8_state.then(|| [ranges(shape, seed ^ 7), ranges(shape, seed ^ 8)]),
                param: owned(if is_plain { plain } else { codes }, 4),
                master: master.then(|| owned(DType::F32, 5)),
                step: step as f32 + 1.0,
                scale,
                new_scale: (target == Target::Tensor).then_some(number * 1.25),
                amax: (target == Target::Measure || amax && !matches!(target, Target::Blocks(..)))
                    .then(|| Owned::dense(DType::F32, (1, 1)).random(seed ^ 6)),
                offset: seed >> 3,
                stream,
            }
        };
        list.into_iter().map(make).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn step_matches_the_definition_and_writes_nothing_else(
        shared in shared(),
        (target, tensors) in target().prop_flat_map(|target| (Just(target), tensors(target))),
    ) {
        let mut expected = tensors.clone();
        defined(&shared, target, &mut expected);
        on_each_level(|| {
            let mut got = tensors.clone();
            run(&shared, target, &mut got).unwrap();
            assert_eq!(memory(&got), memory(&expected));
        });
    }

    #[test]
    fn random_uniform_matches_the_definition(
        (dtype, shape, layout) in (common::wide_dtype(), common::shape(), common::output_layout()),
        (seed, offset, stream) in (any::<u64>(), 0..u64::MAX / 2, any::<u32>()),
        step in proptest::option::of(0..1_u32 << 24),
        (low, range) in (-100.0_f32..100.0, 0.0_f32..100.0),
    ) {
        let x = Owned::new(dtype, shape, layout, 1);
        let mut expected = x.clone();
        let words = Words { seed, stream, step: step.unwrap_or(0) };
        let step = step.map(|step| step as f32);
        for (i, (row, col)) in x.cells().enumerate() {
            put(&mut expected, row, col, between(words.of(offset + i as u64), low, low + range));
        }
        on_each_level(|| {
            let mut got = x.clone();
            let numbers = ops::Numbers { seed, offset, stream, step: step.as_ref().map(one) };
            ops::random_uniform(got.view_mut(), numbers, (low, low + range), Stream::default()).unwrap();
            assert_eq!(&got.bytes, &expected.bytes);
        });
    }
}

/// The tensor is large enough for threads, and for several uses of the scratch buffers.
#[test]
fn step_over_threads_matches_the_definition() {
    let rule = BlockScale::F32(ScaleRule::default());
    for target in [Target::Plain, Target::Tensor, Target::Blocks(Block::ROW, rule)] {
        let shape = (130, 3001);
        let owned = |dtype, seed| Owned::dense(dtype, shape).random(seed);
        let codes = target != Target::Plain;
        let scales = if let Target::Blocks(..) = target { (130, 1) } else { (1, 1) };
        let tensor = Tensor {
            grad: owned(DType::Bf16, 1),
            moments: [owned(DType::F32, 2), owned(DType::F32, 3)],
            ranges: None,
            param: owned(if codes { DType::E4m3 } else { DType::Bf16 }, 4),
            master: None,
            step: 3.0,
            scale: codes.then(|| Owned::dense(DType::F32, scales).random(5)),
            new_scale: (target == Target::Tensor).then_some(0.5),
            amax: None,
            offset: 3,
            stream: 7,
        };
        let hyper = Hyper { lr: 0.1, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, maximize: false };
        let shared = Shared { hyper, lr: None, grad_scale: None, found_inf: None, seed: Some(5) };
        let (mut got, mut expected) = (vec![tensor.clone()], vec![tensor]);
        run(&shared, target, &mut got).unwrap();
        defined(&shared, target, &mut expected);
        assert!(memory(&got) == memory(&expected), "{target:?}");
    }
}

const HYPER: Hyper =
    Hyper { lr: 0.1, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, maximize: false };
const SHARED: Shared = Shared { hyper: HYPER, lr: None, grad_scale: None, found_inf: None, seed: None };

fn plain() -> Tensor {
    let owned = |seed| Owned::dense(DType::F32, (4, 8)).random(seed);
    Tensor {
        grad: owned(1),
        moments: [owned(2), owned(3)],
        ranges: None,
        param: owned(4),
        master: None,
        step: 1.0,
        scale: None,
        new_scale: None,
        amax: None,
        offset: 0,
        stream: 0,
    }
}

#[track_caller]
fn refused(shared: Shared, target: Target, change: impl Fn(&mut Tensor), message: &str) {
    let mut tensors = vec![plain(), plain()];
    change(&mut tensors[1]);
    let before = memory(&tensors);
    let error = run(&shared, target, &mut tensors).expect_err("the call must return an error");
    assert_eq!(error.to_string(), message);
    assert_eq!(memory(&tensors), before);
}

#[test]
fn invalid_calls_return_errors_and_write_nothing() {
    let wide = |dtype| Owned::dense(dtype, (4, 8));
    refused(
        SHARED,
        Target::Plain,
        |t| t.grad = wide(DType::E4m3),
        "grads[1] has dtype float8_e4m3fn; it must be float32, bfloat16 or float16",
    );
    refused(
        SHARED,
        Target::Plain,
        |t| t.moments[1] = wide(DType::Bf16),
        "exp_avg_sqs[1] has dtype bfloat16; it must be float32",
    );
    refused(
        SHARED,
        Target::Plain,
        |t| t.moments[0] = wide(DType::F16),
        "exp_avgs[1] has dtype float16; it must be float32",
    );
    refused(
        SHARED,
        Target::Plain,
        |t| t.master = Some(wide(DType::F32)),
        "masters[1] is given; it must be as for the first tensor (present for all tensors or for none)",
    );
    refused(
        SHARED,
        Target::Plain,
        |t| t.param = Owned::dense(DType::F32, (8, 4)),
        "grads[1] has shape (4, 8) as a 2-d view; it must be (8, 4), the shape of params[1]",
    );
    refused(
        SHARED,
        Target::Plain,
        |t| t.param = Owned::new(DType::F32, (4, 8), Layout::Padded, 0),
        "params[1] is strided; it must be contiguous",
    );
    refused(
        SHARED,
        Target::Plain,
        |t| t.grad = Owned::new(DType::F32, (4, 8), Layout::Transposed, 0),
        "grads[1] is strided; it must be contiguous",
    );
    refused(
        SHARED,
        Target::Plain,
        |t| t.scale = Some(wide(DType::F32)),
        "scales[1] is given; it must be present if and only if the parameter is FP8 codes",
    );
    refused(
        SHARED,
        Target::Plain,
        |t| t.param = wide(DType::E4m3),
        "params[1] has dtype float8_e4m3fn; it must be float32, bfloat16 or float16",
    );
    refused(
        SHARED,
        Target::Tensor,
        |_| (),
        "params[0] has dtype float32; it must be float8_e4m3fn or float8_e5m2",
    );
    let beta = Shared { hyper: Hyper { beta2: 1.0, ..HYPER }, ..SHARED };
    refused(beta, Target::Plain, |_| (), "beta2 is 1; it must be at least 0 and below 1");
    let lr = Shared { hyper: Hyper { lr: -1.0, ..HYPER }, ..SHARED };
    refused(lr, Target::Plain, |_| (), "lr is -1; it must be finite and at least 0");
    let bad = Target::Blocks(Block { rows: 1, cols: 128 }, BlockScale::F32(ScaleRule::default()));
    refused(SHARED, bad, |_| (), "block is (1, 128); it must be (1, all) or (128, 128) with float32 scales");
    let mut x = Owned::dense(DType::F32, (2, 2));
    for (low, high, message) in [
        (f32::NAN, 1.0, "low is NaN; it must be finite"),
        (1.0, 0.0, "high is 0; it must be at least low (1), and high - low must be finite"),
    ] {
        let numbers = ops::Numbers { seed: 0, offset: 0, stream: 0, step: None };
        let error = ops::random_uniform(x.view_mut(), numbers, (low, high), Stream::default()).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
}

#[test]
fn strided_optimizer_state_is_an_error() {
    let strided = || Owned::new(DType::F32, (4, 8), Layout::Transposed, 0).random(3);
    let words = |name: &str| format!("{name} is strided; it must be contiguous");
    refused(SHARED, Target::Plain, |t| t.moments[0] = strided(), &words("exp_avgs[1]"));
    refused(SHARED, Target::Plain, |t| t.moments[1] = strided(), &words("exp_avg_sqs[1]"));
    let masters = [Owned::dense(DType::F32, (4, 8)).random(5), strided()];
    let mut tensors = vec![plain(), plain()];
    for (tensor, master) in tensors.iter_mut().zip(masters) {
        tensor.master = Some(master);
    }
    let error = run(&SHARED, Target::Plain, &mut tensors).unwrap_err();
    assert_eq!(error.to_string(), words("masters[1]"));
    let scales = Owned::new(DType::F32, (4, 1), Layout::Sparse, 0).random(6);
    let mut tensors =
        vec![Tensor { param: Owned::dense(DType::E4m3, (4, 8)).random(4), scale: Some(scales), ..plain() }];
    let rows = Target::Blocks(Block::ROW, BlockScale::F32(ScaleRule::default()));
    let error = run(&SHARED, rows, &mut tensors).unwrap_err();
    assert_eq!(error.to_string(), words("scales[0]"));
}

#[test]
fn measure_requires_an_amax() {
    let mut tensors = vec![Tensor {
        param: Owned::dense(DType::E4m3, (4, 8)).random(4),
        scale: Some(Owned::dense(DType::F32, (1, 1)).random(6)),
        ..plain()
    }];
    let error = run(&SHARED, Target::Measure, &mut tensors).unwrap_err();
    assert_eq!(error.to_string(), "amaxes[0] is absent; it must be present, to measure");
}

#[test]
fn nonzero_found_inf_skips_the_step() {
    for found in [f32::NAN, -1.0, f32::INFINITY, f32::from_bits(1)] {
        let mut tensors = vec![plain()];
        let before = memory(&tensors);
        run(&Shared { found_inf: Some(found), ..SHARED }, Target::Plain, &mut tensors).unwrap();
        assert_eq!(memory(&tensors), before, "{found}");
    }
}

#[test]
fn step_replaces_a_nan_amax() {
    let mut amax = Owned::dense(DType::F32, (1, 1));
    amax.set(0, 0, f32::NAN);
    let mut scale = Owned::dense(DType::F32, (1, 1));
    scale.set(0, 0, 0.5_f32);
    let mut param = Owned::dense(DType::E4m3, (4, 8));
    param.cells().for_each(|(r, c)| param.set(r, c, 0x38_u8));
    let quarters = |mut owned: Owned| {
        owned.cells().for_each(|(r, c)| owned.set(r, c, 0.25_f32));
        owned
    };
    let base = plain();
    let mut tensors = vec![Tensor {
        grad: quarters(base.grad.clone()),
        moments: [quarters(base.moments[0].clone()), quarters(base.moments[1].clone())],
        param,
        scale: Some(scale),
        new_scale: Some(0.5),
        amax: Some(amax),
        ..base
    }];
    let mut expected = tensors.clone();
    run(&SHARED, Target::Tensor, &mut tensors).unwrap();
    defined(&SHARED, Target::Tensor, &mut expected);
    assert!(tensors[0].amax.as_ref().unwrap().value(0, 0).is_finite());
    assert_eq!(memory(&tensors), memory(&expected));
}

#[test]
fn first_moment_interpolates_from_the_gradient_at_weight_one_half() {
    // torch.lerp does the same. At a weight of 0.5, the two formulas differ in the last bit.
    let factors = Hyper { beta1: 0.5, ..HYPER }.factors(3.0, None);
    let (grad, exp_avg) = (1.000_000_1_f32, 3.1e-8_f32);
    let from_grad = grad + (grad - exp_avg) * -0.5;
    assert_ne!(from_grad, exp_avg + (grad - exp_avg) * 0.5);
    assert_eq!(factors.update(grad, exp_avg, 0.0, 0.0).0, from_grad);
}
