// What the block-format kernels share beyond the elements: E8M0 scales, reductions over lanes.
#pragma once
#include "elements.cuh"

/// Scale byte of a block from the fp32 bits of its absolute maximum, whose sign does not count.
/// 1.75 * 2^emax is the largest code of both formats: a mantissa above .75 needs one exponent more.
template <class F> DEVICE u32 e8m0_byte(u32 amax_bits, bool floor_rule) {
  amax_bits &= 0x7fffffffu;
  u32 exponent = (amax_bits + (floor_rule ? 0u : 0x1fffffu)) >> 23;
  u32 byte = exponent > F::EMAX ? exponent - F::EMAX : 0u;
  return amax_bits >= 0x7f800000u ? 255u : byte;
}

/// 2^-e for a scale byte; NaN for 255. No rule gives 254, whose factor would be subnormal.
DEVICE float e8m0_factor(u32 byte) {
  return __uint_as_float(byte == 255u ? 0x7fffffffu : (254u - byte) << 23);
}

/// The bits of a given absolute maximum; what is below zero counts as zero.
DEVICE u32 given_bits(float amax) {
  u32 bits = __float_as_uint(amax);
  return bits >> 31 && (bits & 0x7fffffffu) < 0x7f800000u ? 0u : bits & 0x7fffffffu;
}

/// One step of a reduction that also spreads the results: lanes whose `mask` bit is set keep the
/// upper half of `unit`, the others the lower half, each reduced over the two lanes.
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

/// The same over LANES neighbouring lanes, a power of two: the place in all of `unit` of what this
/// lane is left with, the first COUNT / LANES (or one) of its registers.
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
