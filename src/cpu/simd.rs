//! Run-time selection of the instruction set. A [`Kernel`] is plain code that is compiled once for each
//! [`Level`]. Its inner loops are written so that the compiler vectorizes them: no branches, no calls,
//! selects on integers.

use std::sync::atomic::{AtomicU8, Ordering};

/// An instruction set that kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Level {
    /// The baseline instruction set of the architecture.
    Scalar,
    /// AVX2 and FMA, whose instructions are used where `mul_add` is written, and only there.
    Avx2,
    /// FMA and AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl Level {
    /// Returns the level's name on the command line and in Python.
    #[cfg(feature = "python")]
    #[must_use]
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    /// Returns whether this CPU supports the level.
    #[must_use]
    pub(crate) fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        match self {
            Self::Scalar => true,
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            Self::Avx512 => {
                is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        matches!(self, Self::Scalar)
    }
}

const UNSET: u8 = u8::MAX;

/// The current level, as its index in `LEVELS`.
static CURRENT: AtomicU8 = AtomicU8::new(UNSET);

const LEVELS: [Level; 3] = [Level::Scalar, Level::Avx2, Level::Avx512];

/// Sets the level of the kernels for all threads. None selects the best level that the CPU supports. For
/// tests and benchmarks; results are byte-identical. If the CPU does not support the level, returns false and
/// changes nothing.
#[cfg(any(feature = "python", test))]
pub(crate) fn set_simd(level: Option<Level>) -> bool {
    let level = level.unwrap_or_else(best);
    let available = level.is_available();
    if available {
        CURRENT.store(level as u8, Ordering::Relaxed);
    }
    available
}

/// Returns the level of the kernels.
#[must_use]
pub(crate) fn simd() -> Level {
    match CURRENT.load(Ordering::Relaxed) {
        UNSET => {
            let level = best();
            CURRENT.store(level as u8, Ordering::Relaxed);
            level
        }
        index => LEVELS[usize::from(index)],
    }
}

fn best() -> Level {
    LEVELS.into_iter().rev().find(|level| level.is_available()).unwrap_or(Level::Scalar)
}

/// Code that is compiled for each level.
pub(crate) trait Kernel {
    type Output;

    /// Must be `#[inline(always)]`, and so must everything that it calls in its loops. The code is compiled
    /// for the instruction set of the function that it is inlined into.
    fn run(self) -> Self::Output;
}

/// Runs a kernel at the current level.
pub(crate) fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    match simd() {
        Level::Scalar => kernel.run(),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `set_simd` and `simd` only select levels that this CPU supports, so it has AVX2 and FMA.
        Level::Avx2 => unsafe { avx2(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `set_simd` and `simd` only select levels that this CPU supports, so it has these AVX-512
        // extensions.
        Level::Avx512 => unsafe { avx512(kernel) },
        #[cfg(not(target_arch = "x86_64"))]
        Level::Avx2 | Level::Avx512 => kernel.run(),
    }
}

/// Runs a kernel that is compiled for AVX2 and FMA.
///
/// # Safety
/// The CPU must support AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}

/// Runs a kernel that is compiled for AVX-512.
///
/// # Safety
/// The CPU must support FMA and AVX-512 F, BW, DQ and VL.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "fma,avx512f,avx512bw,avx512dq,avx512vl")]
fn avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}

#[cfg(test)]
pub(crate) use tests::on_each_level;

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, PoisonError};

    use super::{LEVELS, Level, set_simd};

    /// Serializes tests that set the level. Tests run in threads of one process, and the level is global.
    static OVERRIDE: Mutex<()> = Mutex::new(());

    /// Calls `check` at each level that this CPU supports.
    pub(crate) fn on_each_level(mut check: impl FnMut(Level)) {
        let _alone = OVERRIDE.lock().unwrap_or_else(PoisonError::into_inner);
        for level in LEVELS {
            if set_simd(Some(level)) {
                check(level);
            }
        }
        set_simd(None);
    }

    #[test]
    fn set_simd_selects_the_level() {
        on_each_level(|level| assert_eq!(super::simd(), level));
    }
}
