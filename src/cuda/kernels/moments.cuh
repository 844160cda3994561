// 8-bit codes of AdamW's moments (format/moments.rs). A warp has one block: 128 elements of a
// row, four per lane. So the range of a block is a reduction over the warp.
#pragma once
#include "adamw.cuh"

/// The number of elements of a block of moments.
constexpr u32 MOMENT_BLOCK = 128;

struct FirstMoment {
  static constexpr u32 TOP = 127, BINADES = 20;
  static constexpr bool SIGNED = true;
  static DEVICE u32 magnitude(float v) { return __float_as_uint(v) & 0x7fffffffu; }
};
struct SecondMoment {
  static constexpr u32 TOP = 255, BINADES = 40;
  static constexpr bool SIGNED = false;
  /// Second moments are not negative. A NaN may have a sign, and is not below infinity either.
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

template <class M> DEVICE void decode_moments(u32 codes, const MomentRange &r, float (&out)[4]) {
  u32 step = moment_step<M>(r), lowest = r.largest - M::TOP * step;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    u32 magnitude = codes >> (8 * j) & M::TOP;
    u32 bits = magnitude ? lowest + magnitude * step : 0u;
    if (M::SIGNED) bits |= codes << (24 - 8 * j) & 0x80000000u;
    out[j] = __uint_as_float(bits);
  }
}

/// Returns the range of a block. All lanes of the warp must call this.
template <class M> DEVICE MomentRange range_of(const float (&v)[4]) {
  u32 largest = 0, below_smallest = 0xffffffffu;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    u32 magnitude = M::magnitude(v[j]);
    largest = max_u32(largest, magnitude);
    below_smallest = min(below_smallest, magnitude - 1u);
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  u32 smallest = __reduce_min_sync(0xffffffffu, below_smallest) + 1u;
  if (largest >= 0x7f800000u) return {NAN_BITS, NAN_BITS};
  constexpr u32 WIDEST = M::BINADES << 23;
  return {largest, max_u32(smallest, largest > WIDEST ? largest - WIDEST : 0u)};
}

/// Returns the low bytes of four words.
DEVICE u32 low_bytes(u32 a, u32 b, u32 c, u32 d) {
  return byte_permute(byte_permute(a, b, 0x0040), byte_permute(c, d, 0x0040), 0x5410);
}

template <class M> DEVICE u32 encode_moments(const float (&v)[4], const MomentRange &r) {
  if (r.largest >= 0x7f800000u) return M::TOP * 0x01010101u;
  float per_step = __fdiv_rn(1.0f, __uint2float_rn(moment_step<M>(r)));
  constexpr u32 BINADE = 1u << 23;
  u32 cut = M::SIGNED && r.smallest > BINADE ? r.smallest - BINADE : 1u;
  u32 code[4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    u32 magnitude = M::magnitude(v[j]);
    float steps = __fmul_rn(__int2float_rn((int)(r.largest - magnitude)), per_step);
    steps = fminf(steps, (float)(M::TOP - 1));
    // 1.5 * 2^23, whose neighbours are the integers: the difference rounds to nearest, and its low
    // byte is the code.
    u32 counted = __float_as_uint(__fsub_rn(12582912.0f + M::TOP, steps));
    code[j] = magnitude < cut ? 0u : counted;
  }
  u32 codes = low_bytes(code[0], code[1], code[2], code[3]);
  if (!M::SIGNED) return codes;
  u32 signs[4];
#pragma unroll
  for (int j = 0; j < 4; j++) signs[j] = __float_as_uint(v[j]) >> 24;
  return codes | (low_bytes(signs[0], signs[1], signs[2], signs[3]) & 0x80808080u);
}

/// Loads four adjacent elements of any alignment, in the form of `load_four`.
DEVICE uint4 load_four(const void *p, u64 i, u32 kind, bool vectors) {
  if (vectors) return load_four(p, i, kind);
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

/// The inputs of the update of four adjacent elements whose moments are codes.
struct FourCodes {
  uint4 grad, weight;
  u32 exp_avg, exp_avg_sq;
  MomentRange exp_avg_range, exp_avg_sq_range;
};

/// `kind` is the kind of the parameter.
DEVICE FourCodes load_codes(const AdamWEntry &t, u64 i, u32 kind) {
  bool vectors = t.flags & VECTORS;
  FourCodes d;
  d.grad = load_four(t.grad, i, grad_kind(t), vectors);
  d.exp_avg = load_four(t.exp_avg, i, CODES, vectors).x;
  d.exp_avg_sq = load_four(t.exp_avg_sq, i, CODES, vectors).x;
  d.weight = t.master ? load_four(t.master, i, F32, vectors) : load_four(t.param, i, kind, vectors);
  d.exp_avg_range = load_range(t.exp_avg_range, i);
  d.exp_avg_sq_range = load_range(t.exp_avg_sq_range, i);
  return d;
}

template <class M>
DEVICE void store_moments(void *codes, u32 *ranges, u64 i, const float (&v)[4], bool vectors) {
  MomentRange r = range_of<M>(v);
  store_codes(codes, i, encode_moments<M>(v, r), vectors);
  if (i % MOMENT_BLOCK == 0) {
    u64 at = i / MOMENT_BLOCK * 2;
    ranges[at] = r.largest;
    ranges[at + 1] = r.smallest;
  }
}

/// Computes the new values. With `keep`, stores moments and master. The lanes of a warp have
/// the elements of one block, and all of them must call this.
DEVICE void update(const AdamWEntry &t, const Factors &f, const FourCodes &d, u32 kind,
                   float scale, u64 i, bool keep, float (&w)[4]) {
  float g[4], m[4], v[4];
  widen_four(d.grad, grad_kind(t), g);
  decode_moments<FirstMoment>(d.exp_avg, d.exp_avg_range, m);
  decode_moments<SecondMoment>(d.exp_avg_sq, d.exp_avg_sq_range, v);
  widen_weight(t, d.weight, kind, scale, w);
#pragma unroll
  for (int j = 0; j < 4; j++) advance(f, g[j], m[j], v[j], w[j]);
  if (!keep) return;
  bool vectors = t.flags & VECTORS;
  store_moments<FirstMoment>(t.exp_avg, t.exp_avg_range, i, m, vectors);
  store_moments<SecondMoment>(t.exp_avg_sq, t.exp_avg_sq_range, i, v, vectors);
  if (t.master) store_four(t.master, i, F32, w, vectors);
}
