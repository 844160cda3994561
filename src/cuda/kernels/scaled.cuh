// The tile kernel for fp32 scales: blocks of 128, or whole rows and columns.
#pragma once
#include "tile.cuh"

/// Which elements share a scale.
enum Blocks {
  LINES_128,    // 1x128 rowwise, 128x1 columnwise
  SQUARE_128,   // 128x128
  WHOLE_LINES,  // whole rows rowwise, whole columns columnwise; maxima or scales are given
};

/// Quantizes one tile. Thread t converts the maxima of the tile's row t and column t to
/// factors.
template <class T, class F, Blocks KIND> DEVICE void scaled_tile(const TileArgs &a) {
  typedef TileShape<T> S;
  __shared__ u32 row_part[S::WARPS_ACROSS][128];
  __shared__ u32 col_part[2][128];
  __shared__ __align__(16) float row_factor[128];
  __shared__ __align__(16) float col_factor[128];
  bool found = KIND == WHOLE_LINES && (a.flags & FOUND);
  TilePlace<T> p(a, found ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  u32 d[16][4];
  load_tile<T>(a, p, d);

  if (KIND == LINES_128 && a.row && !a.row_amax) {
    u32 unit[S::UNITS];
    row_maxima<T>(d, unit);
    int first = fold_lanes<T, 8>(unit, p.lane);
#pragma unroll
    for (int i = 0; i < S::UNITS / 8; i++)
#pragma unroll
      for (int h = 0; h < T::PER_REG; h++)
        row_part[p.col_in_tile / (8 * S::COLS)][p.row_in_tile + (first + i) * T::PER_REG + h] =
            T::amax_bits(unit[i], h);
  }
  if ((KIND == LINES_128 && a.col && !a.col_amax) || (KIND == SQUARE_128 && !a.row_amax)) {
    u32 unit[4];
    col_maxima<T>(d, unit);
    fold_halves<T>(unit, 4, p.lane, 8);
    fold_halves<T>(unit, 2, p.lane, 16);
    int first = (p.lane & 8 ? 2 : 0) + (p.lane & 16 ? 1 : 0);
#pragma unroll
    for (int h = 0; h < T::PER_REG; h++)
      col_part[p.row_in_tile / 64][p.col_in_tile + first * T::PER_REG + h] =
          T::amax_bits(unit[0], h);
  }
  __syncthreads();

  if (KIND == SQUARE_128) {
    u32 bits = 0;
    if (a.row_amax) {
      bits = given_bits(a.row_amax[p.tile_row * a.row_amax_rs + p.tile_col * a.row_amax_cs]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int t = p.lane + 32 * i;
        bits = max(bits, max(col_part[0][t], col_part[1][t]));
      }
      bits = __reduce_max_sync(0xffffffffu, bits);
    }
    float scale = scale_of<F>(bits, a.rule);
    float f = reciprocal(scale);
    if (threadIdx.x == 0) {
      i64 r = p.tile_row, c = p.tile_col;
      if (a.row) ((float *)a.row_scale)[r * a.row_scale_rs + c * a.row_scale_cs] = scale;
      if (a.col) ((float *)a.col_scale)[c * a.col_scale_rs + r * a.col_scale_cs] = scale;
    }
    if (a.row)
      store_rows<T, F>(a, p, d, [&](int) { return f; }, [](int, float x) { return x; });
    if (a.col) store_cols<T, F>(a, p, d, [&](int) { return f; });
    return;
  }

  if (threadIdx.x < 128) {
    int t = threadIdx.x;
    i64 r = p.tile_row * 128 + t - a.rows_before, c = p.tile_col * 128 + t;
    if (a.row && r >= 0 && r < a.rows) {
      i64 k = KIND == WHOLE_LINES ? 0 : p.tile_col;
      u32 bits = 0;
      float given = 0.0f;
      if (a.row_amax) {
        given = a.row_amax[r * a.row_amax_rs + k * a.row_amax_cs];
        bits = given_bits(found ? -given : given);
      } else {
#pragma unroll
        for (int i = 0; i < S::WARPS_ACROSS; i++) bits = max(bits, row_part[i][t]);
      }
      bool known = found && !(__float_as_uint(given) & MAXIMUM);
      float scale = known ? given : scale_of<F>(bits, a.rule);
      row_factor[t] = reciprocal(scale);
      if (!known && (KIND != WHOLE_LINES || p.tile_col == 0))
        ((float *)a.row_scale)[r * a.row_scale_rs + k * a.row_scale_cs] = scale;
    }
    if (a.col && c < a.cols) {
      i64 k = KIND == WHOLE_LINES ? 0 : p.tile_row;
      u32 bits = 0;
      float given = 0.0f;
      if (a.col_amax) {
        given = a.col_amax[c * a.col_amax_rs + k * a.col_amax_cs];
        bits = given_bits(found ? -given : given);
      } else {
        bits = max(col_part[0][t], col_part[1][t]);
      }
      bool known = found && !(__float_as_uint(given) & MAXIMUM);
      float scale = known ? given : scale_of<F>(bits, a.rule);
      col_factor[t] = reciprocal(scale);
      if (!known && (KIND != WHOLE_LINES || p.tile_row == 0))
        ((float *)a.col_scale)[c * a.col_scale_rs + k * a.col_scale_cs] = scale;
    }
  }
  __syncthreads();

  if (a.row) {
    const float *f = row_factor + p.row_in_tile;
    if (KIND == WHOLE_LINES) {
      // Without column scales the factor is 1, which changes no byte and avoids a second copy
      // of this code.
      float column_scale[S::COLS];
#pragma unroll
      for (int j = 0; j < S::COLS; j++)
        column_scale[j] = a.column_scale && p.col + j < a.cols
                              ? a.column_scale[(p.col + j) * a.column_scale_cs]
                              : 1.0f;
      store_rows<T, F>(a, p, d, [&](int r) { return f[r]; },
                       [&](int j, float x) { return x * column_scale[j]; });
    } else {
      store_rows<T, F>(a, p, d, [&](int r) { return f[r]; }, [](int, float x) { return x; });
    }
  }
  if (a.col) {
    const float *f = col_factor + p.col_in_tile;
    store_cols<T, F>(a, p, d, [&](int j) { return f[j]; });
  }
}
