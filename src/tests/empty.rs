//! Tensors without elements have a null data pointer in torch. No operation may form a slice from it.

use crate::format::activation::Activation;
use crate::format::e8m0::Rounding;
use crate::format::groups::padded_columns;
use crate::ops::{
    Axis, BlockInputs, BlockPlane, BlockScale, BlockSpec, Combine, CombineBackward, Gated, Groups, Numbers,
    Rotation, Routes,
};
use crate::{Block, BlockFormat, DType, Device, FORMATS, ScaleRule, Stream, View, ViewMut, ops};

/// A tensor whose pointer is null if it has no elements.
struct Owned {
    bytes: Vec<u64>,
    dtype: DType,
    shape: (usize, usize),
}

impl Owned {
    fn new(dtype: DType, rows: usize, cols: usize) -> Self {
        Self { bytes: vec![0; (rows * cols * dtype.size()).div_ceil(8)], dtype, shape: (rows, cols) }
    }

    fn ptr(&self) -> *mut u8 {
        if self.bytes.is_empty() { std::ptr::null_mut() } else { self.bytes.as_ptr().cast_mut().cast() }
    }

    fn view(&self) -> View<'_> {
        // SAFETY: the buffer has rows * cols elements, or the view has none.
        unsafe { View::from_raw(self.ptr(), self.dtype, Device::Cpu, self.shape, (self.shape.1 as isize, 1)) }
    }

    fn view_mut(&mut self) -> ViewMut<'_> {
        let ptr = if self.bytes.is_empty() { std::ptr::null_mut() } else { self.bytes.as_mut_ptr().cast() };
        // SAFETY: the buffer has rows * cols elements and is borrowed mutably, or the view has none.
        unsafe { ViewMut::from_raw(ptr, self.dtype, Device::Cpu, self.shape, (self.shape.1 as isize, 1)) }
    }
}

const SHAPES: [(usize, usize); 3] = [(0, 0), (0, 64), (64, 0)];

fn wide(rows: usize, cols: usize) -> Owned {
    Owned::new(DType::Bf16, rows, cols)
}

fn f32s(rows: usize, cols: usize) -> Owned {
    Owned::new(DType::F32, rows, cols)
}

fn codes(rows: usize, cols: usize) -> Owned {
    Owned::new(DType::E4m3, rows, cols)
}

fn plane<'a>(codes: &'a mut Owned, scales: &'a mut Owned) -> BlockPlane<'a> {
    BlockPlane { codes: codes.view_mut(), scales: scales.view_mut() }
}

#[test]
fn tensorwise() {
    for (rows, cols) in SHAPES {
        let x = wide(rows, cols);
        let (mut out, scale) = (f32s(1, 1), f32s(1, 1));
        let (mut row, mut col) = (codes(rows, cols), codes(cols, rows));
        ops::amax(x.view(), out.view_mut(), Stream::default()).unwrap();
        let (rowwise, columnwise) = (Some(row.view_mut()), Some(col.view_mut()));
        ops::quantize(x.view(), scale.view(), rowwise, columnwise, Stream::default()).unwrap();
        let rule = ScaleRule::default();
        let (rowwise, columnwise) = (Some(row.view_mut()), Some(col.view_mut()));
        ops::quantize_current(x.view(), rule, out.view_mut(), rowwise, columnwise, Stream::default())
            .unwrap();
        ops::multi_quantize(&[x.view()], scale.view(), &[row.view_mut()], Stream::default()).unwrap();
        ops::multi_rescale(
            &[row.view_mut()],
            f32s(1, usize::from(cols > 0)).view(),
            f32s(1, usize::from(cols > 0)).view(),
            cols.max(1),
            Stream::default(),
        )
        .unwrap();
        ops::transpose(row.view(), col.view_mut(), Stream::default()).unwrap();
        ops::dequantize(
            row.view(),
            scale.view(),
            Block::TENSOR,
            wide(rows, cols).view_mut(),
            Stream::default(),
        )
        .unwrap();
        let numbers = Numbers { seed: 0, offset: 0, stream: 0, step: None };
        ops::random_uniform(wide(rows, cols).view_mut(), numbers, (0.0, 1.0), Stream::default()).unwrap();
        if rows > 0 {
            ops::sum_rows(f32s(1, cols).view_mut(), x.view(), 1.0, Stream::default()).unwrap();
        }
    }
}

#[test]
fn blocks() {
    for BlockFormat { block, scale_dtype, .. } in FORMATS {
        let scale = match scale_dtype {
            DType::E8m0 => BlockScale::E8m0(Rounding::Ceil),
            _ => BlockScale::F32(ScaleRule::default()),
        };
        for (rows, cols) in SHAPES {
            let x = wide(rows, cols);
            let spec = BlockSpec { block, scale, row_offset: 0, packed: false, divide: false };
            let [(down, across), (down_t, across_t)] = spec.grids(rows, cols);
            let (mut row, mut row_scale) = (codes(rows, cols), Owned::new(scale_dtype, down, across));
            let (mut col, mut col_scale) = (codes(cols, rows), Owned::new(scale_dtype, down_t, across_t));
            let planes = (Some(plane(&mut row, &mut row_scale)), Some(plane(&mut col, &mut col_scale)));
            ops::quantize_blocks(
                x.view(),
                spec,
                BlockInputs::default(),
                planes.0,
                planes.1,
                Stream::default(),
            )
            .unwrap();
            ops::block_amax(x.view(), block, 0, f32s(down, across).view_mut(), Stream::default()).unwrap();
            let mut out = wide(rows, cols);
            ops::dequantize(row.view(), row_scale.view(), block, out.view_mut(), Stream::default()).unwrap();
            if scale_dtype == DType::E8m0 {
                for (axis, (lines, length)) in [(Axis::Rows, (rows, cols)), (Axis::Columns, (cols, rows))] {
                    let (mut out, mut scales) = (codes(lines, length), f32s(lines, 1));
                    let (to, to_scale) = (out.view_mut(), scales.view_mut());
                    ops::rebase(row.view(), row_scale.view(), block, axis, to, to_scale, Stream::default())
                        .unwrap();
                }
            }
        }
    }
}

#[test]
fn groups() {
    for (rows, cols) in SHAPES {
        for count in [0, 2] {
            let (ends, columns) = (Owned::new(DType::I32, 1, count), padded_columns(rows, count));
            let groups = Groups { ends: ends.view(), padded_ends: ends.view() };
            let rule = ScaleRule::default();
            let (mut row, mut row_scale) = (codes(rows, cols), f32s(rows, 1));
            let (mut col, mut col_scale) = (codes(cols, columns), f32s(count, cols));
            let x = wide(rows, cols);
            let planes = (Some(plane(&mut row, &mut row_scale)), Some(plane(&mut col, &mut col_scale)));
            ops::quantize_groups(x.view(), None, groups, rule, planes.0, planes.1, Stream::default())
                .unwrap();
            ops::zero_tail(wide(rows, cols).view_mut(), ends.view(), Stream::default()).unwrap();

            let (h, dy) = (wide(rows, cols), wide(rows, cols / 2));
            for dy in [None, Some(dy.view())] {
                let width = if dy.is_some() { cols } else { cols / 2 };
                let (mut row, mut values) = (codes(rows, width), wide(rows, width));
                let gated =
                    Gated { h: h.view(), dy, activation: Activation::Silu, values: values.view_mut() };
                let rowwise = Some(plane(&mut row, &mut row_scale));
                ops::quantize_gated(gated, groups, rule, rowwise, None, Stream::default()).unwrap();
            }
        }
    }
}

#[test]
fn routes() {
    for (rows, count, k) in [(0, 2, 2), (0, 0, 0), (3, 0, 1)] {
        let row_experts = Owned::new(DType::I64, 1, rows);
        let mut row_pairs = Owned::new(DType::I64, 1, rows);
        (0..).zip(&mut row_pairs.bytes).for_each(|(i, pair)| *pair = i);
        let bounds = || Owned::new(DType::I32, 1, count);
        let (mut ends, mut padded_ends) = (bounds(), bounds());
        let (mut row_tokens, mut token_rows) =
            (Owned::new(DType::I64, 1, rows), Owned::new(DType::I64, 1, rows));
        let routes = Routes {
            row_experts: row_experts.view(),
            row_pairs: row_pairs.view(),
            k,
            ends: ends.view_mut(),
            padded_ends: padded_ends.view_mut(),
            row_tokens: row_tokens.view_mut(),
            token_rows: token_rows.view_mut(),
        };
        ops::route_rows(routes, Stream::default()).unwrap();
        assert_eq!(token_rows.bytes, (0..rows as u64).collect::<Vec<_>>());
    }
}

#[test]
fn rotation() {
    for (rows, cols) in SHAPES {
        let (x, angles) = (wide(rows, cols), f32s(rows, 8));
        let rotation = Rotation { x: x.view(), cos: angles.view(), sin: angles.view(), back: false };
        ops::rotate(rotation, wide(rows, cols).view_mut(), Stream::default()).unwrap();
    }
}

#[test]
fn combine() {
    for (tokens, k, cols) in [(0, 2, 8), (3, 0, 8), (3, 2, 0), (0, 0, 0)] {
        let mut token_rows = Owned::new(DType::I64, tokens, k);
        (0..).zip(&mut token_rows.bytes).for_each(|(i, index)| *index = i);
        let (rows, weights) = (wide(tokens * k, cols), f32s(tokens, k));
        let combine =
            Combine { rows: rows.view(), token_rows: token_rows.view(), weights: Some(weights.view()) };
        ops::combine_rows(combine, wide(tokens, cols).view_mut(), Stream::default()).unwrap();
        let grad = wide(tokens, cols);
        let (mut d_rows, mut d_weights) = (wide(tokens * k, cols), f32s(tokens, k));
        let backward = CombineBackward {
            grad: grad.view(),
            rows: Some(rows.view()),
            token_rows: token_rows.view(),
            weights: weights.view(),
            d_rows: Some(d_rows.view_mut()),
            d_weights: Some(d_weights.view_mut()),
        };
        ops::combine_rows_backward(backward, Stream::default()).unwrap();
    }
}
