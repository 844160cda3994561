//! The block operations element by element, from the definition.

use std::ops::Range;

use half::{bf16, f16};

use super::plane::Plane;
use crate::format::{e8m0, scale, wide};
use crate::layout::{Block, DType, Matrix, View, ViewMut, packed};
use crate::ops::{Axis, BlockCall, BlockScale};

pub(super) fn cells(rows: usize, cols: usize) -> impl Iterator<Item = (usize, usize)> {
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

pub(super) fn quantize_blocks(call: BlockCall) {
    Plane::of(&call).iter().flatten().for_each(quantize_plane);
}

pub(super) fn block_amax(x: View, block: Block, lead: usize, out: ViewMut) {
    let (x, out) = (x.matrix(), out.matrix());
    cells(out.rows, out.cols).for_each(|(r, c)| out.write(r, c, 0.0_f32));
    for (row, col) in cells(x.rows, x.cols) {
        let (r, c) = ((row + lead) / block.rows, col / block.cols);
        out.write(r, c, wide::amax([load(&x, row, col), out.read::<f32>(r, c)]));
    }
}

pub(super) fn rebase(codes: View, scales: View, block: Block, axis: Axis, out: ViewMut, scale_out: ViewMut) {
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
