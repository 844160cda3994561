//! Invalid calls return errors before anything is written. The message names the argument, what was given,
//! and what is expected.

use super::common::{self, Layout, Owned};
use crate::format::e8m0::Rounding;
use crate::layout::{block_extents, list};
use crate::ops::{BlockInputs, BlockPlane, BlockScale, BlockSpec, Numbers};
use crate::{Block, DType, Device, Error, Fp8Format, ScaleRule, Stream, View, ViewMut, ops};

fn matrix(dtype: DType, rows: usize, cols: usize) -> Owned {
    Owned::dense(dtype, (rows, cols)).random(1)
}

fn f32s(rows: usize, cols: usize) -> Owned {
    matrix(DType::F32, rows, cols)
}

/// Returns a vector of zeros.
fn i32s(count: usize) -> Owned {
    let mut zeros = Owned::dense(DType::I32, (1, count));
    (0..count).for_each(|i| zeros.set(0, i, 0_i32));
    zeros
}

fn codes(rows: usize, cols: usize) -> Owned {
    matrix(DType::E4m3, rows, cols)
}

/// Returns a view of an existing matrix's memory with other properties.
fn view_as(
    of: &Owned,
    dtype: DType,
    device: Device,
    shape: (usize, usize),
    strides: (isize, isize),
) -> View<'_> {
    // SAFETY: the call returns an error before it reads the view.
    unsafe { View::from_raw(of.view().ptr(), dtype, device, shape, strides) }
}

fn out_as(
    of: &mut Owned,
    dtype: DType,
    device: Device,
    shape: (usize, usize),
    strides: (isize, isize),
) -> ViewMut<'_> {
    // SAFETY: the call returns an error before it writes to the view.
    unsafe { ViewMut::from_raw(of.view_mut().ptr(), dtype, device, shape, strides) }
}

fn null(shape: (usize, usize)) -> View<'static> {
    // SAFETY: the call returns an error before it reads the view, or the view has no elements.
    unsafe { View::from_raw(std::ptr::null(), DType::F32, Device::Cpu, shape, (shape.1 as isize, 1)) }
}

#[track_caller]
fn refused(result: Result<(), Error>, message: &str) {
    assert_eq!(result.expect_err("the call must return an error").to_string(), message);
}

#[test]
fn dtypes() {
    let mut scalar = f32s(1, 1);
    refused(
        ops::amax(codes(2, 2).view(), scalar.view_mut(), Stream::default()),
        "x has dtype float8_e4m3fn; it must be float32, bfloat16 or float16",
    );
    refused(
        ops::amax(f32s(2, 2).view(), matrix(DType::Bf16, 1, 1).view_mut(), Stream::default()),
        "out has dtype bfloat16; it must be float32",
    );
    refused(
        ops::quantize(
            f32s(2, 2).view(),
            codes(1, 1).view(),
            Some(codes(2, 2).view_mut()),
            None,
            Stream::default(),
        ),
        "scale has dtype float8_e4m3fn; it must be float32",
    );
    refused(
        ops::quantize(f32s(2, 2).view(), scalar.view(), Some(f32s(2, 2).view_mut()), None, Stream::default()),
        "rowwise has dtype float32; it must be float8_e4m3fn or float8_e5m2",
    );
    refused(
        ops::quantize(
            f32s(2, 2).view(),
            scalar.view(),
            Some(codes(2, 2).view_mut()),
            Some(matrix(DType::E5m2, 2, 2).view_mut()),
            Stream::default(),
        ),
        "columnwise has dtype float8_e5m2; it must be float8_e4m3fn, as rowwise is",
    );
    refused(
        ops::transpose(codes(2, 2).view(), matrix(DType::E5m2, 2, 2).view_mut(), Stream::default()),
        "out has dtype float8_e5m2; it must be float8_e4m3fn",
    );
    refused(
        ops::dequantize(
            codes(2, 2).view(),
            matrix(DType::Bf16, 1, 1).view(),
            Block::TENSOR,
            f32s(2, 2).view_mut(),
            Stream::default(),
        ),
        "scale has dtype bfloat16; it must be float32 or float8_e8m0fnu",
    );
    refused(
        ops::dequantize(
            codes(2, 2).view(),
            scalar.view(),
            Block::TENSOR,
            codes(2, 2).view_mut(),
            Stream::default(),
        ),
        "out has dtype float8_e4m3fn; it must be float32, bfloat16 or float16",
    );
    let (a, b) = (f32s(2, 2), codes(2, 2));
    refused(
        ops::multi_amax(&[a.view(), b.view()], f32s(1, 2).view_mut(), Stream::default()),
        "xs[1] has dtype float8_e4m3fn; it must be float32, bfloat16 or float16",
    );
}

#[test]
fn shapes() {
    let scalar = f32s(1, 1);
    refused(
        ops::amax(f32s(2, 3).view(), f32s(1, 2).view_mut(), Stream::default()),
        "out has shape (1, 2) as a 2-d view; it must be (1, 1), one element",
    );
    refused(
        ops::quantize(
            f32s(2, 3).view(),
            scalar.view(),
            Some(codes(3, 2).view_mut()),
            None,
            Stream::default(),
        ),
        "rowwise has shape (3, 2) as a 2-d view; it must be (2, 3), the shape of x",
    );
    refused(
        ops::quantize(
            f32s(2, 3).view(),
            scalar.view(),
            None,
            Some(codes(2, 3).view_mut()),
            Stream::default(),
        ),
        "columnwise has shape (2, 3) as a 2-d view; it must be (3, 2), the transposed shape of x",
    );
    refused(
        ops::quantize(
            f32s(2, 3).view(),
            f32s(2, 1).view(),
            Some(codes(2, 3).view_mut()),
            None,
            Stream::default(),
        ),
        "scale has shape (2, 1) as a 2-d view; it must be (1, 1), one element",
    );
    refused(
        ops::transpose(codes(2, 3).view(), codes(2, 3).view_mut(), Stream::default()),
        "out has shape (2, 3) as a 2-d view; it must be (3, 2), the transposed shape of codes",
    );
    refused(
        ops::scale_from_amax(
            f32s(2, 3).view(),
            Fp8Format::E4m3,
            ScaleRule::default(),
            f32s(3, 2).view_mut(),
            Stream::default(),
        ),
        "scale_out has shape (3, 2) as a 2-d view; it must be (2, 3), the shape of amax",
    );
    refused(
        ops::dequantize(
            codes(130, 3).view(),
            f32s(1, 1).view(),
            Block { rows: 128, cols: 128 },
            f32s(130, 3).view_mut(),
            Stream::default(),
        ),
        "scale has shape (1, 1) as a 2-d view; it must be (2, 1), one element for each block",
    );
    refused(
        ops::dequantize(
            codes(2, 2).view(),
            scalar.view(),
            Block { rows: 0, cols: 1 },
            f32s(2, 2).view_mut(),
            Stream::default(),
        ),
        "block is (0, 1); it must be at least 1 in each dimension",
    );
    refused(
        ops::quantize(f32s(2, 3).view(), scalar.view(), None, None, Stream::default()),
        "rowwise is absent, and so is columnwise; it must be given, unless columnwise is",
    );
}

#[test]
fn lists() {
    let (a, b) = (f32s(2, 2), f32s(3, 2));
    let xs = [a.view(), b.view()];
    let scales = f32s(1, 2);
    let mut out = codes(2, 2);
    refused(
        ops::multi_amax(&xs, f32s(1, 3).view_mut(), Stream::default()),
        "out has 3 elements; it must have 2, as many as xs",
    );
    refused(
        ops::multi_amax(&xs, f32s(2, 1).view_mut(), Stream::default()),
        "out has shape (2, 1) as a 2-d view; it must be (1, 2), a vector with one element for each tensor",
    );
    refused(
        ops::multi_quantize(&xs, scales.view(), &[out.view_mut()], Stream::default()),
        "outs has 1 elements; it must have 2, as many as xs",
    );
    refused(
        ops::multi_quantize(&xs, f32s(1, 1).view(), &[], Stream::default()),
        "scales has 1 elements; it must have 2, as many as xs",
    );
    let mut wrong = codes(2, 3);
    refused(
        ops::multi_quantize(&xs, scales.view(), &[out.view_mut(), wrong.view_mut()], Stream::default()),
        "outs[1] has shape (2, 3) as a 2-d view; it must be (3, 2), the shape of xs[1]",
    );
    let (mut amaxes, mut used) = (f32s(1, 2), f32s(1, 1));
    refused(
        ops::multi_quantize_delayed(
            &xs,
            scales.view(),
            amaxes.view_mut(),
            used.view_mut(),
            &[],
            Stream::default(),
        ),
        "scales_used has 1 elements; it must have 2, as many as xs",
    );
}

#[test]
fn devices() {
    let (x, mut out) = (f32s(2, 2), f32s(1, 1));
    let elsewhere = out_as(&mut out, DType::F32, Device::Cuda(1), (1, 1), (1, 1));
    refused(
        ops::amax(x.view(), elsewhere, Stream::default()),
        "out is on cuda:1; it must be on cpu, where x is",
    );
    let x0 = view_as(&x, DType::F32, Device::Cuda(0), (2, 2), (2, 1));
    let elsewhere = out_as(&mut out, DType::F32, Device::Cuda(1), (1, 1), (1, 1));
    refused(
        ops::amax(x0, elsewhere, Stream::default()),
        "out is on cuda:1; it must be on cuda:0, where x is",
    );
}

#[test]
fn overlaps() {
    let mut x = f32s(4, 4);
    let (mut buffer, scalar) = (matrix(DType::E4m3, 8, 8), f32s(1, 1));
    let self_overlap = out_as(&mut buffer, DType::E4m3, Device::Cpu, (4, 4), (0, 1));
    refused(
        ops::quantize(x.view(), scalar.view(), Some(self_overlap), None, Stream::default()),
        "rowwise has strides (0, 1) for shape (4, 4), so its elements overlap in memory; \
         each element of an output must have its own address",
    );
    let self_overlap = out_as(&mut buffer, DType::E4m3, Device::Cpu, (4, 4), (3, 1));
    assert!(matches!(
        ops::quantize(x.view(), scalar.view(), None, Some(self_overlap), Stream::default()),
        Err(Error::SelfOverlap { .. })
    ));
    // Both planes in the same memory.
    let rowwise = out_as(&mut buffer, DType::E4m3, Device::Cpu, (4, 4), (4, 1));
    let other = rowwise.ptr();
    // SAFETY: the call returns an error before it writes to the view.
    let columnwise = unsafe { ViewMut::from_raw(other.add(15), DType::E4m3, Device::Cpu, (4, 4), (4, 1)) };
    refused(
        ops::quantize(x.view(), scalar.view(), Some(rowwise), Some(columnwise), Stream::default()),
        "columnwise overlaps rowwise in memory; an output must not share memory with another argument",
    );
    // An output inside its input.
    let inside = out_as(&mut x, DType::E4m3, Device::Cpu, (4, 4), (4, 1));
    let input = inside.ptr();
    // SAFETY: the call returns an error before it reads the view.
    let input = unsafe { View::from_raw(input, DType::F32, Device::Cpu, (4, 4), (4, 1)) };
    refused(
        ops::quantize(input, scalar.view(), Some(inside), None, Stream::default()),
        "rowwise overlaps x in memory; an output must not share memory with another argument",
    );
}

#[test]
fn halves_of_one_buffer_do_not_overlap() {
    let (x, scales) = (f32s(4, 4), f32s(1, 2));
    let mut buffer = Owned::dense(DType::E4m3, (4, 8));
    let ptr = buffer.view_mut().ptr();
    // SAFETY: these are the left and the right half of the buffer, which do not overlap.
    let halves = [0, 4]
        .map(|start| unsafe { ViewMut::from_raw(ptr.add(start), DType::E4m3, Device::Cpu, (4, 4), (8, 1)) });
    ops::multi_quantize(&[x.view(), x.view()], scales.view(), &halves, Stream::default()).unwrap();
    let mut expected = Owned::dense(DType::E4m3, (4, 4));
    for half in 0..2 {
        common::cast(&x, scales.get(0, half), &mut expected);
        for (row, col) in x.cells() {
            assert_eq!(buffer.get::<u8>(row, col + 4 * half), expected.get::<u8>(row, col));
        }
    }
    // The right half starts one column too far to the left.
    let (left, right) = (ptr, ptr.wrapping_add(3));
    // SAFETY: the call returns an error before it writes to the views.
    let halves =
        [left, right].map(|ptr| unsafe { ViewMut::from_raw(ptr, DType::E4m3, Device::Cpu, (4, 4), (8, 1)) });
    refused(
        ops::multi_quantize(&[x.view(), x.view()], scales.view(), &halves, Stream::default()),
        "outs[1] overlaps outs[0] in memory; an output must not share memory with another argument",
    );
}

#[test]
fn pointers() {
    let mut out = f32s(1, 1);
    refused(
        ops::amax(null((2, 3)), out.view_mut(), Stream::default()),
        "x has 6 elements and a null data pointer; it must be a tensor with storage",
    );
    ops::amax(null((0, 3)), out.view_mut(), Stream::default()).unwrap();
    assert_eq!(out.get::<f32>(0, 0), 0.0);
    let x = f32s(2, 2);
    // SAFETY: the call returns an error before it reads the view.
    let misaligned =
        unsafe { View::from_raw(x.view().ptr().add(1), DType::F32, Device::Cpu, (1, 2), (2, 1)) };
    refused(
        ops::amax(misaligned, out.view_mut(), Stream::default()),
        "x starts at an address that is not a multiple of its element size, 4 bytes; copy it first",
    );
}

#[test]
fn numbers() {
    for (rule, message) in [
        (
            ScaleRule { amax_epsilon: -1.0, ..Default::default() },
            "amax_epsilon is -1; it must be finite and at least 0",
        ),
        (
            ScaleRule { amax_epsilon: f32::NAN, ..Default::default() },
            "amax_epsilon is NaN; it must be finite and at least 0",
        ),
        (ScaleRule { margin: 128, ..Default::default() }, "margin is 128; it must be between -126 and 127"),
    ] {
        let mut out = f32s(1, 1);
        refused(
            ops::scale_from_amax(f32s(1, 1).view(), Fp8Format::E4m3, rule, out.view_mut(), Stream::default()),
            message,
        );
        refused(
            ops::quantize_current(
                f32s(1, 1).view(),
                rule,
                out.view_mut(),
                Some(codes(1, 1).view_mut()),
                None,
                Stream::default(),
            ),
            message,
        );
    }
}

#[test]
fn slices() {
    assert_eq!(
        View::from_slice(&[0.0_f32; 5], 2, 3).unwrap_err().to_string(),
        "slice has 5 elements; it must have 6, as many as rows * cols"
    );
    assert_eq!(
        View::from_bytes(&[0; 6], DType::Bf16, 2, 3).unwrap_err().to_string(),
        "slice has dtype bfloat16; it must be float8_e4m3fn, float8_e5m2 or float8_e8m0fnu"
    );
}

#[test]
fn invalid_call_writes_nothing() {
    let x = Owned::new(DType::F32, (4, 4), Layout::Dense, 0).random(3);
    let scale = f32s(1, 1);
    let (mut amax, mut used) = (f32s(1, 1), f32s(1, 1));
    let (mut rowwise, mut columnwise) = (codes(4, 4), codes(4, 3));
    let before = [&amax, &used, &rowwise, &columnwise].map(|m| m.bytes.clone());
    assert!(
        ops::quantize_delayed(
            x.view(),
            scale.view(),
            amax.view_mut(),
            used.view_mut(),
            Some(rowwise.view_mut()),
            Some(columnwise.view_mut()),
            Stream::default(),
        )
        .is_err()
    );
    assert_eq!([&amax, &used, &rowwise, &columnwise].map(|m| m.bytes.clone()), before);
}

#[test]
fn overlaps_of_every_order() {
    let mut buffer = vec![0_f32; 256];
    let ptr = buffer.as_mut_ptr();
    // SAFETY: the view stays inside the buffer, which outlives it. Calls that return errors write nothing.
    let view = |at: usize, n: usize| unsafe {
        View::from_raw(ptr.add(at).cast(), DType::F32, Device::Cpu, (1, n), (n as isize, 1))
    };
    // SAFETY: the view stays inside the buffer, which outlives it. Calls that return errors write nothing.
    let out = |at: usize, n: usize| unsafe {
        ViewMut::from_raw(ptr.add(at).cast(), DType::F32, Device::Cpu, (1, n), (n as isize, 1))
    };
    let scale = Owned::dense(DType::F32, (1, 1));
    // An output that begins before the input that it overlaps.
    // SAFETY: the view stays inside the buffer, which outlives it. Calls that return errors write nothing.
    let codes = unsafe { View::from_raw(ptr.add(2).cast(), DType::E4m3, Device::Cpu, (1, 64), (64, 1)) };
    refused(
        ops::dequantize(codes, scale.view(), Block::TENSOR, out(0, 64), Stream::default()),
        "out overlaps codes in memory; an output must not share memory with another argument",
    );
    // A long input, another input inside it, and then the output.
    let mut codes = Owned::dense(DType::E4m3, (1, 64));
    let mut used = Owned::dense(DType::F32, (1, 1));
    refused(
        ops::quantize_delayed(
            view(0, 64),
            view(3, 1),
            out(10, 1),
            used.view_mut(),
            Some(codes.view_mut()),
            None,
            Stream::default(),
        ),
        "amax overlaps x in memory; an output must not share memory with another argument",
    );
}

const ONE_128: Block = Block { rows: 1, cols: 128 };
const MX: Block = Block { rows: 1, cols: 32 };

fn quantize(spec: BlockSpec, scales: ViewMut, given: BlockInputs) -> Result<(), Error> {
    let (x, mut codes) = (Owned::dense(DType::F32, (4, 64)).random(1), Owned::dense(DType::E4m3, (64, 4)));
    let plane = BlockPlane { codes: codes.view_mut(), scales };
    ops::quantize_blocks(x.view(), spec, given, None, Some(plane), Stream::default())
}

#[test]
fn packed_scales_must_be_e8m0_and_contiguous() {
    let mut packed = Owned::dense(DType::F32, (1, 512));
    let spec = BlockSpec {
        block: ONE_128,
        scale: BlockScale::F32(ScaleRule::default()),
        row_offset: 0,
        packed: true,
        divide: false,
    };
    refused(
        quantize(spec, packed.view_mut(), BlockInputs::default()),
        "packed is true; it must be false with float32 scales",
    );
    let mut bytes = vec![0_u8; 1024];
    // SAFETY: the view stays inside the memory, which is borrowed mutably.
    let spread =
        unsafe { ViewMut::from_raw(bytes.as_mut_ptr(), DType::E8m0, Device::Cpu, (1, 512), (1024, 2)) };
    let spec = BlockSpec {
        block: MX,
        scale: BlockScale::E8m0(Rounding::Ceil),
        row_offset: 0,
        packed: true,
        divide: false,
    };
    refused(
        quantize(spec, spread, BlockInputs::default()),
        "columnwise_scale is strided; it must be contiguous, because scales are packed",
    );
    let scales = Owned::dense(DType::E8m0, (4, 2));
    let mut out = Owned::dense(DType::E8m0, (1, 512));
    refused(
        ops::pack_scales(scales.view(), 7, 2, out.view_mut(), Stream::default()),
        "block_rows is 2; it must be 1 or 32",
    );
}

#[test]
fn unused_given_maxima_are_an_error() {
    let spec = BlockSpec {
        block: MX,
        scale: BlockScale::E8m0(Rounding::Ceil),
        row_offset: 0,
        packed: false,
        divide: false,
    };
    let (amax, mut scales) = (Owned::dense(DType::F32, (4, 2)).random(1), Owned::dense(DType::E8m0, (64, 1)));
    refused(
        quantize(spec, scales.view_mut(), BlockInputs { amax: Some(amax.view()), ..BlockInputs::default() }),
        "amax is given; it must be absent, unless there is a rowwise output or blocks are square",
    );
}

#[test]
fn block_scales_reject_margins_and_block_amax_rejects_other_sizes() {
    let rule = ScaleRule { margin: 1, ..ScaleRule::default() };
    let mut scales = Owned::dense(DType::F32, (64, 1));
    let spec = BlockSpec {
        block: ONE_128,
        scale: BlockScale::F32(rule),
        row_offset: 0,
        packed: false,
        divide: false,
    };
    refused(
        quantize(spec, scales.view_mut(), BlockInputs::default()),
        "margin is 1; it must be 0 for block scales",
    );
    let (x, mut out) = (Owned::dense(DType::F32, (4, 64)).random(1), Owned::dense(DType::F32, (1, 1)));
    let extents = list(block_extents().into_iter().map(Block::extent_name).collect());
    refused(
        ops::block_amax(x.view(), Block { rows: 48, cols: 48 }, 0, out.view_mut(), Stream::default()),
        &format!("block is (48, 48); it must be made of {extents}"),
    );
}

#[test]
fn bounds_of_numbers() {
    let (amax, mut out) = (Owned::dense(DType::F32, (1, 1)), Owned::dense(DType::F32, (1, 1)));
    let mut call =
        |rule| ops::scale_from_amax(amax.view(), Fp8Format::E4m3, rule, out.view_mut(), Stream::default());
    for margin in [-127, 128] {
        let words = format!("margin is {margin}; it must be between -126 and 127");
        refused(call(ScaleRule { margin, ..ScaleRule::default() }), &words);
    }
    for margin in [-126, 127] {
        call(ScaleRule { margin, ..ScaleRule::default() }).unwrap();
    }
    for amax_epsilon in [f32::INFINITY, f32::NAN, -1.0] {
        let words = format!("amax_epsilon is {amax_epsilon}; it must be finite and at least 0");
        refused(call(ScaleRule { amax_epsilon, ..ScaleRule::default() }), &words);
    }
    let numbers = Numbers { seed: 0, offset: 0, stream: 0, step: None };
    let wide = (f32::MIN, f32::MAX);
    let error = ops::random_uniform(out.view_mut(), numbers, wide, Stream::default()).unwrap_err();
    assert!(error.to_string().ends_with("and high - low must be finite"), "{error}");
}

#[test]
fn group_bounds_that_exceed_int32() {
    let (offs, mut ends, mut padded) = (i32s(2), i32s(2), i32s(2));
    let rows = i32::MAX as usize - 30;
    ops::group_bounds(offs.view(), rows, ends.view_mut(), padded.view_mut(), Stream::default()).unwrap();
    refused(
        ops::group_bounds(offs.view(), rows + 16, ends.view_mut(), padded.view_mut(), Stream::default()),
        "rows is 2147483633; it must be below 2^31 even if each group is padded to a multiple of 16 rows; split \
         the rows",
    );
}
