// Quantization with one fp32 scale per row, rowwise only, from one read.
#include "blocks.cuh"

/// Returns the largest of `bits` over the block, in all threads.
DEVICE u32 block_max_for_all(u32 bits) {
  __shared__ u32 part[32];
  return block_max<true>(bits, part);
}

struct RowArgs {
  const void *x;        // (rows, cols), rows of 16-byte vectors
  u8 *codes;
  float *scale;         // (rows)
  const float *amax;    // (rows) or null
  const float *column_scale;  // (cols), contiguous, 16-byte aligned, or null
  i64 x_rs, codes_rs, scale_rs, amax_rs;
  i64 cols;
  Rule rule;
  u32 unused;           // pads the struct to a multiple of 8 bytes
};

/// Type of vector indices in a row: 32 bits if the row is held in registers, and 64 bits for
/// rows of any length (2^31 vectors are 2^33 elements of fp32).
template <int VECTORS> struct Count { typedef int type; };
template <> struct Count<0> { typedef i64 type; };

/// Quantizes a row that is held in registers. A block processes a row, and a thread `VECTORS`
/// 16-byte vectors. With VECTORS 0, the row may have any length and is read twice. Column
/// scales are applied before the maximum is computed.
template <class T, class F, int VECTORS, bool COLUMN_SCALE> DEVICE void row_scaled(const RowArgs &a) {
  constexpr int COLS = 4 * T::PER_REG;
  constexpr int HELD = VECTORS ? VECTORS : 1;
  typedef typename Count<VECTORS>::type N;
  const uint4 *from = (const uint4 *)((const char *)a.x + (i64)blockIdx.x * a.x_rs * T::BYTES);
  u8 *to = a.codes + (i64)blockIdx.x * a.codes_rs;
  N vectors = a.cols / COLS;

  uint4 held[HELD];
  // The values of a vector, multiplied by the column scales.
  auto values = [&](const uint4 &v, N i, float (&out)[COLS]) {
    u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < COLS; j++) out[j] = T::get(w[j / T::PER_REG], j % T::PER_REG);
    if (COLUMN_SCALE) {
#pragma unroll
      for (int j = 0; j < COLS; j += 4) {
        float4 f = ((const float4 *)a.column_scale)[(i * COLS + j) / 4];
        out[j] *= f.x, out[j + 1] *= f.y, out[j + 2] *= f.z, out[j + 3] *= f.w;
      }
    }
  };
  auto maximum = [&](const uint4 &v, N i) {
    u32 bits = 0;
    if (COLUMN_SCALE) {
      float x[COLS];
      values(v, i, x);
#pragma unroll
      for (int j = 0; j < COLS; j++) bits = max(bits, __float_as_uint(x[j]) & 0x7fffffffu);
    } else {
      bits = magnitude<T>(vector_amax<T>(v));
    }
    return bits;
  };
  auto store = [&](const uint4 &v, N i, float factor) {
    float x[COLS];
    values(v, i, x);
    u32 word[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < COLS; j += 2)
      word[j / 4] |= (u32)F::pair(x[j] * factor, x[j + 1] * factor) << (j % 4 * 8);
    if (COLS == 8) ((uint2 *)to)[i] = make_uint2(word[0], word[1]);
    else ((u32 *)to)[i] = word[0];
  };

  u32 bits = 0;
  if (VECTORS) {
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      int i = threadIdx.x + k * blockDim.x;
      held[k] = i < vectors ? from[i] : make_uint4(0, 0, 0, 0);
    }
    if (!a.amax) {
#pragma unroll
      for (int k = 0; k < HELD; k++) {
        int i = threadIdx.x + k * blockDim.x;
        if (!COLUMN_SCALE || i < vectors) bits = max(bits, maximum(held[k], i));
      }
    }
  } else if (!a.amax) {
    for (N i = threadIdx.x; i < vectors; i += blockDim.x) bits = max(bits, maximum(from[i], i));
  }
  if (a.amax) bits = given_bits(a.amax[blockIdx.x * a.amax_rs]);
  else bits = block_max_for_all(bits);
  float scale = scale_of<F>(bits, a.rule);
  float factor = reciprocal(scale);
  if (threadIdx.x == 0) a.scale[blockIdx.x * a.scale_rs] = scale;
  if (VECTORS) {
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      int i = threadIdx.x + k * blockDim.x;
      if (i < vectors) store(held[k], i, factor);
    }
  } else {
    for (N i = threadIdx.x; i < vectors; i += blockDim.x) store(from[i], i, factor);
  }
}

#define ROW_KERNELS(NAME, T, F)                                                                  \
  extern "C" __global__ void __launch_bounds__(256) row_4_##NAME(                                 \
      const __grid_constant__ RowArgs a) {                                                        \
    row_scaled<T, F, 4, false>(a);                                                                \
  }                                                                                               \
  extern "C" __global__ void __launch_bounds__(512) row_8_##NAME(                                 \
      const __grid_constant__ RowArgs a) {                                                        \
    row_scaled<T, F, 8, false>(a);                                                                \
  }                                                                                               \
  extern "C" __global__ void __launch_bounds__(512) row_long_##NAME(                              \
      const __grid_constant__ RowArgs a) {                                                        \
    row_scaled<T, F, 0, false>(a);                                                                \
  }                                                                                               \
  extern "C" __global__ void __launch_bounds__(512) row_fold_##NAME(                              \
      const __grid_constant__ RowArgs a) {                                                        \
    row_scaled<T, F, 8, true>(a);                                                                 \
  }                                                                                               \
  extern "C" __global__ void __launch_bounds__(512) row_long_fold_##NAME(                         \
      const __grid_constant__ RowArgs a) {                                                        \
    row_scaled<T, F, 0, true>(a);                                                                 \
  }

FOR_TYPES(ROW_KERNELS)
