//! Dispatch from run-time types to compile-time types. A new element type or format needs one line here, for
//! all operations.

/// `with_element!(dtype, T => body)` evaluates the body with `T` as the element type. Validation rejects
/// other types.
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        $crate::cpu::types::with_type!($dtype, $T => $body, {
            $crate::layout::DType::F32 => f32,
            $crate::layout::DType::F16 => half::f16,
            $crate::layout::DType::Bf16 => half::bf16,
        }, other => unreachable!("{other} passed validation"))
    };
}

/// `with_codes!(format, C => body)` evaluates the body with `C` as the type of the format's codes.
macro_rules! with_codes {
    ($format:expr, $C:ident => $body:expr) => {
        $crate::cpu::types::with_type!($format, $C => $body, {
            $crate::format::Fp8Format::E4m3 => $crate::cpu::convert::E4m3,
            $crate::format::Fp8Format::E5m2 => $crate::cpu::convert::E5m2,
        })
    };
}

/// A match with the same body in each arm, compiled for the arm's type.
macro_rules! with_type {
    (
        $value:expr, $T:ident => $body:expr, { $($pattern:path => $type:ty,)* }
        $(, $other:ident => $otherwise:expr)?
    ) => {
        match $value {
            $($pattern => {
                type $T = $type;
                $body
            })*
            $($other => $otherwise,)?
        }
    };
}

pub(super) use {with_codes, with_element, with_type};
