// Norms over rows with quantization of their result (format/norm.rs).
//
// A quantization has two launches. The first computes the statistics of each row and, for current
// scaling, the scale. A warp reads a row once and holds it in registers. The second reads the input
// again, normalizes it and casts it in both directions.
#include "fused.cuh"

/// The parameters of a norm.
struct NormArgs {
  const void *weight;    // (cols), contiguous, or null
  const void *bias;      // (cols), contiguous, or null
  float *mean;           // (rows), or null: the mean is not subtracted
  float *rstd;           // (rows)
};

struct NormStatsArgs {
  const void *x;
  NormArgs norm;
  float *scale;          // output, or null
  GridMax *grid_max;     // with `scale`
  i64 x_rs, x_cs;
  i64 rows, cols;
  float eps;
  Rule rule;
  u32 flags;
  u32 unused;            // pads the struct to a multiple of 8 bytes
};

enum : u32 {
  X_VECTORS = 1,         // rows of x are contiguous and 16-byte aligned
  WEIGHT_VECTORS = 2,    // weight and bias are 16-byte aligned
};

#define LANES 256        // partial sums of a row, 8 for each thread of a warp
#define EACH 8

/// EACH adjacent elements of a row.
template <class T> struct Octet {
  static constexpr int PER_VECTOR = 4 * T::PER_REG, VECTORS = EACH / PER_VECTOR;
  u32 d[VECTORS][4];

  DEVICE void load(const void *x, i64 rs, i64 cs, bool vectors, i64 row, i64 col, i64 cols) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
      load_vector<T>(x, rs, cs, vectors, row, col + v * PER_VECTOR, cols, d[v]);
  }

  DEVICE float get(int i) const {
    return T::get(d[i / PER_VECTOR][i % PER_VECTOR / T::PER_REG], i % T::PER_REG);
  }

  /// Replaces the elements by values rounded to T, and returns the `T::amax` of them.
  DEVICE u32 put(const float (&v)[EACH]) {
    u32 m = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      pack<T>(v + i * PER_VECTOR, d[i]);
#pragma unroll
      for (int k = 0; k < 4; k++) m = T::amax(m, d[i][k]);
    }
    return m;
  }
};

/// Loads EACH elements of a weight or a bias. If it is absent, every element is `absent`.
template <class T>
DEVICE void load_parameter(const void *p, float absent, bool vectors, i64 col, i64 cols,
                           float (&out)[EACH]) {
  Octet<T> octet;
  if (p) octet.load(p, 0, 1, vectors, 0, col, cols);
#pragma unroll
  for (int i = 0; i < EACH; i++) out[i] = p ? octet.get(i) : absent;
}

/// Returns the value of an element. Without a mean, 0 is subtracted. An absent weight is 1 and an
/// absent bias -0. None of these changes a bit.
DEVICE float normalized(float x, float mean, float rstd, float weight, float bias) {
  return __fadd_rn(__fmul_rn(__fmul_rn(__fadd_rn(x, -mean), rstd), weight), bias);
}

#define ABSENT_WEIGHT 1.0f
#define ABSENT_BIAS (-0.0f)

DEVICE float shuffle_down(float v, int threads) {
  float d;
  asm volatile("shfl.sync.down.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=f"(d) : "f"(v), "r"(threads));
  return d;
}

/// Returns the sum of the partial sums of a warp, in all threads.
DEVICE float sum_lanes(const float (&s)[EACH]) {
  float sum = __fadd_rn(__fadd_rn(__fadd_rn(s[0], s[4]), __fadd_rn(s[2], s[6])),
                        __fadd_rn(__fadd_rn(s[1], s[5]), __fadd_rn(s[3], s[7])));
#pragma unroll
  for (int half = 16; half > 0; half /= 2) sum = __fadd_rn(sum, shuffle_down(sum, half));
  float d;
  asm volatile("shfl.sync.idx.b32 %0, %1, 0, 0x1f, 0xffffffff;" : "=f"(d) : "f"(sum));
  return d;
}

/// Processes a row with a warp. Up to CHUNKS chunks of 256 elements are held in registers. With
/// CHUNKS 0, a row may have any length, and is read two or three times.
template <class T, class F, int CHUNKS> DEVICE void norm_stats(const NormStatsArgs &a) {
  constexpr int HELD = CHUNKS ? CHUNKS : 1;
  int lane = threadIdx.x & 31;
  i64 row = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
  bool vectors = a.flags & X_VECTORS;
  Octet<T> held[HELD];
  u32 m = 0;

  // Calls `f` with each chunk's octet of this thread, and its first column.
  auto each = [&](auto f) {
    if (CHUNKS) {
#pragma unroll
      for (int k = 0; k < HELD; k++)
        if (k * LANES < a.cols) f(held[k], (i64)k * LANES + lane * EACH);
    } else {
#pragma unroll 1
      for (i64 col = lane * EACH; col - lane * EACH < a.cols; col += LANES) {
        held[0].load(a.x, a.x_rs, a.x_cs, vectors, row, col, a.cols);
        f(held[0], col);
      }
    }
  };

  if (row < a.rows) {
    if (CHUNKS) {
#pragma unroll
      for (int k = 0; k < HELD; k++)
        if (k * LANES < a.cols)
          held[k].load(a.x, a.x_rs, a.x_cs, vectors, row, (i64)k * LANES + lane * EACH, a.cols);
    }
    float mean = 0.0f;
    if (a.norm.mean) {
      float sums[EACH] = {0, 0, 0, 0, 0, 0, 0, 0};
      each([&](const Octet<T> &octet, i64) {
#pragma unroll
        for (int i = 0; i < EACH; i++) sums[i] = __fadd_rn(sums[i], octet.get(i));
      });
      mean = __fdiv_rn(sum_lanes(sums), (float)a.cols);
    }
    float sums[EACH] = {0, 0, 0, 0, 0, 0, 0, 0};
    each([&](const Octet<T> &octet, i64 col) {
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        float x = __fadd_rn(octet.get(i), -mean);
        if (col + i < a.cols) sums[i] = __fadd_rn(sums[i], __fmul_rn(x, x));
      }
    });
    float mean_square = __fdiv_rn(sum_lanes(sums), (float)a.cols);
    float rstd = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean_square, a.eps)));
    rstd = __uint_as_float(OutF32::bits(rstd));
    mean = __uint_as_float(OutF32::bits(mean));
    if (lane == 0) {
      a.norm.rstd[row] = rstd;
      if (a.norm.mean) a.norm.mean[row] = mean;
    }
    if (a.scale) {
      bool aligned = a.flags & WEIGHT_VECTORS;
      each([&](Octet<T> &octet, i64 col) {
        float weight[EACH], bias[EACH], v[EACH];
        load_parameter<T>(a.norm.weight, ABSENT_WEIGHT, aligned, col, a.cols, weight);
        load_parameter<T>(a.norm.bias, ABSENT_BIAS, aligned, col, a.cols, bias);
#pragma unroll
        for (int i = 0; i < EACH; i++)
          v[i] = col + i < a.cols ? normalized(octet.get(i), mean, rstd, weight[i], bias[i]) : 0.0f;
        m = T::amax(m, octet.put(v));
      });
    }
  }
  if (a.scale) {
    m = block_max(magnitude<T>(m));
    if (last_of(a.grid_max, gridDim.x, m)) *a.scale = scale_of<F>(m, a.rule);
  }
}

struct NormCastArgs {
  StridedArgs cast;
  NormArgs norm;
};

template <class T, class F> DEVICE void norm_cast(const NormCastArgs &a) {
  cast_patch<T, F>(a.cast, [&](Patch<T> &patch, i64 r, i64 c) {
    patch.load(a.cast, blockIdx.x);
    constexpr int PER = 4 * T::PER_REG;
    float weight[EACH], bias[EACH];
    load_parameter<T>(a.norm.weight, ABSENT_WEIGHT, true, c, a.cast.cols, weight);
    load_parameter<T>(a.norm.bias, ABSENT_BIAS, true, c, a.cast.cols, bias);
#pragma unroll
    for (int i = 0; i < Patch<T>::ROWS; i++) {
      float rstd = a.norm.rstd[r + i], mean = a.norm.mean ? a.norm.mean[r + i] : 0.0f;
#pragma unroll
      for (int k = 0; k < Patch<T>::VECTORS; k++) {
        uint4 &d = patch.v[i * Patch<T>::VECTORS + k];
        u32 word[4] = {d.x, d.y, d.z, d.w};
        float v[PER];
#pragma unroll
        for (int j = 0; j < PER; j++)
          v[j] = normalized(T::get(word[j / T::PER_REG], j % T::PER_REG), mean, rstd,
                            weight[k * PER + j], bias[k * PER + j]);
        pack<T>(v, word);
        d = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  });
}

template <class T, class F> DEVICE void norm_strided(const NormCastArgs &a) {
  cast_strided<T, F>(a.cast, [&](i64 r, i64 c) {
    float x = T::get(T::load(a.cast.x, r * a.cast.x_rs + c * a.cast.x_cs), 0);
    float weight = a.norm.weight ? T::get(T::load(a.norm.weight, c), 0) : ABSENT_WEIGHT;
    float bias = a.norm.bias ? T::get(T::load(a.norm.bias, c), 0) : ABSENT_BIAS;
    float mean = a.norm.mean ? a.norm.mean[r] : 0.0f;
    return rounded<T>(normalized(x, mean, a.norm.rstd[r], weight, bias));
  });
}

/// 16-bit rows of up to 8,192 elements and fp32 rows of up to 4,096 are held in registers.
#define NORM(NAME, T, F)                                                                           \
  extern "C" __global__ void __launch_bounds__(128)                                                \
      norm_stats_##NAME(const __grid_constant__ NormStatsArgs a) {                                 \
    norm_stats<T, F, 64 / T::BYTES>(a);                                                            \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(128, 6)                                             \
      norm_stats_long_##NAME(const __grid_constant__ NormStatsArgs a) {                            \
    norm_stats<T, F, 0>(a);                                                                        \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(128)                                                \
      norm_cast_##NAME(const __grid_constant__ NormCastArgs a) { norm_cast<T, F>(a); }             \
  extern "C" __global__ void __launch_bounds__(256)                                                \
      norm_strided_##NAME(const __grid_constant__ NormCastArgs a) { norm_strided<T, F>(a); }
FOR_TYPES(NORM)
