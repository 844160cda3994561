//! Bounds and quantization of groups of rows (`kernels/groups.cu`).

use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use super::MAX_DEVICES;
use super::driver::{Grid, args, device, host_word, launch, zero};
use super::modules::{
    ByFormat, ByInput, ByTypes, Kernel, Module, by_format, by_input, by_types, format_index, input_index,
    kernel, module,
};
use super::tensorwise::Rule;
use super::views::{aligned, ordinal, rows_aligned};
use crate::error::Error;
use crate::format::activation::Activation;
use crate::format::groups::padded_columns;
use crate::layout::{Device, Matrix, View, ViewMut};
use crate::spec::{BlockPlane, Gated, GroupCall, Routes, Stream};

#[derive(Clone, Copy)]
#[repr(C)]
struct GroupBoundsArgs {
    offs: *const u8,
    ends: *mut u8,
    padded_ends: *mut u8,
    invalid: *mut u8,
    count: i64,
    rows: i64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RouteArgs {
    row_experts: *const u8,
    row_pairs: *const u8,
    ends: *mut u8,
    padded_ends: *mut u8,
    row_tokens: *mut u8,
    token_rows: *mut u8,
    count: i64,
    rows: i64,
    k: i64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ZeroTailArgs {
    out: *mut u8,
    ends: *const u8,
    count: i64,
    rows: i64,
    bytes: i64,
    pitch: i64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct GroupArgs {
    x: *const u8,
    dy: *const u8,
    index: *const u8,
    ends: *const u8,
    padded_ends: *const u8,
    values: *mut u8,
    row: *mut u8,
    row_scale: *mut u8,
    col: *mut u8,
    col_scale: *mut u8,
    x_rs: i64,
    x_cs: i64,
    dy_rs: i64,
    dy_cs: i64,
    x_rows: i64,
    rows: i64,
    cols: i64,
    columns: i64,
    count: i64,
    tiles_across: i64,
    rule: Rule,
    gelu: u32,
    flags: u32,
    unused: u32,
}

args!(GroupBoundsArgs, RouteArgs, ZeroTailArgs, GroupArgs);

// Defined in `kernels/groups.cu`.
const X_VECTORS: u32 = 1;
const DY_VECTORS: u32 = 2;
const VALUE_VECTORS: u32 = 4;
/// Threads of a block that computes bounds, or routes of rows.
const BOUNDS_THREADS: u32 = 1024;
/// Rows that a thread block of the maxima's kernels processes.
const STRIP_ROWS: usize = 128;
/// The most thread blocks that zero rows. Each takes rows in turn.
const ZERO_BLOCKS: u64 = 1024;

static GROUPS_MODULE: Module = module!("groups");

static BOUNDS: Kernel = kernel!(GROUPS_MODULE, "group_bounds", GroupBoundsArgs);
static ROUTE: Kernel = kernel!(GROUPS_MODULE, "route_rows", RouteArgs);
static ZERO_TAIL: Kernel = kernel!(GROUPS_MODULE, "zero_tail", ZeroTailArgs);
static AMAX: ByInput = by_input!(GROUPS_MODULE, "group_amax", GroupArgs);
static GATED: ByInput = by_input!(GROUPS_MODULE, "group_gated", GroupArgs);
static GRADIENT: ByInput = by_input!(GROUPS_MODULE, "group_gradient", GroupArgs);
static SCALES: ByFormat = by_format!(GROUPS_MODULE, "group_scales", GroupArgs);
static CAST: ByTypes = by_types!(GROUPS_MODULE, "group_cast", GroupArgs);

#[cfg(test)]
pub(super) fn kernels() -> Vec<&'static Kernel> {
    let by_input = [&AMAX, &GATED, &GRADIENT].into_iter().flatten();
    [&BOUNDS, &ROUTE, &ZERO_TAIL]
        .into_iter()
        .chain(by_input)
        .chain(&SCALES)
        .chain(CAST.iter().flatten())
        .collect()
}

/// For each device, a flag that is 1 from the time when its kernel finds an invalid offset until the host
/// reads the flag. The memory belongs to the host and is never freed, so that captured graphs set it as well.
static FLAGS: [OnceLock<&AtomicU32>; MAX_DEVICES] = [const { OnceLock::new() }; MAX_DEVICES];

/// Returns the flag of a device.
fn flag(ordinal: i32) -> Result<&'static AtomicU32, Error> {
    device(ordinal)?;
    let slot = &FLAGS[ordinal as usize];
    if let Some(flag) = slot.get() {
        return Ok(flag);
    }
    let word = host_word(ordinal)?;
    // If two threads reach this line, the second word is unused.
    Ok(slot.get_or_init(|| word))
}

/// Returns an error if the flag of a device is set, and clears it.
fn check_flag(flag: &AtomicU32, ordinal: i32) -> Result<(), Error> {
    if flag.load(Ordering::Acquire) == 0 {
        return Ok(());
    }
    flag.store(0, Ordering::Release);
    Err(Error::Offsets { device: Device::Cuda(ordinal) })
}

pub(crate) fn check_offsets() -> Result<(), Error> {
    for (ordinal, slot) in (0..).zip(&FLAGS) {
        if let Some(flag) = slot.get() {
            check_flag(flag, ordinal)?;
        }
    }
    Ok(())
}

pub(crate) fn group_bounds(
    offs: View,
    rows: usize,
    ends: ViewMut,
    padded_ends: ViewMut,
    stream: Stream,
) -> Result<(), Error> {
    let ordinal = ordinal(offs.device());
    let flag = flag(ordinal)?;
    let args = GroupBoundsArgs {
        offs: offs.ptr(),
        ends: ends.ptr(),
        padded_ends: padded_ends.ptr(),
        invalid: flag.as_ptr().cast(),
        count: offs.cols() as i64,
        rows: rows as i64,
    };
    launch(ordinal, stream, &BOUNDS, Grid { blocks: 1, threads: BOUNDS_THREADS }, &args)?;
    // The host reads the flag after the launch, because CUDA_LAUNCH_BLOCKING=1 makes the launch wait for the
    // kernel.
    check_flag(flag, ordinal)
}

pub(crate) fn route_rows(routes: Routes, stream: Stream) -> Result<(), Error> {
    let Routes { row_experts, row_pairs, k, ends, padded_ends, row_tokens, token_rows } = routes;
    let rows = row_pairs.cols();
    let args = RouteArgs {
        row_experts: row_experts.ptr(),
        row_pairs: row_pairs.ptr(),
        ends: ends.ptr(),
        padded_ends: padded_ends.ptr(),
        row_tokens: row_tokens.ptr(),
        token_rows: token_rows.ptr(),
        count: ends.cols() as i64,
        rows: rows as i64,
        k: k as i64,
    };
    // The first block computes the bounds.
    let blocks = 1 + (rows as u64).div_ceil(BOUNDS_THREADS.into());
    launch(ordinal(row_pairs.device()), stream, &ROUTE, Grid { blocks, threads: BOUNDS_THREADS }, &args)
}

pub(crate) fn zero_tail(out: ViewMut, ends: View, stream: Stream) -> Result<(), Error> {
    let matrix = out.matrix();
    let size = matrix.dtype.size();
    let args = ZeroTailArgs {
        out: matrix.ptr,
        ends: ends.ptr(),
        count: ends.cols() as i64,
        rows: matrix.rows as i64,
        bytes: (matrix.cols * size) as i64,
        pitch: (matrix.row_stride * size as isize) as i64,
    };
    let grid = Grid { blocks: ZERO_BLOCKS.min(matrix.rows as u64), threads: 256 };
    launch(ordinal(out.device()), stream, &ZERO_TAIL, grid, &args)
}

pub(crate) fn quantize_groups(call: GroupCall, stream: Stream) -> Result<(), Error> {
    quantize(&call, None, stream)
}

pub(crate) fn quantize_gated(gated: &Gated, call: GroupCall, stream: Stream) -> Result<(), Error> {
    quantize(&call, Some(gated), stream)
}

impl GroupArgs {
    /// Returns the arguments for the values of a call.
    fn new(call: &GroupCall) -> Self {
        let GroupCall { x, index, groups, rule, rowwise, columnwise, .. } = call;
        let values = x.matrix();
        let (rows, cols) = call.shape();
        let pointers = |plane: &Option<BlockPlane>| match plane {
            Some(plane) => (plane.codes.ptr(), plane.scales.ptr()),
            None => (ptr::null_mut(), ptr::null_mut()),
        };
        let (row, row_scale) = pointers(rowwise);
        let (col, col_scale) = pointers(columnwise);

        let mut flags = 0;
        if cols.is_multiple_of(16 / values.dtype.size()) && (row.is_null() || aligned(row, 8)) {
            flags |= VALUE_VECTORS;
        }
        if rows_aligned(&values, 16) {
            flags |= X_VECTORS;
        }
        Self {
            x: values.ptr,
            dy: ptr::null(),
            index: index.map_or(ptr::null(), |index| index.ptr()),
            ends: groups.ends.ptr(),
            padded_ends: groups.padded_ends.ptr(),
            values: ptr::null_mut(),
            row,
            row_scale,
            col,
            col_scale,
            x_rs: values.row_stride as i64,
            x_cs: values.col_stride as i64,
            dy_rs: 0,
            dy_cs: 0,
            x_rows: values.rows as i64,
            rows: rows as i64,
            cols: cols as i64,
            columns: padded_columns(rows, groups.count()) as i64,
            count: groups.count() as i64,
            tiles_across: cols.div_ceil(128) as i64,
            rule: (*rule).into(),
            gelu: 0,
            flags,
            unused: 0,
        }
    }
}

/// Launches three kernels: the maxima of all lines, the scales computed from them, and the cast.
fn quantize(call: &GroupCall, gated: Option<&Gated>, stream: Stream) -> Result<(), Error> {
    let (device, dtype) = (ordinal(call.x.device()), call.x.dtype());
    let (rows, cols) = call.shape();
    let args = GroupArgs::new(call);

    // The maxima are computed in the memory of the scales. The kernels see from the codes which planes there are.
    let row_scales = if args.row.is_null() { 0 } else { rows };
    let col_scales = if args.col.is_null() { 0 } else { call.groups.count() * cols };
    for (scales, count) in [(args.row_scale, row_scales), (args.col_scale, col_scales)] {
        zero(device, stream, scales, size_of::<f32>() * count)?;
    }

    let (kernels, maxima, width) = match gated {
        None => (&AMAX, args, cols),
        Some(gated) => gated_args(gated, args, cols),
    };
    if rows > 0 && cols > 0 {
        // A thread block processes a strip of 32 vectors of 16 bytes.
        let across = width.div_ceil(32 * 16 / dtype.size());
        let maxima = GroupArgs { tiles_across: across as i64, ..maxima };
        let grid = Grid { blocks: (rows.div_ceil(STRIP_ROWS) * across) as u64, threads: 256 };
        launch(device, stream, &kernels[input_index(dtype)], grid, &maxima)?;
    }

    let blocks = (row_scales + col_scales).div_ceil(256) + row_scales.min(ZERO_BLOCKS as usize);
    let grid = Grid { blocks: blocks as u64, threads: 256 };
    launch(device, stream, &SCALES[format_index(call.format)], grid, &args)?;

    let columns = args.columns as usize;
    let grid = Grid {
        blocks: columns.div_ceil(128) as u64 * cols.div_ceil(128) as u64,
        threads: 16 * dtype.size() as u32 * 4,
    };
    launch(device, stream, &CAST[input_index(dtype)][format_index(call.format)], grid, &args)
}

/// Returns the kernels that compute an activation and its maxima, their arguments, and the columns that they
/// iterate over.
fn gated_args(gated: &Gated, args: GroupArgs, cols: usize) -> (&'static ByInput, GroupArgs, usize) {
    let h: Matrix = gated.h.matrix();
    let (width, bytes) = (h.cols / 2, h.dtype.size());
    let vectors = |m: &Matrix| rows_aligned(m, 16) && (width * bytes).is_multiple_of(16);
    let mut args = GroupArgs {
        x: h.ptr,
        values: gated.values.ptr(),
        x_rs: h.row_stride as i64,
        x_cs: h.col_stride as i64,
        gelu: u32::from(gated.activation == Activation::GeluTanh),
        flags: 0,
        ..args
    };
    if vectors(&h) {
        args.flags |= X_VECTORS;
    }
    if (width * bytes).is_multiple_of(16) && aligned(args.values, 16) {
        args.flags |= VALUE_VECTORS;
    }
    debug_assert!(cols == width || cols == 2 * width);
    let Some(dy) = gated.dy.map(|dy| dy.matrix()) else { return (&GATED, args, width) };
    if vectors(&dy) {
        args.flags |= DY_VECTORS;
    }
    args.dy = dy.ptr;
    (args.dy_rs, args.dy_cs) = (dy.row_stride as i64, dy.col_stride as i64);
    (&GRADIENT, args, width)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_flag_is_an_error_once() {
        let flag = AtomicU32::new(0);
        assert_eq!(check_flag(&flag, 3), Ok(()));
        flag.store(1, Ordering::Relaxed);
        let error = check_flag(&flag, 3).unwrap_err();
        assert_eq!(error, Error::Offsets { device: Device::Cuda(3) });
        assert!(error.to_string().contains("cuda:3") && error.to_string().contains("CUDA_LAUNCH_BLOCKING"));
        assert_eq!(check_flag(&flag, 3), Ok(()));
    }

    #[test]
    fn devices_without_a_flag_are_not_checked() {
        assert_eq!(check_offsets(), Ok(()));
    }
}
