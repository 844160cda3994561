// Shared by the MXFP8 tile kernels: storing scale bytes.
#pragma once
#include "tile.cuh"

/// Stores the tile's scale bytes of one direction. `line(i, k)` returns the byte of line i (a
/// row of the plane, 0..128 in the tile) and its block k (0..4). `first_line` is the index of
/// line 0 in the plane.
template <class Line>
DEVICE void store_scales(u8 *to, i64 rs, i64 cs, bool packed, bool words, int thread, int threads,
                         i64 tile, i64 first_line, i64 lines, i64 first_block, i64 blocks,
                         Line line) {
  if (packed) {
    if (thread < 32) {
      u32 word[4];
#pragma unroll
      for (int q = 0; q < 4; q++) {
        int i = thread + 32 * q;
        u32 w = 0;
#pragma unroll
        for (int k = 0; k < 4; k++)
          if (first_line + i < lines && first_block + k < blocks) w |= line(i, k) << (8 * k);
        word[q] = w;
      }
      *(uint4 *)(to + tile * 512 + thread * 16) = make_uint4(word[0], word[1], word[2], word[3]);
    }
    return;
  }
  for (int i = thread; i < 128; i += threads) {
    i64 at = first_line + i;
    if (at < 0 || at >= lines) continue;
    u8 *out = to + at * rs + first_block * cs;
    if (words && first_block + 4 <= blocks) {
      *(u32 *)out = line(i, 0) | line(i, 1) << 8 | line(i, 2) << 16 | line(i, 3) << 24;
    } else {
      for (int k = 0; k < 4 && first_block + k < blocks; k++) out[k * cs] = (u8)line(i, k);
    }
  }
}
