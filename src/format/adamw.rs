//! One step of `AdamW` (Loshchilov and Hutter: Decoupled weight decay regularization; ICLR 2019): the arithmetic,
//! each operation rounded, none contracted.
//!
//! What depends on the step alone is computed in fp64 and rounded to fp32 once ([`Factors`]); what is done to each
//! element is fp32 ([`Factors::update`]), in the order of `torch.optim.AdamW`.

/// What a step is made with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hyper {
    /// The learning rate.
    pub lr: f64,
    /// How much of the first moment is kept.
    pub beta1: f64,
    /// How much of the second moment is kept.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Times `lr`: the part of the weight that is taken away.
    pub weight_decay: f64,
    /// Go uphill.
    pub maximize: bool,
}

/// The numbers of one step that all elements share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Factors {
    /// Of the gradient: 1 / (its scale), negative to go uphill.
    pub grad: f32,
    /// Of the weight: 1 - `lr` * `weight_decay`.
    pub decay: f32,
    /// Of the way from the first moment to the gradient: 1 - `beta1`; where that is 0.5 or more, the part of the
    /// way back from the gradient, negative.
    pub lerp: f32,
    /// Whether the way is counted from the gradient.
    pub from_grad: bool,
    /// Of the second moment.
    pub beta2: f32,
    /// Of the squared gradient: 1 - `beta2`.
    pub rest: f32,
    /// The square root of 1 - `beta2`^step.
    pub root: f32,
    /// Added to the denominator.
    pub eps: f32,
    /// `lr` / (1 - `beta1`^step).
    pub size: f32,
}

/// `base`^`exponent` by squaring, from the exponent's lowest bit up.
#[must_use]
pub const fn power(base: f64, exponent: u32) -> f64 {
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
    /// The factors of step number `step`, counted from 1 (towards zero where it is no whole number). `grad_scale` is
    /// what the gradient was multiplied with.
    #[must_use]
    pub fn factors(&self, step: f32, grad_scale: Option<f32>) -> Factors {
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
            rest: (1.0 - self.beta2) as f32,
            root: (1.0 - power(self.beta2, step)).sqrt() as f32,
            eps: self.eps as f32,
            size: (self.lr / (1.0 - power(self.beta1, step))) as f32,
        }
    }
}

impl Factors {
    /// The new first moment, second moment and weight. All are used as computed here, whatever they are stored as.
    #[inline(always)]
    #[must_use]
    pub fn update(&self, grad: f32, exp_avg: f32, exp_avg_sq: f32, weight: f32) -> (f32, f32, f32) {
        let grad = grad * self.grad;
        let weight = weight * self.decay;
        let start = if self.from_grad { grad } else { exp_avg };
        let exp_avg = start + (grad - exp_avg) * self.lerp;
        let exp_avg_sq = exp_avg_sq * self.beta2 + self.rest * grad * grad;
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
    fn power_is_the_power() {
        for (base, n) in [(0.9, 0), (0.9, 1), (0.999, 7), (0.95, 1000), (0.0, 3), (0.999_999, 1 << 24)] {
            // A squaring doubles the relative error and adds a rounding: n of them in all, and one of the other side.
            let (got, expected) = (power(base, n), base.powf(f64::from(n)));
            let bound = expected * f64::from(n + 4) * f64::EPSILON;
            assert!((got - expected).abs() <= bound, "{base}^{n}: {got} and {expected}");
        }
    }

    #[test]
    fn the_first_step_is_as_long_as_the_learning_rate() {
        let factors = HYPER.factors(1.0, None);
        let (m, v, w) = factors.update(2.0, 0.0, 0.0, 1.0);
        assert!((m - 0.2).abs() < 1e-7 && (v - 0.004).abs() < 1e-8);
        assert!((w - (1.0 - 1e-4 - 1e-3)).abs() < 1e-6, "{w}");
        // Uphill, and with a gradient that was scaled.
        let uphill = Hyper { maximize: true, ..HYPER }.factors(1.0, Some(1024.0));
        assert_eq!(uphill.update(-2.0 * 1024.0, 0.0, 0.0, 1.0), (m, v, w));
    }

    #[test]
    fn a_moment_goes_the_same_way_from_both_ends() {
        for beta1 in [0.0, 0.3, 0.5, 0.51, 0.9, 1.0 - 1e-9] {
            let factors = Hyper { beta1, ..HYPER }.factors(3.0, None);
            let (m, _, _) = factors.update(3.0, -5.0, 0.0, 0.0);
            let expected = beta1 * -5.0 + (1.0 - beta1) * 3.0;
            assert!((f64::from(m) - expected).abs() < 1e-6, "{beta1}: {m}");
        }
        assert_eq!(Hyper { beta1: 0.0, ..HYPER }.factors(1.0, None).update(3.0, -5.0, 0.0, 0.0).0, 3.0);
    }
}
