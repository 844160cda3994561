//! The interface of a device on which kernels are timed: allocate, fill, copy, run rounds and time them.

use std::time::Duration;

use fp8rs::{DType, Device, Stream};
use half::{bf16, f16};

/// A device, and how to time work on it.
pub(crate) trait Machine {
    /// Returns the part of a benchmark's name that identifies the device.
    fn name(&self) -> &'static str;

    /// Returns the device of the views.
    fn device(&self) -> Device;

    /// Returns the stream on which operations queue their work.
    fn stream(&self) -> Stream;

    /// Returns the inputs of the benchmarks on this machine, and their duration.
    fn plan(&self) -> Plan;

    /// Returns the time of `rounds` calls of `round`, which queue work (or do it, on the host).
    fn time(&self, rounds: u64, round: &mut dyn FnMut()) -> Duration;

    /// Allocates zeroed memory, to be freed with [`Machine::free`]. It is aligned to 64 bytes, as torch's is.
    fn allocate(&self, bytes: usize) -> *mut u8;

    /// Frees memory after the queued work is done.
    ///
    /// # Safety
    /// `at` must come from [`Machine::allocate`] with the same number of bytes, and must not be used
    /// afterwards.
    unsafe fn free(&self, at: *mut u8, bytes: usize);

    /// Writes host bytes, and returns when they have been written.
    ///
    /// # Safety
    /// `to` must point to memory of this machine with space for the bytes.
    unsafe fn write(&self, to: *mut u8, from: &[u8]);

    /// Queues a copy, by the fastest method of the platform.
    ///
    /// # Safety
    /// Both must point to `bytes` bytes of this machine's memory, and must not overlap.
    unsafe fn copy(&self, to: *mut u8, from: *const u8, bytes: usize);
}

/// Returns the number of copies of a row's operands (`bytes` in total) that rounds alternate between, so that
/// caches do not hold the operands of the next round: 180 MB, three times the L2 of an H200, and at least
/// three copies. Rows of a few bytes, which measure the cost of a call, get at most 64.
pub(crate) fn copies(bytes: usize) -> usize {
    (180_000_000 / bytes.max(1) + 1).clamp(3, 64)
}

/// An input's element type and shape.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) dtype: DType,
    pub(crate) shape: (usize, usize),
}

/// The inputs of each kind of row on a machine, and the duration of a benchmark.
pub(crate) struct Plan {
    /// Per-tensor operations.
    pub(crate) tensorwise: Vec<Case>,
    /// Operations that limit the speed of others: amax and casts with a given scale.
    pub(crate) basic: Vec<Case>,
    /// Operations on lists, which split the input into as many matrices as a model has weights. Calls take
    /// longer on the host, so a GPU needs more elements to be busy.
    pub(crate) lists: Vec<Case>,
    /// Block formats.
    pub(crate) blocks: Vec<Case>,
    /// MXFP8 with 1x32 blocks.
    pub(crate) mx: Vec<Case>,
    pub(crate) warm_up: Duration,
    pub(crate) measurement: Duration,
}

/// Memory of a machine, freed when dropped.
pub(crate) struct Buffer<'m> {
    machine: &'m dyn Machine,
    at: *mut u8,
    bytes: usize,
}

impl<'m> Buffer<'m> {
    /// Allocates `bytes` (at least one) and fills them with repetitions of `pattern`, or with zeros if it is
    /// empty.
    pub(crate) fn new(machine: &'m dyn Machine, bytes: usize, pattern: &[u8]) -> Self {
        let at = machine.allocate(bytes);
        let mut filled = pattern.len().min(bytes);
        if filled > 0 {
            // SAFETY: the memory was just allocated, and `filled` is at most its size.
            unsafe { machine.write(at, &pattern[..filled]) };
        }
        while 0 < filled && filled < bytes {
            let more = filled.min(bytes - filled);
            // SAFETY: the first `filled` bytes and the `more` bytes after them are inside the memory and do
            // not overlap.
            unsafe { machine.copy(at.wrapping_add(filled), at, more) };
            filled += more;
        }
        Self { machine, at, bytes }
    }

    pub(crate) fn at(&self) -> *mut u8 {
        self.at
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        // SAFETY: this machine allocated as many bytes, and a buffer outlives its views.
        unsafe { self.machine.free(self.at, self.bytes) }
    }
}

/// The initial contents of an operand.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fill {
    Zeros,
    /// fp32, all elements equal.
    Value(f32),
    /// Close to a normal distribution, without special values. FP8 codes are not NaN, and E8M0 scales are
    /// near one. Zeros would draw less power on a GPU and therefore run faster.
    Random,
}

impl Fill {
    /// Random data repeats after this many elements, because generating more on the host would take longer
    /// than the benchmark.
    const PERIOD: usize = 1 << 22;

    /// Returns the bytes of the first `count` elements, or nothing for zeros.
    pub(crate) fn pattern(self, dtype: DType, count: usize) -> Vec<u8> {
        let count = count.min(Self::PERIOD);
        let mut random = Random(0);
        match (self, dtype) {
            (Self::Zeros, _) => Vec::new(),
            (Self::Value(value), _) => value.to_ne_bytes().repeat(count),
            (Self::Random, DType::F32) => (0..count).flat_map(|_| random.value().to_ne_bytes()).collect(),
            (Self::Random, DType::Bf16) => {
                (0..count).flat_map(|_| bf16::from_f32(random.value()).to_ne_bytes()).collect()
            }
            (Self::Random, DType::F16) => {
                (0..count).flat_map(|_| f16::from_f32(random.value()).to_ne_bytes()).collect()
            }
            // NaN codes of E4M3 (0x7F, 0xFF) become the largest finite code.
            (Self::Random, DType::E4m3 | DType::E5m2) => {
                let codes = (0..count).map(|_| (random.bits() >> 56) as u8);
                codes.map(|code| if code & 0x7F == 0x7F { code ^ 1 } else { code }).collect()
            }
            (Self::Random, DType::U8) => (0..count).map(|_| (random.bits() >> 56) as u8).collect(),
            (Self::Random, DType::I32) => {
                (0..count).flat_map(|_| (random.bits() as i32).to_ne_bytes()).collect()
            }
            (Self::Random, DType::I64) => {
                (0..count).flat_map(|_| (random.bits() as i64).to_ne_bytes()).collect()
            }
            (Self::Random, DType::E8m0) => (0..count).map(|_| 120 + (random.bits() >> 60) as u8).collect(),
        }
    }
}

/// splitmix64, which needs few operations per number and is random enough for this purpose.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns the sum of four uniform numbers, shifted to [-2, 2).
    fn value(&mut self) -> f32 {
        let bits = self.bits();
        let sum: f32 = (0..4).map(|part| ((bits >> (16 * part)) & 0xFFFF) as f32).sum();
        sum / 65536.0 - 2.0
    }
}
