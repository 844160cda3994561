// Gated activations (format/activation.rs).
#pragma once
#include "vectors.cuh"

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
  const float LOG2_E = __uint_as_float(0x3fb8aa3b);
  float rounded = __fmaf_rn(clamped, LOG2_E, ROUND);
  float k = __fadd_rn(rounded, -ROUND);
  float r = __fmaf_rn(clamped, LOG2_E, -k);
  float p = 0.00132647f;
  p = __fmaf_rn(p, r, 0.009671534f);
  p = __fmaf_rn(p, r, 0.05550734f);
  p = __fmaf_rn(p, r, 0.24022242f);
  p = __fmaf_rn(p, r, 0.693147f);
  p = __fmaf_rn(p, r, 1.0f);
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
  float slope = __fmaf_rn(x, __fadd_rn(1.0f, -s), 1.0f);
  return {__fmul_rn(x, s), __fmul_rn(s, slope)};
}

DEVICE Activated gelu(float x) {
  const float TWICE_ROOT = __uint_as_float(0x3fcc422a), CUBIC = 0.044715f;
  float square = __fmul_rn(x, x);
  float s = sigmoid(__fmul_rn(__fmul_rn(TWICE_ROOT, x), __fmaf_rn(square, CUBIC, 1.0f)));
  float slope = __fmul_rn(TWICE_ROOT, __fmaf_rn(square, 3.0f * CUBIC, 1.0f));
  float change = __fmul_rn(__fmul_rn(s, __fadd_rn(1.0f, -s)), slope);
  return {__fmul_rn(x, s), __fmaf_rn(x, change, s)};
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

/// Computes the product of a vector, or with GRADIENTS the gradients of gate and up, rounded to T.
/// Raises the `T::amax` of each output. Elements that are 0 have products and gradients of 0.
template <class T, bool GRADIENTS>
DEVICE void glu_vector(bool is_gelu, const u32 (&gate)[4], const u32 (&up)[4], const u32 (&dy)[4],
                       u32 (&values)[4], u32 (&up_values)[4], u32 &amax, u32 &up_amax) {
  constexpr int COLS = 4 * T::PER_REG;
  Activated activated[COLS];
  activate<T>(is_gelu, gate, activated);
  float v[COLS];
  if (GRADIENTS) {
#pragma unroll
    for (int j = 0; j < COLS; j++)
      v[j] = __fmul_rn(T::get(dy[j / T::PER_REG], j % T::PER_REG), activated[j].value);
    up_amax = T::amax(up_amax, pack<T>(v, up_values));
  }
#pragma unroll
  for (int j = 0; j < COLS; j++) {
    float u = T::get(up[j / T::PER_REG], j % T::PER_REG);
    if (GRADIENTS) {
      float g = T::get(dy[j / T::PER_REG], j % T::PER_REG);
      v[j] = __fmul_rn(__fmul_rn(g, u), activated[j].derivative);
    } else {
      v[j] = __fmul_rn(activated[j].value, u);
    }
  }
  amax = T::amax(amax, pack<T>(v, values));
}
