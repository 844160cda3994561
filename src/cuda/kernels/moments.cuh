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

/// The largest and the smallest magnitude of a block, or of a lane's elements, as fp32 bits.
struct MomentRange {
  u32 largest, smallest;
};

template <class M> DEVICE u32 moment_step(const MomentRange &r) {
  u32 span = max_u32(r.largest, r.smallest) - r.smallest;
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

template <class M>
DEVICE void decode_moments(const u32 (&codes)[GROUPS], const MomentGrid &grid, float (&out)[GROUPS][4]) {
  u32 zero_bytes = 0;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    u32 magnitudes = codes[g] & M::TOP * 0x01010101u;
    zero_bytes |= (magnitudes - 0x01010101u) & ~magnitudes;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      u32 bits = grid.lowest + byte_permute(magnitudes, 0, 0x4440 + j) * grid.step;
      if (M::SIGNED) bits |= codes[g] << (24 - 8 * j) & 0x80000000u;
      out[g][j] = __uint_as_float(bits);
    }
  }
  // Few blocks have zeros.
  if (zero_bytes & 0x80808080u) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        u32 sign = M::SIGNED ? __float_as_uint(out[g][j]) & 0x80000000u : 0u;
        if ((codes[g] >> (8 * j) & M::TOP) == 0) out[g][j] = __uint_as_float(sign);
      }
    }
  }
}

/// Returns the range of a lane's elements. Zeros count.
template <class M> DEVICE MomentRange lane_range(const float (&v)[GROUPS][4]) {
  u32 largest = __float_as_uint(v[0][0]), smallest = largest;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      u32 bits = __float_as_uint(v[g][j]);
      if (M::SIGNED) {
        largest = InF32::amax(largest, bits);
        smallest = __float_as_uint(fminf(fabsf(__uint_as_float(smallest)), fabsf(v[g][j])));
      } else {
        largest = max_u32(largest, bits);
        smallest = min(smallest, bits);
      }
    }
  }
  if (M::SIGNED) largest = InF32::amax_bits(largest, 0);
  return {largest, smallest};
}

/// Returns the largest value of the lanes of a block. All lanes of the warp must call this.
DEVICE u32 block_lanes_max(u32 v) {
#pragma unroll
  for (int mask = 1; mask < LANES; mask *= 2) v = max_u32(v, shuffle_xor(v, mask));
  return v;
}

/// Returns the range of a block, for which zeros do not count. `lane` is the result of `lane_range`. All
/// lanes of the warp must call this.
template <class M>
DEVICE MomentRange block_range(const float (&v)[GROUPS][4], const MomentRange &lane) {
  u32 below_smallest = lane.smallest - 1u;
  if (lane.smallest == 0) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
#pragma unroll
      for (int j = 0; j < 4; j++) below_smallest = min(below_smallest, M::magnitude(v[g][j]) - 1u);
    }
  }
  u32 largest = block_lanes_max(lane.largest);
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

/// Encodes a lane's elements. `r` is the result of `block_range`. Its step is an integer from 1 to
/// 2^21, also if the range is NaN, so `moderate_reciprocal` supports it.
template <class M>
DEVICE void encode_moments(const float (&v)[GROUPS][4], const MomentRange &lane,
                           const MomentRange &r, u32 (&codes)[GROUPS]) {
  float per_step = moderate_reciprocal(__uint2float_rn(moment_step<M>(r)));
  // Bits of negative numbers are 2^31 larger than their magnitudes, so twice the bits do not depend on
  // the sign. Conversion to fp32 rounds twice a distance to twice its value.
  u32 largest = r.largest;
  if (M::SIGNED) {
    largest *= 2u, per_step = __fmul_rn(per_step, 0.5f);
    // Without this, the compiler subtracts first, which needs two instructions.
    asm("" : "+r"(largest));
  }
  // Smaller magnitudes have code 0.
  constexpr u32 BINADE = 1u << 23;
  u32 cut = M::SIGNED && r.smallest > BINADE ? r.smallest - BINADE : 1u;
  bool is_finite = r.largest < 0x7f800000u;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    u32 code[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      u32 bits = __float_as_uint(v[g][j]);
      u32 distance = largest - (M::SIGNED ? bits * 2u : bits);
      float steps = __fmul_rn(__uint2float_rn(distance), per_step);
      steps = fminf(steps, (float)(M::TOP - 1));
      // 1.5 * 2^23, whose neighbours are the integers: the difference rounds to nearest, and its
      // low byte is the code.
      code[j] = __float_as_uint(__fsub_rn(12582912.0f + M::TOP, steps));
    }
    codes[g] = low_bytes(code[0], code[1], code[2], code[3]);
  }
  // Few blocks have zeros, or values that are not finite.
  if (lane.smallest < cut || !is_finite) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (M::magnitude(v[g][j]) < cut) codes[g] &= ~(0xffu << (8 * j));
      if (M::SIGNED) codes[g] |= signs_of(v[g]);
      if (!is_finite) codes[g] = M::TOP * 0x01010101u;
    }
    return;
  }
#pragma unroll
  for (int g = 0; g < GROUPS; g++)
    if (M::SIGNED) codes[g] |= signs_of(v[g]);
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

/// Stores four adjacent numbers without looking for NaN.
DEVICE void store_raw(float *p, u64 i, const float (&v)[4], bool vectors) {
  if (vectors) {
    *(float4 *)(p + i) = make_float4(v[0], v[1], v[2], v[3]);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; j++) p[i + j] = v[j];
}

/// How the elements of a tensor are stored. Code that is compiled for one storage has no branches
/// for others.
struct Storage {
  u32 kind, grad_kind;
  bool has_master, is_e5m2, vectors;
};

DEVICE Storage storage_of(const AdamWEntry &t, u32 kind) {
  bool is_e5m2 = t.flags & IS_E5M2, vectors = t.flags & VECTORS;
  return {kind, grad_kind(t), t.master != nullptr, is_e5m2, vectors};
}

/// The inputs of the update of a lane's elements.
struct LaneInputs {
  uint4 grad[GROUPS], weight[GROUPS];
  u32 exp_avg[GROUPS], exp_avg_sq[GROUPS];
  MomentRange exp_avg_range, exp_avg_sq_range;
};

DEVICE MomentRange load_range(const u32 *ranges, u64 i, bool vectors) {
  u64 at = i / MOMENT_BLOCK * 2;
  if (!vectors) return {ranges[at], ranges[at + 1]};
  uint2 range = *(const uint2 *)(ranges + at);
  return {range.x, range.y};
}

/// Loads the inputs of a lane's elements. `i` is the index of the first one.
DEVICE LaneInputs load_inputs(const AdamWEntry &t, const Storage &s, u64 i) {
  LaneInputs d;
  const void *weights = s.has_master ? t.master : t.param;
  u32 weight_kind = s.has_master ? F32 : s.kind;
  if (s.vectors) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      u64 at = i + g * APART;
      d.grad[g] = load_four(t.grad, at, s.grad_kind == F32 ? F32 : BF16);
      d.exp_avg[g] = load_four(t.exp_avg, at, CODES).x;
      d.exp_avg_sq[g] = load_four(t.exp_avg_sq, at, CODES).x;
      d.weight[g] = load_four(weights, at, weight_kind);
    }
  } else {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      u64 at = i + g * APART;
      d.grad[g] = load_unaligned(t.grad, at, s.grad_kind);
      d.exp_avg[g] = load_unaligned(t.exp_avg, at, CODES).x;
      d.exp_avg_sq[g] = load_unaligned(t.exp_avg_sq, at, CODES).x;
      d.weight[g] = load_unaligned(weights, at, weight_kind);
    }
  }
  d.exp_avg_range = load_range(t.exp_avg_range, i, s.vectors);
  d.exp_avg_sq_range = load_range(t.exp_avg_sq_range, i, s.vectors);
  return d;
}

/// Encodes and stores a lane's moments. All lanes of the warp must call this.
template <class M>
DEVICE void store_moments(void *codes, u32 *ranges, u64 i, const float (&v)[GROUPS][4],
                          const MomentRange &lane, bool vectors) {
  MomentRange r = block_range<M>(v, lane);
  u32 encoded[GROUPS];
  encode_moments<M>(v, lane, r, encoded);
#pragma unroll
  for (int g = 0; g < GROUPS; g++) store_codes(codes, i + g * APART, encoded[g], vectors);
  if (threadIdx.x % LANES == 0) {
    u64 at = i / MOMENT_BLOCK * 2;
    if (vectors) {
      *(uint2 *)(ranges + at) = make_uint2(r.largest, r.smallest);
    } else {
      ranges[at] = r.largest;
      ranges[at + 1] = r.smallest;
    }
  }
}

/// Moves each element forward by one, and the first one to the end.
DEVICE void rotate(float (&x)[GROUPS][4]) {
  float first = x[0][0];
#pragma unroll
  for (int n = 1; n < GROUPS * 4; n++) x[(n - 1) / 4][(n - 1) % 4] = x[n / 4][n % 4];
  x[GROUPS - 1][3] = first;
}

/// Updates a lane's elements as `advance` updates one.
DEVICE void advance(const Factors &f, const float (&g)[GROUPS][4], float (&m)[GROUPS][4],
                    float (&v)[GROUPS][4], float (&w)[GROUPS][4], MomentRange &m_range,
                    MomentRange &v_range) {
#pragma unroll
  for (int k = 0; k < GROUPS; k++) {
#pragma unroll
    for (int j = 0; j < 4; j++) advance_moments(f, g[k][j], m[k][j], v[k][j]);
  }
  m_range = lane_range<FirstMoment>(m);
  v_range = lane_range<SecondMoment>(v);
  // Products with NaN are NaN, and comparisons with it are false.
  float least = fabsf(__fmul_rn(f.size, __uint_as_float(m_range.smallest)));
  float most = fabsf(__fmul_rn(f.size, __uint_as_float(m_range.largest)));
  bool is_moderate = f.is_moderate && v_range.smallest >= SMALLEST_SQUARE &&
                     v_range.largest <= LARGEST_SQUARE && least >= SMALLEST_NUMERATOR &&
                     most <= LARGEST_NUMERATOR;
#pragma unroll
  for (int k = 0; k < GROUPS; k++) {
#pragma unroll
    for (int j = 0; j < 4; j++) w[k][j] = __fmul_rn(w[k][j], f.decay);
  }
  if (is_moderate) {
#pragma unroll
    for (int k = 0; k < GROUPS; k++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float root = divide_by_moderate_root(moderate_sqrt(v[k][j]), f);
        float numerator = __fmul_rn(f.size, m[k][j]);
        w[k][j] = __fsub_rn(w[k][j], moderate_quotient(numerator, __fadd_rn(root, f.eps)));
      }
    }
  } else {
    // Rare, so a loop keeps the code short. Registers have no index, so each element in turn moves to
    // the front. After the last round, all elements are where they were.
#pragma unroll 1
    for (int n = 0; n < GROUPS * 4; n++) {
      float root = divide_by_root(__fsqrt_rn(v[0][0]), f);
      float numerator = __fmul_rn(f.size, m[0][0]);
      w[0][0] = __fsub_rn(w[0][0], __fdiv_rn(numerator, __fadd_rn(root, f.eps)));
      rotate(m);
      rotate(v);
      rotate(w);
    }
  }
}

/// Computes the new values, and the bits of the largest magnitude of each group. With `keep`, stores
/// moments and master. `i` is the index of the lane's first element, and `scale` the weight's scale for
/// each group. All lanes of the warp must call this.
DEVICE void update(const AdamWEntry &t, const Storage &s, const Factors &f, const LaneInputs &d,
                   const float (&scale)[GROUPS], u64 i, bool keep, float (&w)[GROUPS][4],
                   u32 (&group_max)[GROUPS]) {
  float g[GROUPS][4], m[GROUPS][4], v[GROUPS][4];
  decode_moments<FirstMoment>(d.exp_avg, moment_grid<FirstMoment>(d.exp_avg_range), m);
  decode_moments<SecondMoment>(d.exp_avg_sq, moment_grid<SecondMoment>(d.exp_avg_sq_range), v);
#pragma unroll
  for (int k = 0; k < GROUPS; k++) {
    widen_four(d.grad[k], s.grad_kind, g[k]);
    if (s.has_master) widen_four(d.weight[k], F32, w[k]);
    else if (s.kind != CODES) widen_four(d.weight[k], s.kind, w[k]);
    else decode_four(d.weight[k].x, s.is_e5m2, scale[k], w[k]);
  }
  MomentRange m_range, v_range;
  advance(f, g, m, v, w, m_range, v_range);
#pragma unroll
  for (int k = 0; k < GROUPS; k++) {
    u32 low = InF32::amax(__float_as_uint(w[k][0]), __float_as_uint(w[k][1]));
    u32 high = InF32::amax(__float_as_uint(w[k][2]), __float_as_uint(w[k][3]));
    group_max[k] = InF32::amax_bits(InF32::amax(low, high), 0);
  }
  if (!keep) return;
  store_moments<FirstMoment>(t.exp_avg, t.exp_avg_range, i, m, m_range, s.vectors);
  store_moments<SecondMoment>(t.exp_avg_sq, t.exp_avg_sq_range, i, v, v_range, s.vectors);
  if (!s.has_master) return;
  if (max_u32(group_max[0], group_max[1]) > 0x7f800000u) {
#pragma unroll
    for (int k = 0; k < GROUPS; k++) {
#pragma unroll
      for (int j = 0; j < 4; j++) w[k][j] = __uint_as_float(OutF32::bits(w[k][j]));
    }
  }
#pragma unroll
  for (int k = 0; k < GROUPS; k++) store_raw(t.master, i + k * APART, w[k], s.vectors);
}

/// Encodes and stores new values of codes. `q` is the factor to quantize each group with. Rows have whole
/// blocks, so groups of four also start at multiples of four in the whole tensor.
DEVICE void store_weights(const AdamWArgs &a, const AdamWEntry &t, const Storage &s,
                          const Factors &f, u64 i, const float (&w)[GROUPS][4],
                          const float (&q)[GROUPS]) {
  u64 at[GROUPS];
  u32 codes[GROUPS];
#pragma unroll
  for (int g = 0; g < GROUPS; g++) at[g] = i + g * APART;
  encode_fours(a, t, s.is_e5m2, f.step, at, w, q, codes);
#pragma unroll
  for (int g = 0; g < GROUPS; g++) store_codes(t.param, at[g], codes[g], s.vectors);
}
