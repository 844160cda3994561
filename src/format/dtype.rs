//! Element types and devices.

use std::fmt;

use super::Fp8Format;

/// An element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper 16 bits of IEEE single precision.
    Bf16,
    /// FP8 E4M3 codes, one byte each.
    E4m3,
    /// FP8 E5M2 codes, one byte each.
    E5m2,
    /// E8M0 power-of-two scales, one byte each.
    E8m0,
    /// 8-bit codes of other formats: the moments of an optimizer.
    U8,
    /// 32-bit integers: offsets of groups and indices of rows.
    I32,
    /// 64-bit integers: the indices of a token's rows.
    I64,
}

impl DType {
    /// Returns the size of an element in bytes.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::E4m3 | Self::E5m2 | Self::E8m0 | Self::U8 => 1,
        }
    }

    /// Returns the FP8 format, or None for other types.
    #[must_use]
    pub const fn fp8(self) -> Option<Fp8Format> {
        match self {
            Self::E4m3 => Some(Fp8Format::E4m3),
            Self::E5m2 => Some(Fp8Format::E5m2),
            _ => None,
        }
    }

    /// Returns whether the type is fp32, bf16 or fp16.
    #[must_use]
    pub const fn is_wide(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::Bf16)
    }
}

impl From<Fp8Format> for DType {
    fn from(format: Fp8Format) -> Self {
        match format {
            Fp8Format::E4m3 => Self::E4m3,
            Fp8Format::E5m2 => Self::E5m2,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
            Self::E4m3 => "float8_e4m3fn",
            Self::E5m2 => "float8_e5m2",
            Self::E8m0 => "float8_e8m0fnu",
            Self::U8 => "uint8",
            Self::I32 => "int32",
            Self::I64 => "int64",
        })
    }
}

/// The device that memory is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Device {
    /// The host.
    Cpu,
    /// A CUDA device, by its ordinal.
    Cuda(i32),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}
