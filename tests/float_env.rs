//! Results do not depend on whether the caller flushes subnormals (`torch.set_flush_denormal`), neither on
//! the caller's thread nor on the pool's threads. This is a separate test binary with one test, because the
//! pool must be created by a caller that flushes.

#[path = "../src/tests/flush_to_zero.rs"]
mod flush_to_zero;

use flush_to_zero::set_flush_to_zero;
use fp8rs::ops::{
    AdamW, AdamWTensor, BlockInputs, BlockPlane, BlockScale, BlockSpec, Hyper, Numbers, Rounding, Target,
};
use fp8rs::{Block, BlockFormat, DType, FORMATS, Fp8Format, ScaleRule, Stream, View, ViewMut, ops};

/// Asserts that the results of an operation with and without flushing are the same bits, and that they are
/// not all zero.
#[track_caller]
fn both<T: PartialEq + Default + Clone>(n: usize, operation: impl Fn(&mut [T])) {
    let [got, expected] = [true, false].map(|flush| {
        let mut out = vec![T::default(); n];
        set_flush_to_zero(flush);
        operation(&mut out);
        set_flush_to_zero(false);
        out
    });
    assert!(expected.iter().all(|bits| *bits != T::default()));
    assert!(got == expected);
}

fn floats(words: &mut [u32]) -> &mut [f32] {
    // SAFETY: `u32` and `f32` have the same size and alignment, and any bits are a valid value of both.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), words.len()) }
}

#[test]
fn no_operation_depends_on_the_callers_flush_to_zero() {
    let stream = Stream::default();
    let tiny = f32::from_bits(1 << 20);
    let few = [tiny; 64];
    let x = || View::from_slice(&few, 2, 32).unwrap();
    let one = |value: &'static [f32; 1]| View::from_slice(value, 1, 1).unwrap();

    // Create the pool with an operation that does no arithmetic.
    let (rows, cols) = (512, 1024);
    let (many, codes) = (vec![tiny; rows * cols], vec![1_u8; rows * cols]);
    let mut transposed = vec![0_u8; rows * cols];
    set_flush_to_zero(true);
    ops::transpose(
        View::from_bytes(&codes, DType::E5m2, rows, cols).unwrap(),
        ViewMut::from_bytes(&mut transposed, DType::E5m2, cols, rows).unwrap(),
        stream,
    )
    .unwrap();
    set_flush_to_zero(false);
    both::<u8>(rows * cols, |out| {
        let x = View::from_slice(&many, rows, cols).unwrap();
        let out = ViewMut::from_bytes(out, DType::E5m2, rows, cols).unwrap();
        ops::quantize(x, one(&[f32::MIN_POSITIVE]), Some(out), None, stream).unwrap();
    });

    both::<u32>(64, |out| {
        let out = ViewMut::from_slice(floats(out), 2, 32).unwrap();
        // The scale would be 1 if the amax were flushed to zero.
        ops::scale_from_amax(x(), Fp8Format::E4m3, ScaleRule::default(), out, stream).unwrap();
    });
    both::<u8>(64, |out| {
        let scales = one(&[f32::MIN_POSITIVE]);
        let out = ViewMut::from_bytes(out, DType::E5m2, 2, 32).unwrap();
        ops::multi_quantize(&[x()], scales, &[out], stream).unwrap();
    });
    both::<u8>(64, |out| {
        let scales = one(&[f32::MIN_POSITIVE]);
        let (mut amax, mut used) = ([0_f32], [0_f32]);
        let out = ViewMut::from_bytes(out, DType::E5m2, 2, 32).unwrap();
        let (amax, used) =
            (ViewMut::from_slice(&mut amax, 1, 1).unwrap(), ViewMut::from_slice(&mut used, 1, 1).unwrap());
        ops::multi_quantize_delayed(&[x()], scales, amax, used, &[out], stream).unwrap();
    });
    both::<u32>(64, |out| {
        let codes = View::from_bytes(&codes[..64], DType::E5m2, 2, 32).unwrap();
        let scale = one(&[f32::MIN_POSITIVE]);
        let out = ViewMut::from_slice(floats(out), 2, 32).unwrap();
        ops::dequantize(codes, scale, Block::TENSOR, out, stream).unwrap();
    });
    // A matrix of two rows has one row of square blocks.
    for BlockFormat { block, scale_dtype, .. } in FORMATS {
        let grid = block.grid(2, 32);
        both::<u8>(64, |out| {
            let (mut scales, mut bytes) = ([0_f32; 2], [0_u8; 2]);
            let (scale, scales) = match scale_dtype {
                DType::E8m0 => (
                    BlockScale::E8m0(Rounding::Ceil),
                    ViewMut::from_bytes(&mut bytes[..grid.0], DType::E8m0, grid.0, 1).unwrap(),
                ),
                _ => (
                    BlockScale::F32(ScaleRule::default()),
                    ViewMut::from_slice(&mut scales[..grid.0], grid.0, 1).unwrap(),
                ),
            };
            let codes = ViewMut::from_bytes(out, DType::E5m2, 2, 32).unwrap();
            let spec = BlockSpec { block, scale, row_offset: 0, packed: false, divide: false };
            let plane = BlockPlane { codes, scales };
            ops::quantize_blocks(x(), spec, BlockInputs::default(), Some(plane), None, stream).unwrap();
        });
    }
    both::<u32>(64, |out| {
        let numbers = Numbers { seed: 3, offset: 0, stream: 0, step: None };
        let out = ViewMut::from_slice(floats(out), 2, 32).unwrap();
        ops::random_uniform(out, numbers, (tiny, f32::from_bits(1 << 21)), stream).unwrap();
    });
    // The second moment is subnormal: the square of a small but normal gradient.
    both::<u32>(64, |out| {
        let (grad, mut exp_avg, mut param) = ([1e-18_f32; 64], [1e-18_f32; 64], [1_f32; 64]);
        let hyper =
            Hyper { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1, maximize: false };
        let shared = AdamW {
            hyper,
            lr: None,
            grad_scale: None,
            found_inf: None,
            stochastic: None,
            target: Target::Plain,
        };
        let tensor = AdamWTensor {
            grad: View::from_slice(&grad, 2, 32).unwrap(),
            exp_avg: ViewMut::from_slice(&mut exp_avg, 2, 32).unwrap(),
            exp_avg_sq: ViewMut::from_slice(floats(out), 2, 32).unwrap(),
            ranges: None,
            param: ViewMut::from_slice(&mut param, 2, 32).unwrap(),
            master: None,
            step: one(&[1.0]),
            scale: None,
            new_scale: None,
            amax: None,
            offset: 0,
            stream: 0,
        };
        ops::adamw(shared, vec![tensor], stream).unwrap();
    });
}
