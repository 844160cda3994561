//! What a device must do for its kernels to be timed: allocate, fill, copy, run rounds and time them.

use std::time::Duration;

use fp8rs::{DType, Device, Stream};
use half::{bf16, f16};

/// A device and how to time work on it.
pub(crate) trait Machine {
    /// The part of a benchmark's name that says where it ran.
    fn name(&self) -> &'static str;

    /// The device of the views.
    fn device(&self) -> Device;

    /// Where operations queue their work.
    fn stream(&self) -> Stream;

    /// What is timed here, and for how long.
    fn plan(&self) -> Plan;

    /// The time of `rounds` calls of `round`, which queue work (or do it, on the host).
    fn time(&self, rounds: u64, round: &mut dyn FnMut()) -> Duration;

    /// Memory that holds zeros, for [`Machine::free`]. It begins at a multiple of 64 bytes, as torch's does.
    fn allocate(&self, bytes: usize) -> *mut u8;

    /// Gives memory back, after the work that was queued.
    ///
    /// # Safety
    /// `at` is from [`Machine::allocate`] with as many bytes, and is not used afterwards.
    unsafe fn free(&self, at: *mut u8, bytes: usize);

    /// Writes host bytes, and returns when they are there.
    ///
    /// # Safety
    /// `to` has room for them in memory of this machine.
    unsafe fn write(&self, to: *mut u8, from: &[u8]);

    /// Queues a copy: the fastest way that the platform offers.
    ///
    /// # Safety
    /// Both are `bytes` of this machine's memory, and do not overlap.
    unsafe fn copy(&self, to: *mut u8, from: *const u8, bytes: usize);
}

/// How many copies of a row's operands, of `bytes` together, rounds take turns with, so that caches hold
/// nothing of the next round's: 180 MB of them, which is three times the L2 of an H200, and at least three.
/// Rows of a few bytes, which show what a call costs, get no more than 64.
pub(crate) fn copies(bytes: usize) -> usize {
    (180_000_000 / bytes.max(1) + 1).clamp(3, 64)
}

/// An input's element type and shape.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) dtype: DType,
    pub(crate) shape: (usize, usize),
}

/// Which inputs each kind of row has on a machine, and how long a benchmark takes.
pub(crate) struct Plan {
    /// Per-tensor operations.
    pub(crate) tensorwise: Vec<Case>,
    /// Those whose speed the others build on: amax and the casts with a known scale.
    pub(crate) basic: Vec<Case>,
    /// Operations on lists, which cut it into as many matrices as a model has weights. Calls of them take
    /// the host longer, so that a GPU needs more elements to be kept busy.
    pub(crate) lists: Vec<Case>,
    /// Block formats.
    pub(crate) blocks: Vec<Case>,
    /// MXFP8 with 1x32 blocks.
    pub(crate) mx: Vec<Case>,
    pub(crate) warm_up: Duration,
    pub(crate) measurement: Duration,
}

/// Memory of a machine, given back when dropped.
pub(crate) struct Buffer<'m> {
    machine: &'m dyn Machine,
    at: *mut u8,
    bytes: usize,
}

impl<'m> Buffer<'m> {
    /// `bytes` (at least one) that hold `pattern` again and again, or zeros where it is empty.
    pub(crate) fn new(machine: &'m dyn Machine, bytes: usize, pattern: &[u8]) -> Self {
        let at = machine.allocate(bytes);
        let mut filled = pattern.len().min(bytes);
        if filled > 0 {
            // SAFETY: the memory was just allocated, and `filled` is at most its size.
            unsafe { machine.write(at, &pattern[..filled]) };
        }
        while 0 < filled && filled < bytes {
            let more = filled.min(bytes - filled);
            // SAFETY: the first `filled` bytes and the `more` after them are inside and do not overlap.
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
        // SAFETY: allocated by this machine with as many bytes; a buffer outlives the views of it.
        unsafe { self.machine.free(self.at, self.bytes) }
    }
}

/// What an operand holds before the first round.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fill {
    Zeros,
    /// fp32, all the same.
    Value(f32),
    /// Near to a normal distribution, no value special; FP8 codes without NaN; E8M0 scales near one. Zeros
    /// would draw less power on a GPU, and run faster.
    Random,
}

impl Fill {
    /// Random data repeats after this many elements: making more on the host would take longer than the
    /// benchmark.
    const PERIOD: usize = 1 << 22;

    /// The bytes of (the first) `count` elements; none for zeros.
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
            // A byte that is NaN in E4M3 (0x7F, 0xFF) becomes the largest finite one.
            (Self::Random, DType::E4m3 | DType::E5m2) => {
                let codes = (0..count).map(|_| (random.bits() >> 56) as u8);
                codes.map(|code| if code & 0x7F == 0x7F { code ^ 1 } else { code }).collect()
            }
            (Self::Random, DType::E8m0) => (0..count).map(|_| 120 + (random.bits() >> 60) as u8).collect(),
        }
    }
}

/// splitmix64: a few operations a number, and good enough to look at.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// The sum of four uniform numbers: within (-2, 2).
    fn value(&mut self) -> f32 {
        let bits = self.bits();
        let sum: f32 = (0..4).map(|part| ((bits >> (16 * part)) & 0xFFFF) as f32).sum();
        sum / 65536.0 - 2.0
    }
}
