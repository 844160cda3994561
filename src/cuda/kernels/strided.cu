// Views with any strides, any alignment and any size: casts, and absolute maxima.
#include "strided.cuh"

#define STRIDED(NAME, T, F)                                                                        \
  extern "C" __global__ void __launch_bounds__(256)                                                \
      strided_cast_##NAME(const __grid_constant__ StridedArgs a) {                                 \
    cast_strided<T, F>(a, [&](i64 r, i64 c) { return T::load(a.x, r * a.x_rs + c * a.x_cs); });    \
  }
FOR_TYPES(STRIDED)

struct StridedAmaxArgs {
  const void *x;
  i64 rows, cols;        // the last dimension has the shorter stride
  i64 x_rs, x_cs;
  float *out;
  GridMax *grid_max;
  Rule rule;
};

template <class T> DEVICE u32 strided_amax(const StridedAmaxArgs &a) {
  i64 n = a.rows * a.cols;
  u32 m = 0;
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) {
    i64 r = i / a.cols, c = i - r * a.cols;
    m = max_u32(m, T::amax_bits(T::load(a.x, r * a.x_rs + c * a.x_cs), 0));
  }
  return block_max(m);
}

#define STRIDED_AMAX(NAME, T)                                                                      \
  extern "C" __global__ void __launch_bounds__(512)                                                \
      strided_amax_##NAME(const __grid_constant__ StridedAmaxArgs a) {                             \
    u32 m = strided_amax<T>(a);                                                                    \
    if (last_of(a.grid_max, gridDim.x, m)) *a.out = __uint_as_float(m);                             \
  }
FOR_INPUTS(STRIDED_AMAX)

#define STRIDED_SCALE(NAME, T, F)                                                                  \
  extern "C" __global__ void __launch_bounds__(512)                                                \
      strided_current_scale_##NAME(const __grid_constant__ StridedAmaxArgs a) {                    \
    u32 m = strided_amax<T>(a);                                                                    \
    if (last_of(a.grid_max, gridDim.x, m)) *a.out = scale_of<F>(m, a.rule);                         \
  }
FOR_TYPES(STRIDED_SCALE)
