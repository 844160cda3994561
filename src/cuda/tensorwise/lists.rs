//! Operations on lists of tensors, in as few launches as the types of the tensors allow.

use super::args::{Delayed, Entry, MultiArgs};
use super::{AMAX, Cast, CastScale, STRIDED_AMAX, find_amax};
use crate::cuda::driver::{self, Grid, launch};
use crate::cuda::modules::{
    ByInput, ByTypes, Kernel, Module, by_input, by_types, format_index, input_index, module,
};
use crate::cuda::views::{aligned, contiguous_and_aligned, ordinal};
use crate::cuda::workspace::{self, PER_CHUNK};
use crate::error::Error;
use crate::layout::{Matrix, View, ViewMut};
use crate::spec::{ScaleRule, Stream};

/// Number of entries in the two sizes of [`MultiArgs`]. Small parameters launch faster.
const SHORT: usize = 64;
const LONG: usize = 1000;
const _: () = assert!(LONG <= PER_CHUNK);

static MULTI_MODULE: Module = module!("multi");

static AMAX_SHORT: ByInput = by_input!(MULTI_MODULE, "multi_amax_short", MultiArgs<SHORT>);
static AMAX_LONG: ByInput = by_input!(MULTI_MODULE, "multi_amax_long", MultiArgs<LONG>);
static MULTI_SHORT: ByTypes = by_types!(MULTI_MODULE, "multi_cast_short", MultiArgs<SHORT>);
static MULTI_LONG: ByTypes = by_types!(MULTI_MODULE, "multi_cast_long", MultiArgs<LONG>);
static DELAYED_SHORT: ByTypes = by_types!(MULTI_MODULE, "multi_cast_delayed_short", MultiArgs<SHORT>);
static DELAYED_LONG: ByTypes = by_types!(MULTI_MODULE, "multi_cast_delayed_long", MultiArgs<LONG>);

#[cfg(test)]
pub(super) fn kernels() -> Vec<&'static Kernel> {
    let by_types = [&MULTI_SHORT, &MULTI_LONG, &DELAYED_SHORT, &DELAYED_LONG];
    let by_types = by_types.into_iter().flatten().flatten();
    [&AMAX_SHORT, &AMAX_LONG].into_iter().flatten().chain(by_types).collect()
}

/// The unused entries of a launch.
const NONE: Entry =
    Entry { x: std::ptr::null(), codes: std::ptr::null_mut(), n: 0, first_block: 0, index: 0 };

/// The arguments that all launches of a list share, all of them absent.
const HEAD: MultiArgs<0> = MultiArgs {
    scales: std::ptr::null(),
    amaxes: std::ptr::null_mut(),
    scales_used: std::ptr::null_mut(),
    maxima: std::ptr::null_mut(),
    count: 0,
    blocks: 0,
    entries: [],
};

/// Returns the pointer to element `i` of an fp32 list, which is a matrix of one row.
fn element(list: &Matrix, i: usize) -> *mut u8 {
    list.ptr.wrapping_offset(list.col_stride * 4 * i as isize)
}

/// Whether a list kernel supports the tensor. Other tensors are launched one by one.
fn listed(x: &View, out: Option<&ViewMut>) -> bool {
    contiguous_and_aligned(x)
        && x.numel() < 1 << 40
        && out.is_none_or(|o| o.is_contiguous() && aligned(o.ptr(), 16))
}

/// Launches one kernel for entries that share an input type (and a format).
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
    let mut args = MultiArgs {
        scales: head.scales,
        amaxes: head.amaxes,
        scales_used: head.scales_used,
        maxima: head.maxima,
        count: entries.len() as u32,
        blocks,
        entries: [NONE; N],
    };
    args.entries[..entries.len()].copy_from_slice(entries);
    args
}

/// Splits a list into launches of at most [`LONG`] entries that use the same kernel.
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
        let of_kernel: Vec<Entry> = entries.iter().filter(|(k, _)| *k == key).map(|(_, e)| *e).collect();
        for part in of_kernel.chunks(LONG) {
            let mut part = part.to_vec();
            let mut blocks = 0_u64;
            for entry in &mut part {
                entry.first_block = blocks as u32;
                blocks += entry.n.div_ceil(per_block(key.0)).max(least);
            }
            // 2^31 blocks are 2^43 elements, more than any device holds.
            run(key, &part, blocks as u32)?;
        }
    }
    Ok(())
}

pub(crate) fn multi_amax(xs: &[View], out: ViewMut, stream: Stream) -> Result<(), Error> {
    let (device, out) = (ordinal(out.device()), out.matrix());
    let dense = out.col_stride == 1 || xs.len() <= 1;
    if dense {
        driver::zero(device, stream, out.ptr, xs.len() * 4)?;
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
            let (to, rule) = (element(&out, i), ScaleRule::default());
            find_amax(x, to, &AMAX[at], &STRIDED_AMAX[at], rule, stream)?;
        }
    }
    let head = MultiArgs { amaxes: out.ptr, ..HEAD };
    // Elements per block: 256 threads, 8 loads, 4 rounds of 16 bytes.
    let per_block = |input: usize| 256 * 8 * 4 * if input == 0 { 4 } else { 8 };
    for_each_launch(entries, per_block, 0, |(i, _), part, blocks| {
        launch_list(device, stream, part, &head, blocks, &AMAX_SHORT[i], &AMAX_LONG[i])
    })
}

/// Casts a list. With delayed scaling, `delayed` are the amaxes and the used scales, shaped like `scales`.
fn multi_cast(
    xs: &[View],
    scales: &Matrix,
    delayed: Option<[Matrix; 2]>,
    outs: &[ViewMut],
    stream: Stream,
) -> Result<(), Error> {
    let device = ordinal(scales.device);
    let mut lists = delayed.iter().flatten().chain([scales]);
    let dense = xs.len() <= 1 || lists.all(|list| list.col_stride == 1);
    let mut entries = Vec::with_capacity(xs.len());
    for (i, (x, out)) in xs.iter().zip(outs).enumerate() {
        let Some(format) = out.dtype().fp8() else { continue };
        if dense && listed(x, Some(out)) {
            if x.numel() > 0 || delayed.is_some() {
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
        let scale = element(scales, i).cast_const();
        let source = match delayed {
            None => CastScale::Static(scale),
            Some(lists) => {
                let [amax, scale_used] = lists.map(|list| element(&list, i));
                let grid_max = workspace::slots(device, stream, 1)?;
                CastScale::Delayed { scale, delayed: Delayed { amax, scale_used, grid_max } }
            }
        };
        Cast { x, source, format, rowwise: Some(out), columnwise: None, stream }.run()?;
    }
    let least = u64::from(delayed.is_some());
    for_each_launch(
        entries,
        |_| 2 * 4096,
        least,
        |(i, j), part, blocks| {
            let mut head = MultiArgs { scales: scales.ptr, ..HEAD };
            let (short, long) = if let Some(lists) = delayed {
                [head.amaxes, head.scales_used] = lists.map(|list| list.ptr);
                head.maxima = workspace::slots(device, stream, part.len())?;
                (&DELAYED_SHORT[i][j], &DELAYED_LONG[i][j])
            } else {
                (&MULTI_SHORT[i][j], &MULTI_LONG[i][j])
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
    multi_cast(xs, &scales.matrix(), None, outs, stream)
}

pub(crate) fn multi_quantize_delayed(
    xs: &[View],
    scales: View,
    amaxes: ViewMut,
    scales_used: ViewMut,
    outs: &[ViewMut],
    stream: Stream,
) -> Result<(), Error> {
    multi_cast(xs, &scales.matrix(), Some([amaxes.matrix(), scales_used.matrix()]), outs, stream)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::layout::{DType, Device};

    /// The launches that a list was split into.
    type Launches = Vec<((usize, usize), Vec<Entry>, u32)>;

    fn split(sizes: &[((usize, usize), u64)], least: u64) -> Launches {
        let entries = (0..).zip(sizes).map(|(index, &(key, n))| (key, Entry { n, index, ..NONE })).collect();
        let mut launches = Launches::new();
        let run = |key, part: &[Entry], blocks| {
            launches.push((key, part.to_vec(), blocks));
            Ok(())
        };
        for_each_launch(entries, per_block, least, run).unwrap();
        launches
    }

    fn per_block(input: usize) -> u64 {
        [16, 100, 7][input]
    }

    /// Few enough keys that some have more than one launch.
    const KEYS: &[(usize, usize)] = &[(1, 1), (0, 0), (2, 0)];

    proptest! {
        #[test]
        fn every_entry_has_blocks_for_its_elements(
            sizes in prop::collection::vec((prop::sample::select(KEYS), 0..500_u64), 0..4 * LONG),
            least in 0..2_u64,
        ) {
            let launches = split(&sizes, least);
            let mut visits = vec![0; sizes.len()];
            for (key, part, blocks) in &launches {
                prop_assert!(!part.is_empty() && part.len() <= LONG);
                let mut next = 0;
                for entry in part {
                    let (entry_key, n) = sizes[entry.index as usize];
                    prop_assert_eq!((entry_key, n), (*key, entry.n));
                    prop_assert_eq!(u64::from(entry.first_block), next);
                    next += n.div_ceil(per_block(key.0)).max(least);
                    visits[entry.index as usize] += 1;
                }
                prop_assert_eq!(u64::from(*blocks), next);
            }
            prop_assert!(visits.iter().all(|&times| times == 1));
            // There are as few launches as the kernels' lengths allow.
            let mut keys: Vec<_> = sizes.iter().map(|(key, _)| *key).collect();
            keys.sort_unstable();
            let runs = keys.chunk_by(|a, b| a == b).map(|run| run.len().div_ceil(LONG));
            prop_assert_eq!(launches.len(), runs.sum::<usize>());
        }
    }

    #[test]
    fn failing_launch_stops_the_list() {
        let entry = Entry { n: 1, ..NONE };
        let entries = vec![((0, 0), entry), ((1, 0), entry)];
        let mut launches = 0;
        let refused = for_each_launch(entries, per_block, 0, |_, _, _| {
            launches += 1;
            Err(Error::Cuda { call: "cuLaunchKernel".into(), message: "no".into() })
        });
        assert!(refused.is_err() && launches == 1);
    }

    #[test]
    fn parameters_contain_the_entries_and_are_empty_after_them() {
        let entry = |index| Entry {
            x: std::ptr::without_provenance(16),
            codes: std::ptr::without_provenance_mut(32),
            n: 5,
            first_block: index,
            index,
        };
        let head = MultiArgs::<0> {
            scales: std::ptr::without_provenance(1),
            amaxes: std::ptr::without_provenance_mut(2),
            scales_used: std::ptr::without_provenance_mut(3),
            maxima: std::ptr::without_provenance_mut(4),
            count: 0,
            blocks: 0,
            entries: [],
        };
        let args = fill::<SHORT>(&head, &[entry(0), entry(1)], 9);
        assert_eq!((args.count, args.blocks), (2, 9));
        let pointers = [args.amaxes.addr(), args.scales_used.addr(), args.maxima.addr()];
        assert_eq!((args.scales.addr(), pointers), (1, [2, 3, 4]));
        assert_eq!(args.entries.map(|e| e.n)[..4], [5, 5, 0, 0]);
        assert_eq!(args.entries[1].index, 1);
        assert!(args.entries[2..].iter().all(|e| e.x.is_null() && e.codes.is_null()));
    }

    #[test]
    fn elements_of_a_list_are_a_column_stride_apart() {
        let list = |col_stride| {
            let start = std::ptr::without_provenance_mut(1000);
            Matrix::new(start, DType::F32, Device::Cuda(0), (1, 4), (7, col_stride))
        };
        assert_eq!(element(&list(2), 3).addr(), 1024);
        assert_eq!(element(&list(-2), 3).addr(), 976);
    }
}
