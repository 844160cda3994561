//! Benchmarks of the block formats on the CPU. Throughput is in bytes of input.

use criterion::{
    BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main, measurement::WallTime,
};
use fp8rs::format::e8m0::Rounding;
use fp8rs::ops::{self, Axis, BlockPlane, BlockScale, BlockSpec, Given};
use fp8rs::{Block, DType, ScaleRule, Stream, View, ViewMut};
use half::bf16;

const ROWS: usize = 2048;
const COLS: usize = 4096;

/// Random enough: no two blocks alike, no value special.
fn input() -> Vec<bf16> {
    let mut state = 1_u32;
    (0..ROWS * COLS)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            bf16::from_f32(state as f32 / u32::MAX as f32 - 0.5)
        })
        .collect()
}

struct Out {
    codes: Vec<u8>,
    floats: Vec<f32>,
    bytes: Vec<u8>,
    shape: (usize, usize),
    grid: (usize, usize),
}

impl Out {
    fn new(spec: BlockSpec, shape: (usize, usize)) -> Self {
        let mut grid = spec.block.grid(shape.0, shape.1);
        if spec.packed {
            grid = (1, fp8rs::layout::packed::bytes(shape.0, grid.1));
        }
        let count = grid.0 * grid.1;
        Self {
            codes: vec![0; shape.0 * shape.1],
            floats: vec![0.0; count],
            bytes: vec![0; count],
            shape,
            grid,
        }
    }

    fn plane(&mut self, spec: BlockSpec) -> BlockPlane<'_> {
        let (rows, cols) = self.grid;
        let scales = match spec.scale {
            BlockScale::F32(_) => ViewMut::from_slice(&mut self.floats, rows, cols),
            BlockScale::E8m0(_) => ViewMut::from_bytes(&mut self.bytes, DType::E8m0, rows, cols),
        };
        let codes = ViewMut::from_bytes(&mut self.codes, DType::E4m3, self.shape.0, self.shape.1);
        BlockPlane { codes: codes.unwrap(), scales: scales.unwrap() }
    }
}

fn quantize(group: &mut BenchmarkGroup<WallTime>, x: &[bf16], name: &str, block: Block, packed: bool) {
    let scale = if block.cols == 32 {
        BlockScale::E8m0(Rounding::Ceil)
    } else {
        BlockScale::F32(ScaleRule { power_of_2: true, ..Default::default() })
    };
    let spec = BlockSpec { block, scale, row_offset: 0, packed };
    let (mut row, mut col) = (Out::new(spec, (ROWS, COLS)), Out::new(spec, (COLS, ROWS)));
    for (direction, rowwise, columnwise) in [("row", true, false), ("col", false, true), ("both", true, true)]
    {
        group.bench_function(format!("{name}/{direction}"), |b| {
            b.iter(|| {
                ops::quantize_blocks(
                    View::from_slice(x, ROWS, COLS).unwrap(),
                    spec,
                    Given::default(),
                    rowwise.then(|| row.plane(spec)),
                    columnwise.then(|| col.plane(spec)),
                    Stream::default(),
                )
                .unwrap();
            });
        });
    }
}

fn blocks(c: &mut Criterion) {
    let x = input();
    let mut group = c.benchmark_group("quantize_blocks/cpu/bf16");
    group.throughput(Throughput::Bytes(2 * x.len() as u64)).sample_size(20);
    quantize(&mut group, &x, "mx", Block { rows: 1, cols: 32 }, false);
    quantize(&mut group, &x, "mx_packed", Block { rows: 1, cols: 32 }, true);
    quantize(&mut group, &x, "mx_square", Block { rows: 32, cols: 32 }, false);
    quantize(&mut group, &x, "1x128", Block { rows: 1, cols: 128 }, false);
    quantize(&mut group, &x, "128x128", Block { rows: 128, cols: 128 }, false);
    quantize(&mut group, &x, "per_row", Block::ROW, false);
    group.finish();

    let mut group = c.benchmark_group("block_amax/cpu/bf16");
    group.throughput(Throughput::Bytes(2 * x.len() as u64)).sample_size(20);
    for (name, block) in [("32x32", Block { rows: 32, cols: 32 }), ("per_row", Block::ROW)] {
        let grid = block.grid(ROWS, COLS);
        let mut out = vec![0.0_f32; grid.0 * grid.1];
        group.bench_function(name, |b| {
            b.iter(|| {
                let x = View::from_slice(&x, ROWS, COLS).unwrap();
                let out = ViewMut::from_slice(&mut out, grid.0, grid.1).unwrap();
                ops::block_amax(x, block, 0, out, Stream::default()).unwrap();
            });
        });
    }
    group.finish();
}

fn planes(c: &mut Criterion) {
    let x = input();
    let codes: Vec<u8> = x.iter().map(|x| (x.to_bits() >> 4) as u8 & 0xBF).collect();
    let mut group = c.benchmark_group("rebase/cpu");
    group.throughput(Throughput::Bytes(codes.len() as u64)).sample_size(20);
    for (name, axis) in [("rows", Axis::Rows), ("columns", Axis::Columns)] {
        let block = Block { rows: 32, cols: 32 };
        let grid = block.grid(ROWS, COLS);
        let scales: Vec<u8> = (0..grid.0 * grid.1).map(|i| 120 + (i % 7) as u8).collect();
        let (rows, cols) = if axis == Axis::Rows { (ROWS, COLS) } else { (COLS, ROWS) };
        let (mut out, mut scale_out) = (vec![0; codes.len()], vec![0.0_f32; rows]);
        group.bench_function(name, |b| {
            b.iter(|| {
                ops::rebase(
                    View::from_bytes(&codes, DType::E4m3, ROWS, COLS).unwrap(),
                    View::from_bytes(&scales, DType::E8m0, grid.0, grid.1).unwrap(),
                    block,
                    axis,
                    ViewMut::from_bytes(&mut out, DType::E4m3, rows, cols).unwrap(),
                    ViewMut::from_slice(&mut scale_out, rows, 1).unwrap(),
                    Stream::default(),
                )
                .unwrap();
            });
        });
    }
    group.finish();

    let mut group = c.benchmark_group("scales/cpu");
    let (rows, blocks) = (16384, 128);
    let mut compact = vec![1_u8; rows * blocks];
    let mut packed = vec![0_u8; compact.len()];
    group.throughput(Throughput::Bytes(compact.len() as u64)).sample_size(20);
    group.bench_function("pack", |b| {
        b.iter(|| {
            let scales = View::from_bytes(&compact, DType::E8m0, rows, blocks).unwrap();
            let out = ViewMut::from_bytes(&mut packed, DType::E8m0, 1, rows * blocks).unwrap();
            ops::pack_scales(scales, rows, 1, out, Stream::default()).unwrap();
        });
    });
    group.bench_function("unpack", |b| {
        b.iter(|| {
            let packed = View::from_bytes(&packed, DType::E8m0, 1, rows * blocks).unwrap();
            let out = ViewMut::from_bytes(&mut compact, DType::E8m0, rows, blocks).unwrap();
            ops::unpack_scales(packed, rows, 1, out, Stream::default()).unwrap();
        });
    });
    group.finish();
}

criterion_group!(benches, blocks, planes);
criterion_main!(benches);
