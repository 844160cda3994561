// Quantization with one scale, which writes both directions from one read, or the transpose
// only.
//
// Works in registers. A thread holds 8 columns of 16 rows (8 rows of fp32), loaded with
// 16-byte loads. A warp is 8 lanes across and 4 down, and four warps are a tile. Rowwise codes
// are written with 8-byte stores, 64 contiguous bytes per row. The 16 rows of a column are
// converted again, which is cheaper than permuting bytes, and written with one 16-byte store.
#include "patch.cuh"

struct CastTransposeArgs {
  const void *x;         // rows are 16-byte aligned
  u8 *rowwise;           // rows are 8-byte aligned; or null
  u8 *columnwise;        // contiguous, aligned to the number of rows that a thread holds
  i64 rows, cols;        // multiples of the rows that a thread holds and of 8
  i64 x_rs, rowwise_rs;
  i64 tiles_across;
  const float *scale;
  Delayed delayed;
};

template <class T, class F, bool DELAYED> DEVICE void cast_transpose(const CastTransposeArgs &a) {
  Patch<T> patch;
  float scale = *a.scale;
  patch.load(a, blockIdx.x);
  u32 m = DELAYED ? patch.amax(a, blockIdx.x) : 0;
  patch.template store<F>(a, blockIdx.x, reciprocal(scale));
  if (DELAYED) {
    m = block_max(m);
    if (last_of(a.delayed.grid_max, gridDim.x, m)) finish_delayed(a.delayed, scale, m);
  }
}

struct CurrentCastTransposeArgs {
  CastTransposeArgs cast;  // cast.scale is not read
  Current current;
};

#define CAST_TRANSPOSE(NAME, T, F)                                                                 \
  extern "C" __global__ void __launch_bounds__(128)                                                \
      cast_transpose_##NAME(const __grid_constant__ CastTransposeArgs a) {                         \
    cast_transpose<T, F, false>(a);                                                                \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(128)                                                \
      cast_transpose_delayed_##NAME(const __grid_constant__ CastTransposeArgs a) {                 \
    cast_transpose<T, F, true>(a);                                                                 \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(128, 4)                                              \
      cast_transpose_current_##NAME(const __grid_constant__ CurrentCastTransposeArgs a) {          \
    quantize_current<F, Patch<T>>(a.cast, a.current);                                              \
  }
FOR_TYPES(CAST_TRANSPOSE)
