// Block quantization of a 128x128 tile in one or both directions, from one read.
//
// A thread holds 16 rows of 16 bytes in registers. A warp is 8 lanes across and 4 down, so
// that both row-major and transposed codes are written in pieces of 64 bytes. Values are
// converted once per direction, which is cheaper than permuting bytes. Block maxima are
// exchanged by shuffles, and scale bytes and factors through a little shared memory.
//
// `rows_before` shifts the tile grid up, so that a shard that starts inside a block has the
// block boundaries of the whole tensor. Positions in the shifted grid are called "virtual"
// rows.
#pragma once
#include "blocks.cuh"

/// The arguments of every tile kernel, mirrored by `TileArgs` in the launch code.
struct TileArgs {
  const void *x;                     // (rows, cols)
  u8 *row;                           // codes (rows, cols), or null
  u8 *col;                           // codes (cols, rows), or null
  void *row_scale;                   // with `row`
  void *col_scale;                   // with `col`; indexed (column, row block)
  const float *row_amax;             // given maxima, indexed like row_scale, or null
  const float *col_amax;             // given maxima, indexed like col_scale, or null
  const float *column_scale;         // per-column factors of the rowwise output, or null
  i64 x_rs, x_cs, row_rs, row_cs, col_rs, col_cs;
  i64 row_scale_rs, row_scale_cs, col_scale_rs, col_scale_cs;
  i64 row_amax_rs, row_amax_cs, col_amax_rs, col_amax_cs, column_scale_cs;
  i64 rows, cols;
  i64 rows_before;                   // rows of the first block that lie before this view
  i64 tiles_across;
  Rule rule;                         // for fp32 scales
  u32 flags;
};

enum : u32 {
  X_VECTORS = 1,      // rows of x are contiguous and 16-byte aligned
  ROW_VECTORS = 2,    // rows of `row` are contiguous and 8-byte aligned
  COL_VECTORS = 4,    // rows of `col` are contiguous and 16-byte aligned; rows_before in 16s
  PACKED = 8,         // scales are stored in the 128x4 layout
  FLOOR_RULE = 16,
  ROW_SCALE_WORDS = 32,  // four adjacent scale bytes can be stored as one word
  COL_SCALE_WORDS = 64,
  FOUND = 128,           // row_amax and col_amax point to row_scale and col_scale. These hold maxima
                         // marked with MAXIMUM, or scales that other tiles computed from them. The
                         // kernel before left the end of x in L2, so tiles start from the end.
};

/// Marks a maximum that is stored in the place of a scale. Scales are positive.
#define MAXIMUM 0x80000000u

template <class T> struct TileShape {
  static constexpr int COLS = 4 * T::PER_REG;       // per thread
  static constexpr int WARPS_ACROSS = 128 / (8 * COLS);
  static constexpr int THREADS = 64 * WARPS_ACROSS;
  static constexpr int UNITS = 16 / T::PER_REG;     // registers for the maxima of 16 rows
};

/// The position of a thread, and the part of the tensor that it holds.
template <class T> struct TilePlace {
  typedef TileShape<T> S;
  int lane, row_in_tile, col_in_tile;
  i64 tile_row, tile_col;            // position of the tile, in tiles
  i64 row, col;                      // the thread's first element; row may be negative
  bool rows_inside, cols_inside;     // whether all 16 rows and all COLS columns are inside

  template <class Args> DEVICE TilePlace(const Args &a, u32 block = blockIdx.x) {
    lane = threadIdx.x & 31;
    int warp = threadIdx.x >> 5;
    int warp_col = warp % S::WARPS_ACROSS, warp_row = warp / S::WARPS_ACROSS;
    row_in_tile = warp_row * 64 + (lane >> 3) * 16;
    col_in_tile = warp_col * 8 * S::COLS + (lane & 7) * S::COLS;
    tile_row = block / a.tiles_across;
    tile_col = block - tile_row * a.tiles_across;
    row = tile_row * 128 + row_in_tile - a.rows_before;
    col = tile_col * 128 + col_in_tile;
    rows_inside = row >= 0 && row + 16 <= a.rows;
    cols_inside = col + S::COLS <= a.cols;
  }
};

/// Loads the 16 rows at `p`, a TilePlace or a similar struct. Elements outside are zero.
template <class T, class Args, class Place>
DEVICE void load_tile(const Args &a, const Place &p, u32 (&d)[16][4]) {
  constexpr int COLS = TileShape<T>::COLS;
  if ((a.flags & X_VECTORS) && p.cols_inside) {
    const char *at = (const char *)a.x + (p.row * a.x_rs + p.col) * T::BYTES;
    i64 step = a.x_rs * T::BYTES;
    if (p.rows_inside) {
#pragma unroll
      for (int r = 0; r < 16; r++) {
        uint4 v = *(const uint4 *)(at + r * step);
        d[r][0] = v.x, d[r][1] = v.y, d[r][2] = v.z, d[r][3] = v.w;
      }
    } else {
#pragma unroll
      for (int r = 0; r < 16; r++) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (p.row + r >= 0 && p.row + r < a.rows) v = *(const uint4 *)(at + r * step);
        d[r][0] = v.x, d[r][1] = v.y, d[r][2] = v.z, d[r][3] = v.w;
      }
    }
    return;
  }
  // Loads element by element, for all 16 rows at a time. Each element is shifted into its
  // row's registers from above. With one loop per row, the driver's compiler would take twice
  // as long as for the rest of a kernel.
#pragma unroll
  for (int r = 0; r < 16; r++) d[r][0] = d[r][1] = d[r][2] = d[r][3] = 0;
  const char *at = (const char *)a.x + (p.row * a.x_rs + p.col * a.x_cs) * T::BYTES;
  i64 step = a.x_rs * T::BYTES;
#pragma unroll 1
  for (int j = 0; j < COLS; j++, at += a.x_cs * T::BYTES) {
    bool inside = p.col + j < a.cols;
#pragma unroll
    for (int r = 0; r < 16; r++) {
      u32 v = 0;
      if (inside && p.row + r >= 0 && p.row + r < a.rows) v = T::load(at + r * step, 0);
      d[r][0] = T::shift_in(d[r][0], d[r][1]);
      d[r][1] = T::shift_in(d[r][1], d[r][2]);
      d[r][2] = T::shift_in(d[r][2], d[r][3]);
      d[r][3] = T::shift_in(d[r][3], v);
    }
  }
}

/// Computes the absolute maxima of the thread's 16 rows. A register holds two of them for
/// 16-bit inputs.
template <class T>
DEVICE void row_maxima(const u32 (&d)[16][4], u32 (&unit)[TileShape<T>::UNITS]) {
#pragma unroll
  for (int i = 0; i < TileShape<T>::UNITS; i++) {
    if (T::PER_REG == 1) {
      unit[i] = T::amax(T::amax(d[i][0], d[i][1]), T::amax(d[i][2], d[i][3]));
    } else {
      const u32(&e)[4] = d[2 * i % 16], (&o)[4] = d[(2 * i + 1) % 16];
      u32 even = T::amax(T::amax(e[0], e[1]), T::amax(e[2], e[3]));
      u32 odd = T::amax(T::amax(o[0], o[1]), T::amax(o[2], o[3]));
      unit[i] = T::amax(byte_permute(even, odd, 0x5410), byte_permute(even, odd, 0x7632));
    }
  }
}

/// Computes the absolute maxima of the thread's columns over its 16 rows.
template <class T> DEVICE void col_maxima(const u32 (&d)[16][4], u32 (&unit)[4]) {
#pragma unroll
  for (int k = 0; k < 4; k++) {
    u32 m[8];
#pragma unroll
    for (int r = 0; r < 8; r++) m[r] = T::amax(d[r][k], d[r + 8][k]);
#pragma unroll
    for (int n = 4; n > 0; n /= 2)
#pragma unroll
      for (int r = 0; r < n; r++) m[r] = T::amax(m[r], m[r + n]);
    unit[k] = m[0];
  }
}

/// Returns the absolute maximum of the 32x32 elements around the thread's elements, given the
/// maxima of its columns. All lanes that share the elements get the result (`magnitude`
/// converts it to bits).
template <class T> DEVICE u32 square_maximum(const u32 (&unit)[4]) {
  u32 m = T::amax(T::amax(unit[0], unit[1]), T::amax(unit[2], unit[3]));
#pragma unroll
  for (int mask = 1; mask < 32 / TileShape<T>::COLS; mask *= 2) m = T::amax(m, shuffle_xor(m, mask));
  return T::amax(m, shuffle_xor(m, 8));
}

/// Stores the rowwise codes. `factor(r)` scales row r, and `column_scale(j, x)` scales x in
/// column j.
template <class T, class F, class Factor, class ColumnScale>
DEVICE void store_rows(const TileArgs &a, const TilePlace<T> &p, const u32 (&d)[16][4],
                       Factor factor, ColumnScale column_scale) {
  constexpr int COLS = TileShape<T>::COLS;
  bool vectors = (a.flags & ROW_VECTORS) && p.cols_inside;
  u8 *at = a.row + p.row * a.row_rs + p.col * a.row_cs;
#pragma unroll
  for (int r = 0; r < 16; r++) {
    float f = factor(r);
    u32 word[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < COLS; j += 2) {
      float lo = T::get(d[r][j / T::PER_REG], 0);
      float hi = T::get(d[r][(j + 1) / T::PER_REG], T::PER_REG - 1);
      u32 two = F::pair(column_scale(j, lo) * f, column_scale(j + 1, hi) * f);
      word[j / 4] |= two << (j % 4 * 8);
    }
    bool inside = p.rows_inside || (p.row + r >= 0 && p.row + r < a.rows);
    if (!inside) continue;
    u8 *to = at + r * a.row_rs;
    if (vectors) {
      if (COLS == 8) *(uint2 *)to = make_uint2(word[0], word[1]);
      else *(u32 *)to = word[0];
    } else {
      u64 all = (u64)word[1] << 32 | word[0];
#pragma unroll 1
      for (int j = 0; j < COLS && p.col + j < a.cols; j++, all >>= 8) to[j * a.row_cs] = (u8)all;
    }
  }
}

/// Stores the transposed codes. `factor(j)` scales column j.
template <class T, class F, class Factor>
DEVICE void store_cols(const TileArgs &a, const TilePlace<T> &p, const u32 (&d)[16][4],
                       Factor factor) {
  constexpr int COLS = TileShape<T>::COLS;
  bool vectors = (a.flags & COL_VECTORS) && p.rows_inside;
  u8 *at = a.col + p.col * a.col_rs + p.row * a.col_cs;
#pragma unroll
  for (int j = 0; j < COLS; j++) {
    float f = factor(j);
    constexpr int P = T::PER_REG;
    u32 word[4] = {0, 0, 0, 0};
#pragma unroll
    for (int r = 0; r < 16; r += 2) {
      u32 two = F::pair(T::get(d[r][j / P], j % P) * f, T::get(d[r + 1][j / P], j % P) * f);
      word[r / 4] |= two << (r % 4 * 8);
    }
    if (p.col + j >= a.cols) continue;
    u8 *to = at + j * a.col_rs;
    if (vectors) {
      *(uint4 *)to = make_uint4(word[0], word[1], word[2], word[3]);
    } else {
      u64 low = (u64)word[1] << 32 | word[0], high = (u64)word[3] << 32 | word[2];
#pragma unroll 1
      for (int r = 0; r < 16; r++) {
        if (p.row + r >= 0 && p.row + r < a.rows) to[r * a.col_cs] = (u8)low;
        low = low >> 8 | high << 56;
        high >>= 8;
      }
    }
  }
}

/// Four blocks per SM. Without the bound, a thread would take 148 registers.
#define TILE_BOUNDS(T) __launch_bounds__(TileShape<T>::THREADS, 512 / TileShape<T>::THREADS)
