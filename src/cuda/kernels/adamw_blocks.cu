// AdamW over codes with scales of their own: a row's, or a square's. New values stay in registers
// until their maximum is known; those of rows too long for that, and of tensors that cannot be read
// four elements at a time, are computed twice.
#include "adamw.cuh"

/// The value of a block's scale before the step.
DEVICE float scale_before(const AdamWEntry &t, u64 at) {
  if (t.master) return 1.0f;
  if (!(t.flags & IS_E8M0)) return ((const float *)t.scale)[at];
  u32 b = ((const u8 *)t.scale)[at];
  return __uint_as_float(b == 255u ? NAN_BITS : b == 0u ? 0x00400000u : b << 23);
}

/// The factor for a block's maximum; its scale is written by one thread.
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

/// Largest of `bits` over the block; all threads get it.
DEVICE u32 block_max_for_all(u32 bits) {
  __shared__ u32 part[32];
  bits = __reduce_max_sync(0xffffffffu, bits);
  int warps = blockDim.x >> 5;
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = bits;
  __syncthreads();
  bits = (int)(threadIdx.x & 31) < warps ? part[threadIdx.x & 31] : 0u;
  return __reduce_max_sync(0xffffffffu, bits);
}

DEVICE u32 warp_max(u32 bits) { return __reduce_max_sync(0xffffffffu, bits); }

/// Rows and columns that share a scale; a part of a tensor whose rows are `pitch` long.
struct Rectangle {
  u64 start;               // the index of its first element
  u32 rows;
  u64 cols, pitch;
};

/// The block of a grid of `size` by `size`, or with 0 of whole rows.
DEVICE Rectangle rectangle(const AdamWEntry &t, u64 number, u32 size) {
  if (size == 0) return {number * t.cols, 1, t.cols, t.cols};
  u64 across = (t.cols + size - 1) / size;
  u64 row = number / across * size, col = number % across * size;
  u64 rows = t.rows - row, cols = t.cols - col;
  return {row * t.cols + col, (u32)(rows < size ? rows : size), cols < size ? cols : size, t.cols};
}

/// The factors of the step, for all threads of a block.
DEVICE void share_factors(const AdamWArgs &a, const AdamWEntry &t, Factors &shared) {
  if (threadIdx.x == 0) shared = factors_of(a, t);
  __syncthreads();
}

/// A rectangle in the registers of `THREADS` threads: HELD groups of four each, next to each other
/// in a row, `across` groups a row.
template <int HELD, int THREADS, class Reduce>
DEVICE void held(const AdamWArgs &a, const AdamWEntry &t, const Factors &f, const Rectangle &p,
                 u32 across, u32 thread, u64 number, Reduce reduce) {
  float scale = scale_before(t, number);
  float w[HELD][4];
  u32 inside = 0;          // a bit for each group
  u32 groups = (u32)(p.cols / 4);
  auto place = [&](int k, u64 &i) {
    u32 at = thread + k * THREADS, row = at / across, col = at - row * across;
    i = p.start + row * p.pitch + col * 4;
    return row < p.rows && col < groups;
  };
  u64 i, next;
  Four d, ahead;
  if (place(0, i)) d = load(t, i, CODES), inside = 1;
  u32 found = 0;
#pragma unroll
  for (int k = 0; k < HELD; k++) {
    if (k + 1 < HELD && place(k + 1, next)) ahead = load(t, next, CODES), inside |= 2u << k;
    if (inside >> k & 1) {
      update(t, f, d, CODES, scale, i, true, w[k]);
      found = larger(found, w[k]);
    }
    d = ahead, i = next;
  }
  float q = scale_after(a, t, number, reduce(found), thread == 0);
#pragma unroll
  for (int k = 0; k < HELD; k++)
    if (place(k, i)) *(u32 *)((u8 *)t.param + i) = encode_four(a, t, f.step, i, w[k], q);
}

template <int HELD> DEVICE void row_held(const AdamWArgs &a) {
  __shared__ Factors shared;
  if (skipped(a)) return;
  const AdamWEntry &t = a.entries[entry_of(a, blockIdx.x)];
  u64 row = blockIdx.x - t.first_block;
  share_factors(a, t, shared);
  // One row: no group is beyond it.
  held<HELD, 512>(a, t, shared, rectangle(t, row, 0), 1u << 30, threadIdx.x, row, block_max_for_all);
}

/// A block of threads takes a row of up to 4096 columns.
extern "C" __global__ void __launch_bounds__(512)
    adamw_row_4096(const __grid_constant__ AdamWArgs a) { row_held<2>(a); }

/// A block of threads takes a row of up to 16384 columns.
extern "C" __global__ void __launch_bounds__(512)
    adamw_row_16384(const __grid_constant__ AdamWArgs a) { row_held<8>(a); }

/// A block of threads takes a square.
extern "C" __global__ void __launch_bounds__(512)
    adamw_square_128(const __grid_constant__ AdamWArgs a) {
  __shared__ Factors shared;
  if (skipped(a)) return;
  const AdamWEntry &t = a.entries[entry_of(a, blockIdx.x)];
  u64 number = blockIdx.x - t.first_block;
  share_factors(a, t, shared);
  held<8, 512>(a, t, shared, rectangle(t, number, 128), 32, threadIdx.x, number, block_max_for_all);
}

/// A warp takes a square.
extern "C" __global__ void __launch_bounds__(256)
    adamw_square_32(const __grid_constant__ AdamWArgs a) {
  __shared__ Factors shared;
  if (skipped(a)) return;
  const AdamWEntry &t = a.entries[entry_of(a, blockIdx.x)];
  share_factors(a, t, shared);
  u64 number = (u64)(blockIdx.x - t.first_block) * 8 + (threadIdx.x >> 5);
  if (number >= (t.rows + 31) / 32 * ((t.cols + 31) / 32)) return;
  held<8, 32>(a, t, shared, rectangle(t, number, 32), 8, threadIdx.x & 31, number, warp_max);
}

/// A block of threads takes a row of any length, or a square of 128 or 32, element by element and
/// twice: first for the maximum alone.
template <int SIZE> DEVICE void twice(const AdamWArgs &a) {
  __shared__ Factors shared;
  if (skipped(a)) return;
  const AdamWEntry &t = a.entries[entry_of(a, blockIdx.x)];
  u64 number = blockIdx.x - t.first_block;
  share_factors(a, t, shared);
  Factors f = shared;
  Rectangle p = rectangle(t, number, SIZE);
  float scale = scale_before(t, number);
  constexpr u32 ACROSS = SIZE ? SIZE : 512, DOWN = 512 / ACROSS;
  u32 first_row = threadIdx.x / ACROSS, first_col = threadIdx.x % ACROSS;
  u32 found = 0;
  for (u32 row = first_row; row < p.rows; row += DOWN)
    for (u64 col = first_col; col < p.cols; col += ACROSS)
      found = larger(found, update_one(t, f, CODES, scale, p.start + row * p.pitch + col, false));
  found = block_max_for_all(found);
  float q = scale_after(a, t, number, found, threadIdx.x == 0);
  for (u32 row = first_row; row < p.rows; row += DOWN) {
    for (u64 col = first_col; col < p.cols; col += ACROSS) {
      u64 i = p.start + row * p.pitch + col;
      float w = update_one(t, f, CODES, scale, i, true);
      ((u8 *)t.param)[i] = encode_one(a, t, f.step, i, w, q);
    }
  }
}

extern "C" __global__ void __launch_bounds__(512)
    adamw_row_twice(const __grid_constant__ AdamWArgs a) { twice<0>(a); }
extern "C" __global__ void __launch_bounds__(512)
    adamw_square_128_twice(const __grid_constant__ AdamWArgs a) { twice<128>(a); }
extern "C" __global__ void __launch_bounds__(512)
    adamw_square_32_twice(const __grid_constant__ AdamWArgs a) { twice<32>(a); }
