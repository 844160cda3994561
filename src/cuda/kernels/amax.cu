// The absolute maximum of one contiguous tensor, or the scale computed from it, in one launch.
//
// A fixed grid strides over the tensor. Each thread has four 16-byte loads in flight. The
// block that arrives last writes the result.
#include "elements.cuh"

struct AmaxArgs {
  const void *x;
  u64 n;                 // elements; x is 16-byte aligned
  float *out;
  GridMax *grid_max;
  Rule rule;             // used if the scale is computed
};

template <class T> DEVICE u32 amax_of(const AmaxArgs &a) {
  constexpr u64 PER = 16 / T::BYTES;
  const uint4 *v = (const uint4 *)a.x;
  u64 vectors = a.n / PER, step = (u64)gridDim.x * blockDim.x;
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  u32 m0 = 0, m1 = 0;
  for (; i + 3 * step < vectors; i += 4 * step) {
    uint4 w[4];
#pragma unroll
    for (int k = 0; k < 4; k++) w[k] = v[i + k * step];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      m0 = T::amax(m0, T::amax(w[k].x, w[k].y));
      m1 = T::amax(m1, T::amax(w[k].z, w[k].w));
    }
  }
  for (; i < vectors; i += step) {
    uint4 w = v[i];
    m0 = T::amax(m0, T::amax(w.x, w.y));
    m1 = T::amax(m1, T::amax(w.z, w.w));
  }
  u32 m = max_u32(magnitude<T>(m0), magnitude<T>(m1));
  u64 tail = vectors * PER + threadIdx.x;
  if (blockIdx.x == 0 && tail < a.n) m = max_u32(m, T::amax_bits(T::load(a.x, tail), 0));
  return block_max(m);
}

#define AMAX(NAME, T)                                                                              \
  extern "C" __global__ void __launch_bounds__(512)                                                \
      amax_##NAME(const __grid_constant__ AmaxArgs a) {                                            \
    u32 m = amax_of<T>(a);                                                                         \
    if (last_of(a.grid_max, gridDim.x, m)) *a.out = __uint_as_float(m);                             \
  }
FOR_INPUTS(AMAX)

#define CURRENT_SCALE(NAME, T, F)                                                                  \
  extern "C" __global__ void __launch_bounds__(512)                                                \
      current_scale_##NAME(const __grid_constant__ AmaxArgs a) {                                   \
    u32 m = amax_of<T>(a);                                                                         \
    if (last_of(a.grid_max, gridDim.x, m)) *a.out = scale_of<F>(m, a.rule);                         \
  }
FOR_TYPES(CURRENT_SCALE)

struct ScaleArgs {
  const float *amax;
  float *scale;
  i64 n, cols;
  i64 amax_rs, amax_cs, scale_rs, scale_cs;
  Rule rule;
};

#define SCALE(NAME, F)                                                                             \
  extern "C" __global__ void __launch_bounds__(256)                                                \
      scale_##NAME(const __grid_constant__ ScaleArgs a) {                                          \
    i64 i = (i64)blockIdx.x * 256 + threadIdx.x;                                                   \
    if (i >= a.n) return;                                                                          \
    i64 r = i / a.cols, c = i % a.cols;                                                            \
    u32 bits = __float_as_uint(a.amax[r * a.amax_rs + c * a.amax_cs]) & 0x7fffffffu;               \
    a.scale[r * a.scale_rs + c * a.scale_cs] = scale_of<F>(bits, a.rule);                          \
  }
SCALE(e4m3, E4m3)
SCALE(e5m2, E5m2)
