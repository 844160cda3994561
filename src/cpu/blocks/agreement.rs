//! Compares the block operations with their definition, byte for byte, on every instruction set.

use half::{bf16, f16};
use proptest::prelude::*;

use super::definition::{self, cells, put};
use crate::cpu::simd::on_each_level;
use crate::format::e8m0::Rounding;
use crate::layout::{Block, BlockFormat, DType, FORMATS, View, ViewMut, block_extents, packed};
use crate::spec::{Axis, BlockCall, BlockInputs, BlockPlane, BlockScale, BlockSpec, ScaleRule};

type Quantize = dyn Fn(BlockCall);
type Amax = dyn Fn(View, Block, usize, ViewMut);
type Rebase = dyn Fn(View, View, Block, Axis, ViewMut, ViewMut);

/// A matrix in a buffer of 32-bit words: row-major, transposed, every other element, or backwards.
#[derive(Debug, Clone, Copy)]
enum Lay {
    Rows,
    Columns,
    Spread,
    Reversed,
}

struct Buffer {
    words: Vec<u32>,
    dtype: DType,
    shape: (usize, usize),
    lay: Lay,
}

impl Buffer {
    fn new(dtype: DType, shape: (usize, usize), lay: Lay) -> Self {
        let words = vec![0xAAAA_AAAA; (shape.0 * shape.1 * 2 * dtype.size()).div_ceil(4) + 1];
        Self { words, dtype, shape, lay }
    }

    fn place(&self) -> (usize, (isize, isize)) {
        let (rows, cols) = (self.shape.0 as isize, self.shape.1 as isize);
        match self.lay {
            Lay::Rows => (0, (cols, 1)),
            Lay::Columns => (0, (1, rows)),
            Lay::Spread => (0, (2 * cols, 2)),
            Lay::Reversed => ((rows * cols - 1).max(0) as usize, (-cols, -1)),
        }
    }

    fn view(&self) -> View<'_> {
        let (start, strides) = self.place();
        let ptr = self.words.as_ptr().cast::<u8>().wrapping_add(start * self.dtype.size());
        // SAFETY: every layout stays inside the buffer, which is twice as large as the matrix.
        unsafe { View::from_raw(ptr, self.dtype, crate::Device::Cpu, self.shape, strides) }
    }

    fn view_mut(&mut self) -> ViewMut<'_> {
        let (start, strides) = self.place();
        let ptr = self.words.as_mut_ptr().cast::<u8>().wrapping_add(start * self.dtype.size());
        // SAFETY: every layout stays inside the buffer, which is twice as large as the matrix, and the buffer
        // is borrowed mutably.
        unsafe { ViewMut::from_raw(ptr, self.dtype, crate::Device::Cpu, self.shape, strides) }
    }
}

/// Values of very different magnitudes, with special values.
fn value() -> impl Strategy<Value = f32> {
    prop_oneof![
        20 => (-1.0_f32..1.0, -140..120).prop_map(|(m, e)| (f64::from(m) * 2.0_f64.powi(e)) as f32),
        20 => -4.0_f32..4.0,
        2 => Just(0.0_f32),
        1 => Just(-0.0_f32),
        1 => any::<u32>().prop_map(f32::from_bits),
    ]
}

fn lay() -> impl Strategy<Value = Lay> {
    prop_oneof![3 => Just(Lay::Rows), 1 => Just(Lay::Columns), 1 => Just(Lay::Spread), 1 => Just(Lay::Reversed)]
}

fn wide_dtype() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::Bf16)]
}

fn extent() -> impl Strategy<Value = usize> {
    prop_oneof![1 => Just(0_usize), 2 => 1..40_usize, 2 => 60..140_usize, 1 => 250..300_usize]
}

/// A matrix that repeats the given values.
#[derive(Debug, Clone)]
struct Filled {
    rows: usize,
    cols: usize,
    lay: Lay,
    dtype: DType,
    values: Vec<f32>,
}

/// Generates a shape, layout, element type, values and a row offset. There are only a few values, so that a
/// case is generated quickly.
fn input() -> impl Strategy<Value = (Filled, usize)> {
    (
        extent(),
        prop_oneof![4 => extent(), 1 => 500..560_usize],
        lay(),
        wide_dtype(),
        prop::collection::vec(value(), 1..200),
    )
        .prop_flat_map(|(rows, cols, lay, dtype, values)| {
            (
                Just(Filled { rows, cols, lay, dtype, values }),
                prop_oneof![2 => Just(0_usize), 1 => 0..300_usize],
            )
        })
}

impl Filled {
    fn fill(&self) -> Buffer {
        let mut buffer = Buffer::new(self.dtype, (self.rows, self.cols), self.lay);
        let view = buffer.view_mut();
        let m = view.matrix();
        for (i, (row, col)) in cells(self.rows, self.cols).enumerate() {
            // The stride is coprime to most lengths, so that neighbours differ from row to row.
            let x = self.values[(i * 7 + row) % self.values.len()];
            match self.dtype {
                DType::F32 => put(&m, row, col, x),
                DType::F16 => put(&m, row, col, f16::from_f32(x)),
                _ => put(&m, row, col, bf16::from_f32(x)),
            }
        }
        buffer
    }
}

fn spec() -> impl Strategy<Value = BlockSpec> {
    let format = prop::sample::select(FORMATS.to_vec());
    let e8m0 = (prop_oneof![Just(Rounding::Ceil), Just(Rounding::Floor)], any::<bool>());
    let f32 = (any::<bool>(), prop_oneof![Just(0.0_f32), Just(1e-3)], any::<bool>());
    (format, e8m0, f32).prop_map(|(format, (rounding, packed), (power_of_2, amax_epsilon, divide))| {
        let block = format.block;
        if format.scale_dtype == DType::E8m0 {
            return BlockSpec {
                block,
                scale: BlockScale::E8m0(rounding),
                row_offset: 0,
                packed,
                divide: false,
            };
        }
        let rule = ScaleRule { power_of_2, amax_epsilon, margin: 0 };
        let divide = divide && block == Block::ROW;
        BlockSpec { block, scale: BlockScale::F32(rule), row_offset: 0, packed: false, divide }
    })
}

fn fp8() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::E4m3), Just(DType::E5m2)]
}

/// A call of `quantize_blocks`.
#[derive(Debug, Clone)]
struct Quantization {
    input: Filled,
    spec: BlockSpec,
    dtype: DType,
    /// Layouts of (the rowwise codes, the columnwise codes and all scales).
    lays: (Lay, Lay),
    /// Whether the rowwise and columnwise outputs are requested.
    directions: [bool; 2],
    amax: bool,
    column_scale: bool,
}

impl Quantization {
    fn check(&self) {
        let Self { input, spec, dtype, directions: [rowwise, columnwise], .. } = self;
        let x = input.fill();
        let (rows, cols) = x.shape;
        let block = spec.block;
        let grid = block.grid_from(spec.row_offset, rows, cols);
        let along = block.transposed().grid_from(spec.row_offset, rows, cols);
        let grid_t = if block.is_square() { (grid.1, grid.0) } else { (along.1, along.0) };
        let factors = |grid: (usize, usize)| {
            // Some values are negative. A negative amax is invalid and counts as 0.
            let values = input.values.iter().enumerate();
            let values = values.map(|(i, x)| if i % 8 == 7 { *x } else { x.abs() }).collect();
            Filled { rows: grid.0, cols: grid.1, lay: Lay::Spread, dtype: DType::F32, values }.fill()
        };
        let (amax, amax_t, column_scale) = (factors(grid), factors(grid_t), factors((1, cols)));
        let inputs = BlockInputs {
            amax: (self.amax && (*rowwise || block.is_square())).then(|| amax.view()),
            amax_columnwise: (self.amax && *columnwise && !block.is_square()).then(|| amax_t.view()),
            column_scale: (self.column_scale && *rowwise && block == Block::ROW).then(|| column_scale.view()),
        };
        let scale_dtype = if matches!(spec.scale, BlockScale::F32(_)) { DType::F32 } else { DType::E8m0 };
        let scale_shape = |lines: usize, grid: (usize, usize)| {
            if spec.packed { (1, packed::bytes(lines, grid.1)) } else { grid }
        };
        let run = |f: &Quantize| {
            let mut codes = Buffer::new(*dtype, (rows, cols), self.lays.0);
            let mut codes_t = Buffer::new(*dtype, (cols, rows), self.lays.1);
            let scales_lay = if spec.packed { Lay::Rows } else { self.lays.1 };
            let mut scales = Buffer::new(scale_dtype, scale_shape(rows, grid), scales_lay);
            let mut scales_t = Buffer::new(scale_dtype, scale_shape(cols, grid_t), scales_lay);
            f(BlockCall {
                x: x.view(),
                spec: *spec,
                format: dtype.fp8().unwrap(),
                inputs,
                rowwise: rowwise.then(|| BlockPlane { codes: codes.view_mut(), scales: scales.view_mut() }),
                columnwise: columnwise
                    .then(|| BlockPlane { codes: codes_t.view_mut(), scales: scales_t.view_mut() }),
            });
            [codes.words, codes_t.words, scales.words, scales_t.words]
        };
        let expected = run(&definition::quantize_blocks);
        on_each_level(|level| assert!(run(&super::quantize_blocks) == expected, "{level:?}: {spec:?}"));
    }
}

fn check_block_amax(input: &Filled, row_offset: usize, block: Block, out_lay: Lay) {
    let x = input.fill();
    let grid = block.grid_from(row_offset, x.shape.0, x.shape.1);
    let run = |f: &Amax| {
        let mut out = Buffer::new(DType::F32, grid, out_lay);
        f(x.view(), block, block.block_offset(row_offset), out.view_mut());
        out.words
    };
    let expected = run(&definition::block_amax);
    on_each_level(|level| assert!(run(&super::block_amax) == expected, "{level:?}: {block:?}"));
}

/// A call of `rebase`. Codes and scales repeat the given bytes.
struct Rebasing<'a> {
    shape: (usize, usize),
    block: Block,
    axis: Axis,
    dtype: DType,
    codes: &'a [u8],
    scales: &'a [u8],
    /// Layouts of (the codes and the new scales, the old scales and the new codes).
    lays: (Lay, Lay),
}

impl Rebasing<'_> {
    fn check(&self) {
        let Self { block, axis, dtype, .. } = *self;
        let (rows, cols) = self.shape;
        let fill = |dtype, shape: (usize, usize), lay, bytes: &[u8]| {
            let mut buffer = Buffer::new(dtype, shape, lay);
            let view = buffer.view_mut();
            let m = view.matrix();
            for (i, (row, col)) in cells(shape.0, shape.1).enumerate() {
                put(&m, row, col, bytes[(i * 7 + row) % bytes.len()]);
            }
            buffer
        };
        let codes = fill(dtype, (rows, cols), self.lays.0, self.codes);
        let scales = fill(DType::E8m0, block.grid(rows, cols), self.lays.1, self.scales);
        let run = |f: &Rebase| {
            let shape = if axis == Axis::Columns { (cols, rows) } else { (rows, cols) };
            let mut out = Buffer::new(dtype, shape, self.lays.1);
            let mut scale_out = Buffer::new(DType::F32, (shape.0, 1), self.lays.0);
            f(codes.view(), scales.view(), block, axis, out.view_mut(), scale_out.view_mut());
            (out.words, scale_out.words)
        };
        let expected = run(&definition::rebase);
        on_each_level(|level| assert!(run(&super::rebase) == expected, "{level:?}: {block:?} {axis:?}"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]

    #[test]
    fn quantize_blocks_matches_the_definition(
        (input, row_offset) in input(),
        mut spec in spec(),
        dtype in fp8(),
        lays in (lay(), lay()),
        which in 0..3_usize,
        (amax, column_scale) in (any::<bool>(), any::<bool>()),
    ) {
        spec.row_offset = if spec.packed { row_offset / 32 * 32 } else { row_offset };
        let directions = [which != 1, which != 0];
        Quantization { input, spec, dtype, lays, directions, amax, column_scale }.check();
    }

    #[test]
    fn block_amax_matches_the_definition(
        (input, row_offset) in input(),
        rows in prop::sample::select(block_extents()),
        cols in prop::sample::select(block_extents()),
        out_lay in lay(),
    ) {
        check_block_amax(&input, row_offset, Block { rows, cols }, out_lay);
    }

    #[test]
    fn rebase_matches_the_definition(
        shape in (extent(), extent()),
        rows in prop::sample::select(vec![1_usize, 32]),
        axis in prop::sample::select(vec![Axis::Rows, Axis::Columns]),
        dtype in fp8(),
        codes in prop::collection::vec(any::<u8>(), 1..300),
        scales in prop::collection::vec(prop_oneof![8 => 100..130_u8, 1 => any::<u8>(), 1 => Just(255)], 1..50),
        lays in (lay(), lay()),
    ) {
        let block = Block { rows, cols: 32 };
        Rebasing { shape, block, axis, dtype, codes: &codes, scales: &scales, lays }.check();
    }
}

/// A shape above the threshold for threads that is not a multiple of a thread's piece.
const LARGE: (usize, usize) = (700, 513);

/// Values of many magnitudes, with a few special values.
fn large(dtype: DType, lay: Lay) -> Filled {
    let mut values: Vec<f32> =
        (0..997).map(|i: i32| (i - 498) as f32 * 2.0_f32.powi(i * 31 % 24 - 20)).collect();
    (values[300], values[600]) = (f32::NAN, f32::INFINITY);
    // Special values occur in few blocks only, because the bytes of other blocks are more informative.
    let values =
        [values.clone(), values.iter().map(|x| if x.is_finite() { *x } else { -0.5 }).collect::<Vec<_>>()]
            .concat();
    Filled { rows: LARGE.0, cols: LARGE.1, lay, dtype, values }
}

#[test]
fn quantize_blocks_over_threads_matches_the_definition() {
    let spec = |format: &BlockFormat, variant: bool, row_offset| {
        let scale = match format.scale_dtype {
            DType::E8m0 => BlockScale::E8m0(if variant { Rounding::Floor } else { Rounding::Ceil }),
            _ => BlockScale::F32(ScaleRule { power_of_2: variant, ..Default::default() }),
        };
        BlockSpec { block: format.block, scale, row_offset, packed: false, divide: false }
    };
    for format in &FORMATS {
        let mut cases = vec![(spec(format, false, 45), false), (spec(format, true, 77), false)];
        if format.scale_dtype == DType::E8m0 {
            cases.push((BlockSpec { packed: true, ..spec(format, true, 64) }, false));
        }
        if format.block == Block::ROW {
            cases.push((spec(format, true, 0), true));
            cases.push((BlockSpec { divide: true, ..spec(format, false, 0) }, false));
            cases.push((BlockSpec { divide: true, ..spec(format, false, 0) }, true));
        }
        for (spec, column_scale) in cases {
            for (dtype, lay) in [(DType::Bf16, Lay::Rows), (DType::F32, Lay::Columns)] {
                let (input, lays) = (large(dtype, lay), (Lay::Rows, Lay::Rows));
                let (dtype, directions, amax) = (DType::E4m3, [true, true], false);
                Quantization { input, spec, dtype, lays, directions, amax, column_scale }.check();
            }
        }
    }
}

#[test]
fn block_amax_over_threads_matches_the_definition() {
    let all = Block::ALL;
    for (rows, cols) in [(1, 32), (32, 32), (128, 128), (1, all), (all, 1), (32, 1), (all, all)] {
        for lay in [Lay::Rows, Lay::Columns] {
            check_block_amax(&large(DType::Bf16, lay), 45, Block { rows, cols }, Lay::Rows);
        }
    }
}

#[test]
fn rebase_over_threads_matches_the_definition() {
    let codes: Vec<u8> = (0..=255).collect();
    let scales: Vec<u8> = (0..41).map(|i| if i == 17 { 255 } else { 110 + i % 13 }).collect();
    for (rows, axis) in [(1, Axis::Rows), (32, Axis::Rows), (1, Axis::Columns), (32, Axis::Columns)] {
        for (dtype, lay) in [(DType::E4m3, Lay::Rows), (DType::E5m2, Lay::Columns)] {
            let block = Block { rows, cols: 32 };
            let lays = (lay, Lay::Rows);
            Rebasing { shape: LARGE, block, axis, dtype, codes: &codes, scales: &scales, lays }.check();
        }
    }
}

#[test]
fn pack_scales_over_threads_matches_the_layout() {
    for (lines, blocks, block_rows) in [(1000, 133, 1), (2001, 67, 32)] {
        let rows = usize::div_ceil(lines, block_rows);
        let compact: Vec<u8> = (0..rows * blocks).map(|i| (i * 7 + i / blocks) as u8).collect();
        let mut expected = vec![0_u8; packed::bytes(lines, blocks)];
        for (line, block) in cells(lines, blocks) {
            expected[packed::index(line, block, blocks)] = compact[line / block_rows * blocks + block];
        }
        let mut out = vec![0xAA; expected.len()];
        let scales = View::from_bytes(&compact, DType::E8m0, rows, blocks).unwrap();
        let to = ViewMut::from_bytes(&mut out, DType::E8m0, 1, expected.len()).unwrap();
        super::pack_scales(scales, lines, block_rows, to);
        assert!(out == expected);
    }
}
