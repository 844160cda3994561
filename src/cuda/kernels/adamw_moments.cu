// AdamW for parameters whose moments are 8-bit codes: plain parameters, and codes with one
// scale per tensor, row or square block. Half of a warp updates 128 adjacent elements of a row, which
// are one block of each moment.
#include "moments.cuh"
#include "adamw_scales.cuh"

/// Elements of a thread block, which updates them in rounds.
constexpr u32 PER_ROUND = 256 * 4 * GROUPS, ROUNDS = 2, PER_BLOCK = PER_ROUND * ROUNDS;

DEVICE u32 larger(u32 before, const float (&w)[GROUPS][4]) {
  return larger(larger(before, w[0]), w[1]);
}

template <u32 KIND> DEVICE void elements(const AdamWArgs &a) {
  __shared__ Factors shared;
  // The scale of the codes before the step, and the factor to quantize with.
  __shared__ float shared_scale, shared_q;
  if (skipped(a)) return;
  u32 e = entry_of(a, blockIdx.x);
  const AdamWEntry &t = a.entries[e];
  u64 n = t.rows * t.cols;
  u64 base = (u64)(blockIdx.x - t.first_block) * PER_BLOCK + first_element(threadIdx.x);
  bool keep = KIND != CODES || t.new_scale, vectors = t.flags & VECTORS;
  u32 found = 0;
#pragma unroll 1
  for (u32 round = 0; round < ROUNDS; round++) {
    u64 i = base + round * PER_ROUND;
    // Either all lanes of a block have elements or none, because n is a multiple of 128.
    EightCodes d;
    if (i < n) d = load_codes(t, i, KIND);
    if (round == 0) {
      // Overlaps with the first loads.
      if (threadIdx.x == 0) {
        shared_scale = KIND == CODES && !t.master ? *(const float *)t.scale : 1.0f;
        shared_q = KIND == CODES && keep ? reciprocal(*t.new_scale) : 1.0f;
      }
      share_factors(a, t, shared);
    }
    if (i < n) {
      Factors f = shared;
      float scale[GROUPS] = {shared_scale, shared_scale}, q[GROUPS] = {shared_q, shared_q};
      float w[GROUPS][4];
      update(t, f, d, KIND, scale, i, keep, w);
      if (KIND == CODES) {
        if (keep) store_weights(a, t, f, i, w, q);
      } else {
#pragma unroll
        for (int g = 0; g < GROUPS; g++) store_four(t.param, i + g * APART, KIND, w[g], vectors);
      }
      found = larger(found, w);
    }
  }
  finish_elements<KIND>(a, t, e, keep, found);
}

#define ELEMENTS(NAME, KIND)                                                                       \
  extern "C" __global__ void __launch_bounds__(256, 3)                                             \
      adamw_moments_##NAME(const __grid_constant__ AdamWArgs a) { elements<KIND>(a); }
ELEMENTS(f32, F32)
ELEMENTS(bf16, BF16)
ELEMENTS(f16, F16)
ELEMENTS(codes, CODES)

/// Updates a rectangle that THREADS threads hold in registers, as `held` in adamw_blocks.cu. A row
/// has ACROSS blocks of moments.
template <int HELD, u32 THREADS, u32 ACROSS>
DEVICE void held(const AdamWArgs &a, const AdamWEntry &t, const Factors &f, const Rectangle &p,
                 u64 number) {
  float before = scale_before(t, number), scale[GROUPS] = {before, before};
  float w[HELD][GROUPS][4];
  u32 blocks = (u32)(p.cols / MOMENT_BLOCK);
  auto place = [&](int k, u64 &i) {
    u32 at = (threadIdx.x + k * THREADS) / LANES, row = at / ACROSS, block = at % ACROSS;
    i = p.start + row * t.cols + block * MOMENT_BLOCK + threadIdx.x % LANES * 4;
    return row < p.rows && block < blocks;
  };
  u64 i;
  u32 found = 0;
#pragma unroll
  for (int k = 0; k < HELD; k++) {
    if (place(k, i)) {
      update(t, f, load_codes(t, i, CODES), CODES, scale, i, true, w[k]);
      found = larger(found, w[k]);
    }
  }
  float factor = scale_after(a, t, number, largest<THREADS / 32>(found), threadIdx.x == 0);
  float q[GROUPS] = {factor, factor};
#pragma unroll
  for (int k = 0; k < HELD; k++)
    if (place(k, i)) store_weights(a, t, f, i, w[k], q);
}

template <int HELD, u32 THREADS> DEVICE void row_held(const AdamWArgs &a) {
  __shared__ Factors shared;
  if (skipped(a)) return;
  const AdamWEntry &t = a.entries[entry_of(a, blockIdx.x)];
  u64 row = blockIdx.x - t.first_block;
  share_factors(a, t, shared);
  // There is only one row, so ACROSS is larger than any number of blocks.
  held<HELD, THREADS, 1u << 30>(a, t, shared, rectangle(t, row, 0), row);
}

/// A thread block updates a row of up to 4096 columns.
extern "C" __global__ void __launch_bounds__(512, 2)
    adamw_moments_row_4096(const __grid_constant__ AdamWArgs a) { row_held<1, 512>(a); }

/// A thread block updates a row of up to 16384 columns.
extern "C" __global__ void __launch_bounds__(512)
    adamw_moments_row_16384(const __grid_constant__ AdamWArgs a) { row_held<4, 512>(a); }

/// A thread block updates a row of any length. New values are computed twice. The first time
/// only determines the maximum.
extern "C" __global__ void __launch_bounds__(512, 2)
    adamw_moments_row_twice(const __grid_constant__ AdamWArgs a) {
  __shared__ Factors shared;
  if (skipped(a)) return;
  const AdamWEntry &t = a.entries[entry_of(a, blockIdx.x)];
  u64 row = blockIdx.x - t.first_block, start = row * t.cols;
  share_factors(a, t, shared);
  Factors f = shared;
  constexpr u32 STRIDE = 512 * 4 * GROUPS;
  float before = scale_before(t, row), scale[GROUPS] = {before, before}, w[GROUPS][4];
  u32 found = 0;
#pragma unroll 1
  for (u64 col = first_element(threadIdx.x); col < t.cols; col += STRIDE) {
    update(t, f, load_codes(t, start + col, CODES), CODES, scale, start + col, false, w);
    found = larger(found, w);
  }
  float factor = scale_after(a, t, row, largest<16>(found), threadIdx.x == 0);
  float q[GROUPS] = {factor, factor};
#pragma unroll 1
  for (u64 col = first_element(threadIdx.x); col < t.cols; col += STRIDE) {
    u64 i = start + col;
    update(t, f, load_codes(t, i, CODES), CODES, scale, i, true, w);
    store_weights(a, t, f, i, w, q);
  }
}

/// A thread block updates a square block.
extern "C" __global__ void __launch_bounds__(512)
    adamw_moments_square_128(const __grid_constant__ AdamWArgs a) {
  __shared__ Factors shared;
  if (skipped(a)) return;
  const AdamWEntry &t = a.entries[entry_of(a, blockIdx.x)];
  u64 number = blockIdx.x - t.first_block;
  share_factors(a, t, shared);
  held<4, 512, 1>(a, t, shared, rectangle(t, number, 128), number);
}

/// A thread block of 16 warps updates four adjacent square blocks, 32 rows of 128 columns. Eight
/// lanes update columns of square 0 or 1 in their first group, and of square 2 or 3 in their second.
extern "C" __global__ void __launch_bounds__(512, 2)
    adamw_moments_square_32(const __grid_constant__ AdamWArgs a) {
  __shared__ Factors shared;
  __shared__ u32 part[16][4];
  if (skipped(a)) return;
  const AdamWEntry &t = a.entries[entry_of(a, blockIdx.x)];
  share_factors(a, t, shared);
  Factors f = shared;
  u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, eighth = lane % 8;
  u64 tile = blockIdx.x - t.first_block, across = t.cols / MOMENT_BLOCK;
  u64 row = tile / across * 32 + threadIdx.x / LANES;
  u64 i = row * t.cols + tile % across * MOMENT_BLOCK + threadIdx.x % LANES * 4;
  u32 square[GROUPS];
  float scale[GROUPS], q[GROUPS], w[GROUPS][4];
  u32 found[GROUPS] = {0, 0};
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    square[g] = lane % LANES / 8 + g * 2;
    scale[g] = scale_before(t, tile * 4 + square[g]);
  }
  if (row < t.rows) {
    update(t, f, load_codes(t, i, CODES), CODES, scale, i, true, w);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) found[g] = larger(0, w[g]);
  }
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    // The eight lanes of a row, and those of the warp's other row.
    for (int mask = 1; mask < 8; mask *= 2) found[g] = max_u32(found[g], shuffle_xor(found[g], mask));
    found[g] = max_u32(found[g], shuffle_xor(found[g], LANES));
    if (lane < LANES && eighth == 0) part[warp][square[g]] = found[g];
  }
  __syncthreads();
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    found[g] = max_u32(part[eighth][square[g]], part[eighth + 8][square[g]]);
    for (int mask = 1; mask < 8; mask *= 2) found[g] = max_u32(found[g], shuffle_xor(found[g], mask));
    bool writes = warp == 0 && lane < LANES && eighth == 0;
    q[g] = scale_after(a, t, tile * 4 + square[g], found[g], writes);
  }
  if (row < t.rows) store_weights(a, t, f, i, w, q);
}
