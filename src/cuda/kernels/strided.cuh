// Casts of views with any strides, any alignment and any size, in tiles of 32x32 through shared memory.
#pragma once
#include "elements.cuh"

struct StridedArgs {
  const void *x;
  u8 *rowwise;           // or null
  u8 *columnwise;        // or null; (cols, rows)
  i64 rows, cols;
  i64 x_rs, x_cs;
  i64 rowwise_rs, rowwise_cs;
  i64 columnwise_rs, columnwise_cs;
  i64 tiles_across;
  const float *scale;
  Delayed delayed;       // without grid_max, amaxes are not recorded
};

/// Casts a tile. `element(r, c)` returns an element in the first place of a register. Loads run along
/// the input's shorter stride, and stores along each output's, so that a transposed view is as fast as
/// a contiguous one.
template <class T, class F, class Element>
DEVICE void cast_strided(const StridedArgs &a, Element element) {
  __shared__ u8 tile[32][33];
  i64 r0 = blockIdx.x / a.tiles_across * 32, c0 = blockIdx.x % a.tiles_across * 32;
  int across = threadIdx.x & 31, down = threadIdx.x >> 5;
  float scale = *a.scale, q = reciprocal(scale);
  bool by_column = a.x_rs < a.x_cs;
  u32 m = 0;
  for (int k = down; k < 32; k += 8) {
    int i = by_column ? across : k, j = by_column ? k : across;
    i64 r = r0 + i, c = c0 + j;
    if (r < a.rows && c < a.cols) {
      u32 w = element(r, c);
      m = max_u32(m, T::amax_bits(w, 0));
      tile[i][j] = encode<F>(__fmul_rn(T::get(w, 0), q));
    }
  }
  __syncthreads();
  for (int k = down; k < 32; k += 8) {
    if (a.rowwise && r0 + k < a.rows && c0 + across < a.cols)
      a.rowwise[(r0 + k) * a.rowwise_rs + (c0 + across) * a.rowwise_cs] = tile[k][across];
    if (a.columnwise && c0 + k < a.cols && r0 + across < a.rows)
      a.columnwise[(c0 + k) * a.columnwise_rs + (r0 + across) * a.columnwise_cs] = tile[across][k];
  }
  if (a.delayed.grid_max) {
    m = block_max(m);
    if (last_of(a.delayed.grid_max, gridDim.x, m)) finish_delayed(a.delayed, scale, m);
  }
}
