//! Every CPU operation matches its definition byte for byte, on every instruction set and for every layout,
//! and writes nothing else.

use super::common::{self, Layout, Owned, on_each_level};
use super::flush_to_zero::set_flush_to_zero;
use crate::format::wide::NAN_BITS;
use crate::{Block, DType, Device, FORMATS, ScaleRule, Stream, View, ViewMut, ops};
use proptest::prelude::*;

fn one(value: &mut f32) -> ViewMut<'_> {
    ViewMut::from_slice(std::slice::from_mut(value), 1, 1).unwrap()
}

fn one_ref(value: &f32) -> View<'_> {
    View::from_slice(std::slice::from_ref(value), 1, 1).unwrap()
}

/// A quantization to check: an input and its outputs.
#[derive(Debug, Clone)]
struct Case {
    x: Owned,
    rowwise: Option<Owned>,
    columnwise: Option<Owned>,
}

impl Case {
    fn format(&self) -> crate::Fp8Format {
        self.rowwise.as_ref().or(self.columnwise.as_ref()).unwrap().dtype.fp8().unwrap()
    }

    /// Runs an operation on copies of the outputs, and compares all of their memory with the definition's.
    fn check(&self, scale: f32, run: impl FnOnce(View, Option<ViewMut>, Option<ViewMut>)) {
        let mut got = (self.rowwise.clone(), self.columnwise.clone());
        let mut expected = got.clone();
        run(self.x.view(), got.0.as_mut().map(Owned::view_mut), got.1.as_mut().map(Owned::view_mut));
        if let Some(out) = &mut expected.0 {
            common::cast(&self.x, scale, out);
        }
        if let Some(out) = &mut expected.1 {
            common::cast_transposed(&self.x, scale, out);
        }
        for (got, expected) in [(got.0, expected.0), (got.1, expected.1)] {
            assert_eq!(got.map(|out| out.bytes), expected.map(|out| out.bytes));
        }
    }
}

fn case() -> impl Strategy<Value = Case> {
    let input = (common::wide_dtype(), common::shape(), common::input_layout(), 0_usize..4, any::<u64>());
    let outputs =
        (common::fp8_dtype(), common::output_layout(), common::output_layout(), 0_usize..9, 0_u8..3);
    (input, outputs).prop_map(
        |((dtype, shape, layout, offset, seed), (codes, rows, cols, out_offset, which))| {
            let swapped = (shape.1, shape.0);
            Case {
                x: Owned::new(dtype, shape, layout, offset).random(seed),
                rowwise: (which != 1).then(|| Owned::new(codes, shape, rows, out_offset)),
                columnwise: (which != 0).then(|| Owned::new(codes, swapped, cols, out_offset)),
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn quantize_matches_the_definition(case in case(), scale in common::scale()) {
        on_each_level(|| case.check(scale, |x, rowwise, columnwise| {
            ops::quantize(x, one_ref(&scale), rowwise, columnwise, Stream::default()).unwrap();
        }));
    }

    #[test]
    fn current_scaling_matches_the_definition(
        case in case(),
        power_of_2: bool,
        amax_epsilon in prop_oneof![Just(0.0_f32), Just(1000.0)],
        margin in -3_i32..4,
    ) {
        let rule = ScaleRule { power_of_2, amax_epsilon, margin };
        let expected = rule.scale(common::amax(&case.x), case.format());
        on_each_level(|| {
            let mut scale = 0.0;
            case.check(expected, |x, rowwise, columnwise| {
                ops::quantize_current(x, rule, one(&mut scale), rowwise, columnwise, Stream::default()).unwrap();
            });
            assert_eq!(scale.to_bits(), expected.to_bits());
        });
    }

    #[test]
    fn delayed_scaling_records_finite_maxima_and_reports_others(
        case in case(),
        scale in common::scale(),
        before in prop_oneof![Just(0.0_f32), 0.0_f32..1e6],
    ) {
        let found = common::amax(&case.x);
        on_each_level(|| {
            let (mut amax, mut used) = (before, 7.0);
            case.check(scale, |x, rowwise, columnwise| {
                let (amax, used) = (one(&mut amax), one(&mut used));
                ops::quantize_delayed(x, one_ref(&scale), amax, used, rowwise, columnwise, Stream::default())
                    .unwrap();
            });
            if found.is_finite() {
                assert_eq!((amax, used.to_bits()), (before.max(found), scale.to_bits()));
            } else {
                assert_eq!((amax, used.to_bits()), (before, NAN_BITS));
            }
        });
    }

    #[test]
    fn amax_is_the_largest_magnitude(case in case()) {
        on_each_level(|| {
            let mut out = 7.0;
            ops::amax(case.x.view(), one(&mut out), Stream::default()).unwrap();
            assert_eq!(out.to_bits(), common::amax(&case.x).to_bits());
        });
    }

    #[test]
    fn list_operations_match_single_calls(
        cases in prop::collection::vec(case(), 0..6),
        scales in prop::collection::vec(common::scale(), 6),
    ) {
        let cases: Vec<Case> = cases.into_iter().filter(|case| case.rowwise.is_some()).collect();
        let n = cases.len();
        let scales = &scales[..n];
        let xs: Vec<View> = cases.iter().map(|case| case.x.view()).collect();
        let mut expected: Vec<Owned> = cases.iter().map(|case| case.rowwise.clone().unwrap()).collect();
        for ((case, scale), out) in cases.iter().zip(scales).zip(&mut expected) {
            common::cast(&case.x, *scale, out);
        }
        let found: Vec<f32> = cases.iter().map(|case| common::amax(&case.x)).collect();
        let bits = |xs: &[f32]| xs.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        on_each_level(|| {
            let mut amaxes = vec![7.0_f32; n];
            ops::multi_amax(&xs, ViewMut::from_slice(&mut amaxes, 1, n).unwrap(), Stream::default()).unwrap();
            assert_eq!(bits(&amaxes), bits(&found));

            for delayed in [false, true] {
                let mut got: Vec<Owned> = cases.iter().map(|case| case.rowwise.clone().unwrap()).collect();
                let outs: Vec<ViewMut> = got.iter_mut().map(Owned::view_mut).collect();
                let scales_view = View::from_slice(scales, 1, n).unwrap();
                let (mut amaxes, mut used) = (vec![0.5_f32; n], vec![7.0_f32; n]);
                if delayed {
                    let amaxes = ViewMut::from_slice(&mut amaxes, 1, n).unwrap();
                    let used = ViewMut::from_slice(&mut used, 1, n).unwrap();
                    ops::multi_quantize_delayed(&xs, scales_view, amaxes, used, &outs, Stream::default()).unwrap();
                } else {
                    ops::multi_quantize(&xs, scales_view, &outs, Stream::default()).unwrap();
                }
                drop(outs);
                for (got, expected) in got.iter().zip(&expected) {
                    assert_eq!(got.bytes, expected.bytes);
                }
                for i in 0..if delayed { n } else { 0 } {
                    let finite = found[i].is_finite();
                    assert_eq!(amaxes[i], if finite { found[i].max(0.5) } else { 0.5 });
                    assert_eq!(used[i].to_bits(), if finite { scales[i].to_bits() } else { NAN_BITS });
                }
            }
        });
    }

    #[test]
    fn transpose_moves_every_byte(
        dtype in common::fp8_dtype(),
        shape in common::shape(),
        layouts in (common::input_layout(), common::output_layout()),
        offset in 0_usize..9,
        seed: u64,
    ) {
        let codes = Owned::new(dtype, shape, layouts.0, offset).random(seed);
        let out = Owned::new(dtype, (shape.1, shape.0), layouts.1, offset);
        let mut expected = out.clone();
        for (row, col) in codes.cells() {
            expected.set(col, row, codes.get::<u8>(row, col));
        }
        on_each_level(|| {
            let mut got = out.clone();
            ops::transpose(codes.view(), got.view_mut(), Stream::default()).unwrap();
            assert_eq!(got.bytes, expected.bytes);
        });
    }

    #[test]
    fn dequantize_matches_the_definition(
        (codes, out) in (common::fp8_dtype(), common::wide_dtype()),
        shape in common::shape(),
        layouts in (common::input_layout(), common::input_layout(), common::output_layout()),
        block in prop_oneof![
            5 => prop::sample::select(FORMATS.to_vec()).prop_map(|format| format.block),
            1 => Just(Block::TENSOR),
            1 => Just(Block { rows: 32, cols: 1 }),
            1 => Just(Block { rows: 5, cols: 7 }),
        ],
        e8m0: bool,
        offset in 0_usize..3,
        seed: u64,
    ) {
        let scales = if e8m0 { DType::E8m0 } else { DType::F32 };
        let codes = Owned::new(codes, shape, layouts.0, offset).random(seed);
        let scale = Owned::new(scales, block.grid(shape.0, shape.1), layouts.1, offset).random(seed ^ 1);
        let out = Owned::new(out, shape, layouts.2, offset);
        let mut expected = out.clone();
        common::dequantize(&codes, &scale, block, &mut expected);
        on_each_level(|| {
            let mut got = out.clone();
            ops::dequantize(codes.view(), scale.view(), block, got.view_mut(), Stream::default()).unwrap();
            assert_eq!(got.bytes, expected.bytes);
        });
    }

    #[test]
    fn rescale_is_dequantize_and_quantize_where_scales_differ(
        dtype in common::fp8_dtype(),
        shapes in prop::collection::vec(common::shape(), 1..4),
        layout in common::output_layout(),
        width in prop_oneof![Just(usize::MAX), 1_usize..40],
        equal: bool,
        seed: u64,
    ) {
        let codes: Vec<Owned> =
            shapes.iter().map(|shape| Owned::new(dtype, *shape, layout, 1).random(seed)).collect();
        let counts: Vec<usize> = shapes.iter().map(|shape| shape.1.div_ceil(width)).collect();
        let scales = Owned::dense(DType::F32, (1, counts.iter().sum())).random(seed ^ 1);
        let mut new = Owned::dense(DType::F32, scales.shape).random(seed ^ 2);
        if equal && scales.shape.1 > 0 {
            new.set(0, 0, scales.get::<f32>(0, 0));
        }
        let mut expected = codes.clone();
        let mut first = 0;
        for (out, count) in expected.iter_mut().zip(counts) {
            for (row, col) in out.clone().cells() {
                let at = first + col / width;
                let (from, to) = (scales.get::<f32>(0, at), new.get::<f32>(0, at));
                if from.to_bits() != to.to_bits() {
                    let value = out.value(row, col) * from;
                    out.set(row, col, dtype.fp8().unwrap().encode(value * (1.0 / to)));
                }
            }
            first += count;
        }
        on_each_level(|| {
            let mut got = codes.clone();
            let views: Vec<ViewMut> = got.iter_mut().map(Owned::view_mut).collect();
            ops::multi_rescale(&views, scales.view(), new.view(), width, Stream::default()).unwrap();
            drop(views);
            for (got, expected) in got.iter().zip(&expected) {
                assert_eq!(got.bytes, expected.bytes);
            }
        });
    }

    #[test]
    fn scale_from_amax_applies_the_rule_to_each_element(
        shape in (0_usize..5, 0_usize..5),
        layouts in (common::input_layout(), common::output_layout()),
        dtype in common::fp8_dtype(),
        power_of_2: bool,
        margin in -126_i32..=127,
        seed: u64,
    ) {
        let (rule, format) = (ScaleRule { power_of_2, margin, ..Default::default() }, dtype.fp8().unwrap());
        let amax = Owned::new(DType::F32, shape, layouts.0, 0).random(seed);
        let mut got = Owned::new(DType::F32, shape, layouts.1, 0);
        let mut expected = got.clone();
        for (row, col) in amax.cells() {
            expected.set(row, col, rule.scale(amax.value(row, col), format));
        }
        ops::scale_from_amax(amax.view(), format, rule, got.view_mut(), Stream::default()).unwrap();
        prop_assert_eq!(got.bytes, expected.bytes);
    }
}

#[test]
fn quantize_over_threads_matches_the_definition() {
    for (shape, layout) in [
        ((700, 513), Layout::Dense),
        ((513, 700), Layout::Transposed),
        ((3, 200_001), Layout::Padded),
        ((200_001, 2), Layout::Dense),
        ((1, 300_000), Layout::Dense),
    ] {
        for dtype in [DType::F32, DType::Bf16] {
            let case = Case {
                x: Owned::new(dtype, shape, layout, 1).random(5),
                rowwise: Some(Owned::new(DType::E4m3, shape, Layout::Dense, 1)),
                columnwise: Some(Owned::new(DType::E4m3, (shape.1, shape.0), Layout::Dense, 3)),
            };
            let rowwise = Case { columnwise: None, ..case.clone() };
            let columnwise = Case { rowwise: None, ..case.clone() };
            on_each_level(|| {
                for case in [&case, &rowwise, &columnwise] {
                    case.check(0.3, |x, rowwise, columnwise| {
                        ops::quantize(x, one_ref(&0.3), rowwise, columnwise, Stream::default()).unwrap();
                    });
                }
                let mut found = 0.0;
                ops::amax(case.x.view(), one(&mut found), Stream::default()).unwrap();
                assert_eq!(found.to_bits(), common::amax(&case.x).to_bits());
            });
        }
    }
}

/// From 8 MiB on, stores of columns that start at cache lines bypass the cache.
#[test]
fn large_transposes_support_any_alignment() {
    let (rows, cols) = (4096, 2048);
    let codes: Vec<u8> = (0..rows * cols).map(|i| (i % 251) as u8).collect();
    let mut memory = vec![0xAA_u8; cols * (rows + 8) + 128];
    let line = memory.as_ptr().align_offset(64);
    for (start, pitch) in [(line, rows), (line + 1, rows), (line, rows + 8)] {
        memory.fill(0xAA);
        let out = &mut memory[start..];
        // SAFETY: the view stays inside the memory, which is borrowed mutably.
        let view = unsafe {
            ViewMut::from_raw(out.as_mut_ptr(), DType::E4m3, Device::Cpu, (cols, rows), (pitch as isize, 1))
        };
        let input = View::from_bytes(&codes, DType::E4m3, rows, cols).unwrap();
        ops::transpose(input, view, Stream::default()).unwrap();
        for col in 0..cols {
            for row in 0..rows {
                assert_eq!(out[col * pitch + row], codes[row * cols + col]);
            }
            assert!(out[col * pitch + rows..(col + 1) * pitch].iter().all(|byte| *byte == 0xAA));
        }
    }
}

#[test]
fn results_do_not_depend_on_the_callers_flush_to_zero() {
    let tiny = f32::from_bits(1 << 10);
    let x = [tiny; 64];
    let (scale, mut codes) = (f32::from_bits(0x0080_0000), [0_u8; 64]);
    set_flush_to_zero(true);
    ops::quantize(
        View::from_slice(&x, 1, 64).unwrap(),
        one_ref(&scale),
        Some(ViewMut::from_bytes(&mut codes, DType::E5m2, 1, 64).unwrap()),
        None,
        Stream::default(),
    )
    .unwrap();
    set_flush_to_zero(false);
    assert_eq!(codes, [crate::Fp8Format::E5m2.encode(2.0_f32.powi(-139 + 126)); 64]);
    let mut found = 0.0;
    set_flush_to_zero(true);
    ops::amax(View::from_slice(&x, 1, 64).unwrap(), one(&mut found), Stream::default()).unwrap();
    set_flush_to_zero(false);
    assert_eq!(found.to_bits(), 1 << 10);
}
