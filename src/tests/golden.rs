//! Compares the formats with golden bytes from NVIDIA's `cuda_fp8.h` and from `ml_dtypes`
//! (tests/golden/README.md).

use crate::Fp8Format::{self, E4m3, E5m2};
use crate::format::wide::Wide;
use half::{bf16, f16};

const CUDA_FP8: &[u8] = include_bytes!("../../tests/golden/cuda_fp8.bin");
const ML_DTYPES: &[u8] = include_bytes!("../../tests/golden/ml_dtypes.bin");
const PART: usize = 1 << 16;

fn every_bf16() -> impl Iterator<Item = f32> {
    (0..=u16::MAX).map(|bits| Wide::to_f32(bf16::from_bits(bits)))
}

fn every_f16() -> impl Iterator<Item = f32> {
    (0..=u16::MAX).map(|bits| Wide::to_f32(f16::from_bits(bits)))
}

fn sampled_f32() -> impl Iterator<Item = f32> {
    let mut state = 1_u32;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state
    };
    std::iter::repeat_with(move || {
        let (a, b, c) = (next(), next(), next());
        let keep = c % 24;
        f32::from_bits(c & 0x8000_0000 | (105 + a % 40) << 23 | b >> 8 >> (1 + keep) << keep)
    })
    .take(PART)
}

fn assert_codes(format: Fp8Format, inputs: impl Iterator<Item = f32>, golden: &[u8]) {
    let inputs: Vec<f32> = inputs.collect();
    assert_eq!((inputs.len(), golden.len()), (PART, PART));
    for (x, code) in inputs.into_iter().zip(golden) {
        assert_eq!(format.encode(x), *code, "{format} of {x:e} ({:#010x})", x.to_bits());
    }
}

#[test]
fn encode_matches_cuda_fp8_for_every_bf16_and_fp16_and_sampled_fp32() {
    assert_eq!(CUDA_FP8.len(), 6 * PART);
    let parts: Vec<&[u8]> = CUDA_FP8.chunks(PART).collect();
    for (i, format) in [E4m3, E5m2].into_iter().enumerate() {
        assert_codes(format, every_bf16(), parts[i]);
        assert_codes(format, every_f16(), parts[2 + i]);
        assert_codes(format, sampled_f32(), parts[4 + i]);
    }
}

#[test]
fn decode_and_encode_in_range_match_ml_dtypes() {
    assert_eq!(ML_DTYPES.len(), 2 * (256 * 4 + PART));
    let (values, codes) = ML_DTYPES.split_at(2 * 256 * 4);
    for (i, format) in [E4m3, E5m2].into_iter().enumerate() {
        for (code, value) in (0..=u8::MAX).zip(values[i * 1024..].chunks_exact(4)) {
            let value = f32::from_le_bytes(value.try_into().unwrap());
            let got = format.decode(code);
            assert!(got.to_bits() == value.to_bits() || got.is_nan() && value.is_nan(), "{code:#x}");
        }
        let codes = &codes[i * PART..][..PART];
        let in_range = |x: f32| x.abs() <= format.max();
        for (x, code) in every_bf16().zip(codes).filter(|(x, _)| in_range(*x)) {
            assert_eq!(format.encode(x), *code, "{format} of {x:e}");
        }
    }
}
