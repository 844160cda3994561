// The weighted sum of the rows of each token, and its gradients (format/sum.rs). A token has `k`
// rows, whose indices are in `token_rows`.
#include "vectors.cuh"

/// The arguments of all kernels, mirrored by `CombineArgs` in the launch code.
struct CombineArgs {
  const void *rows;         // (count, cols), or null in a backward without `d_weights`
  const void *grad;         // (tokens, cols), in the backward
  const i64 *token_rows;    // (tokens, k), contiguous
  const void *weights;      // (tokens, k), contiguous, or null
  void *out;                // the sums (tokens, cols), or the gradient of rows (count, cols) or null;
                            // contiguous
  float *d_weights;         // (tokens, k), contiguous, or null
  i64 rows_rs, rows_cs, grad_rs, grad_cs;
  i64 count, tokens, k, cols;
  u32 flags;
  u32 lanes;                // threads of a token in the backward: a power of two, whole warps
};

enum : u32 {
  ROWS_VECTORS = 1,  // rows are contiguous, 16-byte aligned and less than 2^31 bytes apart
  GRAD_VECTORS = 2,  // rows of `grad` are contiguous and 16-byte aligned
  OUT_VECTORS = 4,   // rows of `out` are 16-byte aligned
  F32_WEIGHTS = 8,   // weights are fp32, and otherwise of the type of the rows
};

#define THREADS 256

/// N rows of a token.
template <int N> struct Terms {
  int rows[N];  // -1 for indices that are not rows
  float weights[N];
};

/// Reads the indices and weights of a token's rows, from the `first`-th on, which exists. After the
/// last one, the last one is read again, because a branch between the loads would make each wait.
template <class T, int N> DEVICE void read_terms(const CombineArgs &a, i64 token, i64 first,
                                                 Terms<N> &terms) {
  i64 start = token * a.k + first;
  u32 count = a.k - first < N ? (u32)(a.k - first) : N;
  i64 row[N];
#pragma unroll
  for (u32 i = 0; i < N; i++) row[i] = a.token_rows[start + (i < count ? i : count - 1)];
#pragma unroll
  for (int i = 0; i < N; i++) terms.weights[i] = 1.0f;
  if (a.flags & F32_WEIGHTS) {
    const float *weights = (const float *)a.weights + start;
#pragma unroll
    for (u32 i = 0; i < N; i++) terms.weights[i] = weights[i < count ? i : count - 1];
  } else if (a.weights) {
    const char *weights = (const char *)a.weights + start * T::BYTES;
#pragma unroll
    for (u32 i = 0; i < N; i++)
      terms.weights[i] = T::get(T::load(weights, i < count ? i : count - 1), 0);
  }
#pragma unroll
  for (u32 i = 0; i < N; i++) {
    bool exists = i < count && (u64)row[i] < (u64)a.count;
    terms.rows[i] = exists ? (int)row[i] : -1;
  }
}

/// Loads 16 bytes that no other thread reads, or zeros. The load is predicated, because a branch
/// would make the next load wait.
DEVICE void load_once(const char *at, bool exists, u32 (&d)[4]) {
  asm("{\n"
      ".reg .pred exists;\n"
      "setp.ne.u32 exists, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@exists ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "l"(at), "r"((u32)exists));
}

/// Loads 16 bytes of each of N rows, from column `col` on. Rows that do not exist are 0.
template <class T, int N>
DEVICE void load_rows(const CombineArgs &a, const Terms<N> &terms, i64 col, u32 (&d)[N][4]) {
  if ((a.flags & ROWS_VECTORS) && col + 4 * T::PER_REG <= a.cols) {
    const char *rows = (const char *)a.rows + col * T::BYTES;
    int pitch = (int)a.rows_rs * T::BYTES;
#pragma unroll
    for (int i = 0; i < N; i++) {
      int row = terms.rows[i];
      load_once(rows + (i64)row * pitch, row >= 0, d[i]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < N; i++) {
    int row = terms.rows[i];
    d[i][0] = d[i][1] = d[i][2] = d[i][3] = 0;
    if (row >= 0) load_vector<T>(a.rows, a.rows_rs, a.rows_cs, false, row, col, a.cols, d[i]);
  }
}

/// Each thread sums 16 bytes of columns of one token's rows, N rows at a time.
template <class T, int N> DEVICE void combine(const CombineArgs &a) {
  constexpr int COLS = 4 * T::PER_REG;
  i64 across = (a.cols + COLS - 1) / COLS;
  i64 index = (i64)blockIdx.x * THREADS + threadIdx.x;
  i64 token = index / across, col = (index - token * across) * COLS;
  if (token >= a.tokens) return;
  float sums[COLS];
#pragma unroll
  for (int c = 0; c < COLS; c++) sums[c] = 0.0f;
#pragma unroll 1
  for (i64 first = 0; first < a.k; first += N) {
    Terms<N> terms;
    u32 d[N][4];
    read_terms<T, N>(a, token, first, terms);
    load_rows<T, N>(a, terms, col, d);
#pragma unroll
    for (int i = 0; i < N; i++) {
      if (first + i >= a.k) break;
#pragma unroll
      for (int c = 0; c < COLS; c++) {
        float value = T::get(d[i][c / T::PER_REG], c % T::PER_REG);
        sums[c] = __fadd_rn(sums[c], __fmul_rn(terms.weights[i], value));
      }
    }
  }
  u32 packed[4];
  pack<T>(sums, packed);
  char *to = (char *)a.out + (token * a.cols + col) * T::BYTES;
  store_vector<T>(to, a.flags & OUT_VECTORS, col, a.cols, packed);
}

/// A token's threads take columns in turn. They keep 16 bytes of the gradient in registers for N
/// rows, and add their products in a fixed order.
template <class T, int N> DEVICE void combine_backward(const CombineArgs &a) {
  constexpr int COLS = 4 * T::PER_REG;
  __shared__ float parts[THREADS / 32][N];
  u32 lane = threadIdx.x & (a.lanes - 1), warp = threadIdx.x >> 5;
  i64 token = (i64)blockIdx.x * (THREADS / a.lanes) + threadIdx.x / a.lanes;
  i64 cols = token < a.tokens ? a.cols : 0;
#pragma unroll 1
  for (i64 first = 0; first < a.k; first += N) {
    Terms<N> terms;
    float sums[N];
#pragma unroll
    for (int i = 0; i < N; i++) sums[i] = 0.0f;
    if (cols) read_terms<T, N>(a, token, first, terms);
#pragma unroll 1
    for (i64 col = lane * COLS; col < cols; col += a.lanes * COLS) {
      u32 g[4], d[N][4];
      float grad[COLS];
      if (a.d_weights) load_rows<T, N>(a, terms, col, d);
      load_vector<T>(a.grad, a.grad_rs, a.grad_cs, a.flags & GRAD_VECTORS, token, col, a.cols, g);
#pragma unroll
      for (int c = 0; c < COLS; c++) grad[c] = T::get(g[c / T::PER_REG], c % T::PER_REG);
      if (a.d_weights) {
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
          for (int c = 0; c < COLS; c++) {
            float value = T::get(d[i][c / T::PER_REG], c % T::PER_REG);
            sums[i] = __fadd_rn(sums[i], __fmul_rn(grad[c], value));
          }
      }
      if (!a.out) continue;
#pragma unroll
      for (int i = 0; i < N; i++) {
        if (terms.rows[i] < 0) continue;
        float product[COLS];
        u32 packed[4];
#pragma unroll
        for (int c = 0; c < COLS; c++) product[c] = __fmul_rn(terms.weights[i], grad[c]);
        pack<T>(product, packed);
        char *to = (char *)a.out + (terms.rows[i] * a.cols + col) * T::BYTES;
        store_vector<T>(to, a.flags & OUT_VECTORS, col, a.cols, packed);
      }
    }
    if (!a.d_weights) continue;
#pragma unroll
    for (int i = 0; i < N; i++) {
#pragma unroll
      for (int mask = 16; mask; mask /= 2) {
        u32 other = shuffle_xor(__float_as_uint(sums[i]), mask);
        sums[i] = __fadd_rn(sums[i], __uint_as_float(other));
      }
      if ((threadIdx.x & 31) == 0) parts[warp][i] = sums[i];
    }
    __syncthreads();
    if (token < a.tokens && lane < N && first + lane < a.k) {
      float sum = 0.0f;
      for (u32 i = 0; i < a.lanes / 32; i++) sum = __fadd_rn(sum, parts[warp + i][lane]);
      a.d_weights[token * a.k + first + lane] = __uint_as_float(OutF32::bits(sum));
    }
    __syncthreads();
  }
}

#define COMBINE_KERNELS(NAME, T)                                                                   \
  extern "C" __global__ void __launch_bounds__(THREADS, 6)                                         \
      combine_2_##NAME(const __grid_constant__ CombineArgs a) {                                    \
    combine<T, 2>(a);                                                                              \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(THREADS, 3)                                         \
      combine_8_##NAME(const __grid_constant__ CombineArgs a) {                                    \
    combine<T, 8>(a);                                                                              \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(THREADS, 4)                                         \
      combine_backward_2_##NAME(const __grid_constant__ CombineArgs a) {                           \
    combine_backward<T, 2>(a);                                                                     \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                                         \
      combine_backward_8_##NAME(const __grid_constant__ CombineArgs a) {                           \
    combine_backward<T, 8>(a);                                                                     \
  }

FOR_INPUTS(COMBINE_KERNELS)
