// MXFP8: 32x32 blocks.
#include "mx_tile.cuh"

/// 32x32 blocks. One scale applies to both directions.
template <class T, class F> DEVICE void mx_square(const TileArgs &a) {
  typedef TileShape<T> S;
  __shared__ u8 block_bytes[4][4];                 // [row block][column block]
  TilePlace<T> p(a);
  i64 row_blocks = (a.rows + a.rows_before + 31) / 32, col_blocks = (a.cols + 31) / 32;
  u32 d[16][4];
  load_tile<T>(a, p, d);

  u32 bits;
  i64 rb = p.tile_row * 4 + p.row_in_tile / 32, cb = p.tile_col * 4 + p.col_in_tile / 32;
  if (a.row_amax) {
    bool inside = rb < row_blocks && cb < col_blocks;
    float v = inside ? a.row_amax[rb * a.row_amax_rs + cb * a.row_amax_cs] : 0.0f;
    bits = given_bits(v);
  } else {
    u32 unit[4];
    col_maxima<T>(d, unit);
    bits = magnitude<T>(square_maximum<T>(unit));
  }
  u32 byte = e8m0_byte<F>(bits, a.flags & FLOOR_RULE);
  float f = e8m0_factor(byte);
  // All threads of a block of scales write the same byte.
  block_bytes[p.row_in_tile / 32][p.col_in_tile / 32] = byte;

  if (a.row)
    store_rows<T, F>(a, p, d, [&](int) { return f; }, [](int, float x) { return x; });
  if (a.col) store_cols<T, F>(a, p, d, [&](int) { return f; });

  __syncthreads();
  i64 first_row = p.tile_row * 128 - a.rows_before;
  if (a.flags & PACKED) {
    if (a.row)
      store_scales((u8 *)a.row_scale, 0, 0, true, false, threadIdx.x, S::THREADS, blockIdx.x,
                   first_row, a.rows, p.tile_col * 4, col_blocks,
                   [&](int i, int k) { return (u32)block_bytes[i / 32][k]; });
    if (a.col) {
      i64 tiles_down = (row_blocks + 3) / 4;
      store_scales((u8 *)a.col_scale, 0, 0, true, false, S::THREADS - 1 - threadIdx.x,
                   S::THREADS, p.tile_col * tiles_down + p.tile_row, p.tile_col * 128, a.cols,
                   p.tile_row * 4, row_blocks,
                   [&](int i, int k) { return (u32)block_bytes[k][i / 32]; });
    }
  } else if (threadIdx.x < 16) {
    int i = threadIdx.x / 4, k = threadIdx.x % 4;
    i64 r = p.tile_row * 4 + i, c = p.tile_col * 4 + k;
    if (r < row_blocks && c < col_blocks) {
      u8 v = block_bytes[i][k];
      if (a.row) ((u8 *)a.row_scale)[r * a.row_scale_rs + c * a.row_scale_cs] = v;
      if (a.col) ((u8 *)a.col_scale)[c * a.col_scale_rs + r * a.col_scale_cs] = v;
    }
  }
}

#define KERNEL(NAME, T, F)                                        \
  extern "C" __global__ void TILE_BOUNDS(T)                       \
      mx_square_##NAME(const __grid_constant__ TileArgs a) {         \
    mx_square<T, F>(a);                                              \
  }
FOR_TYPES(KERNEL)
