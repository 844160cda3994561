//! Random numbers that depend on an element's position only.

use super::driver::{Grid, args, launch};
use super::modules::{ByInput, Module, by_input, input_index, module};
use super::views::ordinal;
use crate::error::Error;
use crate::layout::ViewMut;
use crate::spec::{Numbers, Stream};

#[derive(Clone, Copy)]
#[repr(C)]
struct RandomArgs {
    x: *mut u8,
    rows: u64,
    cols: u64,
    x_rs: i64,
    x_cs: i64,
    step: *const u8,
    seed: u64,
    offset: u64,
    low: f32,
    high: f32,
    contiguous: u32,
    stream: u32,
}

args!(RandomArgs);

static RANDOM_MODULE: Module = module!("random");

static RANDOM: ByInput = by_input!(RANDOM_MODULE, "random_uniform", RandomArgs);

#[cfg(test)]
pub(super) fn kernels() -> Vec<&'static super::modules::Kernel> {
    RANDOM.iter().collect()
}

pub(crate) fn random_uniform(
    x: ViewMut,
    numbers: Numbers,
    (low, high): (f32, f32),
    stream: Stream,
) -> Result<(), Error> {
    if x.numel() == 0 {
        return Ok(());
    }
    let args = RandomArgs {
        x: x.ptr(),
        rows: x.rows() as u64,
        cols: x.cols() as u64,
        x_rs: x.row_stride() as i64,
        x_cs: x.col_stride() as i64,
        step: numbers.step.map_or(std::ptr::null(), |step| step.ptr()),
        seed: numbers.seed,
        offset: numbers.offset,
        low,
        high,
        contiguous: u32::from(x.is_contiguous()),
        stream: numbers.stream,
    };
    // A thread computes the random words of four elements. The first and the last thread may have fewer
    // elements.
    let words = (numbers.offset & 3) + x.numel() as u64;
    let grid = Grid { blocks: words.div_ceil(4 * 256), threads: 256 };
    launch(ordinal(x.device()), stream, &RANDOM[input_index(x.dtype())], grid, &args)
}
