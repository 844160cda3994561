// AdamW for plain parameters, and for codes with one given scale per tensor.
#include "adamw.cuh"

/// Groups of four elements that a thread loads together, and the number of such loads.
constexpr int GROUPS = 2, ROUNDS = 2, PER_BLOCK = 256 * 4 * GROUPS * ROUNDS;

template <u32 KIND> DEVICE void elements(const AdamWArgs &a) {
  __shared__ Factors shared;
  if (skipped(a)) return;
  u32 e = entry_of(a, blockIdx.x);
  const AdamWEntry &t = a.entries[e];
  u64 n = t.rows * t.cols;
  u64 base = (u64)(blockIdx.x - t.first_block) * PER_BLOCK + threadIdx.x * 4;
  bool keep = KIND != CODES || t.new_scale, vectors = t.flags & VECTORS;
  float scale = KIND == CODES && !t.master ? *(const float *)t.scale : 1.0f;
  float q = KIND == CODES && keep ? reciprocal(*t.new_scale) : 1.0f;
  u32 maximum = 0;
#pragma unroll 1
  for (int round = 0; round < ROUNDS; round++) {
    Four d[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      u64 i = base + (round * GROUPS + g) * 1024;
      if (vectors && i + 4 <= n) d[g] = load(t, i, KIND);
    }
    if (round == 0) {
      // Overlaps with the first loads.
      share_factors(a, t, shared);
    }
    Factors f = shared;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      u64 i = base + (round * GROUPS + g) * 1024;
      if (vectors && i + 4 <= n) {
        float w[4];
        update(t, f, d[g], KIND, scale, i, keep, w);
        if (KIND != CODES) store_four(t.param, i, KIND, w);
        else if (keep) *(u32 *)((u8 *)t.param + i) = encode_four(a, t, f.step, i, w, q);
        maximum = larger(maximum, w);
      } else {
#pragma unroll 1
        for (int j = 0; j < 4 && i < n; j++, i++) {
          float w = update_one(t, f, KIND, scale, i, keep);
          if (KIND != CODES) store_one(t.param, i, KIND, w);
          else if (keep) ((u8 *)t.param)[i] = encode_one(a, t, f.step, i, w, q);
          maximum = larger(maximum, w);
        }
      }
    }
  }
  finish_elements<KIND>(a, t, e, keep, maximum);
}

#define ELEMENTS(NAME, KIND)                                                                       \
  extern "C" __global__ void __launch_bounds__(256, 3)                                             \
      adamw_##NAME(const __grid_constant__ AdamWArgs a) { elements<KIND>(a); }
ELEMENTS(f32, F32)
ELEMENTS(bf16, BF16)
ELEMENTS(f16, F16)
ELEMENTS(codes, CODES)
