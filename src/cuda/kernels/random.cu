// Fills a tensor with random numbers that depend on an element's position only.
#include "philox.cuh"
#include "values.cuh"

struct RandomArgs {
  void *x;
  u64 rows, cols;
  i64 x_rs, x_cs;
  const float *step;     // step 0 if null
  u64 seed, offset;
  float low, high;
  u32 contiguous, stream;
};

/// A thread computes the elements of one block of words: four adjacent elements, or fewer at
/// the start and end.
template <class O> DEVICE void random_uniform(const RandomArgs &a) {
  u64 n = a.rows * a.cols, block = (u64)blockIdx.x * 256 + threadIdx.x;
  i64 first = (i64)(block * 4) - (i64)(a.offset & 3u);
  if (first >= (i64)n) return;
  u32 words[4], step = a.step ? __float2uint_rz(*a.step) : 0u;
  philox((a.offset >> 2) + block, a.stream, step, a.seed, words);
  float range = __fsub_rn(a.high, a.low);
#pragma unroll
  for (int j = 0; j < 4; j++) {
    i64 i = first + j;
    if (i < 0 || i >= (i64)n) continue;
    u32 bits = O::bits(__fadd_rn(a.low, __fmul_rn(unit(words[j]), range)));
    i64 at = a.contiguous ? i : i / (i64)a.cols * a.x_rs + i % (i64)a.cols * a.x_cs;
    if (O::BYTES == 4) ((u32 *)a.x)[at] = bits;
    else ((u16 *)a.x)[at] = (u16)bits;
  }
}

#define RANDOM(NAME, O)                                                                            \
  extern "C" __global__ void __launch_bounds__(256)                                                \
      random_uniform_##NAME(const __grid_constant__ RandomArgs a) { random_uniform<O>(a); }
RANDOM(f32, OutF32)
RANDOM(bf16, OutBf16)
RANDOM(f16, OutF16)
