// Random numbers that depend on an element's position only (format/random.rs).
#pragma once
#include "elements.cuh"

/// Multiplies to 64 bits. For a product of two u64, the compiler also adds products of the upper words,
/// although both are zero.
DEVICE u64 multiply_wide(u32 a, u32 b) {
  u64 d;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(d) : "r"(a), "r"(b));
  return d;
}

/// Computes Philox4x32-10: for each of N blocks, the words of elements 4 * block to 4 * block + 3. The
/// blocks share the additions to the keys.
template <int N>
DEVICE void philox(const u64 (&blocks)[N], u32 stream, u32 step, u64 seed, u32 (&out)[N][4]) {
  u32 k = (u32)seed, l = (u32)(seed >> 32);
#pragma unroll
  for (int n = 0; n < N; n++) {
    out[n][0] = (u32)blocks[n], out[n][1] = (u32)(blocks[n] >> 32);
    out[n][2] = stream, out[n][3] = step;
  }
#pragma unroll
  for (int round = 0; round < 10; round++) {
#pragma unroll
    for (int n = 0; n < N; n++) {
      u64 x = multiply_wide(out[n][0], 0xD2511F53u), y = multiply_wide(out[n][2], 0xCD9E8D57u);
      out[n][0] = (u32)(y >> 32) ^ out[n][1] ^ k, out[n][1] = (u32)y;
      out[n][2] = (u32)(x >> 32) ^ out[n][3] ^ l, out[n][3] = (u32)x;
    }
    k += 0x9E3779B9u, l += 0xBB67AE85u;
  }
}

DEVICE void philox(u64 block, u32 stream, u32 step, u64 seed, u32 (&out)[4]) {
  u64 blocks[1] = {block};
  u32 words[1][4];
  philox(blocks, stream, step, seed, words);
#pragma unroll
  for (int j = 0; j < 4; j++) out[j] = words[0][j];
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
