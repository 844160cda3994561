// Gated activations of two matrices and their gradients (format/activation.rs), for quantization
// with one scale per tensor.
//
// With delayed scaling and a layout that allows tiles, one launch casts the values, which are rounded
// to the input's type first and never written. Otherwise the kernels write them, and with current
// scaling the scales. Further launches cast the values.
#include "activation.cuh"
#include "patch.cuh"
#include "strided.cuh"

struct GluArgs {
  const void *gate;      // (rows, cols)
  const void *up;
  const void *dy;        // the gradient of the product, or null
  void *values;          // output, contiguous: the product, or the gradient of gate
  void *up_values;       // output, contiguous: the gradient of up
  float *scale;          // output, or null
  float *up_scale;       // output, with `scale`
  GridMax *grid_max;     // with `scale`, one for each output
  i64 rows, cols;
  i64 gate_rs, gate_cs, up_rs, up_cs, dy_rs, dy_cs;
  Rule rule;
  u32 gelu;              // the activation: SiLU, or GELU
  u32 flags;
  u32 unused;            // pads the struct to a multiple of 8 bytes
};

enum : u32 { VECTORS = 1 };  // rows of all inputs and outputs are contiguous and 16-byte aligned

template <class T, class F, bool GRADIENTS> DEVICE void glu(const GluArgs &a) {
  constexpr int COLS = 4 * T::PER_REG;
  const bool vectors = a.flags & VECTORS;
  // Threads process vectors in turn, row by row. The step to a thread's next vector is divided into
  // rows and vectors once. A division for each vector would cost as much as the activation.
  i64 row_vectors = a.cols ? (a.cols + COLS - 1) / COLS : 1;
  i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x, step = (i64)gridDim.x * blockDim.x;
  i64 row = first / row_vectors, vector = first - row * row_vectors;
  i64 row_step = step / row_vectors, vector_step = step - row_step * row_vectors;
  u32 amax = 0, up_amax = 0;
  while (row < a.rows) {
    i64 col = vector * COLS;
    u32 gate[4], up[4], dy[4];
    load_vector<T>(a.gate, a.gate_rs, a.gate_cs, vectors, row, col, a.cols, gate);
    load_vector<T>(a.up, a.up_rs, a.up_cs, vectors, row, col, a.cols, up);
    if (GRADIENTS) load_vector<T>(a.dy, a.dy_rs, a.dy_cs, vectors, row, col, a.cols, dy);

    // Elements outside are 0.
    u32 values[4], up_values[4];
    glu_vector<T, GRADIENTS>(a.gelu, gate, up, dy, values, up_values, amax, up_amax);
    i64 offset = (row * a.cols + col) * T::BYTES;
    store_vector<T>((char *)a.values + offset, vectors, col, a.cols, values);
    if (GRADIENTS) store_vector<T>((char *)a.up_values + offset, vectors, col, a.cols, up_values);

    row += row_step;
    vector += vector_step;
    if (vector >= row_vectors) {
      vector -= row_vectors;
      row++;
    }
  }

  if (!a.scale) return;
  u32 max_bits = block_max(magnitude<T>(amax));
  if (last_of(a.grid_max, gridDim.x, max_bits)) *a.scale = scale_of<F>(max_bits, a.rule);
  if (!GRADIENTS) return;
  __syncthreads();  // the shared memory of the first maximum is used again
  max_bits = block_max(magnitude<T>(up_amax));
  if (last_of(a.grid_max + 1, gridDim.x, max_bits)) *a.up_scale = scale_of<F>(max_bits, a.rule);
}

struct GluCastArgs {
  StridedArgs cast;      // of the product, or of the gradient of gate; x is gate
  StridedArgs up_cast;   // of the gradient of up; x is up
  const void *dy;        // the gradient of the product, or null
  i64 dy_rs;
  u32 gelu;              // the activation: SiLU, or GELU
  u32 unused;            // pads the struct to a multiple of 8 bytes
};

/// Casts half a tile of the product, or of both gradients, with delayed scaling. The arguments have the
/// layout that `CastTransposeArgs` requires.
///
/// A thread computes the vectors of its patch in a loop and stores them in shared memory, because
/// registers have no index. No other thread reads them. A patch has half of the rows of other casts, so
/// that more threads are resident, which wait for their inputs before they compute.
template <class T, class F, bool GRADIENTS> DEVICE void glu_cast(const GluCastArgs &a) {
  typedef Patch<T, Patch<T>::ROWS / 2> P;
  constexpr int OUTPUTS = GRADIENTS ? 2 : 1, COUNT = P::ROWS * P::VECTORS;
  __shared__ uint4 vectors[OUTPUTS][COUNT][P::THREADS];
  P patch;
  i64 r, c;
  bool inside = patch.place(a.cast, blockIdx.x, r, c);
  u32 maxima[2] = {0, 0};
  if (inside) {
    auto load = [&](const void *x, i64 rs, int i, u32 (&d)[4]) {
      const char *at = (const char *)x + ((r + i / P::VECTORS) * rs + c) * T::BYTES;
      uint4 v = ((const uint4 *)at)[i % P::VECTORS];
      d[0] = v.x, d[1] = v.y, d[2] = v.z, d[3] = v.w;
    };
#pragma unroll 2
    for (int i = 0; i < COUNT; i++) {
      u32 gate[4], up[4], dy[4], values[4], up_values[4];
      load(a.cast.x, a.cast.x_rs, i, gate);
      load(a.up_cast.x, a.up_cast.x_rs, i, up);
      if (GRADIENTS) load(a.dy, a.dy_rs, i, dy);
      glu_vector<T, GRADIENTS>(a.gelu, gate, up, dy, values, up_values, maxima[0], maxima[1]);
      vectors[0][i][threadIdx.x] = make_uint4(values[0], values[1], values[2], values[3]);
      if (GRADIENTS)
        vectors[OUTPUTS - 1][i][threadIdx.x] =
            make_uint4(up_values[0], up_values[1], up_values[2], up_values[3]);
    }
  }
#pragma unroll
  for (int output = 0; output < OUTPUTS; output++) {
    const StridedArgs &cast = output == 0 ? a.cast : a.up_cast;
    float scale = *cast.scale;
    if (inside) {
#pragma unroll
      for (int i = 0; i < COUNT; i++) patch.v[i] = vectors[output][i][threadIdx.x];
      float q = reciprocal(scale);
      if (cast.rowwise) patch.template store_rows<F>(cast, r, c, q);
      if (cast.columnwise) patch.template store_columns<F>(cast, r, c, q);
    }
    if (output > 0) __syncthreads();  // the shared memory of the first maximum is used again
    u32 max_bits = block_max(magnitude<T>(maxima[output]));
    if (last_of(cast.delayed.grid_max, gridDim.x, max_bits))
      finish_delayed(cast.delayed, scale, max_bits);
  }
}

// The casts have as many blocks on a multiprocessor as registers allow without spills.
#define GLU(NAME, T, F)                                                                            \
  extern "C" __global__ void __launch_bounds__(256)                                                \
      glu_##NAME(const __grid_constant__ GluArgs a) { glu<T, F, false>(a); }                       \
  extern "C" __global__ void __launch_bounds__(256)                                                \
      glu_gradients_##NAME(const __grid_constant__ GluArgs a) { glu<T, F, true>(a); }              \
  extern "C" __global__ void __launch_bounds__(128, 9)                                             \
      glu_cast_##NAME(const __grid_constant__ GluCastArgs a) { glu_cast<T, F, false>(a); }         \
  extern "C" __global__ void __launch_bounds__(128, 6)                                             \
      glu_cast_gradients_##NAME(const __grid_constant__ GluCastArgs a) { glu_cast<T, F, true>(a); }
FOR_TYPES(GLU)
