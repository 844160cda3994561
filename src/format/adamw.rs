//! The arithmetic of one `AdamW` step (Loshchilov and Hutter: Decoupled weight decay regularization; ICLR
//! 2019). Every operation is rounded; none is contracted into a fused multiply-add.
//!
//! Values that depend on the step only are computed in fp64 and rounded to fp32 once ([`Factors`]). The
//! update of an element is fp32 ([`Factors::update`]), with operations in the order of `torch.optim.AdamW`.

/// The hyperparameters of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hyper {
    /// The learning rate.
    pub lr: f64,
    /// The fraction of the first moment that is kept.
    pub beta1: f64,
    /// The fraction of the second moment that is kept.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay: the step subtracts `lr` * `weight_decay` * weight.
    pub weight_decay: f64,
    /// Maximize the objective instead of minimizing it.
    pub maximize: bool,
}

/// The values of one step that all elements share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Factors {
    /// Factor of the gradient: 1 / `grad_scale`, negative to maximize.
    pub(crate) grad: f32,
    /// Factor of the weight: 1 - `lr` * `weight_decay`.
    pub(crate) decay: f32,
    /// Interpolation weight from the first moment to the gradient: 1 - `beta1`. If that is at least 0.5, 1 is
    /// subtracted from it, and the interpolation starts from the gradient.
    pub(crate) lerp: f32,
    /// Whether the interpolation starts from the gradient.
    pub(crate) from_grad: bool,
    /// Factor of the second moment.
    pub(crate) beta2: f32,
    /// Factor of the squared gradient: 1 - `beta2`.
    pub(crate) one_minus_beta2: f32,
    /// The square root of 1 - `beta2`^step.
    pub(crate) root: f32,
    /// Added to the denominator.
    pub(crate) eps: f32,
    /// The step size, `lr` / (1 - `beta1`^step).
    pub(crate) size: f32,
}

/// Computes `base`^`exponent` by squaring, starting at the exponent's lowest bit.
#[must_use]
pub(crate) const fn power(base: f64, exponent: u32) -> f64 {
    let (mut base, mut exponent, mut result) = (base, exponent, 1.0);
    while exponent > 0 {
        if exponent & 1 == 1 {
            result *= base;
        }
        base *= base;
        exponent >>= 1;
    }
    result
}

impl Hyper {
    /// Returns the factors of step `step`, counted from 1. A fractional step is truncated. `grad_scale` is
    /// the factor that the gradient was multiplied by.
    #[must_use]
    pub(crate) fn factors(&self, step: f32, grad_scale: Option<f32>) -> Factors {
        let step = step as u32;
        let grad = grad_scale.map_or(1.0, |scale| 1.0 / scale);
        let lerp = (1.0 - self.beta1) as f32;
        let from_grad = lerp >= 0.5;
        Factors {
            grad: if self.maximize { -grad } else { grad },
            decay: (1.0 - self.lr * self.weight_decay) as f32,
            lerp: if from_grad { -(1.0 - lerp) } else { lerp },
            from_grad,
            beta2: self.beta2 as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            root: (1.0 - power(self.beta2, step)).sqrt() as f32,
            eps: self.eps as f32,
            size: (self.lr / (1.0 - power(self.beta1, step))) as f32,
        }
    }
}

impl Factors {
    /// Returns the new first moment, second moment and weight. The weight is computed from the unrounded
    /// moments, whatever dtype they are stored in.
    #[inline(always)]
    #[must_use]
    pub(crate) fn update(&self, grad: f32, exp_avg: f32, exp_avg_sq: f32, weight: f32) -> (f32, f32, f32) {
        let grad = grad * self.grad;
        let weight = weight * self.decay;
        let start = if self.from_grad { grad } else { exp_avg };
        let exp_avg = start + (grad - exp_avg) * self.lerp;
        let exp_avg_sq = exp_avg_sq * self.beta2 + self.one_minus_beta2 * grad * grad;
        let denominator = exp_avg_sq.sqrt() / self.root + self.eps;
        (exp_avg, exp_avg_sq, weight - self.size * exp_avg / denominator)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYPER: Hyper =
        Hyper { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1, maximize: false };

    #[test]
    fn power_matches_powf() {
        for (base, n) in [(0.9, 0), (0.9, 1), (0.999, 7), (0.95, 1000), (0.0, 3), (0.999_999, 1 << 24)] {
            // Each squaring doubles the relative error and adds a rounding. This gives n roundings, plus one
            // in `powf`.
            let (got, expected) = (power(base, n), base.powf(f64::from(n)));
            let bound = expected * f64::from(n + 4) * f64::EPSILON;
            assert!((got - expected).abs() <= bound, "{base}^{n}: {got} and {expected}");
        }
    }

    #[test]
    fn first_step_moves_by_the_learning_rate() {
        let factors = HYPER.factors(1.0, None);
        let (m, v, w) = factors.update(2.0, 0.0, 0.0, 1.0);
        assert!((m - 0.2).abs() < 1e-7 && (v - 0.004).abs() < 1e-8);
        assert!((w - (1.0 - 1e-4 - 1e-3)).abs() < 1e-6, "{w}");
        // Maximizing, with a scaled gradient.
        let uphill = Hyper { maximize: true, ..HYPER }.factors(1.0, Some(1024.0));
        assert_eq!(uphill.update(-2.0 * 1024.0, 0.0, 0.0, 1.0), (m, v, w));
    }

    #[test]
    fn first_moment_is_the_same_from_either_end_of_the_interpolation() {
        for beta1 in [0.0, 0.3, 0.5, 0.51, 0.9, 1.0 - 1e-9] {
            let factors = Hyper { beta1, ..HYPER }.factors(3.0, None);
            let (m, _, _) = factors.update(3.0, -5.0, 0.0, 0.0);
            let expected = beta1 * -5.0 + (1.0 - beta1) * 3.0;
            assert!((f64::from(m) - expected).abs() < 1e-6, "{beta1}: {m}");
        }
        assert_eq!(Hyper { beta1: 0.0, ..HYPER }.factors(1.0, None).update(3.0, -5.0, 0.0, 0.0).0, 3.0);
    }
}
