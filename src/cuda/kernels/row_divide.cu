// Quantization with one fp32 scale per row, rowwise only, with division by the scale. Inference
// servers divide activations, and `row.cu` multiplies them by the reciprocal, which is faster.
#include "blocks.cuh"
#include "vectors.cuh"

struct RowDivideArgs {
  const void *x;        // (rows, cols)
  u8 *codes;            // (rows, cols)
  float *scale;         // (rows)
  const float *amax;    // (rows) or null
  const float *column_scale;  // (cols) or null
  i64 x_rs, x_cs, codes_rs, codes_cs, scale_rs, amax_rs, column_scale_cs;
  i64 cols;
  Rule rule;
  u32 flags;
};

enum : u32 {
  X_VECTORS = 1,      // rows of x are contiguous and 16-byte aligned
  CODES_VECTORS = 2,  // rows of codes are contiguous and aligned to as many bytes as x has in 16
};

/// Loads the COLS elements of a row from column `col` on, multiplied by the column scales.
/// Elements outside are zero.
template <class T, int COLS>
DEVICE void row_values(const RowDivideArgs &a, i64 col, float (&out)[COLS]) {
  u32 words[4];
  load_vector<T>(a.x, a.x_rs, a.x_cs, a.flags & X_VECTORS, blockIdx.x, col, a.cols, words);
#pragma unroll
  for (int j = 0; j < COLS; j++) out[j] = T::get(words[j / T::PER_REG], j % T::PER_REG);
  if (a.column_scale) {
#pragma unroll
    for (int j = 0; j < COLS; j++)
      if (col + j < a.cols) out[j] = __fmul_rn(out[j], a.column_scale[(col + j) * a.column_scale_cs]);
  }
}

/// Quantizes a row, which a block reads twice. The second time it is in the cache.
template <class T, class F> DEVICE void row_divided(const RowDivideArgs &a) {
  constexpr int COLS = 4 * T::PER_REG;
  i64 step = (i64)blockDim.x * COLS;
  float x[COLS];

  u32 bits = 0;
  if (a.amax) {
    bits = given_bits(a.amax[blockIdx.x * a.amax_rs]);
  } else {
    for (i64 col = (i64)threadIdx.x * COLS; col < a.cols; col += step) {
      row_values<T, COLS>(a, col, x);
#pragma unroll
      for (int j = 0; j < COLS; j++) bits = max_u32(bits, __float_as_uint(x[j]) & 0x7fffffffu);
    }
    __shared__ u32 part[32];
    bits = block_max<true>(bits, part);
  }
  float scale = scale_of<F>(bits, a.rule);
  if (threadIdx.x == 0) a.scale[blockIdx.x * a.scale_rs] = scale;

  u8 *row = a.codes + (i64)blockIdx.x * a.codes_rs;
  for (i64 col = (i64)threadIdx.x * COLS; col < a.cols; col += step) {
    row_values<T, COLS>(a, col, x);
    u32 word[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < COLS; j += 2)
      word[j / 4] |= (u32)F::pair(__fdiv_rn(x[j], scale), __fdiv_rn(x[j + 1], scale)) << (j % 4 * 8);
    u8 *to = row + col * a.codes_cs;
    if ((a.flags & CODES_VECTORS) && col + COLS <= a.cols) {
      if (COLS == 8) *(uint2 *)to = make_uint2(word[0], word[1]);
      else *(u32 *)to = word[0];
    } else {
      u64 all = (u64)word[1] << 32 | word[0];
#pragma unroll 1
      for (int j = 0; j < COLS && col + j < a.cols; j++, all >>= 8) to[j * a.codes_cs] = (u8)all;
    }
  }
}

#define KERNEL(NAME, T, F)                                                     \
  extern "C" __global__ void __launch_bounds__(256)                            \
      row_divide_##NAME(const __grid_constant__ RowDivideArgs a) {             \
    row_divided<T, F>(a);                                                      \
  }
FOR_TYPES(KERNEL)
