// Quantize a contiguous tensor with a known scale, one direction.
//
// One-shot blocks of 256; a thread takes 16 neighbours: 16-byte loads side by side and one 16-byte
// store, so that a warp writes 512 contiguous bytes.
#include "elements.cuh"

struct CastArgs {
  const void *x;
  u8 *codes;
  u64 n;                 // elements; x and codes are 16-byte aligned
  const float *scale;
  Delayed delayed;       // where amaxes are followed
  u32 backwards;         // take the end first: a pass before this one left it in the L2
};

template <class T, class F, bool DELAYED> DEVICE void cast(const CastArgs &a) {
  constexpr int WORDS = 16 / T::PER_REG, VECTORS = WORDS / 4;
  // Blocks that follow the amax meet at its end: fewer of them queue less.
  constexpr int GROUPS = DELAYED ? 4 : 1;
  u64 block = a.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  u64 base = (block * GROUPS * 256 + threadIdx.x) * 16;
  u32 m = 0;
  float scale = *a.scale, q = reciprocal(scale);
  u32 w[GROUPS][WORDS];
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    u64 at = base + g * 4096;
    const uint4 *from = (const uint4 *)((const char *)a.x + at * T::BYTES);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      uint4 d = at + 16 <= a.n ? from[v] : make_uint4(0, 0, 0, 0);
      w[g][4 * v] = d.x, w[g][4 * v + 1] = d.y, w[g][4 * v + 2] = d.z, w[g][4 * v + 3] = d.w;
    }
  }
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    u64 at = base + g * 4096;
    if (at + 16 <= a.n) {
      u32 out[4];
      encode_words<T, F>(w[g], q, out);
      *(uint4 *)(a.codes + at) = make_uint4(out[0], out[1], out[2], out[3]);
      if (DELAYED) {
        u32 r = 0;
#pragma unroll
        for (int i = 0; i < WORDS; i++) r = T::amax(r, w[g][i]);
        m = max_u32(m, magnitude<T>(r));
      }
    } else {
      for (u64 i = at; i < a.n; i++) {
        u32 x = T::load(a.x, i);
        a.codes[i] = encode<F>(__fmul_rn(T::get(x, 0), q));
        if (DELAYED) m = max_u32(m, T::amax_bits(x, 0));
      }
    }
  }
  if (DELAYED) {
    m = block_max(m);
    if (last_of(a.delayed.meeting, gridDim.x, m)) finish_delayed(a.delayed, scale, m);
  }
}

#define CAST(NAME, T, F)                                                                           \
  extern "C" __global__ void __launch_bounds__(256)                                                \
      cast_##NAME(const __grid_constant__ CastArgs a) { cast<T, F, false>(a); }                    \
  extern "C" __global__ void __launch_bounds__(256)                                                \
      cast_delayed_##NAME(const __grid_constant__ CastArgs a) { cast<T, F, true>(a); }
FOR_TYPES(CAST)
