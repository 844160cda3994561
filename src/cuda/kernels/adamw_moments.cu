// AdamW for parameters whose moments are 8-bit codes: plain parameters, and codes with one
// scale per tensor, row or square block. A warp updates 128 adjacent elements of a row, which
// are one block of each moment.
#include "moments.cuh"
#include "adamw_scales.cuh"

/// Groups of four elements that a thread loads together, and the number of such loads.
constexpr int GROUPS = 2, ROUNDS = 2, PER_BLOCK = 256 * 4 * GROUPS * ROUNDS;

template <u32 KIND> DEVICE void elements(const AdamWArgs &a) {
  __shared__ Factors shared;
  // The scale of the codes before the step, and the factor to quantize with.
  __shared__ float scale, q;
  if (skipped(a)) return;
  u32 e = entry_of(a, blockIdx.x);
  const AdamWEntry &t = a.entries[e];
  u64 n = t.rows * t.cols;
  u64 base = (u64)(blockIdx.x - t.first_block) * PER_BLOCK + threadIdx.x * 4;
  bool keep = KIND != CODES || t.new_scale, vectors = t.flags & VECTORS;
  u32 found = 0;
#pragma unroll 1
  for (int round = 0; round < ROUNDS; round++) {
    FourCodes d[GROUPS];
    // Either all lanes of a warp have elements or none, because n is a multiple of 128.
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      u64 i = base + (round * GROUPS + g) * 1024;
      if (i < n) d[g] = load_codes(t, i, KIND);
    }
    if (round == 0) {
      // Overlaps with the first loads.
      if (threadIdx.x == 0) {
        scale = KIND == CODES && !t.master ? *(const float *)t.scale : 1.0f;
        q = KIND == CODES && keep ? reciprocal(*t.new_scale) : 1.0f;
      }
      share_factors(a, t, shared);
    }
    Factors f = shared;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      u64 i = base + (round * GROUPS + g) * 1024;
      if (i < n) {
        float w[4];
        update(t, f, d[g], KIND, scale, i, keep, w);
        if (KIND != CODES) store_four(t.param, i, KIND, w, vectors);
        else if (keep) store_codes(t.param, i, encode_four(a, t, f.step, i, w, q), vectors);
        found = larger(found, w);
      }
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

/// Updates a rectangle that THREADS threads hold in registers, as `held` in adamw_blocks.cu.
template <int HELD, u32 THREADS, u32 ACROSS>
DEVICE void held(const AdamWArgs &a, const AdamWEntry &t, const Factors &f, const Rectangle &p,
                 u64 number) {
  bool vectors = t.flags & VECTORS;
  float scale = scale_before(t, number);
  float w[HELD][4];
  u32 groups = (u32)(p.cols / 4);
  auto place = [&](int k, u64 &i) {
    u32 at = threadIdx.x + k * THREADS, row = at / ACROSS, col = at % ACROSS;
    i = p.start + row * t.cols + col * 4;
    return row < p.rows && col < groups;
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
  float q = scale_after(a, t, number, largest<THREADS / 32>(found), threadIdx.x == 0);
#pragma unroll
  for (int k = 0; k < HELD; k++)
    if (place(k, i)) store_codes(t.param, i, encode_four(a, t, f.step, i, w[k], q), vectors);
}

template <int HELD, u32 THREADS> DEVICE void row_held(const AdamWArgs &a) {
  __shared__ Factors shared;
  if (skipped(a)) return;
  const AdamWEntry &t = a.entries[entry_of(a, blockIdx.x)];
  u64 row = blockIdx.x - t.first_block;
  share_factors(a, t, shared);
  // There is only one row, so ACROSS is larger than any number of groups.
  held<HELD, THREADS, 1u << 30>(a, t, shared, rectangle(t, row, 0), row);
}

/// A thread block updates a row of up to 4096 columns.
extern "C" __global__ void __launch_bounds__(512, 2)
    adamw_moments_row_4096(const __grid_constant__ AdamWArgs a) { row_held<2, 512>(a); }

/// A thread block updates a row of up to 16384 columns.
extern "C" __global__ void __launch_bounds__(1024)
    adamw_moments_row_16384(const __grid_constant__ AdamWArgs a) { row_held<4, 1024>(a); }

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
  float scale = scale_before(t, row), w[4];
  u32 found = 0;
#pragma unroll 1
  for (u64 col = threadIdx.x * 4; col < t.cols; col += 2048) {
    update(t, f, load_codes(t, start + col, CODES), CODES, scale, start + col, false, w);
    found = larger(found, w);
  }
  float q = scale_after(a, t, row, largest<16>(found), threadIdx.x == 0);
#pragma unroll 1
  for (u64 col = threadIdx.x * 4; col < t.cols; col += 2048) {
    u64 i = start + col;
    update(t, f, load_codes(t, i, CODES), CODES, scale, i, true, w);
    store_codes(t.param, i, encode_four(a, t, f.step, i, w, q), t.flags & VECTORS);
  }
}

/// A thread block updates a square block.
extern "C" __global__ void __launch_bounds__(1024)
    adamw_moments_square_128(const __grid_constant__ AdamWArgs a) {
  __shared__ Factors shared;
  if (skipped(a)) return;
  const AdamWEntry &t = a.entries[entry_of(a, blockIdx.x)];
  u64 number = blockIdx.x - t.first_block;
  share_factors(a, t, shared);
  held<4, 1024, 32>(a, t, shared, rectangle(t, number, 128), number);
}

/// A thread block of 16 warps updates four adjacent square blocks, 32 rows of 128 columns. A
/// warp updates two of the rows, and eight lanes have the columns of one square.
extern "C" __global__ void __launch_bounds__(512, 2)
    adamw_moments_square_32(const __grid_constant__ AdamWArgs a) {
  __shared__ Factors shared;
  __shared__ u32 part[16][4];
  if (skipped(a)) return;
  const AdamWEntry &t = a.entries[entry_of(a, blockIdx.x)];
  share_factors(a, t, shared);
  Factors f = shared;
  bool vectors = t.flags & VECTORS;
  u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, square = lane / 8;
  u64 tile = blockIdx.x - t.first_block, across = t.cols / MOMENT_BLOCK;
  u64 first_row = tile / across * 32 + warp, col = tile % across * MOMENT_BLOCK + lane * 4;
  u64 number = tile * 4 + square;
  float scale = scale_before(t, number), w[2][4];
  u32 found = 0;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    u64 row = first_row + k * 16, i = row * t.cols + col;
    if (row < t.rows) {
      update(t, f, load_codes(t, i, CODES), CODES, scale, i, true, w[k]);
      found = larger(found, w[k]);
    }
  }
#pragma unroll
  for (int mask = 1; mask < 8; mask *= 2) found = max_u32(found, shuffle_xor(found, mask));
  if (lane % 8 == 0) part[warp][square] = found;
  __syncthreads();
  found = max_u32(part[lane % 8][square], part[lane % 8 + 8][square]);
#pragma unroll
  for (int mask = 1; mask < 8; mask *= 2) found = max_u32(found, shuffle_xor(found, mask));
  float q = scale_after(a, t, number, found, warp == 0 && lane % 8 == 0);
#pragma unroll
  for (int k = 0; k < 2; k++) {
    u64 row = first_row + k * 16, i = row * t.cols + col;
    if (row < t.rows) store_codes(t.param, i, encode_four(a, t, f.step, i, w[k], q), vectors);
  }
}
