//! The block operations element by element, from the definition, and tests of the fast ones against it.

use std::ops::Range;

use half::{bf16, f16};
use proptest::prelude::*;

use super::plane::Plane;
use crate::cpu::simd::{Level, set_simd};
use crate::format::e8m0::{self, Rounding};
use crate::format::{scale, wide};
use crate::layout::{Block, DType, Matrix, View, ViewMut, packed};
use crate::ops::{Axis, BlockCall, BlockPlane, BlockScale, BlockSpec, Given, ScaleRule};

fn cells(rows: usize, cols: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).flat_map(move |row| (0..cols).map(move |col| (row, col)))
}

fn load(m: &Matrix, row: usize, col: usize) -> f32 {
    match m.dtype {
        DType::F32 => m.read::<f32>(row, col),
        DType::F16 => wide::Wide::to_f32(m.read::<f16>(row, col)),
        DType::Bf16 => wide::Wide::to_f32(m.read::<bf16>(row, col)),
        other => unreachable!("{other}"),
    }
}

/// One direction.
fn quantize_plane(plane: &Plane) {
    let Plane { x, block, lead, codes, scales, format, .. } = plane;
    let value = |row: usize, col: usize| {
        let x = load(x, row, col);
        plane.fold.map_or(x, |fold| x * fold.read::<f32>(0, col))
    };
    let count = |n: usize, lead: usize, block: usize| match block {
        Block::ALL => 1,
        _ if n == 0 => 0,
        block => (lead + n).div_ceil(block),
    };
    let grid = (count(x.rows, lead.0, block.rows), count(x.cols, lead.1, block.cols));
    let inside = |i: usize, lead: usize, block: usize, n: usize| -> Range<usize> {
        if block == Block::ALL { 0..n } else { (i * block).max(lead) - lead..((i + 1) * block - lead).min(n) }
    };
    if plane.packed {
        for i in 0..scales.cols {
            scales.write(0, i, 0_u8);
        }
    }
    for (r, c) in cells(grid.0, grid.1) {
        let rows = inside(r, lead.0, block.rows, x.rows);
        let cols = inside(c, lead.1, block.cols, x.cols);
        let elements = || rows.clone().flat_map(|row| cols.clone().map(move |col| (row, col)));
        let amax = match plane.amax {
            Some(amax) => amax.read(r, c),
            None => wide::amax(elements().map(|(row, col)| value(row, col))),
        };
        let factor = match plane.scale {
            BlockScale::F32(rule) => {
                let scale = rule.scale(amax, *format);
                scales.write(r, c, scale);
                scale::reciprocal(scale)
            }
            BlockScale::E8m0(rounding) => {
                let byte = e8m0::from_amax(amax, *format, rounding);
                if plane.packed {
                    rows.clone().for_each(|row| scales.write(0, packed::index(row, c, grid.1), byte));
                } else {
                    scales.write(r, c, byte);
                }
                e8m0::reciprocal(byte)
            }
        };
        for (row, col) in elements() {
            codes.write(row, col, format.encode(value(row, col) * factor));
        }
    }
}

fn quantize_blocks(call: BlockCall) {
    Plane::of(&call).iter().flatten().for_each(quantize_plane);
}

fn block_amax(x: View, block: Block, lead: usize, out: ViewMut) {
    let (x, out) = (x.matrix(), out.matrix());
    cells(out.rows, out.cols).for_each(|(r, c)| out.write(r, c, 0.0_f32));
    for (row, col) in cells(x.rows, x.cols) {
        let (r, c) = ((row + lead) / block.rows, col / block.cols);
        out.write(r, c, wide::amax([load(&x, row, col), out.read::<f32>(r, c)]));
    }
}

fn rebase(codes: View, scales: View, block: Block, axis: Axis, out: ViewMut, scale_out: ViewMut) {
    let format = codes.dtype().fp8().expect("codes");
    let (mut codes, mut scales, mut block) = (codes.matrix(), scales.matrix(), block);
    if axis == Axis::Columns {
        (codes, scales, block) = (codes.transposed(), scales.transposed(), block.transposed());
    }
    for row in 0..codes.rows {
        let byte = |col: usize| scales.read::<u8>(row / block.rows, col / block.cols);
        let largest = (0..codes.cols).map(byte).filter(|&byte| byte != e8m0::NAN).max();
        let line = largest.unwrap_or(0).max(1);
        let mut counts = false;
        for col in 0..codes.cols {
            let value = format.decode(codes.read(row, col));
            counts |= byte(col) != e8m0::NAN && value.abs() > 0.0;
            let factor = match byte(col) {
                e8m0::NAN => f64::NAN,
                byte => 2.0_f64.powi(i32::from(byte) - i32::from(line)),
            };
            out.matrix().write(row, col, format.encode((f64::from(value) * factor) as f32));
        }
        scale_out.matrix().write(row, 0, if counts { e8m0::decode(line) } else { 1.0 });
    }
}

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
        // SAFETY: every layout stays inside the buffer, which has twice the elements.
        unsafe { View::from_raw(ptr, self.dtype, crate::Device::Cpu, self.shape, strides) }
    }

    fn view_mut(&mut self) -> ViewMut<'_> {
        let (start, strides) = self.place();
        let ptr = self.words.as_mut_ptr().cast::<u8>().wrapping_add(start * self.dtype.size());
        // SAFETY: as in `view`.
        unsafe { ViewMut::from_raw(ptr, self.dtype, crate::Device::Cpu, self.shape, strides) }
    }
}

/// Values of very different sizes, with specials.
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

/// What a buffer is filled with: these values again and again.
#[derive(Debug, Clone)]
struct Filled {
    rows: usize,
    cols: usize,
    lay: Lay,
    dtype: DType,
    values: Vec<f32>,
}

/// Shape, offset, element type and values by index; a few values only, so that a case is quick to make.
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
        let m = buffer.view_mut().matrix();
        for (i, (row, col)) in cells(self.rows, self.cols).enumerate() {
            // A stride that is prime to most lengths, so that neighbours differ from row to row.
            let x = self.values[(i * 7 + row) % self.values.len()];
            match self.dtype {
                DType::F32 => m.write(row, col, x),
                DType::F16 => m.write(row, col, f16::from_f32(x)),
                _ => m.write(row, col, bf16::from_f32(x)),
            }
        }
        buffer
    }
}

fn spec() -> impl Strategy<Value = BlockSpec> {
    let rounding = prop_oneof![Just(Rounding::Ceil), Just(Rounding::Floor)];
    let mx = (prop_oneof![Just(1_usize), Just(32)], rounding, any::<bool>()).prop_map(
        |(rows, rounding, packed)| BlockSpec {
            block: Block { rows, cols: 32 },
            scale: BlockScale::E8m0(rounding),
            row_offset: 0,
            packed,
        },
    );
    let blocks = [Block::ROW, Block { rows: 1, cols: 128 }, Block { rows: 128, cols: 128 }];
    let f32s = (prop::sample::select(blocks.to_vec()), any::<bool>(), prop_oneof![Just(0.0_f32), Just(1e-3)]);
    let f32s = f32s.prop_map(|(block, power_of_2, amax_epsilon)| {
        let rule = ScaleRule { power_of_2, amax_epsilon, margin: 0 };
        BlockSpec { block, scale: BlockScale::F32(rule), row_offset: 0, packed: false }
    });
    prop_oneof![mx, f32s]
}

fn fp8() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::E4m3), Just(DType::E5m2)]
}

fn levels() -> impl Iterator<Item = Level> {
    [Level::Scalar, Level::Avx2, Level::Avx512].into_iter().filter(|level| level.is_available())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]

    #[test]
    fn quantize_blocks_is_the_definition_on_every_level(
        (input, row_offset) in input(),
        mut spec in spec(),
        dtype in fp8(),
        (lay_row, lay_col) in (lay(), lay()),
        which in 0..3_usize,
        (use_amax, use_fold) in (any::<bool>(), any::<bool>()),
    ) {
        let x = input.fill();
        let (rows, cols) = x.shape;
        spec.row_offset = if spec.packed { row_offset / 32 * 32 } else { row_offset };
        let block = spec.block;
        let grid = block.grid_from(spec.row_offset, rows, cols);
        let along = Block { rows: block.cols, cols: block.rows }.grid_from(spec.row_offset, rows, cols);
        let grid_t = if block.is_square() { (grid.1, grid.0) } else { (along.1, along.0) };
        let amaxes = |grid: (usize, usize)| Filled {
            rows: grid.0, cols: grid.1, lay: Lay::Spread, dtype: DType::F32,
            // Some of them negative: they must not be, and count as 0.
            values: input.values.iter().enumerate().map(|(i, x)| if i % 8 == 7 { *x } else { x.abs() }).collect(),
        }.fill();
        let (amax, amax_t, fold) = (amaxes(grid), amaxes(grid_t), amaxes((1, cols)));
        let (rowwise, columnwise) = (which != 1, which != 0);
        let given = Given {
            amax: (use_amax && (rowwise || block.is_square())).then(|| amax.view()),
            amax_columnwise: (use_amax && columnwise && !block.is_square()).then(|| amax_t.view()),
            fold: (use_fold && rowwise && block == Block::ROW).then(|| fold.view()),
        };
        let scale_dtype = if matches!(spec.scale, BlockScale::F32(_)) { DType::F32 } else { DType::E8m0 };
        let scale_shape = |lines: usize, grid: (usize, usize)| {
            if spec.packed { (1, packed::bytes(lines, grid.1)) } else { grid }
        };
        let run = |f: &Quantize| {
            let mut codes = Buffer::new(dtype, (rows, cols), lay_row);
            let mut codes_t = Buffer::new(dtype, (cols, rows), lay_col);
            let scales_lay = if spec.packed { Lay::Rows } else { lay_col };
            let mut scales = Buffer::new(scale_dtype, scale_shape(rows, grid), scales_lay);
            let mut scales_t = Buffer::new(scale_dtype, scale_shape(cols, grid_t), scales_lay);
            f(BlockCall {
                x: x.view(),
                spec,
                format: dtype.fp8().unwrap(),
                given,
                rowwise: rowwise.then(|| BlockPlane { codes: codes.view_mut(), scales: scales.view_mut() }),
                columnwise: columnwise
                    .then(|| BlockPlane { codes: codes_t.view_mut(), scales: scales_t.view_mut() }),
            });
            [codes.words, codes_t.words, scales.words, scales_t.words]
        };
        let expected = run(&quantize_blocks);
        for level in levels() {
            set_simd(Some(level));
            let got = run(&super::quantize_blocks);
            set_simd(None);
            prop_assert!(got == expected, "{level:?}");
        }
    }

    #[test]
    fn block_amax_is_the_definition(
        (input, row_offset) in input(),
        block_rows in prop::sample::select(vec![1, 32, 128, Block::ALL]),
        block_cols in prop::sample::select(vec![1, 32, 128, Block::ALL]),
        out_lay in lay(),
    ) {
        let block = Block { rows: block_rows, cols: block_cols };
        let x = input.fill();
        let grid = block.grid_from(row_offset, x.shape.0, x.shape.1);
        let run = |f: &Amax| {
            let mut out = Buffer::new(DType::F32, grid, out_lay);
            f(x.view(), block, block.lead(row_offset), out.view_mut());
            out.words
        };
        prop_assert_eq!(run(&block_amax), run(&super::block_amax));
    }

    #[test]
    fn rebase_is_the_definition(
        (rows, cols) in (extent(), extent()),
        block_rows in prop::sample::select(vec![1_usize, 32]),
        columns in any::<bool>(),
        dtype in fp8(),
        bytes in prop::collection::vec(any::<u8>(), 1..300),
        scale_bytes in prop::collection::vec(prop_oneof![8 => 100..130_u8, 1 => any::<u8>(), 1 => Just(255)], 1..50),
        (in_lay, out_lay) in (lay(), lay()),
    ) {
        let block = Block { rows: block_rows, cols: 32 };
        let axis = if columns { Axis::Columns } else { Axis::Rows };
        let fill = |dtype, shape: (usize, usize), lay, bytes: &[u8]| {
            let mut buffer = Buffer::new(dtype, shape, lay);
            let m = buffer.view_mut().matrix();
            for (i, (row, col)) in cells(shape.0, shape.1).enumerate() {
                m.write(row, col, bytes[(i * 7 + row) % bytes.len()]);
            }
            buffer
        };
        let codes = fill(dtype, (rows, cols), in_lay, &bytes);
        let scales = fill(DType::E8m0, block.grid(rows, cols), out_lay, &scale_bytes);
        let run = |f: &Rebase| {
            let shape = if columns { (cols, rows) } else { (rows, cols) };
            let mut out = Buffer::new(dtype, shape, out_lay);
            let mut scale_out = Buffer::new(DType::F32, (shape.0, 1), in_lay);
            f(codes.view(), scales.view(), block, axis, out.view_mut(), scale_out.view_mut());
            (out.words, scale_out.words)
        };
        prop_assert_eq!(run(&rebase), run(&super::rebase));
    }
}
