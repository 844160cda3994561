//! Gated activations: the elementwise functions of `SwiGLU` and `GeGLU`, and their derivatives.
//!
//! All operations are fp32 with one rounding each, in the order that is written here. Multiplication and
//! addition are fused where `mul_add` is written, and only there. Backends therefore agree in every byte.

use std::f32::consts::LOG2_E;

use super::wide::canonical_nan;

/// The function that is applied to the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// x * sigmoid(x), as in `SwiGLU`.
    Silu,
    /// The tanh approximation of GELU, as in `GeGLU`. It equals x * sigmoid(2 z) with z = sqrt(2 / pi) * (x +
    /// 0.044715 x^3).
    GeluTanh,
}

/// 2 * sqrt(2 / pi).
const TWICE_ROOT: f32 = 1.595_769_2;

/// The coefficient of the cubic term of GELU's approximation.
const CUBIC: f32 = 0.044_715;

impl Activation {
    /// Returns the activation of `x` and its derivative.
    #[must_use]
    pub(crate) fn with_derivative(self, x: f32) -> (f32, f32) {
        match self {
            Self::Silu => {
                let s = sigmoid(x);
                (x * s, s * x.mul_add(1.0 - s, 1.0))
            }
            Self::GeluTanh => {
                let square = x * x;
                let s = sigmoid(TWICE_ROOT * x * square.mul_add(CUBIC, 1.0));
                let slope = TWICE_ROOT * square.mul_add(3.0 * CUBIC, 1.0);
                (x * s, x.mul_add(s * (1.0 - s) * slope, s))
            }
        }
    }

    /// Returns activation(gate) * up. Every NaN has the same bits.
    #[must_use]
    pub(crate) fn gated(self, gate: f32, up: f32) -> f32 {
        canonical_nan(self.with_derivative(gate).0 * up)
    }

    /// Returns the gradients of `gate` and `up` for the gradient `dy` of [`Self::gated`].
    #[must_use]
    pub(crate) fn gradients(self, gate: f32, up: f32, dy: f32) -> (f32, f32) {
        let (value, derivative) = self.with_derivative(gate);
        (canonical_nan(dy * up * derivative), canonical_nan(dy * value))
    }
}

/// Returns 1 / (1 + exp(-x)).
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Returns e^x, with an error of at most 4 units in the last place for x in [-10, 10], and of 24 elsewhere.
/// `x` is first clamped to [-87, 87], so that 1 / (1 + e^x) is a normal number. The result for NaN has no
/// meaning, because the bits of a NaN have no exponent to add k to. Activations and derivatives multiply by x,
/// so they are NaN.
///
/// With k = x / ln 2 rounded to an integer, e^x = 2^k * 2^r, where |r| <= 1/2. The factor 2^r is a polynomial
/// of degree 5 with the least relative error, 1.1e-7, of those that are 1 at 0.
#[must_use]
pub(crate) fn exp(x: f32) -> f32 {
    /// Adding this number rounds to an integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let clamped = if x > 87.0 { 87.0 } else { x };
    let clamped = if clamped < -87.0 { -87.0 } else { clamped };
    let rounded = clamped.mul_add(LOG2_E, ROUND);
    let k = rounded - ROUND;
    let r = clamped.mul_add(LOG2_E, -k);
    let p = 0.001_326_47_f32;
    let p = p.mul_add(r, 0.009_671_534);
    let p = p.mul_add(r, 0.055_507_34);
    let p = p.mul_add(r, 0.240_222_42);
    #[expect(
        clippy::approx_constant,
        reason = "it is near ln 2, which is the coefficient of the series at 0"
    )]
    let p = p.mul_add(r, 0.693_147);
    let p = p.mul_add(r, 1.0);
    // The low bits of `rounded` are k. Adding k to the exponent multiplies by 2^k.
    f32::from_bits(p.to_bits().wrapping_add(rounded.to_bits() << 23))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::wide::NAN_BITS;

    fn samples() -> impl Iterator<Item = f32> {
        (0..200_001).map(|i| (i as f32 - 100_000.0) * 8.7e-4)
    }

    #[test]
    fn errors_of_exp_are_a_few_units_in_the_last_place() {
        for x in samples() {
            let expected = f64::from(x).exp();
            let unit =
                f64::from(f32::from_bits((expected as f32).to_bits() + 1)) - f64::from(expected as f32);
            let error = (f64::from(exp(x)) - expected).abs();
            let units = if x.abs() <= 10.0 { 4.0 } else { 24.0 };
            assert!(error <= units * unit, "exp({x}) = {} instead of {expected}", exp(x));
        }
        assert_eq!((exp(0.0), exp(-0.0)), (1.0, 1.0));
        assert_eq!((exp(f32::INFINITY), exp(1000.0)), (exp(87.0), exp(87.0)));
        assert_eq!(exp(f32::NEG_INFINITY), exp(-87.0));
    }

    #[test]
    fn activations_and_derivatives_of_any_nan_are_nan() {
        for bits in [0x7FC0_0000, 0xFFC0_0000, 0x7FC0_0001, 0x7F80_0001, 0x7FFF_FFFF, 0xFFFF_FFFF] {
            for activation in [Activation::Silu, Activation::GeluTanh] {
                let (value, derivative) = activation.with_derivative(f32::from_bits(bits));
                assert!(value.is_nan() && derivative.is_nan(), "{activation:?} {bits:#x}");
            }
        }
    }

    fn reference(activation: Activation, x: f64) -> f64 {
        match activation {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::GeluTanh => {
                0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
            }
        }
    }

    #[test]
    fn values_and_derivatives_match_fp64() {
        for activation in [Activation::Silu, Activation::GeluTanh] {
            for x in samples().filter(|x| x.abs() < 20.0) {
                let (value, derivative) = activation.with_derivative(x);
                let at = |x| reference(activation, x);
                let x = f64::from(x);
                assert!((f64::from(value) - at(x)).abs() <= 2e-6 * (1.0 + x.abs()), "{activation:?} {x}");
                let slope = (at(x + 1e-6) - at(x - 1e-6)) / 2e-6;
                assert!(
                    (f64::from(derivative) - slope).abs() <= 5e-6 * (1.0 + x.abs()),
                    "{activation:?} {x}"
                );
            }
        }
    }

    #[test]
    fn gradients_are_those_of_the_product() {
        let (gate, up, dy) = (0.75, -2.0, 3.0);
        let (value, derivative) = Activation::Silu.with_derivative(gate);
        assert_eq!(Activation::Silu.gated(gate, up), value * up);
        assert_eq!(Activation::Silu.gradients(gate, up, dy), (dy * up * derivative, dy * value));
        assert_eq!(Activation::Silu.gated(-f32::NAN, 1.0).to_bits(), NAN_BITS);
        assert_eq!(
            Activation::Silu.gated(f32::NEG_INFINITY, 1.0),
            f32::NEG_INFINITY * sigmoid(f32::NEG_INFINITY)
        );
    }
}
