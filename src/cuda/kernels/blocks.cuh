// Shared by the block-format kernels: E8M0 scales, and reductions over lanes.
#pragma once
#include "elements.cuh"

/// Returns the scale byte of a block from the fp32 bits of its absolute maximum; the sign is
/// ignored. The largest code of both formats is 1.75 * 2^emax, so a mantissa above .75 needs
/// an exponent that is one larger.
template <class F> DEVICE u32 e8m0_byte(u32 amax_bits, bool floor_rule) {
  amax_bits &= 0x7fffffffu;
  u32 exponent = (amax_bits + (floor_rule ? 0u : 0x1fffffu)) >> 23;
  u32 byte = exponent > F::EMAX ? exponent - F::EMAX : 0u;
  return amax_bits >= 0x7f800000u ? 255u : byte;
}

/// Returns 2^-e for a scale byte, or NaN for 255. No rule yields 254, whose factor would be
/// subnormal.
DEVICE float e8m0_factor(u32 byte) {
  return __uint_as_float(byte == 255u ? 0x7fffffffu : (254u - byte) << 23);
}

/// Returns the bits of a given absolute maximum. A negative value counts as zero.
DEVICE u32 given_bits(float amax) {
  u32 bits = __float_as_uint(amax);
  return bits >> 31 && (bits & 0x7fffffffu) < 0x7f800000u ? 0u : bits & 0x7fffffffu;
}

/// One step of a reduction that also distributes the results. Lanes whose `mask` bit is set
/// keep the upper half of `unit`, and the others the lower half, each reduced over the two
/// lanes.
template <class T, int N> DEVICE void fold_halves(u32 (&unit)[N], int count, int lane, int mask) {
  bool upper = lane & mask;
#pragma unroll
  for (int i = 0; i < N / 2; i++) {
    if (i < count / 2) {
      u32 low = unit[i], high = unit[i + count / 2];
      u32 got = shuffle_xor(upper ? low : high, mask);
      unit[i] = T::amax(upper ? high : low, got);
    }
  }
}

/// Repeats `fold_halves` over LANES adjacent lanes, a power of two. A lane is left with COUNT
/// / LANES results (at least one) in its first registers. Returns their position in the
/// original `unit`.
template <class T, int LANES, int COUNT> DEVICE int fold_lanes(u32 (&unit)[COUNT], int lane) {
  int first = 0, count = COUNT;
#pragma unroll
  for (int mask = 1; mask < LANES; mask *= 2) {
    fold_halves<T>(unit, count, lane, mask);
    count /= 2;
    if (lane & mask) first += count;
  }
  return first;
}
