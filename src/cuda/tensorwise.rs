//! One scale per tensor: picks a kernel for how the views lie, and launches it.

use super::driver::{self, Args, Grid, launch};
use super::table::{ByInput, ByTypes, Kernel, by_input, by_types, format_index, input_index, kernel};
use super::workspace::{PER_STREAM, meetings};
use crate::error::Error;
use crate::format::Fp8Format;
use crate::layout::{Device, Matrix, View, ViewMut};
use crate::ops::{ScaleRule, Stream};

// --- what the kernels take (kernels/elements.cuh and each module's source) --------------------------------

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Rule {
    epsilon: f32,
    margin: f32,
    power_of_2: u32,
}

impl From<ScaleRule> for Rule {
    fn from(rule: ScaleRule) -> Self {
        Self {
            epsilon: rule.amax_epsilon,
            margin: f32::from_bits(((rule.margin + 127) as u32) << 23),
            power_of_2: u32::from(rule.power_of_2),
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Delayed {
    amax: *mut u8,
    scale_used: *mut u8,
    meeting: *mut u8,
}

impl Delayed {
    const NONE: Self =
        Self { amax: std::ptr::null_mut(), scale_used: std::ptr::null_mut(), meeting: std::ptr::null_mut() };
}

#[derive(Clone, Copy)]
#[repr(C)]
struct AmaxArgs {
    x: *const u8,
    n: u64,
    out: *mut u8,
    meeting: *mut u8,
    rule: Rule,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct StridedAmaxArgs {
    x: *const u8,
    rows: i64,
    cols: i64,
    x_rs: i64,
    x_cs: i64,
    out: *mut u8,
    meeting: *mut u8,
    rule: Rule,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ScaleArgs {
    amax: *const u8,
    scale: *mut u8,
    n: i64,
    cols: i64,
    amax_rs: i64,
    amax_cs: i64,
    scale_rs: i64,
    scale_cs: i64,
    rule: Rule,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct CastArgs {
    x: *const u8,
    codes: *mut u8,
    n: u64,
    scale: *const u8,
    delayed: Delayed,
    backwards: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct CastTransposeArgs {
    x: *const u8,
    rowwise: *mut u8,
    columnwise: *mut u8,
    rows: i64,
    cols: i64,
    x_rs: i64,
    rowwise_rs: i64,
    tiles_across: i64,
    scale: *const u8,
    delayed: Delayed,
    backwards: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct StridedArgs {
    x: *const u8,
    rowwise: *mut u8,
    columnwise: *mut u8,
    rows: i64,
    cols: i64,
    x_rs: i64,
    x_cs: i64,
    rowwise_rs: i64,
    rowwise_cs: i64,
    columnwise_rs: i64,
    columnwise_cs: i64,
    tiles_across: i64,
    scale: *const u8,
    delayed: Delayed,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Entry {
    x: *const u8,
    codes: *mut u8,
    n: u64,
    first_block: u32,
    index: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct MultiArgs<const N: usize> {
    scales: *const u8,
    amaxes: *mut u8,
    scales_used: *mut u8,
    meetings: *mut u8,
    count: u32,
    blocks: u32,
    entries: [Entry; N],
}

// SAFETY: each is `repr(C)` and mirrors the struct of that name in the kernels; sizes are tested.
unsafe impl Args for AmaxArgs {}
// SAFETY: the same.
unsafe impl Args for StridedAmaxArgs {}
// SAFETY: the same.
unsafe impl Args for ScaleArgs {}
// SAFETY: the same.
unsafe impl Args for CastArgs {}
// SAFETY: the same.
unsafe impl Args for CastTransposeArgs {}
// SAFETY: the same.
unsafe impl Args for StridedArgs {}
// SAFETY: the same.
unsafe impl<const N: usize> Args for MultiArgs<N> {}

/// Entries of the two sizes of [`MultiArgs`]: small parameters launch faster.
const SHORT: usize = 64;
const LONG: usize = 1000;
const _: () = assert!(LONG <= PER_STREAM);

static AMAX: ByInput = by_input!(Amax, "amax", AmaxArgs);
static CURRENT_SCALE: ByTypes = by_types!(Amax, "current_scale", AmaxArgs);
static SCALE: [Kernel; 2] = [kernel!(Amax, "scale_e4m3", ScaleArgs), kernel!(Amax, "scale_e5m2", ScaleArgs)];
static STRIDED_AMAX: ByInput = by_input!(Strided, "strided_amax", StridedAmaxArgs);
static STRIDED_SCALE: ByTypes = by_types!(Strided, "strided_current_scale", StridedAmaxArgs);
static STRIDED_CAST: ByTypes = by_types!(Strided, "strided_cast", StridedArgs);
static CAST: ByTypes = by_types!(Cast, "cast", CastArgs);
static CAST_DELAYED: ByTypes = by_types!(Cast, "cast_delayed", CastArgs);
static CAST_TRANSPOSE: ByTypes = by_types!(CastTranspose, "cast_transpose", CastTransposeArgs);
static CAST_TRANSPOSE_DELAYED: ByTypes =
    by_types!(CastTranspose, "cast_transpose_delayed", CastTransposeArgs);
static AMAX_SHORT: ByInput = by_input!(Multi, "multi_amax_short", MultiArgs<SHORT>);
static AMAX_LONG: ByInput = by_input!(Multi, "multi_amax_long", MultiArgs<LONG>);
static MULTI_SHORT: ByTypes = by_types!(Multi, "multi_cast_short", MultiArgs<SHORT>);
static MULTI_LONG: ByTypes = by_types!(Multi, "multi_cast_long", MultiArgs<LONG>);
static DELAYED_SHORT: ByTypes = by_types!(Multi, "multi_cast_delayed_short", MultiArgs<SHORT>);
static DELAYED_LONG: ByTypes = by_types!(Multi, "multi_cast_delayed_long", MultiArgs<LONG>);

#[cfg(test)]
pub(super) fn kernels() -> Vec<&'static Kernel> {
    let by_input = [&AMAX, &STRIDED_AMAX, &AMAX_SHORT, &AMAX_LONG];
    let by_types = [
        &CURRENT_SCALE,
        &STRIDED_SCALE,
        &STRIDED_CAST,
        &CAST,
        &CAST_DELAYED,
        &CAST_TRANSPOSE,
        &CAST_TRANSPOSE_DELAYED,
        &MULTI_SHORT,
        &MULTI_LONG,
        &DELAYED_SHORT,
        &DELAYED_LONG,
    ];
    let mut all: Vec<_> = by_input.into_iter().flatten().chain(&SCALE).collect();
    all.extend(by_types.into_iter().flatten().flatten());
    all
}

// --- the operations ---------------------------------------------------------------------------------------

pub(super) fn ordinal(device: Device) -> i32 {
    match device {
        Device::Cuda(ordinal) => ordinal,
        Device::Cpu => -1,
    }
}

pub(super) fn aligned(ptr: *const u8, bytes: usize) -> bool {
    ptr.addr().is_multiple_of(bytes)
}

fn contiguous_and_aligned(x: &View) -> bool {
    x.is_contiguous() && aligned(x.ptr(), 16)
}

pub(crate) fn amax(x: View, out: ViewMut, stream: Stream) -> Result<(), Error> {
    let at = input_index(x.dtype());
    find_amax(&x, out.ptr(), &AMAX[at], &STRIDED_AMAX[at], ScaleRule::default(), stream)
}

/// Launches the kernel that finds the absolute maximum and leaves it, or the scale from it, at `out`.
fn find_amax(
    x: &View,
    out: *mut u8,
    fast: &'static Kernel,
    strided: &'static Kernel,
    rule: ScaleRule,
    stream: Stream,
) -> Result<(), Error> {
    let device = ordinal(x.device());
    let meeting = meetings(device, stream, 1)?;
    let n = x.numel() as u64;
    // Four blocks a multiprocessor; fewer where a thread would have no full round of loads.
    let most = 4 * u64::from(driver::device(device)?.multiprocessors);
    if contiguous_and_aligned(x) {
        let per_block = 512 * 4 * 16 / x.dtype().size() as u64;
        let grid = Grid { blocks: n.div_ceil(per_block).clamp(1, most), threads: 512 };
        let args = AmaxArgs { x: x.ptr(), n, out, meeting, rule: rule.into() };
        return launch(device, stream, fast, grid, &args);
    }
    let (mut rows, mut cols) = x.shape();
    let (mut x_rs, mut x_cs) = (x.row_stride(), x.col_stride());
    if x_rs.abs() < x_cs.abs() {
        (rows, cols, x_rs, x_cs) = (cols, rows, x_cs, x_rs);
    }
    let grid = Grid { blocks: n.div_ceil(512 * 8).clamp(1, most), threads: 512 };
    let args = StridedAmaxArgs {
        x: x.ptr(),
        rows: rows as i64,
        cols: cols as i64,
        x_rs: x_rs as i64,
        x_cs: x_cs as i64,
        out,
        meeting,
        rule: rule.into(),
    };
    launch(device, stream, strided, grid, &args)
}

pub(crate) fn scale_from_amax(
    amax: View,
    format: Fp8Format,
    rule: ScaleRule,
    scale_out: ViewMut,
    stream: Stream,
) -> Result<(), Error> {
    scales(&amax.matrix(), format, rule, &scale_out.matrix(), stream)
}

/// The scale of each absolute maximum.
pub(super) fn scales(
    amax: &Matrix,
    format: Fp8Format,
    rule: ScaleRule,
    scale_out: &Matrix,
    stream: Stream,
) -> Result<(), Error> {
    let n = amax.numel();
    let grid = Grid { blocks: (n as u64).div_ceil(256), threads: 256 };
    let args = ScaleArgs {
        amax: amax.ptr,
        scale: scale_out.ptr,
        n: n as i64,
        cols: amax.cols as i64,
        amax_rs: amax.row_stride as i64,
        amax_cs: amax.col_stride as i64,
        scale_rs: scale_out.row_stride as i64,
        scale_cs: scale_out.col_stride as i64,
        rule: rule.into(),
    };
    launch(ordinal(amax.device), stream, &SCALE[format_index(format)], grid, &args)
}

pub(crate) fn quantize(
    x: View,
    scale: View,
    rowwise: Option<ViewMut>,
    columnwise: Option<ViewMut>,
    stream: Stream,
) -> Result<(), Error> {
    cast(&x, scale.ptr(), rowwise.as_ref(), columnwise.as_ref(), None, false, stream)
}

pub(crate) fn quantize_delayed(
    x: View,
    scale: View,
    amax: ViewMut,
    scale_used: ViewMut,
    rowwise: Option<ViewMut>,
    columnwise: Option<ViewMut>,
    stream: Stream,
) -> Result<(), Error> {
    let meeting = meetings(ordinal(x.device()), stream, 1)?;
    let delayed = Delayed { amax: amax.ptr(), scale_used: scale_used.ptr(), meeting };
    cast(&x, scale.ptr(), rowwise.as_ref(), columnwise.as_ref(), Some(delayed), false, stream)
}

/// Two launches: the scale, then the cast. The cast takes the tensor's end first, which the L2 still holds.
///
/// One launch with a barrier between its halves is faster alone (1.25 times the cast), but all its blocks must
/// run at once: beside a collective that holds multiprocessors it would wait for that to end.
pub(crate) fn quantize_current(
    x: View,
    format: Fp8Format,
    rule: ScaleRule,
    scale_out: ViewMut,
    rowwise: Option<ViewMut>,
    columnwise: Option<ViewMut>,
    stream: Stream,
) -> Result<(), Error> {
    let (i, j) = (input_index(x.dtype()), format_index(format));
    find_amax(&x, scale_out.ptr(), &CURRENT_SCALE[i][j], &STRIDED_SCALE[i][j], rule, stream)?;
    cast(&x, scale_out.ptr(), rowwise.as_ref(), columnwise.as_ref(), None, true, stream)
}

fn cast(
    x: &View,
    scale: *const u8,
    rowwise: Option<&ViewMut>,
    columnwise: Option<&ViewMut>,
    delayed: Option<Delayed>,
    backwards: bool,
    stream: Stream,
) -> Result<(), Error> {
    let Some(format) = rowwise.or(columnwise).and_then(|out| out.dtype().fp8()) else { return Ok(()) };
    let device = ordinal(x.device());
    let (rows, cols) = x.shape();
    let (i, j) = (input_index(x.dtype()), format_index(format));
    let follows = delayed.is_some();
    let delayed = delayed.unwrap_or(Delayed::NONE);
    // An empty tensor still leaves its scale behind.
    let least = u64::from(follows);
    let backwards = u32::from(backwards);

    if let (Some(row), None) = (rowwise, columnwise)
        && contiguous_and_aligned(x)
        && row.is_contiguous()
        && aligned(row.ptr(), 16)
    {
        let n = x.numel() as u64;
        let per_block = if follows { 4 * 4096 } else { 4096 };
        let grid = Grid { blocks: n.div_ceil(per_block).max(least), threads: 256 };
        let args = CastArgs { x: x.ptr(), codes: row.ptr(), n, scale, delayed, backwards };
        let kernels = if follows { &CAST_DELAYED } else { &CAST };
        return launch(device, stream, &kernels[i][j], grid, &args);
    }

    let size = x.dtype().size();
    let patch_rows = if size == 4 { 8 } else { 16 };
    if let Some(column) = columnwise
        && x.numel() > 0
        && x.col_stride() == 1
        && x.row_stride() > 0
        && aligned(x.ptr(), 16)
        && (x.row_stride() as usize * size).is_multiple_of(16)
        && rows.is_multiple_of(patch_rows)
        && cols.is_multiple_of(8)
        && column.is_contiguous()
        && aligned(column.ptr(), patch_rows)
        && rowwise.is_none_or(|row| {
            row.col_stride() == 1
                && row.row_stride() > 0
                && aligned(row.ptr(), 8)
                && (row.row_stride() as usize).is_multiple_of(8)
        })
    {
        let tiles_across = cols.div_ceil(128);
        let blocks = (rows.div_ceil(8 * patch_rows) * tiles_across) as u64;
        let args = CastTransposeArgs {
            x: x.ptr(),
            rowwise: rowwise.map_or(std::ptr::null_mut(), ViewMut::ptr),
            columnwise: column.ptr(),
            rows: rows as i64,
            cols: cols as i64,
            x_rs: x.row_stride() as i64,
            rowwise_rs: rowwise.map_or(0, |row| row.row_stride() as i64),
            tiles_across: tiles_across as i64,
            scale,
            delayed,
            backwards,
        };
        let kernels = if follows { &CAST_TRANSPOSE_DELAYED } else { &CAST_TRANSPOSE };
        return launch(device, stream, &kernels[i][j], Grid { blocks, threads: 128 }, &args);
    }

    let tiles_across = cols.div_ceil(32).max(1);
    let blocks = ((rows.div_ceil(32) * tiles_across) as u64).max(least);
    let args = StridedArgs {
        x: x.ptr(),
        rowwise: rowwise.map_or(std::ptr::null_mut(), ViewMut::ptr),
        columnwise: columnwise.map_or(std::ptr::null_mut(), ViewMut::ptr),
        rows: rows as i64,
        cols: cols as i64,
        x_rs: x.row_stride() as i64,
        x_cs: x.col_stride() as i64,
        rowwise_rs: rowwise.map_or(0, |row| row.row_stride() as i64),
        rowwise_cs: rowwise.map_or(0, |row| row.col_stride() as i64),
        columnwise_rs: columnwise.map_or(0, |column| column.row_stride() as i64),
        columnwise_cs: columnwise.map_or(0, |column| column.col_stride() as i64),
        tiles_across: tiles_across as i64,
        scale,
        delayed,
    };
    let blocks = if x.numel() == 0 { least } else { blocks };
    launch(device, stream, &STRIDED_CAST[i][j], Grid { blocks, threads: 256 }, &args)
}

// --- lists ------------------------------------------------------------------------------------------------

/// The pointer to element `i` of a one-row list of fp32.
fn element(list: *mut u8, col_stride: isize, i: usize) -> *mut u8 {
    list.wrapping_offset(col_stride * 4 * i as isize)
}

/// Whether a list kernel takes the tensor; the others are launched one by one.
fn listed(x: &View, out: Option<&ViewMut>) -> bool {
    contiguous_and_aligned(x)
        && x.numel() < 1 << 40
        && out.is_none_or(|o| o.is_contiguous() && aligned(o.ptr(), 16))
}

/// The step from an element to the next: a one-row view, or a one-column one.
fn list_step(rows: usize, row_stride: isize, col_stride: isize) -> isize {
    if rows == 1 { col_stride } else { row_stride }
}

/// Launches one kernel for each run of entries that share an input type (and a format).
fn launch_list(
    device: i32,
    stream: Stream,
    entries: &[Entry],
    head: &MultiArgs<0>,
    blocks: u32,
    short: &'static Kernel,
    long: &'static Kernel,
) -> Result<(), Error> {
    let grid = Grid { blocks: u64::from(blocks), threads: 256 };
    if entries.len() <= SHORT {
        launch(device, stream, short, grid, &fill::<SHORT>(head, entries, blocks))
    } else {
        launch(device, stream, long, grid, &fill::<LONG>(head, entries, blocks))
    }
}

fn fill<const N: usize>(head: &MultiArgs<0>, entries: &[Entry], blocks: u32) -> MultiArgs<N> {
    let none = Entry { x: std::ptr::null(), codes: std::ptr::null_mut(), n: 0, first_block: 0, index: 0 };
    let mut args = MultiArgs {
        scales: head.scales,
        amaxes: head.amaxes,
        scales_used: head.scales_used,
        meetings: head.meetings,
        count: entries.len() as u32,
        blocks,
        entries: [none; N],
    };
    args.entries[..entries.len()].copy_from_slice(entries);
    args
}

/// Cuts a list into launches: entries whose kernels are the same, at most [`LONG`] at once.
fn for_each_launch(
    entries: Vec<((usize, usize), Entry)>,
    per_block: impl Fn(usize) -> u64,
    least: u64,
    mut run: impl FnMut((usize, usize), &[Entry], u32) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut keys: Vec<(usize, usize)> = entries.iter().map(|(key, _)| *key).collect();
    keys.sort_unstable();
    keys.dedup();
    for key in keys {
        let own: Vec<Entry> = entries.iter().filter(|(k, _)| *k == key).map(|(_, e)| *e).collect();
        for part in own.chunks(LONG) {
            let mut part = part.to_vec();
            let mut blocks = 0_u64;
            for entry in &mut part {
                entry.first_block = blocks as u32;
                blocks += entry.n.div_ceil(per_block(key.0)).max(least);
            }
            // 2^31 blocks are 2^43 elements: more than any device holds.
            run(key, &part, blocks as u32)?;
        }
    }
    Ok(())
}

pub(crate) fn multi_amax(xs: &[View], out: ViewMut, stream: Stream) -> Result<(), Error> {
    let device = ordinal(out.device());
    let step = list_step(out.rows(), out.row_stride(), out.col_stride());
    let dense = step == 1 || xs.len() <= 1;
    if dense {
        driver::zero(device, stream, out.ptr(), xs.len() * 4)?;
    }
    let mut entries = Vec::with_capacity(xs.len());
    for (i, x) in xs.iter().enumerate() {
        if dense && listed(x, None) {
            if x.numel() > 0 {
                let entry = Entry {
                    x: x.ptr(),
                    codes: std::ptr::null_mut(),
                    n: x.numel() as u64,
                    first_block: 0,
                    index: i as u32,
                };
                entries.push(((input_index(x.dtype()), 0), entry));
            }
        } else {
            let at = input_index(x.dtype());
            let to = element(out.ptr(), step, i);
            find_amax(x, to, &AMAX[at], &STRIDED_AMAX[at], ScaleRule::default(), stream)?;
        }
    }
    let head = MultiArgs::<0> {
        scales: std::ptr::null(),
        amaxes: out.ptr(),
        scales_used: std::ptr::null_mut(),
        meetings: std::ptr::null_mut(),
        count: 0,
        blocks: 0,
        entries: [],
    };
    // Elements of a block: 256 threads, 8 loads, 4 rounds of 16 bytes.
    let per_block = |input: usize| 256 * 8 * 4 * if input == 0 { 4 } else { 8 };
    for_each_launch(entries, per_block, 0, |(i, _), part, blocks| {
        launch_list(device, stream, part, &head, blocks, &AMAX_SHORT[i], &AMAX_LONG[i])
    })
}

/// What a cast of a list follows: amaxes and scales used, both lists like `scales`.
struct Follow {
    amaxes: ViewMutParts,
    scales_used: ViewMutParts,
}

#[derive(Clone, Copy)]
struct ViewMutParts {
    ptr: *mut u8,
    step: isize,
}

impl ViewMutParts {
    fn of(list: &ViewMut) -> Self {
        Self { ptr: list.ptr(), step: list_step(list.rows(), list.row_stride(), list.col_stride()) }
    }
}

fn multi_cast(
    xs: &[View],
    scales: &View,
    follow: Option<&Follow>,
    outs: &[ViewMut],
    stream: Stream,
) -> Result<(), Error> {
    let device = ordinal(scales.device());
    let step = list_step(scales.rows(), scales.row_stride(), scales.col_stride());
    let dense =
        xs.len() <= 1 || step == 1 && follow.is_none_or(|f| f.amaxes.step == 1 && f.scales_used.step == 1);
    let mut entries = Vec::with_capacity(xs.len());
    for (i, (x, out)) in xs.iter().zip(outs).enumerate() {
        let Some(format) = out.dtype().fp8() else { continue };
        if dense && listed(x, Some(out)) {
            if x.numel() > 0 || follow.is_some() {
                let entry = Entry {
                    x: x.ptr(),
                    codes: out.ptr(),
                    n: x.numel() as u64,
                    first_block: 0,
                    index: i as u32,
                };
                entries.push(((input_index(x.dtype()), format_index(format)), entry));
            }
            continue;
        }
        let delayed = match follow {
            None => None,
            Some(f) => Some(Delayed {
                amax: element(f.amaxes.ptr, f.amaxes.step, i),
                scale_used: element(f.scales_used.ptr, f.scales_used.step, i),
                meeting: meetings(device, stream, 1)?,
            }),
        };
        let scale = element(scales.ptr().cast_mut(), step, i);
        cast(x, scale, Some(out), None, delayed, false, stream)?;
    }
    let least = u64::from(follow.is_some());
    for_each_launch(
        entries,
        |_| 2 * 4096,
        least,
        |(i, j), part, blocks| {
            let head = MultiArgs::<0> {
                scales: scales.ptr(),
                amaxes: follow.map_or(std::ptr::null_mut(), |f| f.amaxes.ptr),
                scales_used: follow.map_or(std::ptr::null_mut(), |f| f.scales_used.ptr),
                meetings: match follow {
                    None => std::ptr::null_mut(),
                    Some(_) => meetings(device, stream, part.len())?,
                },
                count: 0,
                blocks: 0,
                entries: [],
            };
            let (short, long) = match follow {
                None => (&MULTI_SHORT[i][j], &MULTI_LONG[i][j]),
                Some(_) => (&DELAYED_SHORT[i][j], &DELAYED_LONG[i][j]),
            };
            launch_list(device, stream, part, &head, blocks, short, long)
        },
    )
}

pub(crate) fn multi_quantize(
    xs: &[View],
    scales: View,
    outs: &[ViewMut],
    stream: Stream,
) -> Result<(), Error> {
    multi_cast(xs, &scales, None, outs, stream)
}

pub(crate) fn multi_quantize_delayed(
    xs: &[View],
    scales: View,
    amaxes: ViewMut,
    scales_used: ViewMut,
    outs: &[ViewMut],
    stream: Stream,
) -> Result<(), Error> {
    let follow = Follow { amaxes: ViewMutParts::of(&amaxes), scales_used: ViewMutParts::of(&scales_used) };
    multi_cast(xs, &scales, Some(&follow), outs, stream)
}
