// 8-bit codes of AdamW's moments (format/moments.rs). Half of a warp processes one block, 128
// elements of a row. Lane l of 16 processes elements 4 * l to 4 * l + 3 of each half of the block, so
// that the lanes load adjacent elements. A lane computes what depends on the block alone once for its
// eight elements.
#pragma once
#include "adamw.cuh"

/// The number of elements of a block of moments.
constexpr u32 MOMENT_BLOCK = 128;

/// A lane's elements: groups of four, this far apart.
constexpr u32 GROUPS = 2, APART = MOMENT_BLOCK / GROUPS, LANES = APART / 4;

/// Returns the index of the first element of a thread, among elements that start at a block.
DEVICE u32 first_element(u32 thread) { return thread / LANES * MOMENT_BLOCK + thread % LANES * 4; }

struct FirstMoment {
  static constexpr u32 TOP = 127, BINADES = 20;
  static constexpr bool SIGNED = true;
  static DEVICE u32 magnitude(float v) { return __float_as_uint(v) & 0x7fffffffu; }
};
struct SecondMoment {
  static constexpr u32 TOP = 255, BINADES = 40;
  static constexpr bool SIGNED = false;
  /// Second moments are not negative. A NaN may have a sign, and its bits are then also above those
  /// of infinity.
  static DEVICE u32 magnitude(float v) { return __float_as_uint(v); }
};

/// The largest and the smallest magnitude of a block, as fp32 bits.
struct MomentRange {
  u32 largest, smallest;
};

DEVICE MomentRange load_range(const u32 *ranges, u64 i) {
  u64 at = i / MOMENT_BLOCK * 2;
  return {ranges[at], ranges[at + 1]};
}

template <class M> DEVICE u32 moment_step(const MomentRange &r) {
  u32 span = r.largest > r.smallest ? r.largest - r.smallest : 0u;
  return max_u32(span / (M::TOP - 1), 1u);
}

/// What decoding derives from a range: the bits of code 0, if it were not zero, and of a step.
struct MomentGrid {
  u32 lowest, step;
};

template <class M> DEVICE MomentGrid moment_grid(const MomentRange &r) {
  u32 step = moment_step<M>(r), lowest = r.largest - M::TOP * step;
  // Without this, the compiler subtracts TOP from each code instead.
  asm("" : "+r"(lowest));
  return {lowest, step};
}

template <class M> DEVICE void decode_moments(u32 codes, const MomentGrid &grid, float (&out)[4]) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    u32 magnitude = codes >> (8 * j) & M::TOP;
    u32 bits = magnitude ? grid.lowest + magnitude * grid.step : 0u;
    if (M::SIGNED) bits |= codes << (24 - 8 * j) & 0x80000000u;
    out[j] = __uint_as_float(bits);
  }
}

/// Returns the largest value of the lanes of a block. All lanes of the block must call this.
DEVICE u32 block_lanes_max(u32 v) {
  u32 lanes = 0xffffu << (threadIdx.x & LANES);
#pragma unroll
  for (int mask = 1; mask < LANES; mask *= 2) v = max_u32(v, __shfl_xor_sync(lanes, v, mask));
  return v;
}

/// Returns the range of a block. All lanes of the block must call this.
template <class M> DEVICE MomentRange range_of(const float (&v)[GROUPS][4]) {
  u32 largest = 0, below_smallest = 0xffffffffu;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      u32 magnitude = M::magnitude(v[g][j]);
      largest = max_u32(largest, magnitude);
      below_smallest = min(below_smallest, magnitude - 1u);
    }
  }
  largest = block_lanes_max(largest);
  // The complement of the largest complement is the smallest value.
  u32 smallest = ~block_lanes_max(~below_smallest) + 1u;
  if (largest >= 0x7f800000u) return {NAN_BITS, NAN_BITS};
  constexpr u32 WIDEST = M::BINADES << 23;
  return {largest, max_u32(smallest, largest > WIDEST ? largest - WIDEST : 0u)};
}

/// Returns the low bytes of four words.
DEVICE u32 low_bytes(u32 a, u32 b, u32 c, u32 d) {
  return byte_permute(byte_permute(a, b, 0x0040), byte_permute(c, d, 0x0040), 0x5410);
}

/// Returns the sign of each value in the highest bit of its byte.
DEVICE u32 signs_of(const float (&v)[4]) {
  u32 low = byte_permute(__float_as_uint(v[0]), __float_as_uint(v[1]), 0x0073);
  u32 high = byte_permute(__float_as_uint(v[2]), __float_as_uint(v[3]), 0x0073);
  return byte_permute(low, high, 0x5410) & 0x80808080u;
}

/// Encodes a lane's elements. `r` is the result of `range_of`. Its step is an integer from 1 to 2^21,
/// also if the range is NaN, so `moderate_reciprocal` supports it.
template <class M>
DEVICE void encode_moments(const float (&v)[GROUPS][4], const MomentRange &r, u32 (&codes)[GROUPS]) {
  float per_step = moderate_reciprocal(__uint2float_rn(moment_step<M>(r)));
  constexpr u32 BINADE = 1u << 23;
  u32 cut = M::SIGNED && r.smallest > BINADE ? r.smallest - BINADE : 1u;
  bool is_finite = r.largest < 0x7f800000u;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    u32 code[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      u32 magnitude = M::magnitude(v[g][j]);
      float steps = __fmul_rn(__int2float_rn((int)(r.largest - magnitude)), per_step);
      steps = fminf(steps, (float)(M::TOP - 1));
      // 1.5 * 2^23, whose neighbours are the integers: the difference rounds to nearest, and its
      // low byte is the code.
      u32 counted = __float_as_uint(__fsub_rn(12582912.0f + M::TOP, steps));
      code[j] = magnitude < cut ? 0u : counted;
    }
    codes[g] = low_bytes(code[0], code[1], code[2], code[3]);
    if (M::SIGNED) codes[g] |= signs_of(v[g]);
    if (!is_finite) codes[g] = M::TOP * 0x01010101u;
  }
}

/// Loads four adjacent elements of any alignment, in the form of `load_four`.
DEVICE uint4 load_unaligned(const void *p, u64 i, u32 kind) {
  if (kind == F32) {
    const u32 *at = (const u32 *)p + i;
    return make_uint4(at[0], at[1], at[2], at[3]);
  }
  if (kind == CODES) {
    const u8 *at = (const u8 *)p + i;
    return make_uint4(at[0] | at[1] << 8 | at[2] << 16 | (u32)at[3] << 24, 0, 0, 0);
  }
  const u16 *at = (const u16 *)p + i;
  return make_uint4(at[0] | (u32)at[1] << 16, at[2] | (u32)at[3] << 16, 0, 0);
}

DEVICE void store_codes(void *p, u64 i, u32 codes, bool vectors) {
  u8 *at = (u8 *)p + i;
  if (vectors) {
    *(u32 *)at = codes;
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; j++) at[j] = (u8)(codes >> (8 * j));
}

DEVICE void store_four(void *p, u64 i, u32 kind, const float (&v)[4], bool vectors) {
  if (vectors) {
    store_four(p, i, kind, v);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; j++) store_one(p, i + j, kind, v[j]);
}

/// The inputs of the update of a lane's elements.
struct EightCodes {
  uint4 grad[GROUPS], weight[GROUPS];
  u32 exp_avg[GROUPS], exp_avg_sq[GROUPS];
  MomentRange exp_avg_range, exp_avg_sq_range;
};

/// Loads the inputs of a lane's elements. `i` is the index of the first one, and `kind` is the kind of
/// the parameter.
DEVICE EightCodes load_codes(const AdamWEntry &t, u64 i, u32 kind) {
  EightCodes d;
  if (t.flags & VECTORS) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      u64 at = i + g * APART;
      d.grad[g] = load_gradient(t, at);
      d.exp_avg[g] = load_four(t.exp_avg, at, CODES).x;
      d.exp_avg_sq[g] = load_four(t.exp_avg_sq, at, CODES).x;
      d.weight[g] = t.master ? load_four(t.master, at, F32) : load_four(t.param, at, kind);
    }
  } else {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      u64 at = i + g * APART;
      d.grad[g] = load_unaligned(t.grad, at, grad_kind(t));
      d.exp_avg[g] = load_unaligned(t.exp_avg, at, CODES).x;
      d.exp_avg_sq[g] = load_unaligned(t.exp_avg_sq, at, CODES).x;
      d.weight[g] = t.master ? load_unaligned(t.master, at, F32) : load_unaligned(t.param, at, kind);
    }
  }
  d.exp_avg_range = load_range(t.exp_avg_range, i);
  d.exp_avg_sq_range = load_range(t.exp_avg_sq_range, i);
  return d;
}

template <class M>
DEVICE void store_moments(void *codes, u32 *ranges, u64 i, const float (&v)[GROUPS][4],
                          bool vectors) {
  MomentRange r = range_of<M>(v);
  u32 encoded[GROUPS];
  encode_moments<M>(v, r, encoded);
#pragma unroll
  for (int g = 0; g < GROUPS; g++) store_codes(codes, i + g * APART, encoded[g], vectors);
  if (i % MOMENT_BLOCK == 0) {
    u64 at = i / MOMENT_BLOCK * 2;
    ranges[at] = r.largest;
    ranges[at + 1] = r.smallest;
  }
}

/// Computes the new values. With `keep`, stores moments and master. All lanes of a block must call
/// this, each with the index of its first element. `scale` is the weight's scale for each group.
DEVICE void update(const AdamWEntry &t, const Factors &f, const EightCodes &d, u32 kind,
                   const float (&scale)[GROUPS], u64 i, bool keep, float (&w)[GROUPS][4]) {
  float m[GROUPS][4], v[GROUPS][4];
  MomentGrid m_grid = moment_grid<FirstMoment>(d.exp_avg_range);
  MomentGrid v_grid = moment_grid<SecondMoment>(d.exp_avg_sq_range);
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    float grad[4];
    decode_moments<FirstMoment>(d.exp_avg[g], m_grid, m[g]);
    decode_moments<SecondMoment>(d.exp_avg_sq[g], v_grid, v[g]);
    widen_four(d.grad[g], grad_kind(t), grad);
    widen_weight(t, d.weight[g], kind, scale[g], w[g]);
    advance(f, grad, m[g], v[g], w[g]);
  }
  if (!keep) return;
  bool vectors = t.flags & VECTORS;
  store_moments<FirstMoment>(t.exp_avg, t.exp_avg_range, i, m, vectors);
  store_moments<SecondMoment>(t.exp_avg_sq, t.exp_avg_sq_range, i, v, vectors);
  if (!t.master) return;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) store_four(t.master, i + g * APART, F32, w[g], vectors);
}

/// Encodes and stores new values of codes. `q` is the factor to quantize each group with.
DEVICE void store_weights(const AdamWArgs &a, const AdamWEntry &t, const Factors &f, u64 i,
                          const float (&w)[GROUPS][4], const float (&q)[GROUPS]) {
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    u64 at = i + g * APART;
    store_codes(t.param, at, encode_four(a, t, f.step, at, w[g], q[g]), t.flags & VECTORS);
  }
}
