// Gated activations (format/activation.rs).
#pragma once
#include "elements.cuh"

/// Limits a value to [-87, 87]. NaN stays NaN.
DEVICE float clamp_exponent(float x) {
  float d;
  asm("min.NaN.f32 %0, %1, 0f42AE0000;" : "=f"(d) : "f"(x));
  asm("max.NaN.f32 %0, %1, 0fC2AE0000;" : "=f"(d) : "f"(d));
  return d;
}

/// Returns e^x. The result for NaN has no meaning, as in format/activation.rs.
DEVICE float exponential(float x) {
  const float ROUND = 12582912.0f;
  float clamped = clamp_exponent(x);
  float rounded = __fadd_rn(__fmul_rn(clamped, __uint_as_float(0x3fb8aa3b)), ROUND);
  float k = __fadd_rn(rounded, -ROUND);
  float r = __fadd_rn(clamped, -__fmul_rn(k, 0.693359375f));
  r = __fadd_rn(r, -__fmul_rn(k, -2.12194440e-4f));
  float p = 1.0f / 5040.0f;
  p = __fadd_rn(__fmul_rn(p, r), 1.0f / 720.0f);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f / 120.0f);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f / 24.0f);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f / 6.0f);
  p = __fadd_rn(__fmul_rn(p, r), 0.5f);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f);
  return __uint_as_float(__float_as_uint(p) + (__float_as_uint(rounded) << 23));
}

/// Returns 1 / (1 + e^-x). The denominator is at most 1 + e^87 < 2^126, as `moderate_reciprocal`
/// requires. The result for NaN has no meaning. Activations and derivatives multiply by x, so they are
/// NaN.
DEVICE float sigmoid(float x) { return moderate_reciprocal(__fadd_rn(1.0f, exponential(-x))); }

/// The activation of a value and its derivative.
struct Activated {
  float value, derivative;
};

DEVICE Activated silu(float x) {
  float s = sigmoid(x);
  float slope = __fadd_rn(1.0f, __fmul_rn(x, __fadd_rn(1.0f, -s)));
  return {__fmul_rn(x, s), __fmul_rn(s, slope)};
}

DEVICE Activated gelu(float x) {
  const float TWICE_ROOT = __uint_as_float(0x3fcc422a), CUBIC = 0.044715f;
  float square = __fmul_rn(x, x);
  float cubic = __fmul_rn(CUBIC, __fmul_rn(square, x));
  float s = sigmoid(__fmul_rn(TWICE_ROOT, __fadd_rn(x, cubic)));
  float slope = __fmul_rn(__fmul_rn(3.0f, CUBIC), square);
  slope = __fmul_rn(TWICE_ROOT, __fadd_rn(1.0f, slope));
  float change = __fmul_rn(__fmul_rn(s, __fadd_rn(1.0f, -s)), slope);
  return {__fmul_rn(x, s), __fadd_rn(s, __fmul_rn(x, change))};
}

/// Activates the elements of a vector. One branch selects the function for all of them. With a branch
/// for each element, the unrolled loop would contain both functions for each.
template <class T>
DEVICE void activate(bool is_gelu, const u32 (&d)[4], Activated (&out)[4 * T::PER_REG]) {
  constexpr int COUNT = 4 * T::PER_REG, P = T::PER_REG;
  if (is_gelu) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) out[i] = gelu(T::get(d[i / P], i % P));
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; i++) out[i] = silu(T::get(d[i / P], i % P));
  }
}
