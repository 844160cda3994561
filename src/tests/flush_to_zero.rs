//! The caller's mode for subnormals. `tests/float_env.rs` includes this file, too.

/// Does what `torch.set_flush_denormal` does.
pub(crate) fn set_flush_to_zero(on: bool) {
    #[cfg(target_arch = "x86_64")]
    {
        let control: u32 = if on { 0x9FC0 } else { 0x1F80 };
        // SAFETY: this is a valid value of MXCSR.
        unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const control, options(nostack)) };
    }
    let _ = on;
}
