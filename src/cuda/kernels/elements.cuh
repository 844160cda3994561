// Element types: inputs, FP8 conversion, absolute maxima, the fp32 scale rule.
//
// Inputs of every type are processed as 32-bit registers: one fp32 value, or two 16-bit
// values. Conversions use inline PTX, so that compiling needs no CUDA headers.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__

struct E4m3 {
  static constexpr u32 EMAX = 8;
  static constexpr float MAX = 448.0f;
  static DEVICE u16 pair(float lo, float hi) {
    u16 d;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(hi), "f"(lo));
    return d;
  }
};

struct E5m2 {
  static constexpr u32 EMAX = 15;
  static constexpr float MAX = 57344.0f;
  static DEVICE u16 pair(float lo, float hi) {
    u16 d;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(d) : "f"(hi), "f"(lo));
    return d;
  }
};

DEVICE u32 shuffle_xor(u32 v, int mask) {
  u32 d;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(d) : "r"(v), "r"(mask));
  return d;
}

DEVICE u32 byte_permute(u32 a, u32 b, u32 selector) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

/// Transposes four rows of four bytes. Each output word holds one column.
DEVICE void transpose_4x4(u32 a, u32 b, u32 c, u32 d, u32 (&out)[4]) {
  u32 ab_low = byte_permute(a, b, 0x5140), ab_high = byte_permute(a, b, 0x7362);
  u32 cd_low = byte_permute(c, d, 0x5140), cd_high = byte_permute(c, d, 0x7362);
  out[0] = byte_permute(ab_low, cd_low, 0x5410);
  out[1] = byte_permute(ab_low, cd_low, 0x7632);
  out[2] = byte_permute(ab_high, cd_high, 0x5410);
  out[3] = byte_permute(ab_high, cd_high, 0x7632);
}

/// fp32 input: one element per register.
struct InF32 {
  static constexpr int PER_REG = 1;
  static constexpr int BYTES = 4;
  static DEVICE float get(u32 reg, int) { return __uint_as_float(reg); }
  /// Returns the same value as `get`, for a second use. For types with two elements per
  /// register, it uses a different instruction if there is one. Otherwise the compiler would
  /// keep the results of the first use, and run out of registers.
  static DEVICE float get_again(u32 reg, int) { return __uint_as_float(reg); }
  /// Returns the larger magnitude, or NaN if either is NaN. The sign of the result has no
  /// meaning.
  static DEVICE u32 amax(u32 a, u32 b) {
    float d;
    asm("max.NaN.xorsign.abs.f32 %0, %1, %2;"
        : "=f"(d)
        : "f"(__uint_as_float(a)), "f"(__uint_as_float(b)));
    return __float_as_uint(d);
  }
  /// Returns the fp32 bits of the magnitude of an `amax` result.
  static DEVICE u32 amax_bits(u32 reg, int) { return reg & 0x7fffffffu; }
  static DEVICE u32 load(const void *p, i64 i) { return ((const u32 *)p)[i]; }
  /// Moves the elements of a register down by one, and appends the first element of `next`.
  static DEVICE u32 shift_in(u32, u32 next) { return next; }
};

/// bf16 input: two elements per register, the first in the low half.
struct InBf16 {
  static constexpr int PER_REG = 2;
  static constexpr int BYTES = 2;
  static DEVICE float get(u32 reg, int half) {
    return __uint_as_float(half ? reg & 0xffff0000u : reg << 16);
  }
  static DEVICE float get_again(u32 reg, int half) {
    return __uint_as_float(byte_permute(reg, 0, half ? 0x3244 : 0x1044));
  }
  static DEVICE u32 amax(u32 a, u32 b) {
    u32 d;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  }
  static DEVICE u32 amax_bits(u32 reg, int half) {
    return half ? reg & 0x7fff0000u : (reg << 16) & 0x7fff0000u;
  }
  static DEVICE u32 load(const void *p, i64 i) { return ((const u16 *)p)[i]; }
  static DEVICE u32 shift_in(u32 reg, u32 next) { return byte_permute(reg, next, 0x5432); }
};

/// fp16 input: two elements per register, the first in the low half.
struct InF16 {
  static constexpr int PER_REG = 2;
  static constexpr int BYTES = 2;
  static DEVICE float get(u32 reg, int half) {
    float d;
    u16 h = half ? (u16)(reg >> 16) : (u16)reg;
    asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(h));
    return d;
  }
  static DEVICE float get_again(u32 reg, int half) { return get(reg, half); }
  static DEVICE u32 amax(u32 a, u32 b) {
    u32 d;
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  }
  static DEVICE u32 amax_bits(u32 reg, int half) {
    return __float_as_uint(get(reg, half)) & 0x7fffffffu;
  }
  static DEVICE u32 load(const void *p, i64 i) { return ((const u16 *)p)[i]; }
  static DEVICE u32 shift_in(u32 reg, u32 next) { return byte_permute(reg, next, 0x5432); }
};

/// The bits of every NaN in amaxes and scales: positive, quiet, without payload.
#define NAN_BITS 0x7fc00000u

DEVICE u32 canonical(u32 bits) { return bits > 0x7f800000u ? NAN_BITS : bits; }

DEVICE u32 max_u32(u32 a, u32 b) { return a > b ? a : b; }

/// How a scale is computed from an absolute maximum (`ScaleRule` in format/scale.rs).
struct Rule {
  float epsilon;
  float margin;          // 2^margin
  u32 power_of_2;
};

template <class F> DEVICE float scale_of(u32 amax_bits, const Rule &rule) {
  if (amax_bits >= 0x7f800000u) return __uint_as_float(NAN_BITS);
  float amax = __uint_as_float(amax_bits);
  if (!(amax > rule.epsilon)) amax = rule.epsilon;
  if (amax == 0.0f) return 1.0f;
  float scale = __fmul_rn(__fdiv_rn(amax, F::MAX), rule.margin);
  scale = fminf(fmaxf(scale, __uint_as_float(0x00800000u)), __uint_as_float(0x7f000000u));
  if (rule.power_of_2) scale = __uint_as_float((__float_as_uint(scale) + 0x7fffffu) & 0x7f800000u);
  return scale;
}

DEVICE float reciprocal(float scale) { return __fdiv_rn(1.0f, scale); }

/// Returns 1 / x, rounded to nearest. `x` and the result must be normal numbers. The compiler emits
/// these instructions for `__frcp_rn` too, and a branch for all other numbers.
DEVICE float moderate_reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return __fmaf_rn(r, __fmaf_rn(-x, r, 1.0f), r);
}

/// Returns the code of one element.
template <class F> DEVICE u8 encode(float v) { return (u8)F::pair(v, 0.0f); }

/// Converts `WORDS` registers of input to codes, four per output word.
template <class T, class F, int WORDS>
DEVICE void encode_words(const u32 (&in)[WORDS], float q, u32 (&out)[WORDS * T::PER_REG / 4]) {
#pragma unroll
  for (int i = 0; i < WORDS * T::PER_REG / 4; i++) {
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int e = 4 * i + j;
      v[j] = __fmul_rn(T::get(in[e / T::PER_REG], e % T::PER_REG), q);
    }
    out[i] = F::pair(v[0], v[1]) | (u32)F::pair(v[2], v[3]) << 16;
  }
}

/// Returns the bits of the absolute maximum of a register that holds `T::amax` results or raw
/// elements.
template <class T> DEVICE u32 magnitude(u32 reg) {
  u32 m = T::amax_bits(reg, 0);
  return T::PER_REG == 2 ? max_u32(m, T::amax_bits(reg, T::PER_REG - 1)) : m;
}

/// Returns the `T::amax` of the elements of a vector.
template <class T> DEVICE u32 vector_amax(const uint4 &v) {
  return T::amax(T::amax(v.x, v.y), T::amax(v.z, v.w));
}

/// Returns the maximum over a block of up to 1024 threads, in all of its threads (ALL) or in
/// its first warp.
template <bool ALL> DEVICE u32 block_max(u32 m, u32 (&part)[32]) {
  m = __reduce_max_sync(0xffffffffu, m);
  int warps = blockDim.x >> 5, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (lane == 0) part[warp] = m;
  __syncthreads();
  if (ALL || warp == 0) {
    m = lane < warps ? part[lane] : 0u;
    m = __reduce_max_sync(0xffffffffu, m);
  }
  return m;
}

/// Returns the maximum over a block, in thread 0.
DEVICE u32 block_max(u32 m) {
  __shared__ u32 warps[32];
  return block_max<false>(m, warps);
}

/// The state of a maximum over all blocks of a launch, in a workspace. It is zero before and
/// after a launch.
struct GridMax {
  u32 max_bits;
  u32 arrived;
};

/// Adds a block's maximum. Returns true in thread 0 of the last block, with the maximum of all
/// blocks in `m`.
DEVICE bool last_of(GridMax *at, u32 blocks, u32 &m) {
  if (threadIdx.x != 0) return false;
  atomicMax(&at->max_bits, canonical(m));
  __threadfence();
  if (atomicInc(&at->arrived, blocks - 1) != blocks - 1) return false;
  __threadfence();
  m = atomicExch(&at->max_bits, 0u);
  return true;
}

/// The outputs of a delayed-scaling cast, which the last block writes.
///
/// `amax` is raised to the maximum of the cast. If that maximum is NaN or Inf, `amax` is
/// unchanged. If `amax` is NaN (these kernels never write NaN, but a reduction or a checkpoint
/// may have), the first finite maximum replaces it, whatever the sign and payload of the NaN.
/// If `amax` is Inf, it stays Inf.
///
/// `scale` is used unchanged. If it is NaN, every code is 0x7F, and `scale_used` gets its
/// bits, payload included. If the maximum is not finite, `scale_used` is the NaN without
/// payload.
struct Delayed {
  float *amax;
  float *scale_used;
  GridMax *grid_max;
};

DEVICE void finish_delayed(const Delayed &d, float scale, u32 m) {
  bool finite = m < 0x7f800000u;
  // If one operand is NaN, fmaxf returns the other.
  if (finite) *d.amax = fmaxf(*d.amax, __uint_as_float(m));
  *d.scale_used = finite ? scale : __uint_as_float(NAN_BITS);
}

/// For a launch over a list of tensors: returns the entry that a block belongs to, which is
/// the last entry that begins at or before the block.
template <class Args> DEVICE u32 entry_of(const Args &a, u32 block) {
  u32 low = 0, high = a.count;
  while (high - low > 1) {
    u32 middle = (low + high) / 2;
    if (a.entries[middle].first_block <= block) low = middle;
    else high = middle;
  }
  return low;
}

/// Returns the block after the last block of an entry.
template <class Args> DEVICE u32 end_of(const Args &a, u32 e) {
  return e + 1 < a.count ? a.entries[e + 1].first_block : a.blocks;
}

#define FOR_INPUTS(ROW) ROW(f32, InF32) ROW(bf16, InBf16) ROW(f16, InF16)
#define FOR_TYPES(ROW)                                                                             \
  ROW(f32_e4m3, InF32, E4m3) ROW(f32_e5m2, InF32, E5m2) ROW(bf16_e4m3, InBf16, E4m3)               \
  ROW(bf16_e5m2, InBf16, E5m2) ROW(f16_e4m3, InF16, E4m3) ROW(f16_e5m2, InF16, E5m2)
