//! Gated activations with quantization of their result and of their gradients.

use std::ptr::{null, null_mut};

use super::driver::{self, Grid, args, launch};
use super::fused::{FusedCast, current_scale};
use super::modules::{ByTypes, Kernel, Module, by_types, format_index, input_index, module};
use super::tensorwise::{Rule, StridedArgs};
use super::views::{ordinal, rows_aligned};
use super::workspace;
use crate::error::Error;
use crate::format::Fp8Format;
use crate::format::activation::Activation;
use crate::layout::{Matrix, View};
use crate::spec::{Glu, Stream, TensorPlanes};

/// What a launch computes (`Wanted` in `kernels/glu.cu`).
#[derive(Clone, Copy)]
#[repr(u32)]
enum Wanted {
    Product,
    GateGradient,
    UpGradient,
    BothGradients,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct FactorArgs {
    up: *const u8,
    dy: *const u8,
    up_rs: i64,
    up_cs: i64,
    dy_rs: i64,
    dy_cs: i64,
    gelu: u32,
    wanted: Wanted,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct GluScaleArgs {
    gate: *const u8,
    factors: FactorArgs,
    scale: *mut u8,
    up_scale: *mut u8,
    grid_max: *mut u8,
    rows: i64,
    cols: i64,
    gate_rs: i64,
    gate_cs: i64,
    rule: Rule,
    flags: u32,
}

/// Defined in `kernels/glu.cu`.
const VECTORS: u32 = 1;

#[derive(Clone, Copy)]
#[repr(C)]
struct GluCastArgs {
    cast: StridedArgs,
    factors: FactorArgs,
}

args!(GluScaleArgs, GluCastArgs);

static GLU_MODULE: Module = module!("glu");

static SCALE: ByTypes = by_types!(GLU_MODULE, "glu_scale", GluScaleArgs);
static CAST: ByTypes = by_types!(GLU_MODULE, "glu_cast", GluCastArgs);
static STRIDED: ByTypes = by_types!(GLU_MODULE, "glu_strided", GluCastArgs);

#[cfg(test)]
pub(super) fn kernels() -> Vec<&'static Kernel> {
    [&SCALE, &CAST, &STRIDED].into_iter().flatten().flatten().collect()
}

/// Number of blocks of `glu_scale` for each multiprocessor.
const BLOCKS: u64 = 8;

/// The inputs of the launches of one operation.
struct Launches<'a> {
    glu: &'a Glu<'a>,
    dy: Option<Matrix<'a>>,
    format: Fp8Format,
    stream: Stream,
    /// Whether the rows of all inputs are contiguous and aligned.
    vectors: bool,
}

impl<'a> Launches<'a> {
    fn new(glu: &'a Glu, dy: Option<View<'a>>, format: Fp8Format, stream: Stream) -> Self {
        let dy = dy.map(|dy| dy.matrix());
        let inputs = [Some(glu.gate.matrix()), Some(glu.up.matrix()), dy];
        let vectors = inputs.iter().flatten().all(|matrix| rows_aligned(matrix, 16));
        Self { glu, dy, format, stream, vectors }
    }

    fn device(&self) -> i32 {
        ordinal(self.glu.gate.device())
    }

    fn kernel(&self, kernels: &'static ByTypes) -> &'static Kernel {
        &kernels[input_index(self.glu.gate.dtype())][format_index(self.format)]
    }

    fn factors(&self, wanted: Wanted) -> FactorArgs {
        let up = self.glu.up.matrix();
        let strides = |matrix: &Matrix| (matrix.row_stride as i64, matrix.col_stride as i64);
        let (up_rs, up_cs) = strides(&up);
        let (dy_rs, dy_cs) = self.dy.as_ref().map_or((0, 0), strides);
        FactorArgs {
            up: up.ptr,
            dy: self.dy.map_or(null(), |dy| dy.ptr.cast_const()),
            up_rs,
            up_cs,
            dy_rs,
            dy_cs,
            gelu: u32::from(self.glu.activation == Activation::GeluTanh),
            wanted,
        }
    }

    /// Computes the scale of the product, or of both gradients.
    fn scales(&self, wanted: Wanted, planes: &[&TensorPlanes]) -> Result<(), Error> {
        // Either all or none of the planes have delayed scaling.
        let Some((scale, rule)) = current_scale(planes[0]) else { return Ok(()) };
        let up_scale = planes.get(1).map_or(null_mut(), |planes| planes.scale.ptr());
        let device = self.device();
        let gate = self.glu.gate.matrix();
        let (mut rows, mut cols, mut gate_cs) = (gate.rows, gate.cols, gate.col_stride as i64);
        let mut factors = self.factors(wanted);
        let all = [Some(gate), Some(self.glu.up.matrix()), self.dy];
        if all.iter().flatten().all(Matrix::is_contiguous) {
            // One row. The stride of a single column is arbitrary.
            (rows, cols, gate_cs) = (1, rows * cols, 1);
            factors = FactorArgs { up_cs: 1, dy_cs: 1, ..factors };
        }
        let args = GluScaleArgs {
            gate: gate.ptr,
            factors,
            scale,
            up_scale,
            grid_max: workspace::slots(device, self.stream, planes.len())?,
            rows: rows as i64,
            cols: cols as i64,
            gate_rs: gate.row_stride as i64,
            gate_cs,
            rule: rule.into(),
            flags: if self.vectors { VECTORS } else { 0 },
        };
        let vectors = rows as u64 * cols.div_ceil(16 / gate.dtype.size()) as u64;
        let most = BLOCKS * u64::from(driver::device(device)?.multiprocessors);
        let grid = Grid { blocks: vectors.div_ceil(256).clamp(1, most), threads: 256 };
        launch(device, self.stream, self.kernel(&SCALE), grid, &args)
    }

    /// Casts the product or one gradient.
    fn cast(&self, wanted: Wanted, planes: &TensorPlanes) -> Result<(), Error> {
        let cast = FusedCast::new(&self.glu.gate, planes, self.vectors, self.stream)?;
        let kernels = if cast.in_tiles { &CAST } else { &STRIDED };
        let args = GluCastArgs { cast: cast.args, factors: self.factors(wanted) };
        launch(self.device(), self.stream, self.kernel(kernels), cast.grid, &args)
    }
}

/// See `ops::quantize_glu`.
pub(crate) fn quantize_glu(
    glu: &Glu,
    format: Fp8Format,
    planes: &TensorPlanes,
    stream: Stream,
) -> Result<(), Error> {
    let launches = Launches::new(glu, None, format, stream);
    launches.scales(Wanted::Product, &[planes])?;
    launches.cast(Wanted::Product, planes)
}

/// See `ops::quantize_glu_backward`.
pub(crate) fn quantize_glu_backward(
    glu: &Glu,
    dy: View,
    format: Fp8Format,
    [gate, up]: [&TensorPlanes; 2],
    stream: Stream,
) -> Result<(), Error> {
    let launches = Launches::new(glu, Some(dy), format, stream);
    launches.scales(Wanted::BothGradients, &[gate, up])?;
    launches.cast(Wanted::GateGradient, gate)?;
    launches.cast(Wanted::UpGradient, up)
}
