// The sum of the rows of a bf16 matrix in fp32, from first to last, divided by `divisor`
// (format/sum.rs).
#include "values.cuh"

struct SumRowsArgs {
  const void *x;
  float *out;
  u64 rows, cols;
  i64 x_rs, x_cs;
  i64 out_cs;
  float divisor;
};

/// Number of rows that a thread loads at a time.
#define DEPTH 4

DEVICE float divided(float sum, float divisor) {
  return __uint_as_float(OutF32::bits(__fdiv_rn(sum, divisor)));
}

/// Sums one column of any strides.
DEVICE void sum_column(const SumRowsArgs &a, u64 col) {
  float sum = -0.0f;  // adding to -0 changes no value
  for (u64 row = 0; row < a.rows; row++) {
    u32 value = InBf16::load(a.x, (i64)row * a.x_rs + (i64)col * a.x_cs);
    sum = __fadd_rn(sum, InBf16::get(value, 0));
  }
  a.out[(i64)col * a.out_cs] = divided(sum, a.divisor);
}

/// Sums eight columns with a 16-byte load per row, of which DEPTH are in flight, and two
/// 16-byte stores.
DEVICE void sum_columns(const SumRowsArgs &a, u64 first) {
  float sums[8];
#pragma unroll
  for (int i = 0; i < 8; i++) sums[i] = -0.0f;
  const char *from = (const char *)a.x + first * 2;
  for (u64 row = 0; row < a.rows; row += DEPTH) {
    uint4 v[DEPTH];
#pragma unroll
    for (int k = 0; k < DEPTH; k++)
      if (row + k < a.rows) v[k] = *(const uint4 *)(from + (i64)(row + k) * a.x_rs * 2);
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
      if (row + k >= a.rows) break;
      u32 words[4] = {v[k].x, v[k].y, v[k].z, v[k].w};
#pragma unroll
      for (int i = 0; i < 8; i++)
        sums[i] = __fadd_rn(sums[i], InBf16::get(words[i / 2], i % 2));
    }
  }
  float4 *to = (float4 *)(a.out + first);
#pragma unroll
  for (int i = 0; i < 2; i++)
    to[i] = make_float4(divided(sums[4 * i], a.divisor), divided(sums[4 * i + 1], a.divisor),
                        divided(sums[4 * i + 2], a.divisor), divided(sums[4 * i + 3], a.divisor));
}

/// Rows and `out` are contiguous and 16-byte aligned.
extern "C" __global__ void __launch_bounds__(256)
    sum_rows(const __grid_constant__ SumRowsArgs a) {
  u64 first = ((u64)blockIdx.x * 256 + threadIdx.x) * 8;
  if (first + 8 <= a.cols) sum_columns(a, first);
  else
    for (u64 col = first; col < a.cols; col++) sum_column(a, col);
}

extern "C" __global__ void __launch_bounds__(256)
    strided_sum_rows(const __grid_constant__ SumRowsArgs a) {
  u64 col = (u64)blockIdx.x * 256 + threadIdx.x;
  if (col < a.cols) sum_column(a, col);
}
