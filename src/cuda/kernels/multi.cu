// A list of contiguous tensors in one launch. The list is passed in the kernel's parameters.
#include "elements.cuh"

struct Entry {
  const void *x;         // 16-byte aligned
  u8 *codes;             // 16-byte aligned
  u64 n;
  u32 first_block;       // the first block of this tensor in the launch
  u32 index;             // the index of this tensor in the caller's list
};

template <int N> struct MultiArgs {
  const float *scales;
  float *amaxes;
  float *scales_used;
  GridMax *maxima;        // one per entry
  u32 count, blocks;
  Entry entries[N];
};

constexpr int AMAX_LOADS = 8, AMAX_ROUNDS = 4, CAST_GROUPS = 2;

template <class T, int N> DEVICE void multi_amax(const MultiArgs<N> &a) {
  u32 e = entry_of(a, blockIdx.x);
  const Entry &t = a.entries[e];
  constexpr u64 PER = 16 / T::BYTES;
  const uint4 *v = (const uint4 *)t.x;
  u64 n = t.n, vectors = n / PER;
  u64 at = (u64)(blockIdx.x - t.first_block) * (256 * AMAX_LOADS * AMAX_ROUNDS) + threadIdx.x;
  u32 m0 = 0, m1 = 0;
#pragma unroll 1
  for (int round = 0; round < AMAX_ROUNDS; round++, at += 256 * AMAX_LOADS) {
    uint4 w[AMAX_LOADS];
#pragma unroll
    for (int k = 0; k < AMAX_LOADS; k++)
      w[k] = at + k * 256 < vectors ? v[at + k * 256] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int k = 0; k < AMAX_LOADS; k++) {
      m0 = T::amax(m0, T::amax(w[k].x, w[k].y));
      m1 = T::amax(m1, T::amax(w[k].z, w[k].w));
    }
  }
  u32 m = max_u32(magnitude<T>(m0), magnitude<T>(m1));
  u64 tail = vectors * PER + threadIdx.x;
  if (blockIdx.x == t.first_block && tail < n) m = max_u32(m, T::amax_bits(T::load(t.x, tail), 0));
  m = block_max(m);
  // `amaxes` is set to zero before the launch.
  if (threadIdx.x == 0) atomicMax((u32 *)a.amaxes + t.index, canonical(m));
}

template <class T, class F, bool DELAYED, int N> DEVICE void multi_cast(const MultiArgs<N> &a) {
  constexpr int WORDS = 16 / T::PER_REG, VECTORS = WORDS / 4;
  u32 e = entry_of(a, blockIdx.x);
  const Entry &t = a.entries[e];
  float scale = a.scales[t.index], q = reciprocal(scale);
  u32 own = blockIdx.x - t.first_block;
  u64 n = t.n, base = ((u64)own * CAST_GROUPS * 256 + threadIdx.x) * 16;
  u32 m = 0;
  u32 w[CAST_GROUPS][WORDS];
#pragma unroll
  for (int g = 0; g < CAST_GROUPS; g++) {
    u64 at = base + g * 4096;
    const uint4 *from = (const uint4 *)((const char *)t.x + at * T::BYTES);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      uint4 d = at + 16 <= n ? from[v] : make_uint4(0, 0, 0, 0);
      w[g][4 * v] = d.x, w[g][4 * v + 1] = d.y, w[g][4 * v + 2] = d.z, w[g][4 * v + 3] = d.w;
    }
  }
#pragma unroll
  for (int g = 0; g < CAST_GROUPS; g++) {
    u64 at = base + g * 4096;
    u32 out[4];
    encode_words<T, F>(w[g], q, out);
    if (at + 16 <= n) *(uint4 *)(t.codes + at) = make_uint4(out[0], out[1], out[2], out[3]);
    if (DELAYED) {
      u32 r = 0;
#pragma unroll
      for (int i = 0; i < WORDS; i++) r = T::amax(r, w[g][i]);
      m = max_u32(m, magnitude<T>(r));
    }
    if (at < n && at + 16 > n) {
      for (u64 i = at; i < n; i++) {
        u32 x = T::load(t.x, i);
        t.codes[i] = encode<F>(__fmul_rn(T::get(x, 0), q));
        if (DELAYED) m = max_u32(m, T::amax_bits(x, 0));
      }
    }
  }
  if (DELAYED) {
    m = block_max(m);
    u32 end = end_of(a, e);
    Delayed d = {a.amaxes + t.index, a.scales_used + t.index, a.maxima + e};
    if (last_of(d.grid_max, end - t.first_block, m)) finish_delayed(d, scale, m);
  }
}

#define MULTI_AMAX(NAME, T, SIZE, N)                                                               \
  extern "C" __global__ void __launch_bounds__(256)                                                \
      multi_amax_##SIZE##_##NAME(const __grid_constant__ MultiArgs<N> a) { multi_amax<T, N>(a); }
#define MULTI_CAST(NAME, T, F, SIZE, N)                                                            \
  extern "C" __global__ void __launch_bounds__(256)                                                \
      multi_cast_##SIZE##_##NAME(const __grid_constant__ MultiArgs<N> a) {                         \
    multi_cast<T, F, false, N>(a);                                                                 \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(256)                                                \
      multi_cast_delayed_##SIZE##_##NAME(const __grid_constant__ MultiArgs<N> a) {                 \
    multi_cast<T, F, true, N>(a);                                                                  \
  }
#define SHORT_AMAX(NAME, T) MULTI_AMAX(NAME, T, short, 64)
#define LONG_AMAX(NAME, T) MULTI_AMAX(NAME, T, long, 1000)
#define SHORT_CAST(NAME, T, F) MULTI_CAST(NAME, T, F, short, 64)
#define LONG_CAST(NAME, T, F) MULTI_CAST(NAME, T, F, long, 1000)
FOR_INPUTS(SHORT_AMAX)
FOR_INPUTS(LONG_AMAX)
FOR_TYPES(SHORT_CAST)
FOR_TYPES(LONG_CAST)
