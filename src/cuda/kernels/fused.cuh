// Casts of values that a kernel computes, in tiles or for any strides. The values are rounded to
// the input's type and never written.
#pragma once
#include "patch.cuh"
#include "strided.cuh"
#include "vectors.cuh"

/// Casts a tile of a patch that `fill` computes. `StridedArgs` has the layout that
/// `CastTransposeArgs` requires.
template <class T, class F, class Fill> DEVICE void cast_patch(const StridedArgs &a, Fill fill) {
  Patch<T> patch;
  i64 tile = blockIdx.x, r, c;
  float scale = *a.scale;
  bool inside = patch.place(a, tile, r, c);
  if (inside) fill(patch, r, c);
  u32 m = a.delayed.grid_max ? patch.amax(a, tile) : 0;
  if (inside) {
    float q = reciprocal(scale);
    if (a.rowwise) patch.template store_rows<F>(a, r, c, q);
    if (a.columnwise) patch.template store_columns<F>(a, r, c, q);
  }
  if (a.delayed.grid_max) {
    m = block_max(m);
    if (last_of(a.delayed.grid_max, gridDim.x, m)) finish_delayed(a.delayed, scale, m);
  }
}

/// Returns a value rounded to the input's type, in a register's first element.
template <class T> DEVICE u32 rounded(float v) { return Output<T>::type::bits(v); }

/// Casts a tile of 32x32 values. `value(r, c)` computes one.
template <class T, class F, class Value>
DEVICE void cast_strided(const StridedArgs &a, Value value) {
  __shared__ u8 tile[32][33];
  i64 r0 = blockIdx.x / a.tiles_across * 32, c0 = blockIdx.x % a.tiles_across * 32;
  int across = threadIdx.x & 31, down = threadIdx.x >> 5;
  float scale = *a.scale, q = reciprocal(scale);
  u32 m = 0;
  for (int k = down; k < 32; k += 8) {
    i64 r = r0 + k, c = c0 + across;
    if (r < a.rows && c < a.cols) {
      u32 w = rounded<T>(value(r, c));
      m = max_u32(m, T::amax_bits(w, 0));
      tile[k][across] = encode<F>(__fmul_rn(T::get(w, 0), q));
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
