// Vectors of 16 bytes: elements of a row in four registers.
#pragma once
#include "values.cuh"

/// The conversion to the elements of an input type.
template <class T> struct Output;
template <> struct Output<InF32> { typedef OutF32 type; };
template <> struct Output<InBf16> { typedef OutBf16 type; };
template <> struct Output<InF16> { typedef OutF16 type; };

/// Loads 16 bytes of a row, from column `col` on. Elements from `cols` on are 0.
template <class T>
DEVICE void load_vector(const void *x, i64 rs, i64 cs, bool vectors, i64 row, i64 col, i64 cols,
                        u32 (&d)[4]) {
  constexpr int COLS = 4 * T::PER_REG;
  const char *at = (const char *)x + (row * rs + col * cs) * T::BYTES;
  if (vectors && col + COLS <= cols) {
    uint4 v = *(const uint4 *)at;
    d[0] = v.x, d[1] = v.y, d[2] = v.z, d[3] = v.w;
    return;
  }
  d[0] = d[1] = d[2] = d[3] = 0;
#pragma unroll 1
  for (int j = 0; j < COLS; j++, at += cs * T::BYTES) {
    u32 v = col + j < cols ? T::load(at, 0) : 0;
    // Registers have no index, so all elements move down by one.
    d[0] = T::shift_in(d[0], d[1]);
    d[1] = T::shift_in(d[1], d[2]);
    d[2] = T::shift_in(d[2], d[3]);
    d[3] = T::shift_in(d[3], v);
  }
}

/// Rounds values to elements of T, in registers. Returns the `T::amax` of them.
template <class T> DEVICE u32 pack(const float *v, u32 (&d)[4]) {
  typedef typename Output<T>::type O;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    if constexpr (T::PER_REG == 1) d[k] = __float_as_uint(v[k]);
    else d[k] = O::pair(v[2 * k], v[2 * k + 1]);
  }
  u32 m = T::amax(T::amax(d[0], d[1]), T::amax(d[2], d[3]));
  // A stored NaN is positive and has no payload. One branch for all elements, because NaNs are rare.
  if (magnitude<T>(m) > 0x7f800000u) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      d[k] = O::bits(v[T::PER_REG * k]);
      if constexpr (T::PER_REG == 2) d[k] |= O::bits(v[2 * k + 1]) << 16;
    }
  }
  return m;
}

/// Stores the elements of registers to `at`, which is column `col` of `cols`.
template <class T>
DEVICE void store_vector(char *at, bool vectors, i64 col, i64 cols, const u32 (&d)[4]) {
  constexpr int COLS = 4 * T::PER_REG;
  if (vectors && col + COLS <= cols) {
    *(uint4 *)at = make_uint4(d[0], d[1], d[2], d[3]);
    return;
  }
#pragma unroll
  for (int j = 0; j < COLS; j++) {
    if (col + j >= cols) break;
    u32 v = d[j / T::PER_REG] >> (T::PER_REG == 2 ? j % 2 * 16 : 0);
    if (T::BYTES == 4) ((u32 *)at)[j] = v;
    else ((u16 *)at)[j] = (u16)v;
  }
}
