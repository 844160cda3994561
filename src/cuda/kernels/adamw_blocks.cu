// AdamW for codes with one scale per row or square block. New values stay in registers until
// their maximum is known. For rows too long for that, and for tensors that do not allow loads
// of four elements, new values are computed twice.
#include "adamw_scales.cuh"

/// Updates a rectangle that THREADS threads hold in registers. Each thread holds HELD groups
/// of four adjacent elements of a row, and a row has ACROSS groups. All threads must call
/// this, also those whose `p` has no rows. Half of the threads that an SM supports are enough
/// to hide the latency of loads, so each has 64 registers and loads one group at a time.
template <int HELD, u32 THREADS, u32 ACROSS>
DEVICE void held(const AdamWArgs &a, const AdamWEntry &t, const Factors &f, const Rectangle &p,
                 u64 number) {
  u32 thread = threadIdx.x % THREADS;
  float scale = scale_before(t, number);
  float w[HELD][4];
  u32 groups = (u32)(p.cols / 4);
  auto place = [&](int k, u64 &i) {
    u32 at = thread + k * THREADS, row = at / ACROSS, col = at % ACROSS;
    i = p.start + row * t.cols + col * 4;
    return row < p.rows && col < groups;
  };
  u64 i;
  u32 maximum = 0;
#pragma unroll
  for (int k = 0; k < HELD; k++) {
    if (place(k, i)) {
      update(t, f, load(t, i, CODES), CODES, scale, i, true, w[k]);
      maximum = larger(maximum, w[k]);
    }
  }
  float q = scale_after(a, t, number, largest<THREADS / 32>(maximum), thread == 0 && p.rows > 0);
#pragma unroll
  for (int k = 0; k < HELD; k++)
    if (place(k, i)) *(u32 *)((u8 *)t.param + i) = encode_four(a, t, f.step, i, w[k], q);
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
    adamw_row_4096(const __grid_constant__ AdamWArgs a) { row_held<2, 512>(a); }

/// A thread block updates a row of up to 16384 columns.
extern "C" __global__ void __launch_bounds__(1024)
    adamw_row_16384(const __grid_constant__ AdamWArgs a) { row_held<4, 1024>(a); }

/// A thread block updates a square block.
extern "C" __global__ void __launch_bounds__(1024)
    adamw_square_128(const __grid_constant__ AdamWArgs a) {
  __shared__ Factors shared;
  if (skipped(a)) return;
  const AdamWEntry &t = a.entries[entry_of(a, blockIdx.x)];
  u64 number = blockIdx.x - t.first_block;
  share_factors(a, t, shared);
  held<4, 1024, 32>(a, t, shared, rectangle(t, number, 128), number);
}

/// 128 threads update a square block. A thread block updates four of them.
extern "C" __global__ void __launch_bounds__(512, 2)
    adamw_square_32(const __grid_constant__ AdamWArgs a) {
  __shared__ Factors shared;
  if (skipped(a)) return;
  const AdamWEntry &t = a.entries[entry_of(a, blockIdx.x)];
  share_factors(a, t, shared);
  u64 number = (u64)(blockIdx.x - t.first_block) * 4 + threadIdx.x / 128;
  u64 last = (t.rows + 31) / 32 * ((t.cols + 31) / 32) - 1;
  Rectangle p = rectangle(t, number < last ? number : last, 32);
  if (number > last) p.rows = 0;
  held<2, 128, 8>(a, t, shared, p, number < last ? number : last);
}

/// A thread block updates a row of any length, or a square block of 128 or 32, element by
/// element. New values are computed twice. The first time only determines the maximum.
template <int SIZE> DEVICE void twice(const AdamWArgs &a) {
  __shared__ Factors shared;
  if (skipped(a)) return;
  const AdamWEntry &t = a.entries[entry_of(a, blockIdx.x)];
  u64 number = blockIdx.x - t.first_block;
  share_factors(a, t, shared);
  Factors f = shared;
  Rectangle p = rectangle(t, number, SIZE);
  float scale = scale_before(t, number);
  u64 pitch = t.cols;
  constexpr u32 ACROSS = SIZE ? SIZE : 512, DOWN = 512 / ACROSS;
  u32 first_row = threadIdx.x / ACROSS, first_col = threadIdx.x % ACROSS;
  u32 maximum = 0;
  for (u32 row = first_row; row < p.rows; row += DOWN)
    for (u64 col = first_col; col < p.cols; col += ACROSS)
      maximum = larger(maximum, update_one(t, f, CODES, scale, p.start + row * pitch + col, false));
  maximum = largest<16>(maximum);
  float q = scale_after(a, t, number, maximum, threadIdx.x == 0);
  for (u32 row = first_row; row < p.rows; row += DOWN) {
    for (u64 col = first_col; col < p.cols; col += ACROSS) {
      u64 i = p.start + row * pitch + col;
      float w = update_one(t, f, CODES, scale, i, true);
      ((u8 *)t.param)[i] = encode_one(a, t, f.step, i, w, q);
    }
  }
}

extern "C" __global__ void __launch_bounds__(512, 3)
    adamw_row_twice(const __grid_constant__ AdamWArgs a) { twice<0>(a); }
extern "C" __global__ void __launch_bounds__(512, 2)
    adamw_square_128_twice(const __grid_constant__ AdamWArgs a) { twice<128>(a); }
extern "C" __global__ void __launch_bounds__(512, 2)
    adamw_square_32_twice(const __grid_constant__ AdamWArgs a) { twice<32>(a); }
