// Random numbers that depend on an element's position only (format/random.rs).
#pragma once
#include "elements.cuh"

/// Computes Philox4x32-10: the words of elements 4 * `block` to 4 * `block` + 3.
DEVICE void philox(u64 block, u32 stream, u32 step, u64 seed, u32 (&out)[4]) {
  u32 a = (u32)block, b = (u32)(block >> 32), c = stream, d = step;
  u32 k = (u32)seed, l = (u32)(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    u64 x = (u64)a * 0xD2511F53u, y = (u64)c * 0xCD9E8D57u;
    u32 next = (u32)(y >> 32) ^ b ^ k;
    c = (u32)(x >> 32) ^ d ^ l, a = next, b = (u32)y, d = (u32)x;
    k += 0x9E3779B9u, l += 0xBB67AE85u;
  }
  out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

/// Returns the word of an element.
DEVICE u32 word_of(u64 index, u32 stream, u32 step, u64 seed) {
  u32 words[4], at = (u32)index & 3u;
  philox(index >> 2, stream, step, seed, words);
  // Selects, because indexing with a variable would need local memory.
  u32 low = at & 1u ? words[1] : words[0], high = at & 1u ? words[3] : words[2];
  return at & 2u ? high : low;
}

/// Converts a word to a number in [0, 1), a multiple of 2^-24.
DEVICE float unit(u32 word) { return __fmul_rn((float)(word >> 8), __uint_as_float(0x33800000u)); }
