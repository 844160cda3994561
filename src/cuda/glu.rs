//! Gated activations with quantization of their result and of their gradients.

use std::ptr::{null, null_mut};

use super::driver::{self, Grid, args, launch};
use super::modules::{ByTypes, Module, by_types, format_index, input_index, module};
use super::tensorwise::{self, Delayed, Rule, StridedArgs, tile_grid, tiles_across, tiles_are_supported};
use super::views::{aligned, ordinal, rows_aligned};
use super::workspace;
use crate::error::Error;
use crate::format::Fp8Format;
use crate::format::activation::Activation;
use crate::layout::{Matrix, View, ViewMut};
use crate::spec::{Glu, Scaling, Stream, TensorPlanes};

#[derive(Clone, Copy)]
#[repr(C)]
struct GluArgs {
    gate: *const u8,
    up: *const u8,
    dy: *const u8,
    values: *mut u8,
    up_values: *mut u8,
    scale: *mut u8,
    up_scale: *mut u8,
    grid_max: *mut u8,
    rows: i64,
    cols: i64,
    gate_rs: i64,
    gate_cs: i64,
    up_rs: i64,
    up_cs: i64,
    dy_rs: i64,
    dy_cs: i64,
    rule: Rule,
    gelu: u32,
    flags: u32,
    unused: u32,
}

/// Defined in `kernels/glu.cu`.
const VECTORS: u32 = 1;

#[derive(Clone, Copy)]
#[repr(C)]
struct GluCastArgs {
    cast: StridedArgs,
    up_cast: StridedArgs,
    dy: *const u8,
    dy_rs: i64,
    gelu: u32,
    unused: u32,
}

args!(GluArgs, GluCastArgs);

static GLU_MODULE: Module = module!("glu");

static GLU: ByTypes = by_types!(GLU_MODULE, "glu", GluArgs);
static GLU_GRADIENTS: ByTypes = by_types!(GLU_MODULE, "glu_gradients", GluArgs);
static GLU_CAST: ByTypes = by_types!(GLU_MODULE, "glu_cast", GluCastArgs);
static GLU_CAST_GRADIENTS: ByTypes = by_types!(GLU_MODULE, "glu_cast_gradients", GluCastArgs);

#[cfg(test)]
pub(super) fn kernels() -> Vec<&'static super::modules::Kernel> {
    [&GLU, &GLU_GRADIENTS, &GLU_CAST, &GLU_CAST_GRADIENTS].into_iter().flatten().flatten().collect()
}

const THREADS: u32 = 256;

/// Largest number of blocks for each multiprocessor.
const BLOCKS: u64 = 8;

/// Computes the product, or with `dy` the gradients of gate and up, into `values`, and quantizes each into its
/// planes. All planes have the same rule, and either all or none of them have delayed scaling.
fn quantize(
    glu: &Glu,
    dy: Option<View>,
    values: &[ViewMut],
    format: Fp8Format,
    planes: &[&TensorPlanes],
    stream: Stream,
) -> Result<(), Error> {
    if cast_in_tiles(glu, dy.as_ref(), format, planes, stream)? {
        return Ok(());
    }

    let device = ordinal(glu.gate.device());
    let mut gate = glu.gate.matrix();
    let mut up = glu.up.matrix();
    let mut dy = dy.map(|dy| dy.matrix());
    if gate.is_contiguous() && up.is_contiguous() && dy.as_ref().is_none_or(Matrix::is_contiguous) {
        // One row, of which only the beginning has to be aligned.
        gate = gate.flat();
        up = up.flat();
        dy = dy.map(Matrix::flat);
    }
    let outputs_are_aligned = gate.rows <= 1 || (gate.cols * gate.dtype.size()).is_multiple_of(16);
    let vectors = outputs_are_aligned
        && rows_aligned(&gate, 16)
        && rows_aligned(&up, 16)
        && dy.as_ref().is_none_or(|dy| rows_aligned(dy, 16))
        && values.iter().all(|values| aligned(values.ptr(), 16));

    let mut args = GluArgs {
        gate: gate.ptr.cast_const(),
        up: up.ptr.cast_const(),
        dy: dy.map_or(null(), |dy| dy.ptr.cast_const()),
        values: values[0].ptr(),
        up_values: values.get(1).map_or(null_mut(), ViewMut::ptr),
        scale: null_mut(),
        up_scale: null_mut(),
        grid_max: null_mut(),
        rows: gate.rows as i64,
        cols: gate.cols as i64,
        gate_rs: gate.row_stride as i64,
        gate_cs: gate.col_stride as i64,
        up_rs: up.row_stride as i64,
        up_cs: up.col_stride as i64,
        dy_rs: dy.map_or(0, |dy| dy.row_stride as i64),
        dy_cs: dy.map_or(0, |dy| dy.col_stride as i64),
        rule: planes[0].rule.into(),
        gelu: u32::from(glu.activation == Activation::GeluTanh),
        flags: if vectors { VECTORS } else { 0 },
        unused: 0,
    };
    let scales_are_given = planes[0].delayed.is_some();
    if !scales_are_given {
        args.scale = planes[0].scale.ptr();
        args.up_scale = planes.get(1).map_or(null_mut(), |planes| planes.scale.ptr());
        args.grid_max = workspace::slots(device, stream, planes.len())?;
    }
    let vectors_per_row = gate.cols.div_ceil(16 / gate.dtype.size()) as u64;
    let max_blocks = BLOCKS * u64::from(driver::device(device)?.multiprocessors);
    // At least one block, because the scales of empty tensors are written too.
    let blocks = (gate.rows as u64 * vectors_per_row).div_ceil(u64::from(THREADS)).clamp(1, max_blocks);
    let kernels = if dy.is_some() { &GLU_GRADIENTS } else { &GLU };
    let kernel = &kernels[input_index(gate.dtype)][format_index(format)];
    launch(device, stream, kernel, Grid { blocks, threads: THREADS }, &args)?;

    for (values, planes) in values.iter().zip(planes) {
        let mut call = planes.call(values.read(), format);
        if !scales_are_given {
            call.scaling = Scaling::Static(planes.scale.read());
        }
        tensorwise::quantize(call, stream)?;
    }
    Ok(())
}

/// Casts the product, or with `dy` both gradients, in one launch. Returns false, and launches nothing, unless the
/// scales are delayed and the layouts allow tiles.
fn cast_in_tiles(
    glu: &Glu,
    dy: Option<&View>,
    format: Fp8Format,
    planes: &[&TensorPlanes],
    stream: Stream,
) -> Result<bool, Error> {
    // The planes of the product, or of the gradient of gate, and those of the gradient of up.
    let gate_planes = planes[0];
    let up_planes = planes.get(1).copied();
    if gate_planes.delayed.is_none()
        || !tiles_are_supported(&glu.gate, gate_planes.rowwise.as_ref(), gate_planes.columnwise.as_ref())
        || !tiles_are_supported(
            &glu.up,
            up_planes.and_then(|planes| planes.rowwise.as_ref()),
            up_planes.and_then(|planes| planes.columnwise.as_ref()),
        )
        || dy.is_some_and(|dy| !tiles_are_supported(dy, None, None))
    {
        return Ok(false);
    }

    let device = ordinal(glu.gate.device());
    let grid_max = workspace::slots(device, stream, planes.len())?;
    let args = GluCastArgs {
        cast: cast_args(&glu.gate, Some(gate_planes), grid_max),
        up_cast: cast_args(&glu.up, up_planes, grid_max.wrapping_add(workspace::SLOT)),
        dy: dy.map_or(null(), View::ptr),
        dy_rs: dy.map_or(0, |dy| dy.row_stride() as i64),
        gelu: u32::from(glu.activation == Activation::GeluTanh),
        unused: 0,
    };
    // A block casts half a tile.
    let mut grid = tile_grid(&glu.gate);
    grid.blocks *= 2;
    let kernels = if dy.is_some() { &GLU_CAST_GRADIENTS } else { &GLU_CAST };
    let kernel = &kernels[input_index(glu.gate.dtype())][format_index(format)];
    launch(device, stream, kernel, grid, &args)?;
    Ok(true)
}

/// Returns the arguments of a cast in tiles with delayed scaling. Without planes, only the input is used.
fn cast_args(x: &View, planes: Option<&TensorPlanes>, grid_max: *mut u8) -> StridedArgs {
    let rowwise = planes.and_then(|planes| planes.rowwise.as_ref());
    let columnwise = planes.and_then(|planes| planes.columnwise.as_ref());
    let mut scale = null();
    let mut delayed = Delayed::NONE;
    if let Some(planes) = planes
        && let Some((delayed_scale, amax)) = &planes.delayed
    {
        scale = delayed_scale.ptr();
        delayed = Delayed { amax: amax.ptr(), scale_used: planes.scale.ptr(), grid_max };
    }
    let mut args = StridedArgs::new(x, rowwise, columnwise, scale, delayed);
    args.tiles_across = tiles_across(x);
    args
}

/// See `ops::quantize_glu`.
pub(crate) fn quantize_glu(
    glu: &Glu,
    values: ViewMut,
    format: Fp8Format,
    planes: &TensorPlanes,
    stream: Stream,
) -> Result<(), Error> {
    quantize(glu, None, &[values], format, &[planes], stream)
}

/// See `ops::quantize_glu_backward`.
pub(crate) fn quantize_glu_backward(
    glu: &Glu,
    dy: View,
    values: [ViewMut; 2],
    format: Fp8Format,
    planes: [&TensorPlanes; 2],
    stream: Stream,
) -> Result<(), Error> {
    quantize(glu, Some(dy), &values, format, &planes, stream)
}
