//! The block operations element by element, written from the definition.
//!
//! This module shares only the formats (`crate::format`, which are part of the definition) and the argument
//! types with the code that it tests. Block indices, block counts, packed positions and the start of the
//! columnwise plane are computed independently, from the whole matrix that `x` is a part of.

use half::{bf16, f16};

use crate::format::{Fp8Format, e8m0, scale, wide};
use crate::layout::{Block, DType, Matrix, View, ViewMut};
use crate::spec::{Axis, BlockCall, BlockPlane, BlockScale, BlockSpec};

pub(super) fn cells(rows: usize, cols: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).flat_map(move |row| (0..cols).map(move |col| (row, col)))
}

/// Returns the address of an element, computed from the view's fields.
fn at(m: &Matrix, row: usize, col: usize) -> *mut u8 {
    assert!(row < m.rows && col < m.cols, "({row}, {col}) is outside");
    let elements = row as isize * m.row_stride + col as isize * m.col_stride;
    m.ptr.wrapping_offset(elements * m.dtype.size() as isize)
}

pub(super) fn get<T: Copy>(m: &Matrix, row: usize, col: usize) -> T {
    assert_eq!(size_of::<T>(), m.dtype.size());
    // SAFETY: the assertions check the position and the size, and the view is alive in the test.
    unsafe { at(m, row, col).cast::<T>().read() }
}

pub(super) fn put<T: Copy>(m: &Matrix, row: usize, col: usize, value: T) {
    assert_eq!(size_of::<T>(), m.dtype.size());
    // SAFETY: the assertions check the position and the size, and the view is alive in the test and writable.
    unsafe { at(m, row, col).cast::<T>().write(value) }
}

fn load(m: &Matrix, row: usize, col: usize) -> f32 {
    match m.dtype {
        DType::F32 => get::<f32>(m, row, col),
        DType::F16 => wide::Wide::to_f32(get::<f16>(m, row, col)),
        DType::Bf16 => wide::Wide::to_f32(get::<bf16>(m, row, col)),
        other => unreachable!("{other}"),
    }
}

/// Returns the block that contains element `i` of a dimension, counted from the block of element 0. Element 0
/// has index `first` in the whole matrix.
fn block_of(i: usize, first: usize, size: usize) -> usize {
    if size == Block::ALL { 0 } else { (first + i) / size - first / size }
}

/// Returns the number of blocks that `n` elements touch. A block of the whole extent counts as one even if
/// the extent is 0.
fn blocks(n: usize, first: usize, size: usize) -> usize {
    if size == Block::ALL {
        1
    } else if n == 0 {
        0
    } else {
        block_of(n - 1, first, size) + 1
    }
}

/// Returns the position of a scale in the packed layout. The layout has row-major tiles of 128x4 scales. A
/// tile is 32 rows of 16 bytes, and the four scales of row r of the tile are at (r % 32, r / 32 * 4).
fn packed_at(row: usize, block: usize, blocks: usize) -> usize {
    let tiles_across = blocks.div_ceil(4);
    let tile = (row / 128) * tiles_across + block / 4;
    let (in_row, in_col) = (row % 128, block % 4);
    tile * 512 + (in_row % 32) * 16 + (in_row / 32) * 4 + in_col
}

/// One direction of a quantization. `value` returns the elements of the plane's matrix, which starts at
/// `first` in the whole matrix.
struct Direction<'a> {
    shape: (usize, usize),
    first: (usize, usize),
    value: &'a dyn Fn(usize, usize) -> f32,
    amax: Option<Matrix<'a>>,
    /// Whether elements are divided by their scale.
    divide: bool,
}

fn quantize_plane(direction: &Direction, spec: &BlockSpec, format: Fp8Format, plane: &BlockPlane) {
    let Direction { shape: (rows, cols), first, value, amax, divide } = *direction;
    let (codes, scales) = (plane.codes.matrix(), plane.scales.matrix());
    let Block { rows: down, cols: across } = spec.block;
    let grid = (blocks(rows, first.0, down), blocks(cols, first.1, across));
    if spec.packed {
        (0..scales.cols).for_each(|i| put(&scales, 0, i, 0_u8));
    }
    // The elements of each block.
    let mut members = vec![Vec::new(); grid.0 * grid.1];
    for (row, col) in cells(rows, cols) {
        let block = block_of(row, first.0, down) * grid.1 + block_of(col, first.1, across);
        members[block].push((row, col));
    }
    for ((r, c), members) in cells(grid.0, grid.1).zip(members) {
        let amax = match amax {
            Some(amax) => get(&amax, r, c),
            None => wide::amax(members.iter().map(|(row, col)| value(*row, *col))),
        };
        let mut divisor = None;
        let factor = match spec.scale {
            BlockScale::F32(rule) => {
                let scale = rule.scale(amax, format);
                put(&scales, r, c, scale);
                divisor = divide.then_some(scale);
                scale::reciprocal(scale)
            }
            BlockScale::E8m0(rounding) => {
                let byte = e8m0::from_amax(amax, format, rounding);
                if spec.packed {
                    for (row, _) in &members {
                        put(&scales, 0, packed_at(*row, c, grid.1), byte);
                    }
                } else {
                    put(&scales, r, c, byte);
                }
                e8m0::reciprocal(byte)
            }
        };
        for (row, col) in members {
            let x = value(row, col);
            put(&codes, row, col, format.encode(divisor.map_or(x * factor, |scale| x / scale)));
        }
    }
}

pub(super) fn quantize_blocks(call: BlockCall) {
    let BlockCall { x, spec, format, inputs, rowwise, columnwise } = call;
    let (x, column_scale) = (x.matrix(), inputs.column_scale.map(|column_scale| column_scale.matrix()));
    let square = spec.block.rows == spec.block.cols;
    let amax = inputs.amax.map(|amax| amax.matrix());
    if let Some(plane) = rowwise {
        let value = |row, col| {
            let x = load(&x, row, col);
            column_scale.map_or(x, |column_scale| x * get::<f32>(&column_scale, 0, col))
        };
        let (shape, first) = ((x.rows, x.cols), (spec.row_offset, 0));
        let direction = Direction { shape, first, value: &value, amax, divide: spec.divide };
        quantize_plane(&direction, &spec, format, &plane);
    }
    if let Some(plane) = columnwise {
        // The transposed matrix. Its columns are the rows of x, so they start inside the whole matrix.
        let value = |row, col| load(&x, col, row);
        let transposed = amax
            .map(|m| Matrix::new(m.ptr, m.dtype, m.device, (m.cols, m.rows), (m.col_stride, m.row_stride)));
        let amax = if square { transposed } else { inputs.amax_columnwise.map(|amax| amax.matrix()) };
        let (shape, first) = ((x.cols, x.rows), (0, spec.row_offset));
        let direction = Direction { shape, first, value: &value, amax, divide: false };
        quantize_plane(&direction, &spec, format, &plane);
    }
}

pub(super) fn block_amax(x: View, block: Block, block_offset: usize, out: ViewMut) {
    let (x, out) = (x.matrix(), out.matrix());
    cells(out.rows, out.cols).for_each(|(r, c)| put(&out, r, c, 0.0_f32));
    for (row, col) in cells(x.rows, x.cols) {
        let (r, c) = (block_of(row, block_offset, block.rows), block_of(col, 0, block.cols));
        put(&out, r, c, wide::amax([load(&x, row, col), get::<f32>(&out, r, c)]));
    }
}

pub(super) fn rebase(codes: View, scales: View, block: Block, axis: Axis, out: ViewMut, scale_out: ViewMut) {
    let format = codes.dtype().fp8().expect("codes");
    let (codes, scales, out, scale_out) = (codes.matrix(), scales.matrix(), out.matrix(), scale_out.matrix());
    // Process one line (a row or a column) after the other.
    let (lines, length) =
        if axis == Axis::Rows { (codes.rows, codes.cols) } else { (codes.cols, codes.rows) };
    let place = |line, i| if axis == Axis::Rows { (line, i) } else { (i, line) };
    for line in 0..lines {
        let byte = |i: usize| {
            let (row, col) = place(line, i);
            get::<u8>(&scales, row / block.rows, col / block.cols)
        };
        let largest = (0..length).map(byte).filter(|&byte| byte != e8m0::NAN).max();
        let base = largest.unwrap_or(0).max(1);
        let mut counts = false;
        for i in 0..length {
            let (row, col) = place(line, i);
            let value = format.decode(get(&codes, row, col));
            counts |= byte(i) != e8m0::NAN && value.abs() > 0.0;
            let factor = match byte(i) {
                e8m0::NAN => f64::NAN,
                byte => 2.0_f64.powi(i32::from(byte) - i32::from(base)),
            };
            put(&out, line, i, format.encode((f64::from(value) * factor) as f32));
        }
        put(&scale_out, line, 0, if counts { e8m0::decode(base) } else { 1.0 });
    }
}

#[test]
fn packed_at_matches_the_specification() {
    // (r / 128, c / 4) tiles of (32, 16), with positions worked out by hand.
    assert_eq!([packed_at(0, 1, 8), packed_at(1, 0, 8), packed_at(32, 0, 8)], [1, 16, 4]);
    assert_eq!([packed_at(0, 4, 8), packed_at(128, 0, 5), packed_at(127, 3, 4)], [512, 1024, 511]);
}
