// AdamW for parameters whose moments are 8-bit codes: plain parameters, and codes with one
// scale per tensor, row or square block. Half of a warp updates 128 adjacent elements of a row, which
// are one block of each moment.
//
// Branches on how tensors are stored would be a third of the instructions. The most frequent storages
// have kernels of their own, without these branches. One kernel supports all others.
#include "moments.cuh"
#include "adamw_scales.cuh"

template <u32 KIND> struct AnyStorage {
  static DEVICE Storage of(const AdamWEntry &t) { return storage_of(t, KIND); }
};

/// Aligned tensors, with E4M3 if they are codes.
template <u32 KIND, u32 GRAD> struct CommonStorage {
  static DEVICE Storage of(const AdamWEntry &t) {
    return {KIND, GRAD, KIND == CODES && t.master, false, true};
  }
};

/// Threads of a block of tensors without block scales, and the elements that it updates in rounds.
constexpr u32 THREADS = 256, PER_ROUND = THREADS * 4 * GROUPS, PER_BLOCK = 8 * PER_ROUND;

/// Returns whether a warp has a block of moments. `i` is the index of the thread's first element, and
/// `n` the number of elements. All lanes of a warp take part in reductions. If only the first half of a
/// warp has a block, the second half repeats it: `i` becomes its index, and both store the same bytes.
template <class I> DEVICE bool place(I n, I &i) {
  if (i - (threadIdx.x & LANES) * (MOMENT_BLOCK / LANES) >= n) return false;
  if (i >= n) i -= MOMENT_BLOCK;
  return true;
}

template <u32 KIND, class S> DEVICE void elements(const AdamWArgs &a) {
  __shared__ Factors shared;
  // The scale of the codes before the step, and the factor to quantize with.
  __shared__ float shared_scale, shared_q;
  if (skipped(a)) return;
  u32 e = entry_of(a, blockIdx.x);
  const AdamWEntry &t = a.entries[e];
  const Storage s = S::of(t);
  u64 start = (u64)(blockIdx.x - t.first_block) * PER_BLOCK, remaining = t.rows * t.cols - start;
  u32 n = remaining < PER_BLOCK ? (u32)remaining : PER_BLOCK;
  bool keep = KIND != CODES || t.new_scale;
  // `place` may move `i` to the block of the other half of the warp, but not `next`.
  u32 next = first_element(threadIdx.x), i = next, max_bits = 0;
  bool valid = place(n, i);
  LaneInputs d;
  if (valid) d = load_inputs(t, s, start + i);
  // Overlaps with the first loads.
  if (threadIdx.x == 0) {
    shared_scale = KIND == CODES && !s.has_master ? *(const float *)t.scale : 1.0f;
    shared_q = KIND == CODES && keep ? reciprocal(*t.new_scale) : 1.0f;
  }
  share_factors(a, t, shared);
#pragma unroll 1
  while (valid) {
    // The next round's elements are loaded before this one's are updated. With few warps on a
    // multiprocessor, each would wait for its loads otherwise.
    LaneInputs following;
    next += PER_ROUND;
    u32 following_i = next;
    bool following_valid = place(n, following_i);
    if (following_valid) following = load_inputs(t, s, start + following_i);

    Factors f = shared;
    float scale[GROUPS] = {shared_scale, shared_scale}, q[GROUPS] = {shared_q, shared_q};
    float w[GROUPS][4];
    u32 group_max[GROUPS];
    update(t, s, f, d, scale, start + i, keep, w, group_max);
    if (KIND == CODES) {
      if (keep) store_weights(a, t, s, f, start + i, w, q);
    } else {
#pragma unroll
      for (int g = 0; g < GROUPS; g++)
        store_four(t.param, start + i + g * APART, KIND, w[g], s.vectors);
    }
    max_bits = max_u32(max_bits, max_u32(group_max[0], group_max[1]));
    d = following;
    i = following_i;
    valid = following_valid;
  }
  finish_elements<KIND>(a, t, e, keep, max_bits);
}

/// Updates a rectangle that THREADS threads hold in registers, as `held` in adamw_blocks.cu. A row
/// has ACROSS blocks of moments.
template <int HELD, u32 THREADS, u32 ACROSS>
DEVICE void held(const AdamWArgs &a, const AdamWEntry &t, const Storage &s, const Factors &f,
                 const Rectangle &p, u64 number) {
  float before = scale_before(t, number), scale[GROUPS] = {before, before};
  float w[HELD][GROUPS][4];
  u32 blocks = (u32)(p.cols / MOMENT_BLOCK);
  auto place = [&](int k, u64 &i) {
    u32 at = (threadIdx.x + k * THREADS) / LANES, row = at / ACROSS, block = at % ACROSS;
    u32 lower = at & ~1u;
    bool valid = lower / ACROSS < p.rows && lower % ACROSS < blocks;
    // As `place` above.
    if (row >= p.rows || block >= blocks) row = lower / ACROSS, block = lower % ACROSS;
    i = p.start + row * t.cols + block * MOMENT_BLOCK + threadIdx.x % LANES * 4;
    return valid;
  };
  u64 i;
  u32 max_bits = 0;
#pragma unroll
  for (int k = 0; k < HELD; k++) {
    if (place(k, i)) {
      u32 group_max[GROUPS];
      update(t, s, f, load_inputs(t, s, i), scale, i, true, w[k], group_max);
      max_bits = max_u32(max_bits, max_u32(group_max[0], group_max[1]));
    }
  }
  float factor = scale_after(a, t, number, largest<THREADS / 32>(max_bits), threadIdx.x == 0);
  float q[GROUPS] = {factor, factor};
#pragma unroll
  for (int k = 0; k < HELD; k++)
    if (place(k, i)) store_weights(a, t, s, f, i, w[k], q);
}

/// A thread block updates a row of up to HELD * THREADS * 8 columns.
template <int HELD, u32 THREADS, class S> DEVICE void row_held(const AdamWArgs &a) {
  __shared__ Factors shared;
  if (skipped(a)) return;
  const AdamWEntry &t = a.entries[entry_of(a, blockIdx.x)];
  u64 row = blockIdx.x - t.first_block;
  share_factors(a, t, shared);
  // There is only one row, so ACROSS is larger than any number of blocks.
  held<HELD, THREADS, 1u << 30>(a, t, S::of(t), shared, rectangle(t, row, 0), row);
}

/// A thread block updates a row of any length. New values are computed twice. The first time
/// only determines the maximum.
template <u32 THREADS, class S> DEVICE void row_twice(const AdamWArgs &a) {
  __shared__ Factors shared;
  if (skipped(a)) return;
  const AdamWEntry &t = a.entries[entry_of(a, blockIdx.x)];
  u64 row = blockIdx.x - t.first_block, start = row * t.cols;
  share_factors(a, t, shared);
  Factors f = shared;
  constexpr u32 STRIDE = THREADS * 4 * GROUPS;
  const Storage s = S::of(t);
  float before = scale_before(t, row), scale[GROUPS] = {before, before}, w[GROUPS][4];
  u32 max_bits = 0, group_max[GROUPS];
#pragma unroll 1
  for (u64 next = first_element(threadIdx.x);; next += STRIDE) {
    u64 col = next;
    if (!place(t.cols, col)) break;
    update(t, s, f, load_inputs(t, s, start + col), scale, start + col, false, w, group_max);
    max_bits = max_u32(max_bits, max_u32(group_max[0], group_max[1]));
  }
  float factor = scale_after(a, t, row, largest<THREADS / 32>(max_bits), threadIdx.x == 0);
  float q[GROUPS] = {factor, factor};
#pragma unroll 1
  for (u64 next = first_element(threadIdx.x);; next += STRIDE) {
    u64 col = next;
    if (!place(t.cols, col)) break;
    u64 i = start + col;
    update(t, s, f, load_inputs(t, s, i), scale, i, true, w, group_max);
    store_weights(a, t, s, f, i, w, q);
  }
}

/// A thread block updates a square block.
template <int HELD, u32 THREADS, class S> DEVICE void square_128(const AdamWArgs &a) {
  __shared__ Factors shared;
  if (skipped(a)) return;
  const AdamWEntry &t = a.entries[entry_of(a, blockIdx.x)];
  u64 number = blockIdx.x - t.first_block;
  share_factors(a, t, shared);
  held<HELD, THREADS, 1>(a, t, S::of(t), shared, rectangle(t, number, 128), number);
}

/// A thread block of 16 warps updates four adjacent square blocks, 32 rows of 128 columns. Eight
/// lanes update columns of square 0 or 1 in their first group, and of square 2 or 3 in their second.
template <class S> DEVICE void square_32(const AdamWArgs &a) {
  __shared__ Factors shared;
  __shared__ u32 part[16][4];
  if (skipped(a)) return;
  const AdamWEntry &t = a.entries[entry_of(a, blockIdx.x)];
  share_factors(a, t, shared);
  Factors f = shared;
  u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, lane_of_eight = lane % 8;
  u64 tile = blockIdx.x - t.first_block, across = t.cols / MOMENT_BLOCK;
  const Storage s = S::of(t);
  u64 row = tile / across * 32 + threadIdx.x / LANES;
  bool valid = tile / across * 32 + warp * 2 < t.rows;
  // As `place` above.
  if (valid && row >= t.rows) row--;
  u64 i = row * t.cols + tile % across * MOMENT_BLOCK + threadIdx.x % LANES * 4;
  u32 square[GROUPS];
  float scale[GROUPS], q[GROUPS], w[GROUPS][4];
  u32 max_bits[GROUPS] = {0, 0};
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    square[g] = lane % LANES / 8 + g * 2;
    scale[g] = scale_before(t, tile * 4 + square[g]);
  }
  if (valid) update(t, s, f, load_inputs(t, s, i), scale, i, true, w, max_bits);
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    // The eight lanes of a row, and those of the warp's other row.
    for (int mask = 1; mask < 8; mask *= 2)
      max_bits[g] = max_u32(max_bits[g], shuffle_xor(max_bits[g], mask));
    max_bits[g] = max_u32(max_bits[g], shuffle_xor(max_bits[g], LANES));
    if (lane < LANES && lane_of_eight == 0) part[warp][square[g]] = max_bits[g];
  }
  __syncthreads();
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    // The lanes have two warps each, which together are all 16.
    max_bits[g] = max_u32(part[lane_of_eight][square[g]], part[lane_of_eight + 8][square[g]]);
    for (int mask = 1; mask < 8; mask *= 2)
      max_bits[g] = max_u32(max_bits[g], shuffle_xor(max_bits[g], mask));
    bool writes = warp == 0 && lane < LANES && lane_of_eight == 0;
    q[g] = scale_after(a, t, tile * 4 + square[g], max_bits[g], writes);
  }
  if (valid) store_weights(a, t, s, f, i, w, q);
}

#define KERNEL(NAME, BOUNDS, BODY)                                                                 \
  extern "C" __global__ void __launch_bounds__ BOUNDS                                              \
      adamw_moments_##NAME(const __grid_constant__ AdamWArgs a) { BODY(a); }
#define PLAIN(NAME, KIND) KERNEL(NAME, (THREADS, 2), (elements<KIND, AnyStorage<KIND>>))
PLAIN(f32, F32)
PLAIN(bf16, BF16)
PLAIN(f16, F16)
KERNEL(f32_f32, (THREADS, 2), (elements<F32, CommonStorage<F32, F32>>))
typedef AnyStorage<CODES> AnyCodes;
typedef CommonStorage<CODES, BF16> CodesBf16Grad;
typedef CommonStorage<CODES, F32> CodesF32Grad;
// Suffix of the kernels, storage, and blocks for each multiprocessor. Kernels for any storage need more
// registers.
#define FOR_STORAGES(ROW) ROW(, AnyCodes, 1) ROW(_bf16, CodesBf16Grad, 2) ROW(_f32, CodesF32Grad, 2)
#define CODES_ROW(SUFFIX, S, BLOCKS)                                                               \
  KERNEL(codes##SUFFIX, (THREADS, 2), (elements<CODES, S>))                                        \
  KERNEL(row_4096##SUFFIX, (512, BLOCKS), (row_held<1, 512, S>))                                   \
  KERNEL(row_16384##SUFFIX, (512), (row_held<4, 512, S>))                                          \
  KERNEL(row_twice##SUFFIX, (256, BLOCKS + 1), (row_twice<256, S>))                                \
  KERNEL(square_128##SUFFIX, (512), (square_128<4, 512, S>))                                       \
  KERNEL(square_32##SUFFIX, (512, BLOCKS), square_32<S>)
FOR_STORAGES(CODES_ROW)
