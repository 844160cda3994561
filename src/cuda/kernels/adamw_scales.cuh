// Scales of rows and square blocks of codes, before and after a step of AdamW.
#pragma once
#include "adamw.cuh"

/// Returns the value of a block's scale before the step.
DEVICE float scale_before(const AdamWEntry &t, u64 at) {
  if (t.master) return 1.0f;
  if (!(t.flags & IS_E8M0)) return ((const float *)t.scale)[at];
  u32 b = ((const u8 *)t.scale)[at];
  return __uint_as_float(b == 255u ? NAN_BITS : b == 0u ? 0x00400000u : b << 23);
}

/// Returns the factor for a block's maximum. The thread with `writes` stores the scale.
DEVICE float scale_after(const AdamWArgs &a, const AdamWEntry &t, u64 at, u32 bits, bool writes) {
  bool wide = t.flags & IS_E5M2;
  if (t.flags & IS_E8M0) {
    u32 byte = wide ? e8m0_byte<E5m2>(bits, a.flags & FLOOR) : e8m0_byte<E4m3>(bits, a.flags & FLOOR);
    if (writes) ((u8 *)t.scale)[at] = (u8)byte;
    return e8m0_factor(byte);
  }
  float scale = wide ? scale_of<E5m2>(bits, a.rule) : scale_of<E4m3>(bits, a.rule);
  if (writes) ((float *)t.scale)[at] = scale;
  return reciprocal(scale);
}

/// Returns the largest of `bits` over groups of WARPS warps, a power of two. All threads of
/// the block must call this.
template <u32 WARPS> DEVICE u32 largest(u32 bits) {
  __shared__ u32 part[32];
  bits = __reduce_max_sync(0xffffffffu, bits);
  u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (lane == 0) part[warp] = bits;
  __syncthreads();
  return __reduce_max_sync(0xffffffffu, part[warp / WARPS * WARPS + lane % WARPS]);
}

/// Rows and columns of a tensor that share a scale.
struct Rectangle {
  u64 start;               // the index of the first element
  u32 rows;
  u64 cols;
};

/// Returns the block with this number in a grid of `size` by `size` blocks. Size 0 means whole
/// rows.
DEVICE Rectangle rectangle(const AdamWEntry &t, u64 number, u32 size) {
  if (size == 0) return {number * t.cols, 1, t.cols};
  u64 across = (t.cols + size - 1) / size;
  u64 row = number / across * size, col = number % across * size;
  u64 rows = t.rows - row, cols = t.cols - col;
  return {row * t.cols + col, (u32)(rows < size ? rows : size), cols < size ? cols : size};
}
