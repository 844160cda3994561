// Views with any strides, any alignment and any size, in tiles of 32x32 through shared memory.
//
// Loads run along the input's shorter stride, and stores along each output's, so that a
// transposed view is as fast as a contiguous one.
#include "strided.cuh"

template <class T, class F> DEVICE void strided_cast(const StridedArgs &a) {
  __shared__ u8 tile[32][33];
  i64 r0 = blockIdx.x / a.tiles_across * 32, c0 = blockIdx.x % a.tiles_across * 32;
  int across = threadIdx.x & 31, down = threadIdx.x >> 5;
  float scale = *a.scale, q = reciprocal(scale);
  bool by_column = a.x_rs < a.x_cs;
  u32 m = 0;
  for (int k = down; k < 32; k += 8) {
    int i = by_column ? across : k, j = by_column ? k : across;
    i64 r = r0 + i, c = c0 + j;
    if (r < a.rows && c < a.cols) {
      u32 w = T::load(a.x, r * a.x_rs + c * a.x_cs);
      m = max_u32(m, T::amax_bits(w, 0));
      tile[i][j] = encode<F>(__fmul_rn(T::get(w, 0), q));
    }
  }
  __syncthreads();
  for (int k = down; k < 32; k += 8) {
    if (a.rowwise && r0 + k < a.rows && c0 + across < a.cols)
      a.rowwise[(r0 + k) * a.rowwise_rs + (c0 + across) * a.rowwise_cs] = tile[k][across];
    if (a.columnwise && c0 + k < a.cols && r0 + across < a.rows)
      a.columnwise[(c0 + k) * a.columnwise_rs + (r0 + across) * a.columnwise_cs] = tile[across][k];
  }
  if (a.delayed.grid_max) {
    m = block_max(m);
    if (last_of(a.delayed.grid_max, gridDim.x, m)) finish_delayed(a.delayed, scale, m);
  }
}

#define STRIDED(NAME, T, F)                                                                        \
  extern "C" __global__ void __launch_bounds__(256)                                                \
      strided_cast_##NAME(const __grid_constant__ StridedArgs a) { strided_cast<T, F>(a); }
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
