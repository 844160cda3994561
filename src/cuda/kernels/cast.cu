// Quantization of a contiguous tensor in one direction.
//
// With a given scale, each block of 256 threads processes one run of elements. A thread
// processes 16 adjacent elements with adjacent 16-byte loads and one 16-byte store, so that a
// warp writes 512 contiguous bytes.
#include "current.cuh"

struct CastArgs {
  const void *x;
  u8 *codes;
  u64 n;                 // elements; x and codes are 16-byte aligned
  const float *scale;
  Delayed delayed;       // used if amaxes are recorded
};

/// The elements that a block holds at a time. Each thread holds GROUPS times 16 elements, 4096
/// apart.
template <class T, int GROUPS> struct Run {
  static constexpr int THREADS = 256, VECTORS = T::BYTES;
  uint4 v[GROUPS * VECTORS];

  DEVICE u64 at(u64 index, int g) const {
    return (index * GROUPS * 256 + threadIdx.x) * 16 + g * 4096;
  }

  DEVICE void load(const CastArgs &a, u64 index) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      const uint4 *from = (const uint4 *)((const char *)a.x + at(index, g) * T::BYTES);
#pragma unroll
      for (int i = 0; i < VECTORS; i++)
        v[g * VECTORS + i] = at(index, g) + 16 <= a.n ? from[i] : make_uint4(0, 0, 0, 0);
    }
  }

  DEVICE u32 amax(const CastArgs &a, u64 index) const {
    u32 r = 0, m = 0;
#pragma unroll
    for (int i = 0; i < GROUPS * VECTORS; i++)
      r = T::amax(r, vector_amax<T>(v[i]));
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
      if (at(index, g) + 16 > a.n)
        for (u64 i = at(index, g); i < a.n; i++) m = max_u32(m, T::amax_bits(T::load(a.x, i), 0));
    return max_u32(m, magnitude<T>(r));
  }

  template <class F> DEVICE void store(const CastArgs &a, u64 index, float q) const {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      u64 to = at(index, g);
      if (to + 16 <= a.n) {
        u32 w[4 * VECTORS], out[4];
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
          uint4 d = v[g * VECTORS + i];
          w[4 * i] = d.x, w[4 * i + 1] = d.y, w[4 * i + 2] = d.z, w[4 * i + 3] = d.w;
        }
        encode_words<T, F>(w, q, out);
        *(uint4 *)(a.codes + to) = make_uint4(out[0], out[1], out[2], out[3]);
      } else {
        for (u64 i = to; i < a.n; i++)
          a.codes[i] = encode<F>(__fmul_rn(T::get(T::load(a.x, i), 0), q));
      }
    }
  }
};

template <class T, class F, bool DELAYED> DEVICE void cast(const CastArgs &a) {
  // Blocks that record the amax all update one address at the end. Fewer blocks cause less
  // contention.
  Run<T, DELAYED ? 4 : 1> run;
  float scale = *a.scale;
  run.load(a, blockIdx.x);
  run.template store<F>(a, blockIdx.x, reciprocal(scale));
  if (DELAYED) {
    u32 m = block_max(run.amax(a, blockIdx.x));
    if (last_of(a.delayed.grid_max, gridDim.x, m)) finish_delayed(a.delayed, scale, m);
  }
}

struct CurrentCastArgs {
  CastArgs cast;         // cast.scale is not read
  Current current;
};

#define CAST(NAME, T, F)                                                                           \
  extern "C" __global__ void __launch_bounds__(256)                                                \
      cast_##NAME(const __grid_constant__ CastArgs a) { cast<T, F, false>(a); }                    \
  extern "C" __global__ void __launch_bounds__(256)                                                \
      cast_delayed_##NAME(const __grid_constant__ CastArgs a) { cast<T, F, true>(a); }             \
  extern "C" __global__ void __launch_bounds__(256, 4)                                             \
      cast_current_##NAME(const __grid_constant__ CurrentCastArgs a) {                             \
    quantize_current<F, Run<T, 8 / T::BYTES>>(a.cast, a.current);                                  \
  }
FOR_TYPES(CAST)
