//! The host: wall clock, and a copy that uses all threads.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::time::{Duration, Instant};

use fp8rs::{DType, Device, Stream};
use rayon::prelude::*;

use crate::machine::{Case, Machine, Plan};

pub(crate) struct Cpu;

const SHAPE: (usize, usize) = (4096, 4096);

/// Alignment of allocations: a cache line.
const ALIGN: usize = 64;

/// Bytes that a thread copies at a time.
const PART: usize = 1 << 20;

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes.max(1), ALIGN).expect("the size of an operand is a valid allocation size")
}

impl Machine for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn device(&self) -> Device {
        Device::Cpu
    }

    fn stream(&self) -> Stream {
        Stream::default()
    }

    fn plan(&self) -> Plan {
        let of = |dtype| Case { dtype, shape: SHAPE };
        let every = [DType::F32, DType::Bf16, DType::F16].map(of);
        Plan {
            tensorwise: every.to_vec(),
            basic: every.to_vec(),
            lists: every.to_vec(),
            blocks: vec![of(DType::Bf16)],
            mx: vec![of(DType::Bf16)],
            warm_up: Duration::from_millis(300),
            measurement: Duration::from_millis(1500),
        }
    }

    fn time(&self, rounds: u64, round: &mut dyn FnMut()) -> Duration {
        let begun = Instant::now();
        for _ in 0..rounds {
            round();
        }
        begun.elapsed()
    }

    fn allocate(&self, bytes: usize) -> *mut u8 {
        let layout = layout(bytes);
        // SAFETY: the size of the layout is not zero.
        let at = unsafe { alloc_zeroed(layout) };
        if at.is_null() {
            handle_alloc_error(layout);
        }
        at
    }

    unsafe fn free(&self, at: *mut u8, bytes: usize) {
        // SAFETY: the caller guarantees that `at` comes from `allocate`, which used this layout.
        unsafe { dealloc(at, layout(bytes)) }
    }

    unsafe fn write(&self, to: *mut u8, from: &[u8]) {
        // SAFETY: the caller guarantees that `to` has space for the bytes. Memory of `allocate` does not
        // overlap slices.
        unsafe { to.copy_from_nonoverlapping(from.as_ptr(), from.len()) }
    }

    unsafe fn copy(&self, to: *mut u8, from: *const u8, bytes: usize) {
        // SAFETY: the caller guarantees that both ranges are valid and do not overlap. Memory of `allocate`
        // is initialized.
        let (to, from) =
            unsafe { (std::slice::from_raw_parts_mut(to, bytes), std::slice::from_raw_parts(from, bytes)) };
        let parts = to.par_chunks_mut(PART).zip(from.par_chunks(PART));
        parts.for_each(|(to, from)| to.copy_from_slice(from));
    }
}
