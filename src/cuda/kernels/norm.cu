// Norms over rows with quantization of their result (format/norm.rs).
//
// A quantization has two launches. The first computes the statistics of each row and, for current
// scaling, the scale. A block has a row in shared memory, unless the row is long or not aligned. The
// second reads the input again, normalizes it and casts it in both directions.
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

#define WARPS 4          // of a block that computes statistics
#define PER_THREAD 8     // adjacent elements of a thread
#define STEP (WARPS * 32 * PER_THREAD)  // elements that a block reads together
#define STEPS 2          // steps with partial sums of their own
#define LANES (STEPS * STEP)            // partial sums of a row
#define ROW_BYTES 32768  // bytes of rows in the shared memory of a block

/// PER_THREAD adjacent elements of a row.
template <class T> struct Octet {
  static constexpr int PER_VECTOR = 4 * T::PER_REG, VECTORS = PER_THREAD / PER_VECTOR;
  u32 d[VECTORS][4];

  DEVICE void load(const void *x, i64 rs, i64 cs, bool vectors, i64 row, i64 col, i64 cols) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
      load_vector<T>(x, rs, cs, vectors, row, col + v * PER_VECTOR, cols, d[v]);
  }

  /// Loads the elements of whole vectors, of which `at` is the first.
  DEVICE void load(const uint4 *at) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      uint4 vector = at[v];
      d[v][0] = vector.x, d[v][1] = vector.y, d[v][2] = vector.z, d[v][3] = vector.w;
    }
  }

  DEVICE float get(int i) const {
    return T::get(d[i / PER_VECTOR][i % PER_VECTOR / T::PER_REG], i % T::PER_REG);
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

/// Returns the `T::amax` of values rounded to T. They are not stored, so a NaN may have any payload.
template <class T> DEVICE u32 amax_of_rounded(const float (&v)[PER_THREAD]) {
  u32 m = 0;
#pragma unroll
  for (int i = 0; i < PER_THREAD; i += T::PER_REG) {
    if constexpr (T::PER_REG == 1) m = T::amax(m, __float_as_uint(v[i]));
    else m = T::amax(m, Output<T>::type::pair(v[i], v[i + 1]));
  }
  return m;
}

/// The partial sums of a thread.
struct PartialSums {
  float of[STEPS][PER_THREAD];

  DEVICE PartialSums() {
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
      for (int i = 0; i < PER_THREAD; i++) of[s][i] = 0.0f;
  }
};

/// Shared memory for sums over a block.
struct RowSums {
  float warps[2][STEPS * WARPS];

  /// Returns the sum of the partial sums of a block, in all threads. `turn` is the number of sums
  /// before this one. Two sums in succession use different memory, so that one barrier suffices for
  /// each.
  DEVICE float add(const PartialSums &partial, u32 &turn) {
    float sums[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; s++) sums[s] = sum_eight(partial.of[s]);
#pragma unroll
    for (int half = 16; half > 0; half /= 2)
#pragma unroll
      for (int s = 0; s < STEPS; s++) sums[s] = __fadd_rn(sums[s], shuffle_down(sums[s], half));
    float (&warp_sums)[STEPS * WARPS] = warps[turn & 1];
    turn++;
    if ((threadIdx.x & 31) == 0) {
#pragma unroll
      for (int s = 0; s < STEPS; s++) warp_sums[s * WARPS + (threadIdx.x >> 5)] = sums[s];
    }
    __syncthreads();
    return sum_eight(warp_sums);
  }
};

/// The statistics of a row.
struct RowStats {
  float mean, rstd;
};

/// Returns the statistics of a row, and writes them.
DEVICE RowStats finish_row(const NormStatsArgs &a, i64 row, float mean, float sum_of_squares) {
  float mean_square = __fdiv_rn(sum_of_squares, (float)a.cols);
  float rstd = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean_square, a.eps)));
  RowStats stats = {__uint_as_float(OutF32::bits(mean)), __uint_as_float(OutF32::bits(rstd))};
  if (threadIdx.x == 0) {
    a.norm.rstd[row] = stats.rstd;
    if (a.norm.mean) a.norm.mean[row] = stats.mean;
  }
  return stats;
}

/// Writes the scale of a tensor, given the maximum of each thread.
template <class T, class F> DEVICE void finish_scale(const NormStatsArgs &a, u32 amax) {
  u32 max_bits = block_max(magnitude<T>(amax));
  if (last_of(a.grid_max, gridDim.x, max_bits)) *a.scale = scale_of<F>(max_bits, a.rule);
}

/// Computes the statistics of rows, each with a block. Rows may have any length and any layout. They
/// are read again for each sum and for the scale.
template <class T, class F> DEVICE void norm_stats_any(const NormStatsArgs &a) {
  __shared__ RowSums row_sums;
  const bool vectors = a.flags & X_VECTORS, weight_vectors = a.flags & WEIGHT_VECTORS;
  const i64 first = threadIdx.x * PER_THREAD;
  u32 amax = 0, turn = 0;
  for (i64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
    // Calls `f` for each octet of this thread, with its first column and its step.
    auto for_octets = [&](auto f) {
#pragma unroll 1
      for (i64 begin = first; begin < a.cols; begin += LANES)
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
          i64 col = begin + step * STEP;
          Octet<T> x;
          x.load(a.x, a.x_rs, a.x_cs, vectors, row, col, a.cols);
          f(x, col, step);
        }
    };

    float mean = 0.0f;
    if (a.norm.mean) {
      PartialSums sums;
      for_octets([&](const Octet<T> &x, i64, int step) {
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) sums.of[step][i] = __fadd_rn(sums.of[step][i], x.get(i));
      });
      mean = __fdiv_rn(row_sums.add(sums, turn), (float)a.cols);
    }
    PartialSums squares;
    for_octets([&](const Octet<T> &x, i64 col, int step) {
      float (&sums)[PER_THREAD] = squares.of[step];
#pragma unroll
      for (int i = 0; i < PER_THREAD; i++) {
        float d = __fadd_rn(x.get(i), -mean);
        if (col + i < a.cols) sums[i] = __fadd_rn(sums[i], __fmul_rn(d, d));
      }
    });
    RowStats stats = finish_row(a, row, mean, row_sums.add(squares, turn));
    if (!a.scale) continue;
    for_octets([&](const Octet<T> &x, i64 col, int) {
      Parameter<T> weight, bias;
      weight.load(a.norm.weight, weight_vectors, col, a.cols);
      bias.load(a.norm.bias, weight_vectors, col, a.cols);
      float v[PER_THREAD];
#pragma unroll
      for (int i = 0; i < PER_THREAD; i++) {
        v[i] = normalized(x.get(i), stats.mean, stats.rstd, weight.get(i, ABSENT_WEIGHT),
                          bias.get(i, ABSENT_BIAS));
        if (col + i >= a.cols) v[i] = 0.0f;
      }
      amax = T::amax(amax, amax_of_rounded<T>(v));
    });
  }
  if (a.scale) finish_scale<T, F>(a, amax);
}

/// Copies 16 bytes to shared memory. The thread goes on before they arrive.
DEVICE void copy_async(uint4 *to, const uint4 *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}

/// Ends a group of copies.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits for this thread's copies, except for those of the last PENDING groups.
template <int PENDING> DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

/// The shared memory of `norm_stats`.
struct RowBuffers {
  uint4 rows[ROW_BYTES / 16];
  RowSums sums;
};

/// Computes the statistics of rows, each with a block, which has the row in shared memory. While it
/// computes, the next row arrives, if there is space for two. A thread copies the elements that it
/// reads, so that threads do not wait for each other's copies.
///
/// Rows have ROW_BYTES at most and a multiple of PER_THREAD elements. They are contiguous and
/// 16-byte aligned, as are the weight and the bias. With RMS, there is neither a mean nor a bias, and
/// the compiler leaves out both.
template <class T, class F, bool RMS>
DEVICE void norm_stats(const NormStatsArgs &a, RowBuffers &buffers) {
  constexpr int PER = Octet<T>::PER_VECTOR;
  const u32 cols = a.cols, row_vectors = cols / PER, first = threadIdx.x * PER_THREAD;
  const bool two_rows = 2 * row_vectors <= ROW_BYTES / 16;
  uint4 *row_values = buffers.rows;
  uint4 *next_row = two_rows ? row_values + row_vectors : row_values;
  // Copies this thread's octets of a row. Rows after the last one are empty groups.
  auto request = [&](i64 row, uint4 *to) {
    if (row < a.rows) {
      const uint4 *from = (const uint4 *)((const char *)a.x + row * a.x_rs * T::BYTES);
#pragma unroll 1
      for (u32 col = first; col < cols; col += STEP)
#pragma unroll
        for (int v = 0; v < Octet<T>::VECTORS; v++) copy_async(to + col / PER + v, from + col / PER + v);
    }
    commit_copies();
  };
  // Calls `f` for each octet of this thread, with its first column and its step.
  auto for_octets = [&](auto f) {
#pragma unroll 1
    for (u32 begin = first; begin < cols; begin += LANES)
#pragma unroll
      for (int step = 0; step < STEPS; step++) {
        u32 col = begin + step * STEP;
        if (col >= cols) continue;
        Octet<T> x;
        x.load(row_values + col / PER);
        f(x, col, step);
      }
  };

  u32 amax = 0, turn = 0;
  request(blockIdx.x, row_values);
  if (two_rows) request((i64)blockIdx.x + gridDim.x, next_row);
  for (i64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
    if (two_rows) wait_for_copies<1>();
    else wait_for_copies<0>();

    float mean = 0.0f;
    if (!RMS && a.norm.mean) {
      PartialSums sums;
      for_octets([&](const Octet<T> &x, u32, int step) {
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) sums.of[step][i] = __fadd_rn(sums.of[step][i], x.get(i));
      });
      mean = __fdiv_rn(buffers.sums.add(sums, turn), (float)a.cols);
    }
    PartialSums squares;
    for_octets([&](const Octet<T> &x, u32, int step) {
      float (&sums)[PER_THREAD] = squares.of[step];
#pragma unroll
      for (int i = 0; i < PER_THREAD; i++) {
        float d = RMS ? x.get(i) : __fadd_rn(x.get(i), -mean);
        sums[i] = __fadd_rn(sums[i], __fmul_rn(d, d));
      }
    });
    RowStats stats = finish_row(a, row, mean, buffers.sums.add(squares, turn));
    if (a.scale)
      for_octets([&](const Octet<T> &x, u32 col, int) {
        // As `normalized`, with one branch for all elements instead of a selection for each.
        float v[PER_THREAD];
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
          float d = RMS ? x.get(i) : __fadd_rn(x.get(i), -stats.mean);
          v[i] = __fmul_rn(d, stats.rstd);
        }
        if (a.norm.weight) {
          Octet<T> weight;
          weight.load((const uint4 *)a.norm.weight + col / PER);
#pragma unroll
          for (int i = 0; i < PER_THREAD; i++) v[i] = __fmul_rn(v[i], weight.get(i));
        }
        if (!RMS && a.norm.bias) {
          Octet<T> bias;
          bias.load((const uint4 *)a.norm.bias + col / PER);
#pragma unroll
          for (int i = 0; i < PER_THREAD; i++) v[i] = __fadd_rn(v[i], bias.get(i));
        }
        amax = T::amax(amax, amax_of_rounded<T>(v));
      });

    request(row + (i64)gridDim.x * (two_rows ? 2 : 1), row_values);
    uint4 *requested = row_values;
    row_values = next_row;
    next_row = requested;
  }
  if (a.scale) finish_scale<T, F>(a, amax);
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
  // The launch before left the end of the input in the cache, so tiles start from the end.
  i64 tile = gridDim.x - 1 - blockIdx.x, r, c;
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

#define NORM(NAME, T, F)                                                                           \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, 6)                                      \
      norm_stats_##NAME(const __grid_constant__ NormStatsArgs a) {                                 \
    __shared__ RowBuffers buffers;                                                                 \
    if (a.norm.mean || a.norm.bias) norm_stats<T, F, false>(a, buffers);                           \
    else norm_stats<T, F, true>(a, buffers);                                                       \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, 8)                                      \
      norm_stats_any_##NAME(const __grid_constant__ NormStatsArgs a) {                            \
    norm_stats_any<T, F>(a);                                                                      \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(128)                                                \
      norm_cast_##NAME(const __grid_constant__ NormCastArgs a) { norm_cast<T, F>(a); }             \
  extern "C" __global__ void __launch_bounds__(256)                                                \
      norm_strided_##NAME(const __grid_constant__ NormCastArgs a) { norm_strided<T, F>(a); }
FOR_TYPES(NORM)
