//! The `AdamW` step over a list of tensors, with one launch per kernel and [`ENTRIES`] tensors.

use super::driver::{Grid, args, launch};
use super::modules::{Kernel, Module, kernel, module};
use super::tensorwise::Rule;
use super::views::{aligned, ordinal};
use super::workspace::{self, PER_CHUNK};
use crate::error::Error;
use crate::format::e8m0::Rounding;
use crate::layout::{Block, BlockFormat, DType, View, ViewMut};
use crate::spec::{AdamW, AdamWCall, AdamWTensor, BlockScale, ScaleRule, Stream, Target};

/// Entries of a launch. The parameters of a kernel are limited to 32 KB.
const ENTRIES: usize = 255;
const _: () = assert!(ENTRIES <= PER_CHUNK);

/// Elements per thread block for tensors without block scales, with moments in high precision and in codes.
const PER_BLOCK: usize = 4096;
const PER_BLOCK_OF_MOMENTS: usize = 16384;

/// Flags of an entry (`kernels/adamw.cuh`).
const GRAD_BF16: u32 = 1;
const GRAD_F16: u32 = 2;
const MOMENTS_BF16: u32 = 4;
const VECTORS: u32 = 8;
const IS_E5M2: u32 = 16;
const IS_E8M0: u32 = 32;

/// Flags of a launch.
const MAXIMIZE: u32 = 1;
const STOCHASTIC: u32 = 2;
const FLOOR: u32 = 4;

#[derive(Clone, Copy)]
#[repr(C)]
struct AdamWEntry {
    grad: *const u8,
    exp_avg: *mut u8,
    exp_avg_sq: *mut u8,
    param: *mut u8,
    master: *mut u8,
    step: *const u8,
    scale: *mut u8,
    new_scale: *const u8,
    amax: *mut u8,
    exp_avg_range: *mut u8,
    exp_avg_sq_range: *mut u8,
    rows: u64,
    cols: u64,
    offset: u64,
    first_block: u32,
    stream: u32,
    flags: u32,
    unused: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct AdamWArgs {
    lr: *const u8,
    grad_scale: *const u8,
    found_inf: *const u8,
    maxima: *mut u8,
    lr_value: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    seed: u64,
    rule: Rule,
    flags: u32,
    count: u32,
    blocks: u32,
    entries: [AdamWEntry; ENTRIES],
}

args!(AdamWArgs);

static ADAMW_MODULE: Module = module!("adamw");
static ADAMW_BLOCKS_MODULE: Module = module!("adamw_blocks");
static ADAMW_MOMENTS_MODULE: Module = module!("adamw_moments");

macro_rules! kernels {
    ($($name:ident = $module:ident $entry:literal;)*) => {
        $(static $name: Kernel = kernel!($module, $entry, AdamWArgs);)*

        #[cfg(test)]
        pub(super) fn kernels() -> Vec<&'static Kernel> {
            vec![$(&$name),*]
        }
    };
}

kernels! {
    PLAIN_F32 = ADAMW_MODULE "adamw_f32";
    PLAIN_BF16 = ADAMW_MODULE "adamw_bf16";
    PLAIN_F16 = ADAMW_MODULE "adamw_f16";
    CODES = ADAMW_MODULE "adamw_codes";
    ROW_4096 = ADAMW_BLOCKS_MODULE "adamw_row_4096";
    ROW_16384 = ADAMW_BLOCKS_MODULE "adamw_row_16384";
    SQUARE_128 = ADAMW_BLOCKS_MODULE "adamw_square_128";
    SQUARE_32 = ADAMW_BLOCKS_MODULE "adamw_square_32";
    ROW_TWICE = ADAMW_BLOCKS_MODULE "adamw_row_twice";
    SQUARE_128_TWICE = ADAMW_BLOCKS_MODULE "adamw_square_128_twice";
    SQUARE_32_TWICE = ADAMW_BLOCKS_MODULE "adamw_square_32_twice";
    MOMENTS_PLAIN_F32 = ADAMW_MOMENTS_MODULE "adamw_moments_f32";
    MOMENTS_PLAIN_F32_F32 = ADAMW_MOMENTS_MODULE "adamw_moments_f32_f32";
    MOMENTS_PLAIN_BF16 = ADAMW_MOMENTS_MODULE "adamw_moments_bf16";
    MOMENTS_PLAIN_F16 = ADAMW_MOMENTS_MODULE "adamw_moments_f16";
    MOMENTS_CODES = ADAMW_MOMENTS_MODULE "adamw_moments_codes";
    MOMENTS_CODES_BF16 = ADAMW_MOMENTS_MODULE "adamw_moments_codes_bf16";
    MOMENTS_CODES_F32 = ADAMW_MOMENTS_MODULE "adamw_moments_codes_f32";
    MOMENTS_ROW_4096 = ADAMW_MOMENTS_MODULE "adamw_moments_row_4096";
    MOMENTS_ROW_4096_BF16 = ADAMW_MOMENTS_MODULE "adamw_moments_row_4096_bf16";
    MOMENTS_ROW_4096_F32 = ADAMW_MOMENTS_MODULE "adamw_moments_row_4096_f32";
    MOMENTS_ROW_16384 = ADAMW_MOMENTS_MODULE "adamw_moments_row_16384";
    MOMENTS_ROW_16384_BF16 = ADAMW_MOMENTS_MODULE "adamw_moments_row_16384_bf16";
    MOMENTS_ROW_16384_F32 = ADAMW_MOMENTS_MODULE "adamw_moments_row_16384_f32";
    MOMENTS_ROW_TWICE = ADAMW_MOMENTS_MODULE "adamw_moments_row_twice";
    MOMENTS_ROW_TWICE_BF16 = ADAMW_MOMENTS_MODULE "adamw_moments_row_twice_bf16";
    MOMENTS_ROW_TWICE_F32 = ADAMW_MOMENTS_MODULE "adamw_moments_row_twice_f32";
    MOMENTS_SQUARE_128 = ADAMW_MOMENTS_MODULE "adamw_moments_square_128";
    MOMENTS_SQUARE_128_BF16 = ADAMW_MOMENTS_MODULE "adamw_moments_square_128_bf16";
    MOMENTS_SQUARE_128_F32 = ADAMW_MOMENTS_MODULE "adamw_moments_square_128_f32";
    MOMENTS_SQUARE_32 = ADAMW_MOMENTS_MODULE "adamw_moments_square_32";
    MOMENTS_SQUARE_32_BF16 = ADAMW_MOMENTS_MODULE "adamw_moments_square_32_bf16";
    MOMENTS_SQUARE_32_F32 = ADAMW_MOMENTS_MODULE "adamw_moments_square_32_f32";
}

/// How a tensor is launched.
#[derive(Clone, Copy)]
struct Launch {
    kernel: &'static Kernel,
    /// Threads per block.
    threads: u32,
    blocks: u64,
}

/// Whether groups of four adjacent elements, starting at multiples of four, and ranges can be loaded and
/// stored as vectors.
fn four_at_once(tensor: &AdamWTensor, target: &Target) -> bool {
    let views = [
        (tensor.grad.ptr(), tensor.grad.dtype()),
        (tensor.exp_avg.ptr().cast_const(), tensor.exp_avg.dtype()),
        (tensor.exp_avg_sq.ptr().cast_const(), tensor.exp_avg_sq.dtype()),
        (tensor.param.ptr().cast_const(), tensor.param.dtype()),
    ];
    let master = tensor.master.iter().map(|master| (master.ptr().cast_const(), DType::F32));
    let ranges = tensor.ranges.iter().flatten().map(|range| range.ptr().cast_const());
    let rows = !matches!(target, Target::Blocks(..)) || tensor.param.cols().is_multiple_of(4);
    rows && tensor.offset.is_multiple_of(4)
        && views.into_iter().chain(master).all(|(ptr, dtype)| aligned(ptr, 4 * dtype.size()))
        && ranges.into_iter().all(|ptr| aligned(ptr, 8))
}

/// Returns how a matrix with a scale for each block is launched.
fn block_launch(block: Block, (rows, cols): (usize, usize), vectors: bool) -> Result<Launch, Error> {
    let squares = |side: usize| rows.div_ceil(side) as u64 * cols.div_ceil(side) as u64;
    let (kernel, threads, blocks) = match (block.rows, block.cols, vectors) {
        (1, Block::ALL, true) if cols <= 4096 => (&ROW_4096, 512, rows as u64),
        (1, Block::ALL, true) if cols <= 16384 => (&ROW_16384, 1024, rows as u64),
        (1, Block::ALL, _) => (&ROW_TWICE, 512, rows as u64),
        (32, 32, true) => (&SQUARE_32, 512, squares(32).div_ceil(4)),
        (32, 32, false) => (&SQUARE_32_TWICE, 512, squares(32)),
        (128, 128, true) => (&SQUARE_128, 1024, squares(128)),
        (128, 128, false) => (&SQUARE_128_TWICE, 512, squares(128)),
        _ => return Err(block.unsupported(BlockFormat::list_blocks(|format| format.in_adamw))),
    };
    Ok(Launch { kernel, threads, blocks })
}

/// A kernel for each storage of parameters and moments that are both codes: any storage, and aligned E4M3
/// with gradients in bf16 or in fp32.
type ByStorage = [&'static Kernel; 3];

static MOMENTS_CODES_BY_STORAGE: ByStorage = [&MOMENTS_CODES, &MOMENTS_CODES_BF16, &MOMENTS_CODES_F32];
static MOMENTS_ROW_4096_BY_STORAGE: ByStorage =
    [&MOMENTS_ROW_4096, &MOMENTS_ROW_4096_BF16, &MOMENTS_ROW_4096_F32];
static MOMENTS_ROW_16384_BY_STORAGE: ByStorage =
    [&MOMENTS_ROW_16384, &MOMENTS_ROW_16384_BF16, &MOMENTS_ROW_16384_F32];
static MOMENTS_ROW_TWICE_BY_STORAGE: ByStorage =
    [&MOMENTS_ROW_TWICE, &MOMENTS_ROW_TWICE_BF16, &MOMENTS_ROW_TWICE_F32];
static MOMENTS_SQUARE_128_BY_STORAGE: ByStorage =
    [&MOMENTS_SQUARE_128, &MOMENTS_SQUARE_128_BF16, &MOMENTS_SQUARE_128_F32];
static MOMENTS_SQUARE_32_BY_STORAGE: ByStorage =
    [&MOMENTS_SQUARE_32, &MOMENTS_SQUARE_32_BF16, &MOMENTS_SQUARE_32_F32];

/// Returns the index of a tensor's kernel in [`ByStorage`].
fn storage_of(tensor: &AdamWTensor, vectors: bool) -> usize {
    match tensor.grad.dtype() {
        DType::Bf16 if vectors && tensor.param.dtype() == DType::E4m3 => 1,
        DType::F32 if vectors && tensor.param.dtype() == DType::E4m3 => 2,
        _ => 0,
    }
}

/// Returns how a matrix with a scale for each block is launched if its moments are codes. Half of a warp
/// updates whole blocks of them, so tensors of any alignment have these kernels.
fn moments_block_launch(block: Block, (rows, cols): (usize, usize), storage: usize) -> Result<Launch, Error> {
    let squares = |side: usize| rows.div_ceil(side) as u64 * cols.div_ceil(side) as u64;
    let (kernels, threads, blocks) = match (block.rows, block.cols) {
        (1, Block::ALL) if cols <= 4096 => (&MOMENTS_ROW_4096_BY_STORAGE, 512, rows as u64),
        (1, Block::ALL) if cols <= 16384 => (&MOMENTS_ROW_16384_BY_STORAGE, 512, rows as u64),
        (1, Block::ALL) => (&MOMENTS_ROW_TWICE_BY_STORAGE, 256, rows as u64),
        (32, 32) => (&MOMENTS_SQUARE_32_BY_STORAGE, 512, squares(32).div_ceil(4)),
        (128, 128) => (&MOMENTS_SQUARE_128_BY_STORAGE, 512, squares(128)),
        _ => return Err(block.unsupported(BlockFormat::list_blocks(|format| format.in_adamw))),
    };
    Ok(Launch { kernel: kernels[storage], threads, blocks })
}

/// Returns how a tensor is launched.
fn launch_of(tensor: &AdamWTensor, target: &Target, vectors: bool) -> Result<Launch, Error> {
    let (rows, cols) = tensor.param.shape();
    let has_codes = tensor.ranges.is_some();
    if let Target::Blocks(block, _) = target {
        return if has_codes {
            moments_block_launch(*block, (rows, cols), storage_of(tensor, vectors))
        } else {
            block_launch(*block, (rows, cols), vectors)
        };
    }
    let is_aligned_f32 = vectors && tensor.grad.dtype() == DType::F32 && tensor.master.is_none();
    let kernel = match (tensor.param.dtype(), has_codes) {
        (DType::F32, false) => &PLAIN_F32,
        (DType::Bf16, false) => &PLAIN_BF16,
        (DType::F16, false) => &PLAIN_F16,
        (_, false) => &CODES,
        (DType::F32, true) if is_aligned_f32 => &MOMENTS_PLAIN_F32_F32,
        (DType::F32, true) => &MOMENTS_PLAIN_F32,
        (DType::Bf16, true) => &MOMENTS_PLAIN_BF16,
        (DType::F16, true) => &MOMENTS_PLAIN_F16,
        (_, true) => MOMENTS_CODES_BY_STORAGE[storage_of(tensor, vectors)],
    };
    let per_block = if has_codes { PER_BLOCK_OF_MOMENTS } else { PER_BLOCK };
    // A tensor without elements still needs a block if there is an amax or a scale to write.
    let least = u64::from(tensor.amax.is_some() || tensor.new_scale.is_some());
    let blocks = ((rows * cols).div_ceil(per_block) as u64).max(least);
    Ok(Launch { kernel, threads: 256, blocks })
}

fn entry(tensor: &AdamWTensor, vectors: bool) -> AdamWEntry {
    let grad = match tensor.grad.dtype() {
        DType::Bf16 => GRAD_BF16,
        DType::F16 => GRAD_F16,
        _ => 0,
    };
    let flag = |is, flag| if is { flag } else { 0 };
    let scale = tensor.scale.as_ref();
    let range = |i: usize| tensor.ranges.as_ref().map_or(std::ptr::null_mut(), |ranges| ranges[i].ptr());
    let flags = grad
        | flag(tensor.exp_avg.dtype() == DType::Bf16, MOMENTS_BF16)
        | flag(vectors, VECTORS)
        | flag(tensor.param.dtype() == DType::E5m2, IS_E5M2)
        | flag(scale.is_some_and(|scale| scale.dtype() == DType::E8m0), IS_E8M0);
    AdamWEntry {
        grad: tensor.grad.ptr(),
        exp_avg: tensor.exp_avg.ptr(),
        exp_avg_sq: tensor.exp_avg_sq.ptr(),
        param: tensor.param.ptr(),
        master: tensor.master.as_ref().map_or(std::ptr::null_mut(), ViewMut::ptr),
        step: tensor.step.ptr(),
        scale: scale.map_or(std::ptr::null_mut(), ViewMut::ptr),
        new_scale: tensor.new_scale.as_ref().map_or(std::ptr::null(), View::ptr),
        amax: tensor.amax.as_ref().map_or(std::ptr::null_mut(), ViewMut::ptr),
        exp_avg_range: range(0),
        exp_avg_sq_range: range(1),
        rows: tensor.param.rows() as u64,
        cols: tensor.param.cols() as u64,
        offset: tensor.offset,
        first_block: 0,
        stream: tensor.stream,
        flags,
        unused: 0,
    }
}

/// Returns the arguments that all launches of a call share. Kernels read the first `count` entries, so the
/// others may be any entry.
#[expect(clippy::large_stack_arrays, reason = "a kernel's parameters take 32 KB")]
fn shared_arguments(shared: &AdamW, any_entry: AdamWEntry) -> AdamWArgs {
    let (rule, floor) = match shared.target {
        Target::Blocks(_, BlockScale::F32(rule)) => (rule, false),
        Target::Blocks(_, BlockScale::E8m0(rounding)) => (ScaleRule::default(), rounding == Rounding::Floor),
        _ => (ScaleRule::default(), false),
    };
    let flag = |is, flag| if is { flag } else { 0 };
    let element = |view: Option<View>| view.map_or(std::ptr::null(), |view| view.ptr());
    let hyper = shared.hyper;
    AdamWArgs {
        lr: element(shared.lr),
        grad_scale: element(shared.grad_scale),
        found_inf: element(shared.found_inf),
        maxima: std::ptr::null_mut(),
        lr_value: hyper.lr,
        beta1: hyper.beta1,
        beta2: hyper.beta2,
        eps: hyper.eps,
        weight_decay: hyper.weight_decay,
        seed: shared.stochastic.unwrap_or(0),
        rule: rule.into(),
        flags: flag(hyper.maximize, MAXIMIZE)
            | flag(shared.stochastic.is_some(), STOCHASTIC)
            | flag(floor, FLOOR),
        count: 0,
        blocks: 0,
        entries: [any_entry; ENTRIES],
    }
}

pub(crate) fn adamw(call: AdamWCall, stream: Stream) -> Result<(), Error> {
    let AdamWCall { shared, tensors } = call;
    let mut entries: Vec<(Launch, AdamWEntry)> = Vec::with_capacity(tensors.len());
    for tensor in &tensors {
        let vectors = four_at_once(tensor, &shared.target);
        let launch = launch_of(tensor, &shared.target, vectors)?;
        if launch.blocks > 0 {
            entries.push((launch, entry(tensor, vectors)));
        }
    }
    let Some((_, first)) = entries.first() else { return Ok(()) };
    let device = ordinal(tensors[0].param.device());
    let mut args = shared_arguments(&shared, *first);

    // Sort by kernel. The sort is stable, so it keeps the order of the list.
    entries.sort_by_key(|(launch, _)| std::ptr::from_ref(launch.kernel).addr());
    for of_kernel in entries.chunk_by(|(a, _), (b, _)| std::ptr::eq(a.kernel, b.kernel)) {
        for part in of_kernel.chunks(ENTRIES) {
            launch_part(device, stream, part, &mut args)?;
        }
    }
    Ok(())
}

/// Launches a kernel for at most [`ENTRIES`] tensors.
fn launch_part(
    device: i32,
    stream: Stream,
    part: &[(Launch, AdamWEntry)],
    args: &mut AdamWArgs,
) -> Result<(), Error> {
    let mut blocks = 0_u64;
    for (slot, (launch, entry)) in args.entries.iter_mut().zip(part) {
        // 2^32 blocks cover at least 2^41 elements, more than any device holds.
        *slot = AdamWEntry { first_block: blocks as u32, ..*entry };
        blocks += launch.blocks;
    }
    args.count = part.len() as u32;
    args.blocks = blocks as u32;

    let (Launch { kernel, threads, .. }, first) = part[0];
    let reduces_maxima = !first.amax.is_null() || !first.new_scale.is_null();
    args.maxima =
        if reduces_maxima { workspace::slots(device, stream, part.len())? } else { std::ptr::null_mut() };
    launch(device, stream, kernel, Grid { blocks, threads }, args)
}

#[cfg(test)]
mod tests {
    use super::{Block, block_launch, moments_block_launch};
    use crate::layout::FORMATS;

    #[test]
    fn formats_of_adamw_have_a_kernel_and_other_blocks_are_refused() {
        let extents = [1, 32, 64, 128, 256, Block::ALL];
        for (rows, cols) in extents.into_iter().flat_map(|rows| extents.map(|cols| (rows, cols))) {
            let block = Block { rows, cols };
            let expected = FORMATS.iter().any(|format| format.in_adamw && format.block == block);
            for vectors in [true, false] {
                assert_eq!(block_launch(block, (256, 256), vectors).is_ok(), expected, "{block}");
            }
            for storage in 0..3 {
                assert_eq!(moments_block_launch(block, (256, 256), storage).is_ok(), expected, "{block}");
            }
        }
    }
}
