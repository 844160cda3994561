// One step of AdamW (format/adamw.rs): loads, updates and stores of four adjacent elements.
// The dtypes of gradients and moments are flags, because a branch that is uniform over a
// launch costs less than a kernel for each combination.
#pragma once
#include "blocks.cuh"
#include "philox.cuh"
#include "values.cuh"

/// A contiguous tensor.
struct AdamWEntry {
  const void *grad;
  void *exp_avg;
  void *exp_avg_sq;
  void *param;
  float *master;           // or null
  const float *step;
  void *scale;             // one fp32, or one element per block; null without codes
  const float *new_scale;  // or null: for codes with one scale, only amax is written then
  float *amax;             // or null
  u32 *exp_avg_range;      // fp32 bits, two for each block of 128 codes; null unless moments are codes
  u32 *exp_avg_sq_range;
  u64 rows, cols, offset;
  u32 first_block;         // the first block of this tensor in the launch
  u32 stream;
  u32 flags;
  u32 unused;              // pads the struct to a multiple of 8 bytes
};

/// The largest number of entries that fits in the 32 KB of a kernel's parameters.
constexpr int ENTRIES = 255;

struct AdamWArgs {
  const float *lr;         // or null: lr_value is used
  const float *grad_scale; // or null
  const float *found_inf;  // or null
  GridMax *maxima;         // one per entry
  double lr_value, beta1, beta2, eps, weight_decay;
  u64 seed;
  Rule rule;               // for computed scales
  u32 flags;
  u32 count, blocks;
  AdamWEntry entries[ENTRIES];
};

/// Flags of an entry.
enum : u32 {
  GRAD_BF16 = 1,
  GRAD_F16 = 2,
  MOMENTS_BF16 = 4,
  VECTORS = 8,             // groups of four elements are aligned in every tensor
  IS_E5M2 = 16,
  IS_E8M0 = 32,            // the type of the scales
};

/// Flags of a launch.
enum : u32 {
  MAXIMIZE = 1,
  STOCHASTIC = 2,
  FLOOR = 4,
};

/// How elements are stored.
enum Kind : u32 { F32, BF16, F16, CODES };

/// The values of a step that all elements of a tensor share (format/adamw.rs).
struct Factors {
  float grad, decay, lerp, beta2, one_minus_beta2, root, eps, size;
  float per_root;          // 1 / root
  float per_root_error;    // what rounding removed from per_root
  u32 from_grad, step;
  u32 is_moderate;         // whether `advance` may use `moderate_sqrt` and `moderate_quotient`
};

/// Limits of the numbers that `moderate_sqrt` and `moderate_quotient` support. The root of a step is
/// at most 1. Square roots of second moments are then from 2^-48 to 2^16, denominators from 2^-48 to
/// 2^29, and quotients from 2^-119 to 2^108. The remainders that correct them are multiples of
/// 2^-144, so none of them underflows.
constexpr float SMALLEST_ROOT = 0x1p-12f;
constexpr u32 SMALLEST_SQUARE = (127u - 96u) << 23, LARGEST_SQUARE = (127u + 32u) << 23;
constexpr float SMALLEST_NUMERATOR = 0x1p-90f, LARGEST_NUMERATOR = 0x1p60f;

DEVICE double power(double base, u32 exponent) {
  double result = 1.0;
  while (exponent > 0) {
    if (exponent & 1) result = __dmul_rn(result, base);
    base = __dmul_rn(base, base);
    exponent >>= 1;
  }
  return result;
}

DEVICE Factors factors_of(const AdamWArgs &a, const AdamWEntry &t) {
  Factors f;
  double lr = a.lr ? (double)*a.lr : a.lr_value;
  f.step = __float2uint_rz(*t.step);
  float grad = a.grad_scale ? reciprocal(*a.grad_scale) : 1.0f;
  float lerp = __double2float_rn(__dsub_rn(1.0, a.beta1));
  f.grad = a.flags & MAXIMIZE ? -grad : grad;
  f.decay = __double2float_rn(__dsub_rn(1.0, __dmul_rn(lr, a.weight_decay)));
  f.from_grad = lerp >= 0.5f;
  f.lerp = f.from_grad ? -__fsub_rn(1.0f, lerp) : lerp;
  f.beta2 = __double2float_rn(a.beta2);
  f.one_minus_beta2 = __double2float_rn(__dsub_rn(1.0, a.beta2));
  f.root = __double2float_rn(__dsqrt_rn(__dsub_rn(1.0, power(a.beta2, f.step))));
  f.per_root = reciprocal(f.root);
  f.per_root_error = __fmul_rn(__fmaf_rn(-f.root, f.per_root, 1.0f), f.per_root);
  f.eps = __double2float_rn(a.eps);
  f.size = __double2float_rn(__ddiv_rn(lr, __dsub_rn(1.0, power(a.beta1, f.step))));
  f.is_moderate = f.root >= SMALLEST_ROOT && f.eps >= 0.0f && f.eps <= 1.0f;
  return f;
}

DEVICE bool skipped(const AdamWArgs &a) { return a.found_inf && *a.found_inf != 0.0f; }

/// The element types of gradients and moments.
DEVICE u32 grad_kind(const AdamWEntry &t) {
  static_assert(GRAD_BF16 == BF16 && GRAD_F16 == F16, "flags are kinds");
  return t.flags & (GRAD_BF16 | GRAD_F16);
}
DEVICE u32 moment_kind(const AdamWEntry &t) { return t.flags & MOMENTS_BF16 ? BF16 : F32; }

DEVICE float load_one(const void *p, u64 i, u32 kind) {
  if (kind == F32) return ((const float *)p)[i];
  u32 d = ((const u16 *)p)[i];
  return kind == BF16 ? InBf16::get(d, 0) : InF16::get(d, 0);
}

DEVICE void store_one(void *p, u64 i, u32 kind, float v) {
  if (kind == F32) ((u32 *)p)[i] = OutF32::bits(v);
  else ((u16 *)p)[i] = (u16)(kind == BF16 ? OutBf16::bits(v) : OutF16::bits(v));
}

/// Loads four adjacent elements without converting them.
DEVICE uint4 load_four(const void *p, u64 i, u32 kind) {
  if (kind == F32) return *(const uint4 *)((const float *)p + i);
  if (kind == CODES) return make_uint4(*(const u32 *)((const u8 *)p + i), 0, 0, 0);
  uint2 d = *(const uint2 *)((const u16 *)p + i);
  return make_uint4(d.x, d.y, 0, 0);
}

/// Loads the gradients of four adjacent elements. Gradients are not codes, which saves a branch.
DEVICE uint4 load_gradient(const AdamWEntry &t, u64 i) {
  u32 kind = grad_kind(t);
  return kind == F32 ? load_four(t.grad, i, F32) : load_four(t.grad, i, BF16);
}

DEVICE void widen_four(const uint4 &v, u32 kind, float (&out)[4]) {
  if (kind == F32) {
    out[0] = __uint_as_float(v.x), out[1] = __uint_as_float(v.y);
    out[2] = __uint_as_float(v.z), out[3] = __uint_as_float(v.w);
  } else if (kind == BF16) {
    out[0] = InBf16::get(v.x, 0), out[1] = InBf16::get(v.x, 1);
    out[2] = InBf16::get(v.y, 0), out[3] = InBf16::get(v.y, 1);
  } else {
    out[0] = InF16::get(v.x, 0), out[1] = InF16::get(v.x, 1);
    out[2] = InF16::get(v.y, 0), out[3] = InF16::get(v.y, 1);
  }
}

DEVICE void store_four(void *p, u64 i, u32 kind, const float (&v)[4]) {
  if (kind == F32) {
    *(uint4 *)((u32 *)p + i) = make_uint4(OutF32::bits(v[0]), OutF32::bits(v[1]),
                                          OutF32::bits(v[2]), OutF32::bits(v[3]));
  } else if (kind == BF16) {
    *(uint2 *)((u16 *)p + i) = make_uint2(OutBf16::bits(v[0]) | OutBf16::bits(v[1]) << 16,
                                          OutBf16::bits(v[2]) | OutBf16::bits(v[3]) << 16);
  } else {
    *(uint2 *)((u16 *)p + i) = make_uint2(OutF16::bits(v[0]) | OutF16::bits(v[1]) << 16,
                                          OutF16::bits(v[2]) | OutF16::bits(v[3]) << 16);
  }
}

/// Decodes the two codes in the low 16 bits to fp16.
DEVICE u32 halves_of(bool is_e5m2, u32 codes) {
  return is_e5m2 ? FromE5m2::halves(codes) : FromE4m3::halves(codes);
}

/// Encodes two values, rounding to nearest.
DEVICE u32 pair_of(bool is_e5m2, float low, float high) {
  return is_e5m2 ? E5m2::pair(low, high) : E4m3::pair(low, high);
}

/// Returns the value with the smaller magnitude, or NaN if either is NaN. The sign of the result has no
/// meaning.
DEVICE float smaller_magnitude(float a, float b) {
  float d;
  asm("min.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

/// Encodes a value with stochastic rounding (format/fp8.rs).
DEVICE u32 encode_stochastic(bool is_e5m2, float v, u32 random) {
  u32 mantissa = is_e5m2 ? 2 : 3, smallest = (is_e5m2 ? 113u : 121u) << 23;
  u32 bits = __float_as_uint(v), magnitude = bits & 0x7fffffffu;
  u32 clamped = min(magnitude, is_e5m2 ? 0x47600000u : 0x43e00000u);
  u32 exponent = max(clamped & 0x7f800000u, smallest);
  // The magnitude in steps of the format.
  float steps =
      __fmul_rn(__uint_as_float(clamped), __uint_as_float(((254u + mantissa) << 23) - exponent));
  int whole = __float2int_rz(steps);
  int fraction = __float2int_rz(__fmul_rn(__fsub_rn(steps, (float)whole), 16777216.0f));
  u32 up = (int)(random >> 8) < fraction;
  u32 code = ((u32)whole + up + ((exponent - smallest) >> (23 - mantissa))) | (bits >> 24 & 0x80u);
  return magnitude > 0x7f800000u ? 0x7fu : code;
}

/// Encodes four values with stochastic rounding, as `encode_stochastic` does. Values are rounded in
/// fp32 to values of the format, which `pair_of` then encodes.
DEVICE u32 encode_stochastic(bool is_e5m2, const float (&v)[4], const u32 (&words)[4]) {
  u32 dropped_bits = is_e5m2 ? 21u : 20u, dropped = (1u << dropped_bits) - 1u;
  float smallest_normal = is_e5m2 ? 0x1p-14f : 0x1p-6f;
  float rounded[4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    // The dropped bits are the fraction. Adding the complement of a random number of as many bits
    // carries into the other bits if the random number is below the fraction.
    u32 bits = __float_as_uint(v[j]) + dropped - (words[j] >> (32u - dropped_bits));
    rounded[j] = __uint_as_float(bits & ~dropped);
  }
  float least = smaller_magnitude(smaller_magnitude(v[0], v[1]), smaller_magnitude(v[2], v[3]));
  // Few values are below the normal numbers. Comparisons with NaN are false, so it has this branch too.
  if (!(fabsf(least) >= smallest_normal)) {
    float in_steps = is_e5m2 ? 0x1p40f : 0x1p33f, step = is_e5m2 ? 0x1p-16f : 0x1p-9f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float magnitude = fabsf(v[j]);
      // The lower 24 bits of the number of steps are the fraction.
      u32 steps = __float2uint_rz(__fmul_rn(fminf(magnitude, smallest_normal), in_steps));
      u32 code = (steps + 0xffffffu - (words[j] >> 8)) >> 24;
      if (magnitude < smallest_normal)
        rounded[j] = copysignf(__fmul_rn(__uint2float_rn(code), step), v[j]);
      if (magnitude != magnitude) rounded[j] = magnitude;
    }
  }
  return pair_of(is_e5m2, rounded[0], rounded[1]) | pair_of(is_e5m2, rounded[2], rounded[3]) << 16;
}

/// Encodes N groups of four adjacent elements, `v` times `q`. `i` has the index of each group's first
/// element, a multiple of four in the tensor and in the whole tensor.
template <int N>
DEVICE void encode_fours(const AdamWArgs &a, const AdamWEntry &t, bool is_e5m2, u32 step,
                         const u64 (&i)[N], const float (&v)[N][4], const float (&q)[N],
                         u32 (&codes)[N]) {
  float x[N][4];
#pragma unroll
  for (int n = 0; n < N; n++) {
#pragma unroll
    for (int j = 0; j < 4; j++) x[n][j] = __fmul_rn(v[n][j], q[n]);
  }
  if (!(a.flags & STOCHASTIC)) {
#pragma unroll
    for (int n = 0; n < N; n++)
      codes[n] = pair_of(is_e5m2, x[n][0], x[n][1]) | pair_of(is_e5m2, x[n][2], x[n][3]) << 16;
    return;
  }
  u64 blocks[N];
  u32 words[N][4];
#pragma unroll
  for (int n = 0; n < N; n++) blocks[n] = (t.offset + i[n]) >> 2;
  philox(blocks, t.stream, step, a.seed, words);
#pragma unroll
  for (int n = 0; n < N; n++) codes[n] = encode_stochastic(is_e5m2, x[n], words[n]);
}

DEVICE u32 encode_four(const AdamWArgs &a, const AdamWEntry &t, u32 step, u64 i,
                       const float (&v)[4], float q) {
  u64 indices[1] = {i};
  float values[1][4] = {{v[0], v[1], v[2], v[3]}}, factors[1] = {q};
  u32 codes[1];
  encode_fours(a, t, t.flags & IS_E5M2, step, indices, values, factors, codes);
  return codes[0];
}

DEVICE u8 encode_one(const AdamWArgs &a, const AdamWEntry &t, u32 step, u64 i, float v, float q) {
  float x = __fmul_rn(v, q);
  bool is_e5m2 = t.flags & IS_E5M2;
  if (!(a.flags & STOCHASTIC)) return (u8)pair_of(is_e5m2, x, 0.0f);
  return (u8)encode_stochastic(is_e5m2, x, word_of(t.offset + i, t.stream, step, a.seed));
}

/// The inputs of the update of four adjacent elements.
struct Four {
  uint4 grad, exp_avg, exp_avg_sq, weight;
};

/// `kind` is the kind of the parameter.
DEVICE Four load(const AdamWEntry &t, u64 i, u32 kind) {
  Four d;
  d.grad = load_gradient(t, i);
  d.exp_avg = load_four(t.exp_avg, i, moment_kind(t));
  d.exp_avg_sq = load_four(t.exp_avg_sq, i, moment_kind(t));
  d.weight = t.master ? load_four(t.master, i, F32) : load_four(t.param, i, kind);
  return d;
}

/// Divides by the root of the step, rounding to nearest. The quotient must be finite. The product with
/// both parts of 1 / root is within one unit in the last place. One correction then rounds correctly,
/// because `per_root` is the rounded reciprocal (Markstein, 1990). No remainder is subnormal: the square
/// root of a float32 number is at least 2^-75, and the root at least 2^-27 or 0.
DEVICE float divide_by_moderate_root(float x, const Factors &f) {
  float q = __fmaf_rn(x, f.per_root, __fmul_rn(x, f.per_root_error));
  return __fmaf_rn(__fmaf_rn(-f.root, q, x), f.per_root, q);
}

/// Divides any number by the root of the step, rounding to nearest.
DEVICE float divide_by_root(float x, const Factors &f) {
  float q = __fmul_rn(x, f.per_root);
  // The corrections of infinity are NaN.
  return q < __uint_as_float(0x7f800000u) ? divide_by_moderate_root(x, f) : q;
}

/// Returns the square root, rounded to nearest. `x` must be from 2^-101 to 2^127. The compiler emits
/// these instructions for `__fsqrt_rn` too, and a branch for all other numbers.
DEVICE float moderate_sqrt(float x) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  float root = __fmul_rn(x, r), half = __fmul_rn(r, 0.5f);
  return __fmaf_rn(__fmaf_rn(-root, root, x), half, root);
}

/// Returns x / y, rounded to nearest (Markstein, 1990). The magnitudes of both must be within the
/// limits above. The compiler emits these instructions for `__fdiv_rn` too, and a branch for very
/// large and very small numbers.
DEVICE float moderate_quotient(float x, float y) {
  float r = moderate_reciprocal(y), q = __fmul_rn(x, r);
  return __fmaf_rn(r, __fmaf_rn(-y, q, x), q);
}

/// Updates the moments of an element. Returns the numerator of its step.
DEVICE float advance_moments(const Factors &f, float g, float &m, float &v) {
  float grad = __fmul_rn(g, f.grad);
  float start = f.from_grad ? grad : m;
  m = __fadd_rn(start, __fmul_rn(__fsub_rn(grad, m), f.lerp));
  v = __fadd_rn(__fmul_rn(v, f.beta2), __fmul_rn(__fmul_rn(f.one_minus_beta2, grad), grad));
  return __fmul_rn(f.size, m);
}

/// Updates one element.
DEVICE void advance(const Factors &f, float g, float &m, float &v, float &w) {
  float numerator = advance_moments(f, g, m, v);
  float denominator = __fadd_rn(divide_by_root(__fsqrt_rn(v), f), f.eps);
  w = __fsub_rn(__fmul_rn(w, f.decay), __fdiv_rn(numerator, denominator));
}

/// Updates four elements as `advance` updates one. Each `__fsqrt_rn` and `__fdiv_rn` has a branch for
/// unusual numbers. One branch for four elements is faster, and lets their instructions overlap.
DEVICE void advance(const Factors &f, const float (&g)[4], float (&m)[4], float (&v)[4],
                    float (&w)[4]) {
  float numerator[4];
  float least = __uint_as_float(0x7f800000u), most = 0.0f;
  u32 above_smallest = 0;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    numerator[j] = advance_moments(f, g[j], m[j], v[j]);
    least = fminf(least, fabsf(numerator[j]));
    most = fmaxf(most, fabsf(numerator[j]));
    above_smallest = max_u32(above_smallest, __float_as_uint(v[j]) - SMALLEST_SQUARE);
  }
  // `fminf` and `fmaxf` ignore a NaN. Its quotient is NaN by either method.
  bool is_moderate = f.is_moderate && above_smallest <= LARGEST_SQUARE - SMALLEST_SQUARE &&
                     least >= SMALLEST_NUMERATOR && most <= LARGEST_NUMERATOR;
  float step[4];
  if (is_moderate) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float root = divide_by_moderate_root(moderate_sqrt(v[j]), f);
      step[j] = moderate_quotient(numerator[j], __fadd_rn(root, f.eps));
    }
  } else {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float root = divide_by_root(__fsqrt_rn(v[j]), f);
      step[j] = __fdiv_rn(numerator[j], __fadd_rn(root, f.eps));
    }
  }
#pragma unroll
  for (int j = 0; j < 4; j++) w[j] = __fsub_rn(__fmul_rn(w[j], f.decay), step[j]);
}

/// Decodes four codes.
DEVICE void decode_four(u32 codes, bool is_e5m2, float scale, float (&w)[4]) {
  u32 low = halves_of(is_e5m2, codes), high = halves_of(is_e5m2, codes >> 16);
  w[0] = __fmul_rn(InF16::get(low, 0), scale), w[1] = __fmul_rn(InF16::get(low, 1), scale);
  w[2] = __fmul_rn(InF16::get(high, 0), scale), w[3] = __fmul_rn(InF16::get(high, 1), scale);
}

/// Returns the values of four adjacent elements before the step, from the master if there is one.
DEVICE void widen_weight(const AdamWEntry &t, const uint4 &weight, u32 kind, float scale,
                         float (&w)[4]) {
  if (t.master || kind != CODES) {
    widen_four(weight, t.master ? F32 : kind, w);
    return;
  }
  decode_four(weight.x, t.flags & IS_E5M2, scale, w);
}

/// Computes the new values. With `keep`, stores moments and master.
DEVICE void update(const AdamWEntry &t, const Factors &f, const Four &d, u32 kind, float scale,
                   u64 i, bool keep, float (&w)[4]) {
  float g[4], m[4], v[4];
  widen_four(d.grad, grad_kind(t), g);
  widen_four(d.exp_avg, moment_kind(t), m);
  widen_four(d.exp_avg_sq, moment_kind(t), v);
  widen_weight(t, d.weight, kind, scale, w);
  advance(f, g, m, v, w);
  if (!keep) return;
  store_four(t.exp_avg, i, moment_kind(t), m);
  store_four(t.exp_avg_sq, i, moment_kind(t), v);
  if (t.master) store_four(t.master, i, F32, w);
}

/// Updates one element as `update` does, and returns its new value.
DEVICE float update_one(const AdamWEntry &t, const Factors &f, u32 kind, float scale, u64 i,
                        bool keep) {
  u32 moments = moment_kind(t);
  float g = load_one(t.grad, i, grad_kind(t));
  float m = load_one(t.exp_avg, i, moments), v = load_one(t.exp_avg_sq, i, moments), w;
  if (t.master || kind != CODES) w = load_one(t.master ? t.master : t.param, i, t.master ? F32 : kind);
  else w = __fmul_rn(InF16::get(halves_of(t.flags & IS_E5M2, ((const u8 *)t.param)[i]), 0), scale);
  advance(f, g, m, v, w);
  if (keep) {
    store_one(t.exp_avg, i, moments, m);
    store_one(t.exp_avg_sq, i, moments, v);
    if (t.master) store_one(t.master, i, F32, w);
  }
  return w;
}

DEVICE u32 larger(u32 before, float w) { return max_u32(before, __float_as_uint(w) & 0x7fffffffu); }
DEVICE u32 larger(u32 before, const float (&w)[4]) {
  return larger(larger(larger(larger(before, w[0]), w[1]), w[2]), w[3]);
}

/// Computes the factors of the step and shares them with all threads of a block.
DEVICE void share_factors(const AdamWArgs &a, const AdamWEntry &t, Factors &shared) {
  if (threadIdx.x == 0) shared = factors_of(a, t);
  __syncthreads();
}

/// Writes the amax, and the scale of codes with a new one, after all elements of a tensor without
/// block scales. All threads of the block must call this.
template <u32 KIND>
DEVICE void finish_elements(const AdamWArgs &a, const AdamWEntry &t, u32 e, bool keep, u32 maximum) {
  bool known = KIND == CODES && keep;
  if (!t.amax && !known) return;
  maximum = block_max(maximum);
  u32 end = end_of(a, e);
  if (!last_of(a.maxima + e, end - t.first_block, maximum)) return;
  if (!known) {
    *t.amax = __uint_as_float(maximum);
    return;
  }
  bool finite = maximum < 0x7f800000u;
  if (t.amax && finite) *t.amax = fmaxf(*t.amax, __uint_as_float(maximum));
  *(float *)t.scale = finite ? *t.new_scale : __uint_as_float(NAN_BITS);
}
