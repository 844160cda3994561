//! Matrices of any layout for tests, and reference operations written from the definition.

use crate::format::wide::{INF_BITS, NAN_BITS, Wide};
use crate::format::{Fp8Format, e8m0};
use crate::{Block, DType, Device, View, ViewMut};
use half::{bf16, f16};
use proptest::prelude::*;

/// Runs `check` with each instruction set that this CPU supports.
pub(crate) fn on_each_level(mut check: impl FnMut()) {
    crate::cpu::on_each_level(|_| check());
}

/// The layout of a matrix in memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Layout {
    Dense,
    /// Rows with a gap after them.
    Padded,
    Transposed,
    /// Transposed, with a gap after each column.
    TransposedPadded,
    /// Every second element of a larger matrix, in both directions.
    Sparse,
    /// One row that is repeated (inputs only).
    BroadcastRow,
    /// One element per row that is repeated (inputs only).
    BroadcastElement,
}

impl Layout {
    pub(crate) const OUTPUTS: [Self; 5] =
        [Self::Dense, Self::Padded, Self::Transposed, Self::TransposedPadded, Self::Sparse];

    pub(crate) fn strides(self, rows: usize, cols: usize) -> (isize, isize) {
        let (rows, cols) = (rows as isize, cols as isize);
        match self {
            Self::Dense => (cols, 1),
            Self::Padded => (cols + 3, 1),
            Self::Transposed => (1, rows),
            Self::TransposedPadded => (1, rows + 5),
            Self::Sparse => (4 * cols, 2),
            Self::BroadcastRow => (0, 1),
            Self::BroadcastElement => (1, 0),
        }
    }
}

/// A matrix with its own memory. It starts `offset` elements into an allocation. Memory that belongs to no
/// element is filled with canaries.
#[derive(Debug, Clone)]
pub(crate) struct Owned {
    pub(crate) bytes: Vec<u64>,
    pub(crate) dtype: DType,
    pub(crate) shape: (usize, usize),
    pub(crate) layout: Layout,
    pub(crate) offset: usize,
}

const CANARY: u64 = 0xA5A5_A5A5_A5A5_A5A5;

impl Owned {
    pub(crate) fn new(dtype: DType, shape: (usize, usize), layout: Layout, offset: usize) -> Self {
        let (row_stride, col_stride) = layout.strides(shape.0, shape.1);
        let last = |n: usize, stride: isize| n.saturating_sub(1) * stride.unsigned_abs();
        let elements = offset + last(shape.0, row_stride) + last(shape.1, col_stride) + 1;
        Self { bytes: vec![CANARY; (elements * dtype.size()).div_ceil(8) + 1], dtype, shape, layout, offset }
    }

    pub(crate) fn dense(dtype: DType, shape: (usize, usize)) -> Self {
        Self::new(dtype, shape, Layout::Dense, 0)
    }

    fn index(&self, row: usize, col: usize) -> usize {
        let (row_stride, col_stride) = self.layout.strides(self.shape.0, self.shape.1);
        self.offset + row * row_stride as usize + col * col_stride as usize
    }

    pub(crate) fn get<T: Copy>(&self, row: usize, col: usize) -> T {
        assert_eq!(size_of::<T>(), self.dtype.size());
        // SAFETY: the allocation contains the element at every index of the matrix.
        unsafe { self.bytes.as_ptr().cast::<T>().add(self.index(row, col)).read() }
    }

    pub(crate) fn set<T: Copy>(&mut self, row: usize, col: usize, value: T) {
        assert_eq!(size_of::<T>(), self.dtype.size());
        let index = self.index(row, col);
        // SAFETY: the allocation contains the element at every index of the matrix.
        unsafe { self.bytes.as_mut_ptr().cast::<T>().add(index).write(value) }
    }

    pub(crate) fn cells(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (rows, cols) = self.shape;
        (0..rows).flat_map(move |row| (0..cols).map(move |col| (row, col)))
    }

    /// Fills the matrix from random bits. Most values are in the range of the formats.
    pub(crate) fn random(mut self, seed: u64) -> Self {
        let mut random = Random(seed);
        for (row, col) in self.cells() {
            let bits = random.next();
            match self.dtype {
                DType::F32 => self.set(row, col, random_f32(bits)),
                DType::Bf16 => self.set(row, col, (random_f32(bits).to_bits() >> 16) as u16),
                DType::F16 => self.set(row, col, bits as u16),
                _ => self.set(row, col, bits as u8),
            }
        }
        self
    }

    pub(crate) fn view(&self) -> View<'_> {
        let strides = self.layout.strides(self.shape.0, self.shape.1);
        let ptr = self.bytes.as_ptr().cast::<u8>().wrapping_add(self.offset * self.dtype.size());
        // SAFETY: the allocation contains all elements and is borrowed.
        unsafe { View::from_raw(ptr, self.dtype, Device::Cpu, self.shape, strides) }
    }

    pub(crate) fn view_mut(&mut self) -> ViewMut<'_> {
        let strides = self.layout.strides(self.shape.0, self.shape.1);
        let ptr = self.bytes.as_mut_ptr().cast::<u8>().wrapping_add(self.offset * self.dtype.size());
        // SAFETY: the allocation contains all elements and is borrowed mutably.
        unsafe { ViewMut::from_raw(ptr, self.dtype, Device::Cpu, self.shape, strides) }
    }

    /// Returns the value of an element according to the format definitions.
    pub(crate) fn value(&self, row: usize, col: usize) -> f32 {
        match self.dtype {
            DType::F32 => self.get(row, col),
            DType::F16 => Wide::to_f32(self.get::<f16>(row, col)),
            DType::Bf16 => Wide::to_f32(self.get::<bf16>(row, col)),
            DType::E4m3 => Fp8Format::E4m3.decode(self.get(row, col)),
            DType::E5m2 => Fp8Format::E5m2.decode(self.get(row, col)),
            DType::E8m0 => e8m0::decode(self.get(row, col)),
            DType::I32 => self.get::<i32>(row, col) as f32,
            DType::I64 => self.get::<i64>(row, col) as f32,
            DType::U8 => self.get::<u8>(row, col).into(),
        }
    }
}

/// Reference implementation of [`crate::ops::amax`].
pub(crate) fn amax(x: &Owned) -> f32 {
    let bits = x.cells().map(|(row, col)| x.value(row, col).to_bits() & 0x7FFF_FFFF).max().unwrap_or(0);
    f32::from_bits(if bits > INF_BITS { NAN_BITS } else { bits })
}

/// Reference implementation of a cast with a given scale to a rowwise output.
pub(crate) fn cast(x: &Owned, scale: f32, out: &mut Owned) {
    let format = out.dtype.fp8().unwrap();
    let q = 1.0 / scale;
    for (row, col) in x.cells() {
        out.set(row, col, format.encode(x.value(row, col) * q));
    }
}

/// Reference implementation of a cast with a given scale to a columnwise output.
pub(crate) fn cast_transposed(x: &Owned, scale: f32, out: &mut Owned) {
    let format = out.dtype.fp8().unwrap();
    let q = 1.0 / scale;
    for (row, col) in x.cells() {
        out.set(col, row, format.encode(x.value(row, col) * q));
    }
}

/// Reference implementation of [`crate::ops::dequantize`].
pub(crate) fn dequantize(codes: &Owned, scale: &Owned, block: Block, out: &mut Owned) {
    for (row, col) in codes.cells() {
        let value = codes.value(row, col) * scale.value(row / block.rows, col / block.cols);
        match out.dtype {
            DType::F32 => out.set(row, col, <f32 as Wide>::from_f32(value)),
            DType::F16 => out.set(row, col, <f16 as Wide>::from_f32(value)),
            _ => out.set(row, col, <bf16 as Wide>::from_f32(value)),
        }
    }
}

/// A small random number generator (xorshift64*), so that a seed determines all values.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(0x1234_5678_9ABC_DEF1);
        let x = self.0 ^ (self.0 >> 29);
        x.wrapping_mul(0xBF58_476D_1CE4_E5B9) ^ (x >> 31)
    }
}

/// Returns a value that is usually near the range of the formats, including ties, and occasionally any bit
/// pattern.
fn random_f32(bits: u64) -> f32 {
    let (low, high) = (bits as u32, (bits >> 32) as u32);
    match high % 64 {
        0 => f32::from_bits(low),
        1 => f32::from_bits(low & 0x807F_FFFF),
        2..16 => f32::from_bits((low & 0x80F8_0000) | (110 + high / 64 % 30) << 23),
        _ => f32::from_bits((low & 0x807F_FFFF) | (105 + high / 64 % 35) << 23),
    }
}

pub(crate) fn wide_dtype() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::Bf16), Just(DType::F16)]
}

pub(crate) fn fp8_dtype() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::E4m3), Just(DType::E5m2)]
}

/// Sizes around the vector and tile sizes, including 0.
pub(crate) fn size() -> impl Strategy<Value = usize> {
    prop_oneof![0_usize..4, 0_usize..140, Just(64), 500_usize..530]
}

pub(crate) fn shape() -> impl Strategy<Value = (usize, usize)> {
    (size(), size())
        .prop_map(|(rows, cols)| if rows * cols > 70_000 { (rows / 8, cols) } else { (rows, cols) })
}

pub(crate) fn output_layout() -> impl Strategy<Value = Layout> {
    proptest::sample::select(&Layout::OUTPUTS[..])
}

pub(crate) fn input_layout() -> impl Strategy<Value = Layout> {
    prop_oneof![4 => output_layout(), 1 => Just(Layout::BroadcastRow), 1 => Just(Layout::BroadcastElement)]
}

pub(crate) fn scale() -> impl Strategy<Value = f32> {
    prop_oneof![
        6 => 0.001_f32..100.0,
        1 => Just(1.0_f32),
        1 => Just(f32::from_bits(0x0080_0000)),
        1 => Just(f32::NAN),
        1 => any::<f32>(),
    ]
}
