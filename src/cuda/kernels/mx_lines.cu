// MXFP8: 1x32 blocks rowwise, 32x1 columnwise, from one read.
#include "mx_tile.cuh"

/// 1x32 blocks rowwise, 32x1 blocks columnwise.
template <class T, class F> DEVICE void mx_lines(const TileArgs &a) {
  typedef TileShape<T> S;
  __shared__ __align__(16) u8 row_bytes[4][128];   // [block][row]
  __shared__ __align__(16) u8 col_bytes[4][128];   // [block][column]
  TilePlace<T> p(a);
  bool floor_rule = a.flags & FLOOR_RULE;
  i64 row_blocks = (a.rows + a.rows_before + 31) / 32, col_blocks = (a.cols + 31) / 32;
  u32 d[16][4];
  load_tile<T>(a, p, d);

  if (a.row) {
    if (a.row_amax) {
      for (int i = threadIdx.x; i < 512; i += S::THREADS) {
        i64 r = p.tile_row * 128 + i / 4 - a.rows_before, k = p.tile_col * 4 + i % 4;
        bool inside = r >= 0 && r < a.rows && k < col_blocks;
        float v = inside ? a.row_amax[r * a.row_amax_rs + k * a.row_amax_cs] : 0.0f;
        row_bytes[i % 4][i / 4] = e8m0_byte<F>(given_bits(v), floor_rule);
      }
    } else {
      constexpr int LANES = 32 / S::COLS;          // lanes that share a block
      u32 unit[S::UNITS];
      row_maxima<T>(d, unit);
      int first = fold_lanes<T, LANES>(unit, p.lane);
#pragma unroll
      for (int i = 0; i < S::UNITS / LANES; i++)
#pragma unroll
        for (int h = 0; h < T::PER_REG; h++)
          row_bytes[p.col_in_tile / 32][p.row_in_tile + (first + i) * T::PER_REG + h] =
              e8m0_byte<F>(T::amax_bits(unit[i], h), floor_rule);
    }
  }
  if (a.col) {
    if (a.col_amax) {
      for (int i = threadIdx.x; i < 512; i += S::THREADS) {
        i64 c = p.tile_col * 128 + i / 4, k = p.tile_row * 4 + i % 4;
        bool inside = c < a.cols && k < row_blocks;
        float v = inside ? a.col_amax[c * a.col_amax_rs + k * a.col_amax_cs] : 0.0f;
        col_bytes[i % 4][i / 4] = e8m0_byte<F>(given_bits(v), floor_rule);
      }
    } else {
      u32 unit[4];
      col_maxima<T>(d, unit);
      fold_halves<T>(unit, 4, p.lane, 8);
      int first = p.lane & 8 ? 2 : 0;
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int h = 0; h < T::PER_REG; h++)
          col_bytes[p.row_in_tile / 32][p.col_in_tile + (first + i) * T::PER_REG + h] =
              e8m0_byte<F>(T::amax_bits(unit[i], h), floor_rule);
    }
  }
  // Computed bytes are read by the warp that wrote them. Given ones are read by all warps.
  if (a.row_amax || a.col_amax) __syncthreads();
  else __syncwarp();

  if (a.row) {
    uint4 v = *(const uint4 *)&row_bytes[p.col_in_tile / 32][p.row_in_tile];
    u32 bytes[4] = {v.x, v.y, v.z, v.w};
    store_rows<T, F>(
        a, p, d, [&](int r) { return e8m0_factor(bytes[r / 4] >> (r % 4 * 8) & 0xff); },
        [](int, float x) { return x; });
  }
  if (a.col) {
    u32 bytes[2] = {0, 0};
    const u32 *from = (const u32 *)&col_bytes[p.row_in_tile / 32][p.col_in_tile];
#pragma unroll
    for (int j = 0; j < S::COLS / 4; j++) bytes[j] = from[j];
    store_cols<T, F>(a, p, d,
                     [&](int j) { return e8m0_factor(bytes[j / 4] >> (j % 4 * 8) & 0xff); });
  }

  __syncthreads();
  bool packed = a.flags & PACKED;
  if (a.row)
    store_scales((u8 *)a.row_scale, a.row_scale_rs, a.row_scale_cs, packed,
                 a.flags & ROW_SCALE_WORDS, threadIdx.x, S::THREADS, blockIdx.x,
                 p.tile_row * 128 - a.rows_before, a.rows, p.tile_col * 4, col_blocks,
                 [&](int i, int k) { return (u32)row_bytes[k][i]; });
  if (a.col) {
    i64 tiles_down = (row_blocks + 3) / 4;
    // Uses the last warp, so that the first warp does not store the packed scales of both
    // directions.
    store_scales((u8 *)a.col_scale, a.col_scale_rs, a.col_scale_cs, packed,
                 a.flags & COL_SCALE_WORDS, S::THREADS - 1 - threadIdx.x, S::THREADS,
                 p.tile_col * tiles_down + p.tile_row, p.tile_col * 128, a.cols, p.tile_row * 4,
                 row_blocks, [&](int i, int k) { return (u32)col_bytes[k][i]; });
  }
}

#define KERNEL(NAME, T, F)                                        \
  extern "C" __global__ void TILE_BOUNDS(T)                       \
      mx_lines_##NAME(const __grid_constant__ TileArgs a) {         \
    mx_lines<T, F>(a);                                              \
  }
FOR_TYPES(KERNEL)
