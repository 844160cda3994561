//! The floating-point environment: round to nearest, keep subnormals.
//!
//! A caller may have enabled flush-to-zero (`torch.set_flush_denormal`), and a thread inherits the
//! environment of its creator. Results must not depend on either.

/// Sets the default environment. Dropping it restores the caller's environment.
pub(super) struct DefaultFloatEnv {
    saved: Control,
}

impl DefaultFloatEnv {
    pub(super) fn enter() -> Self {
        let saved = read();
        if saved & RELEVANT != DEFAULT {
            write(saved & !RELEVANT | DEFAULT);
        }
        Self { saved }
    }

    /// Sets the default environment for the rest of the thread's life.
    pub(super) fn enter_for_thread() {
        std::mem::forget(Self::enter());
    }
}

impl Drop for DefaultFloatEnv {
    fn drop(&mut self) {
        if self.saved & RELEVANT != DEFAULT {
            write(self.saved);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod arch {
    pub(super) type Control = u32;
    /// Bits for flush to zero, rounding, exception masks, and denormals are zero.
    pub(super) const RELEVANT: Control = 0xFFC0;
    /// All exceptions are masked, and the other bits are zero.
    pub(super) const DEFAULT: Control = 0x1F80;

    pub(super) fn read() -> Control {
        let mut control: Control = 0;
        // SAFETY: stores MXCSR to a variable of its size.
        unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut control, options(nostack)) };
        control
    }

    pub(super) fn write(control: Control) {
        // SAFETY: loads MXCSR with a value that differs only in defined bits from the value that was read.
        unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const control, options(nostack)) };
    }
}

#[cfg(target_arch = "aarch64")]
mod arch {
    pub(super) type Control = u64;
    /// Bits for FZ16, rounding, flush to zero and default NaN.
    pub(super) const RELEVANT: Control = 0x07C8_0000;
    pub(super) const DEFAULT: Control = 0;

    pub(super) fn read() -> Control {
        let control: Control;
        // SAFETY: reads FPCR, which has no other effect.
        unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) control, options(nostack)) };
        control
    }

    pub(super) fn write(control: Control) {
        // SAFETY: writes FPCR with a value that differs only in defined bits from the value that was read.
        unsafe { std::arch::asm!("msr fpcr, {}", in(reg) control, options(nostack)) };
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod arch {
    pub(super) type Control = u32;
    pub(super) const RELEVANT: Control = 0;
    pub(super) const DEFAULT: Control = 0;

    pub(super) fn read() -> Control {
        0
    }

    pub(super) fn write(_: Control) {}
}

use arch::{Control, DEFAULT, RELEVANT, read, write};

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn flush_to_zero_is_disabled_inside_and_restored_after() {
        let before = read();
        write(before | 0x8040);
        {
            let _env = DefaultFloatEnv::enter();
            assert_eq!(read() & RELEVANT, DEFAULT);
        }
        assert_eq!(read() & 0x8040, 0x8040);
        write(before);
    }
}
