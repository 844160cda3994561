// A patch: the elements that a thread holds in registers, to cast and transpose a tile.
#pragma once
#include "current.cuh"

/// The vectors that a thread holds, ROWS rows one after the other. `Args` has the fields of
/// `CastTransposeArgs`.
template <class T, int ROW_COUNT = T::BYTES == 4 ? 8 : 16> struct Patch {
  static constexpr int THREADS = 128, ROWS = ROW_COUNT, VECTORS = T::BYTES / 2;
  uint4 v[ROWS * VECTORS];

  /// Computes the position of the thread's first element. Returns false if the thread has no
  /// element.
  template <class Args> DEVICE bool place(const Args &a, i64 tile, i64 &r, i64 &c) const {
    i64 tile_row = tile / a.tiles_across, tile_col = tile - tile_row * a.tiles_across;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    r = (tile_row * 2 + (warp >> 1)) * 4 * ROWS + (lane >> 3) * ROWS;
    c = tile_col * 128 + (warp & 1) * 64 + (lane & 7) * 8;
    return r < a.rows && c < a.cols;
  }

  template <class Args> DEVICE void load(const Args &a, i64 tile) {
    i64 r, c;
    if (!place(a, tile, r, c)) return;
    const char *from = (const char *)a.x + (r * a.x_rs + c) * T::BYTES;
    i64 row = a.x_rs * T::BYTES;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
      for (int k = 0; k < VECTORS; k++)
        v[i * VECTORS + k] = ((const uint4 *)(from + i * row))[k];
  }

  template <class Args> DEVICE u32 amax(const Args &a, i64 tile) const {
    i64 r, c;
    if (!place(a, tile, r, c)) return 0;
    u32 m = 0;
#pragma unroll
    for (int i = 0; i < ROWS * VECTORS; i++)
      m = T::amax(m, vector_amax<T>(v[i]));
    return magnitude<T>(m);
  }

  /// Returns the register that contains element j of row i.
  DEVICE u32 word(int i, int j) const {
    int w = j / T::PER_REG;
    const uint4 &d = v[i * VECTORS + w / 4];
    return w % 4 == 0 ? d.x : w % 4 == 1 ? d.y : w % 4 == 2 ? d.z : d.w;
  }

  template <class F, class Args> DEVICE void store(const Args &a, i64 tile, float q) const {
    i64 r, c;
    if (!place(a, tile, r, c)) return;
    if (a.rowwise) store_rows<F>(a, r, c, q);
    store_columns<F>(a, r, c, q);
  }

  template <class F, class Args>
  DEVICE void store_rows(const Args &a, i64 r, i64 c, float q) const {
    u8 *to = a.rowwise + r * a.rowwise_rs + c;
    i64 row = a.rowwise_rs;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      u32 in[4 * VECTORS], out[2];
#pragma unroll
      for (int w = 0; w < 4 * VECTORS; w++) in[w] = word(i, w * T::PER_REG);
      encode_words<T, F>(in, q, out);
      *(uint2 *)(to + i * row) = make_uint2(out[0], out[1]);
    }
  }

  template <class F, class Args>
  DEVICE void store_columns(const Args &a, i64 r, i64 c, float q) const {
    u8 *to = a.columnwise + c * a.rows + r;
    i64 column = a.rows;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      u32 out[ROWS / 4];
#pragma unroll
      for (int i = 0; i < ROWS / 4; i++) {
        float e[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
          e[k] = __fmul_rn(T::get_again(word(4 * i + k, j), j % T::PER_REG), q);
        out[i] = F::pair(e[0], e[1]) | (u32)F::pair(e[2], e[3]) << 16;
      }
      if constexpr (ROWS == 16)
        *(uint4 *)(to + j * column) = make_uint4(out[0], out[1], out[2], out[3]);
      else if constexpr (ROWS == 8)
        *(uint2 *)(to + j * column) = make_uint2(out[0], out[1]);
      else
        *(u32 *)(to + j * column) = out[0];
    }
  }
};
