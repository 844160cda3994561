//! From the types that views name at run time to those that kernels are compiled for: a new element type or
//! format is a row here, for every operation.

/// `with_element!(dtype, T => body)`: the body with `T` the element type, which validation has let through.
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        $crate::cpu::types::with_type!($dtype, $T => $body, {
            $crate::layout::DType::F32 => f32,
            $crate::layout::DType::F16 => half::f16,
            $crate::layout::DType::Bf16 => half::bf16,
        }, other => unreachable!("{other} passed validation"))
    };
}

/// `with_codes!(format, C => body)`: the body with `C` the type of the format's codes.
macro_rules! with_codes {
    ($format:expr, $C:ident => $body:expr) => {
        $crate::cpu::types::with_type!($format, $C => $body, {
            $crate::format::Fp8Format::E4m3 => $crate::cpu::convert::E4m3,
            $crate::format::Fp8Format::E5m2 => $crate::cpu::convert::E5m2,
        })
    };
}

/// A match with the same body in each arm, compiled for the type that the arm names.
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
