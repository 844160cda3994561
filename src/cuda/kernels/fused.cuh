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
