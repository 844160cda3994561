// Norms over rows with quantization of their result (format/norm.rs).
//
// A quantization has two launches. The first computes the statistics of each row and, for current
// scaling, the scale. A block holds a row in registers, unless the row is long. The second reads the
// input again, normalizes it and casts it in both directions.
#include "patch.cuh"
#include "strided.cuh"
#include "vectors.cuh"

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

#define WARPS 8
#define PER_THREAD 8     // adjacent partial sums of a thread
#define LANES (WARPS * 32 * PER_THREAD)  // partial sums of a row

/// PER_THREAD adjacent elements of a row.
template <class T> struct Octet {
  static constexpr int PER_VECTOR = 4 * T::PER_REG, VECTORS = PER_THREAD / PER_VECTOR;
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
  DEVICE u32 put(const float (&v)[PER_THREAD]) {
    u32 m = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) m = T::amax(m, pack<T>(v + i * PER_VECTOR, d[i]));
    return m;
  }
};

/// PER_THREAD elements of a weight or a bias. Without one, elements are the `absent` value.
template <class T> struct Parameter {
  Octet<T> octet;
  bool present;

  DEVICE void load(const void *p, bool vectors, i64 col, i64 cols) {
    present = p;
    if (present) octet.load(p, 0, 1, vectors, 0, col, cols);
  }

  DEVICE float get(int i, float absent) const { return present ? octet.get(i) : absent; }
};

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

DEVICE float sum_eight(const float (&s)[8]) {
  return __fadd_rn(__fadd_rn(__fadd_rn(s[0], s[4]), __fadd_rn(s[2], s[6])),
                   __fadd_rn(__fadd_rn(s[1], s[5]), __fadd_rn(s[3], s[7])));
}

/// Shared memory for sums over a block.
struct RowSums {
  float warps[2][WARPS];

  /// Returns the sum of the partial sums of a block, in all threads. `turn` is the number of sums
  /// before this one. Two sums in succession use different memory, so that one barrier suffices for
  /// each.
  DEVICE float add(const float (&partial)[PER_THREAD], u32 &turn) {
    float sum = sum_eight(partial);
#pragma unroll
    for (int half = 16; half > 0; half /= 2) sum = __fadd_rn(sum, shuffle_down(sum, half));
    float (&warp_sums)[WARPS] = warps[turn & 1];
    turn++;
    if ((threadIdx.x & 31) == 0) warp_sums[threadIdx.x >> 5] = sum;
    __syncthreads();
    return sum_eight(warp_sums);
  }
};

/// Computes the statistics of rows, each with a block. Registers hold CHUNKS chunks of LANES elements.
/// With CHUNKS 0, a row may have any length, and is read again for each sum and for the scale.
template <class T, class F, int CHUNKS> DEVICE void norm_stats(const NormStatsArgs &a) {
  constexpr int REGISTER_CHUNKS = CHUNKS ? CHUNKS : 1;
  __shared__ RowSums row_sums;
  const bool vectors = a.flags & X_VECTORS, weight_vectors = a.flags & WEIGHT_VECTORS;
  const i64 first = threadIdx.x * PER_THREAD;
  Octet<T> chunks[REGISTER_CHUNKS];
  u32 amax = 0, turn = 0;
  for (i64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
    auto load = [&](int k, i64 col) {
      chunks[k].load(a.x, a.x_rs, a.x_cs, vectors, row, col, a.cols);
    };
    // Calls `f` for each chunk, with its number and this thread's first column.
    auto for_chunks = [&](auto f) {
      if (CHUNKS) {
#pragma unroll
        for (int k = 0; k < REGISTER_CHUNKS; k++)
          if (k * LANES < a.cols) f(k, k * LANES + first);
      } else {
#pragma unroll 1
        for (i64 col = first; col - first < a.cols; col += LANES) {
          load(0, col);
          f(0, col);
        }
      }
    };
    if (CHUNKS) for_chunks(load);

    float mean = 0.0f;
    if (a.norm.mean) {
      float sums[PER_THREAD] = {0, 0, 0, 0, 0, 0, 0, 0};
      for_chunks([&](int k, i64) {
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) sums[i] = __fadd_rn(sums[i], chunks[k].get(i));
      });
      mean = __fdiv_rn(row_sums.add(sums, turn), (float)a.cols);
    }
    float sums[PER_THREAD] = {0, 0, 0, 0, 0, 0, 0, 0};
    for_chunks([&](int k, i64 col) {
#pragma unroll
      for (int i = 0; i < PER_THREAD; i++) {
        float x = __fadd_rn(chunks[k].get(i), -mean);
        if (col + i < a.cols) sums[i] = __fadd_rn(sums[i], __fmul_rn(x, x));
      }
    });
    float mean_square = __fdiv_rn(row_sums.add(sums, turn), (float)a.cols);
    float rstd = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean_square, a.eps)));
    rstd = __uint_as_float(OutF32::bits(rstd));
    mean = __uint_as_float(OutF32::bits(mean));
    if (threadIdx.x == 0) {
      a.norm.rstd[row] = rstd;
      if (a.norm.mean) a.norm.mean[row] = mean;
    }
    if (!a.scale) continue;
    for_chunks([&](int k, i64 col) {
      Parameter<T> weight, bias;
      weight.load(a.norm.weight, weight_vectors, col, a.cols);
      bias.load(a.norm.bias, weight_vectors, col, a.cols);
      float v[PER_THREAD];
#pragma unroll
      for (int i = 0; i < PER_THREAD; i++) {
        v[i] = normalized(chunks[k].get(i), mean, rstd, weight.get(i, ABSENT_WEIGHT),
                          bias.get(i, ABSENT_BIAS));
        if (col + i >= a.cols) v[i] = 0.0f;
      }
      amax = T::amax(amax, chunks[k].put(v));
    });
  }
  if (a.scale) {
    u32 max_bits = block_max(magnitude<T>(amax));
    if (last_of(a.grid_max, gridDim.x, max_bits)) *a.scale = scale_of<F>(max_bits, a.rule);
  }
}

struct NormCastArgs {
  StridedArgs cast;
  NormArgs norm;
};

/// Casts a tile of normalized values, which are rounded to the input's type and never written. The
/// arguments have the layout that `CastTransposeArgs` requires.
template <class T, class F> DEVICE void norm_cast(const NormCastArgs &a) {
  constexpr int PER = 4 * T::PER_REG;
  const StridedArgs &cast = a.cast;
  Patch<T> patch;
  i64 tile = blockIdx.x, r, c;
  float scale = *cast.scale;
  bool inside = patch.place(cast, tile, r, c);
  if (inside) {
    patch.load(cast, tile);
    Parameter<T> weight, bias;
    weight.load(a.norm.weight, true, c, cast.cols);
    bias.load(a.norm.bias, true, c, cast.cols);
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
                            weight.get(k * PER + j, ABSENT_WEIGHT),
                            bias.get(k * PER + j, ABSENT_BIAS));
        pack<T>(v, word);
        d = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }
  u32 m = cast.delayed.grid_max ? patch.amax(cast, tile) : 0;
  if (inside) {
    float q = reciprocal(scale);
    if (cast.rowwise) patch.template store_rows<F>(cast, r, c, q);
    if (cast.columnwise) patch.template store_columns<F>(cast, r, c, q);
  }
  if (cast.delayed.grid_max) {
    m = block_max(m);
    if (last_of(cast.delayed.grid_max, gridDim.x, m)) finish_delayed(cast.delayed, scale, m);
  }
}

template <class T, class F> DEVICE void norm_strided(const NormCastArgs &a) {
  cast_strided<T, F>(a.cast, [&](i64 r, i64 c) {
    float x = T::get(T::load(a.cast.x, r * a.cast.x_rs + c * a.cast.x_cs), 0);
    float weight = a.norm.weight ? T::get(T::load(a.norm.weight, c), 0) : ABSENT_WEIGHT;
    float bias = a.norm.bias ? T::get(T::load(a.norm.bias, c), 0) : ABSENT_BIAS;
    float mean = a.norm.mean ? a.norm.mean[r] : 0.0f;
    return Output<T>::type::bits(normalized(x, mean, a.norm.rstd[r], weight, bias));
  });
}

/// 16-bit rows of up to 8,192 elements and fp32 rows of up to 4,096 are held in registers.
#define NORM(NAME, T, F)                                                                           \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, 3)                                      \
      norm_stats_##NAME(const __grid_constant__ NormStatsArgs a) {                                 \
    norm_stats<T, F, 8 / T::BYTES>(a);                                                             \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, 4)                                      \
      norm_stats_long_##NAME(const __grid_constant__ NormStatsArgs a) {                            \
    norm_stats<T, F, 0>(a);                                                                        \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(128)                                                \
      norm_cast_##NAME(const __grid_constant__ NormCastArgs a) { norm_cast<T, F>(a); }             \
  extern "C" __global__ void __launch_bounds__(256)                                                \
      norm_strided_##NAME(const __grid_constant__ NormCastArgs a) { norm_strided<T, F>(a); }
FOR_TYPES(NORM)
