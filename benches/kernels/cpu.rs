//! CPU rows: 4096x4096, far larger than the caches.

use criterion::{BenchmarkId, Criterion, Throughput};
use fp8rs::format::wide::Wide;
use fp8rs::{Block, DType, Fp8Format, ScaleRule, Stream, View, ViewMut, ops};
use half::{bf16, f16};
use rayon::prelude::*;

const ROWS: usize = 4096;
const COLS: usize = 4096;
const N: usize = ROWS * COLS;

pub(crate) fn benches(c: &mut Criterion) {
    of_dtype::<f32>(c);
    of_dtype::<bf16>(c);
    of_dtype::<f16>(c);
    transpose(c);
    scale_from_amax(c);
}

/// A row `op/cpu/name` that moves `bytes`, and a copy of as many.
fn row(c: &mut Criterion, op: &str, name: impl std::fmt::Display, bytes: usize, mut run: impl FnMut()) {
    let mut group = c.benchmark_group(op);
    group.throughput(Throughput::Bytes(bytes as u64));
    group.bench_function(BenchmarkId::new("cpu", &name), |b| b.iter(&mut run));
    let source = vec![1_u8; bytes / 2];
    let mut target = vec![0_u8; bytes / 2];
    group.bench_function(BenchmarkId::new("copy", &name), |b| {
        b.iter(|| {
            let parts = target.par_chunks_mut(1 << 20).zip(source.par_chunks(1 << 20));
            parts.for_each(|(target, source)| target.copy_from_slice(source));
        });
    });
    group.finish();
}

/// Values around one, of both signs.
fn input<T: Wide>() -> Vec<T> {
    let values = (0..N as u32).map(|i| i.wrapping_mul(0x9E37_79B9) >> 8);
    values.map(|bits| T::from_f32(bits as f32 / (1 << 23) as f32 - 1.0)).collect()
}

/// Bytes that begin on a cache line, as torch's allocations do.
struct Bytes(Vec<u8>);

impl Bytes {
    fn new(n: usize) -> Self {
        Self(vec![0; n + 63])
    }

    fn get(&mut self) -> &mut [u8] {
        let start = self.0.as_ptr().align_offset(64);
        let n = self.0.len() - 63;
        &mut self.0[start..][..n]
    }
}

fn codes(bytes: &mut [u8]) -> ViewMut<'_> {
    ViewMut::from_bytes(bytes, DType::E4m3, ROWS, COLS).unwrap()
}

fn one(out: &mut [f32]) -> ViewMut<'_> {
    ViewMut::from_slice(out, 1, 1).unwrap()
}

fn of_dtype<T: Wide>(c: &mut Criterion) {
    let (size, dtype) = (T::DTYPE.size(), T::DTYPE);
    let x = input::<T>();
    let x = || View::from_slice(&x, ROWS, COLS).unwrap();
    let (mut rowwise, mut columnwise, mut wide) = (Bytes::new(N), Bytes::new(N), vec![T::from_f32(0.0); N]);
    let scale = [0.01_f32];
    let scale = || View::from_slice(&scale, 1, 1).unwrap();
    let (mut a, mut b) = ([0.0_f32], [0.0_f32]);
    let stream = Stream::default;

    row(c, "amax", dtype, size * N, || ops::amax(x(), one(&mut a), stream()).unwrap());
    row(c, "quantize", dtype, (size + 1) * N, || {
        ops::quantize(x(), scale(), Some(codes(rowwise.get())), None, stream()).unwrap();
    });
    row(c, "quantize_both", dtype, (size + 2) * N, || {
        let (rowwise, columnwise) = (codes(rowwise.get()), codes(columnwise.get()));
        ops::quantize(x(), scale(), Some(rowwise), Some(columnwise), stream()).unwrap();
    });
    row(c, "quantize_delayed", dtype, (size + 1) * N, || {
        let rowwise = Some(codes(rowwise.get()));
        ops::quantize_delayed(x(), scale(), one(&mut a), one(&mut b), rowwise, None, stream()).unwrap();
    });
    row(c, "quantize_current", dtype, (2 * size + 1) * N, || {
        let rowwise = Some(codes(rowwise.get()));
        ops::quantize_current(x(), ScaleRule::default(), one(&mut a), rowwise, None, stream()).unwrap();
    });
    row(c, "dequantize", dtype, (size + 1) * N, || {
        let codes = View::from_bytes(rowwise.get(), DType::E4m3, ROWS, COLS).unwrap();
        let out = ViewMut::from_slice(&mut wide, ROWS, COLS).unwrap();
        ops::dequantize(codes, scale(), Block::TENSOR, out, stream()).unwrap();
    });

    // The same elements as 64 tensors.
    let count = 64;
    let part = N / count;
    let xs: Vec<View> = wide.chunks(part).map(|x| View::from_slice(x, 64, part / 64).unwrap()).collect();
    let scales = vec![0.01_f32; count];
    let mut amaxes = vec![0.0_f32; count];
    row(c, "multi_amax", dtype, size * N, || {
        ops::multi_amax(&xs, ViewMut::from_slice(&mut amaxes, 1, count).unwrap(), stream()).unwrap();
    });
    row(c, "multi_quantize", dtype, (size + 1) * N, || {
        let outs = rowwise.get().chunks_mut(part);
        let outs: Vec<ViewMut> =
            outs.map(|out| ViewMut::from_bytes(out, DType::E4m3, 64, part / 64).unwrap()).collect();
        ops::multi_quantize(&xs, View::from_slice(&scales, 1, count).unwrap(), &outs, stream()).unwrap();
    });
    let mut used = vec![0.0_f32; count];
    row(c, "multi_quantize_delayed", dtype, (size + 1) * N, || {
        let outs = rowwise.get().chunks_mut(part);
        let outs: Vec<ViewMut> =
            outs.map(|out| ViewMut::from_bytes(out, DType::E4m3, 64, part / 64).unwrap()).collect();
        let scales = View::from_slice(&scales, 1, count).unwrap();
        let amaxes = ViewMut::from_slice(&mut amaxes, 1, count).unwrap();
        let used = ViewMut::from_slice(&mut used, 1, count).unwrap();
        ops::multi_quantize_delayed(&xs, scales, amaxes, used, &outs, stream()).unwrap();
    });
}

fn transpose(c: &mut Criterion) {
    let codes = vec![0x38_u8; N];
    let mut out = Bytes::new(N);
    row(c, "transpose", DType::E4m3, 2 * N, || {
        let codes = View::from_bytes(&codes, DType::E4m3, ROWS, COLS).unwrap();
        let out = ViewMut::from_bytes(out.get(), DType::E4m3, COLS, ROWS).unwrap();
        ops::transpose(codes, out, Stream::default()).unwrap();
    });
}

/// The scales of a model's weights: 256 of them.
fn scale_from_amax(c: &mut Criterion) {
    let amaxes = vec![3.0_f32; 256];
    let mut scales = vec![0.0_f32; 256];
    row(c, "scale_from_amax", DType::F32, 2 * 4 * 256, || {
        let amaxes = View::from_slice(&amaxes, 1, 256).unwrap();
        let scales = ViewMut::from_slice(&mut scales, 1, 256).unwrap();
        ops::scale_from_amax(amaxes, Fp8Format::E4m3, ScaleRule::default(), scales, Stream::default())
            .unwrap();
    });
}
