// Quantize with a known scale and write both directions from one read (or the transpose alone).
//
// Registers only. A thread holds 8 columns of 16 rows (8 rows of fp32), read by 16-byte loads; a
// warp is 8 lanes across and 4 down, four warps make a tile. Rowwise codes leave as 8-byte stores
// of 64 contiguous bytes a row; a column's 16 rows are converted again rather than permuted, and
// leave as one 16-byte store.
#include "elements.cuh"

struct CastTransposeArgs {
  const void *x;         // 16-byte aligned rows
  u8 *rowwise;           // 8-byte aligned rows, or null
  u8 *columnwise;        // contiguous, aligned by the rows a thread holds
  i64 rows, cols;        // rows a multiple of the rows a thread holds, cols of 8
  i64 x_rs, rowwise_rs;
  i64 tiles_across;
  const float *scale;
  Delayed delayed;
  u32 backwards;
};

template <class T> struct Patch { static constexpr int ROWS = 16; };
template <> struct Patch<InF32> { static constexpr int ROWS = 8; };

template <class T, class F, bool DELAYED> DEVICE void cast_transpose(const CastTransposeArgs &a) {
  constexpr int ROWS = Patch<T>::ROWS, WORDS = 8 / T::PER_REG;
  i64 block = a.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  i64 tile_row = block / a.tiles_across, tile_col = block - tile_row * a.tiles_across;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  i64 r = (tile_row * 2 + (warp >> 1)) * 4 * ROWS + (lane >> 3) * ROWS;
  i64 c = tile_col * 128 + (warp & 1) * 64 + (lane & 7) * 8;
  float scale = *a.scale, q = reciprocal(scale);
  u32 m = 0;
  if (r < a.rows && c < a.cols) {
    u32 w[ROWS][WORDS];
    const char *from = (const char *)a.x + (r * a.x_rs + c) * T::BYTES;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
      for (int v = 0; v < WORDS / 4; v++) {
        uint4 d = ((const uint4 *)(from + i * a.x_rs * T::BYTES))[v];
        w[i][4 * v] = d.x, w[i][4 * v + 1] = d.y, w[i][4 * v + 2] = d.z, w[i][4 * v + 3] = d.w;
      }
    if (DELAYED) {
      u32 n = 0;
#pragma unroll
      for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < WORDS; j++) n = T::amax(n, w[i][j]);
      m = magnitude<T>(n);
    }
    if (a.rowwise) {
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
        u32 out[2];
        encode_words<T, F>(w[i], q, out);
        *(uint2 *)(a.rowwise + (r + i) * a.rowwise_rs + c) = make_uint2(out[0], out[1]);
      }
    }
    u8 *to = a.columnwise + c * a.rows + r;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      u32 out[ROWS / 4];
#pragma unroll
      for (int i = 0; i < ROWS / 4; i++) {
        float v[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
          v[k] = __fmul_rn(T::get(w[4 * i + k][j / T::PER_REG], j % T::PER_REG), q);
        out[i] = F::pair(v[0], v[1]) | (u32)F::pair(v[2], v[3]) << 16;
      }
      if (ROWS == 16)
        *(uint4 *)(to + j * a.rows) =
            make_uint4(out[0], out[1], out[2 % (ROWS / 4)], out[3 % (ROWS / 4)]);
      else
        *(uint2 *)(to + j * a.rows) = make_uint2(out[0], out[1]);
    }
  }
  if (DELAYED) {
    m = block_max(m);
    if (last_of(a.delayed.meeting, gridDim.x, m)) finish_delayed(a.delayed, scale, m);
  }
}

#define CAST_TRANSPOSE(NAME, T, F)                                                                 \
  extern "C" __global__ void __launch_bounds__(128)                                                \
      cast_transpose_##NAME(const __grid_constant__ CastTransposeArgs a) {                         \
    cast_transpose<T, F, false>(a);                                                                \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(128)                                                \
      cast_transpose_delayed_##NAME(const __grid_constant__ CastTransposeArgs a) {                 \
    cast_transpose<T, F, true>(a);                                                                 \
  }
FOR_TYPES(CAST_TRANSPOSE)
