// Gated activations of two matrices and their gradients (format/activation.rs), for quantization
// with one scale per tensor.
//
// The kernels write values that are rounded to the input's type, and with current scaling the
// scales. Further launches cast the values.
#include "activation.cuh"
#include "vectors.cuh"

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

    float v[COLS];  // the elements of one output: first of `up_values`, then of `values`
    Activated activated[COLS];
    activate<T>(a.gelu, gate, activated);

    // Elements outside are 0, and so are their products and gradients.
    i64 offset = (row * a.cols + col) * T::BYTES;
    if (GRADIENTS) {
#pragma unroll
      for (int j = 0; j < COLS; j++)
        v[j] = __fmul_rn(T::get(dy[j / T::PER_REG], j % T::PER_REG), activated[j].value);
      u32 packed[4];
      up_amax = T::amax(up_amax, pack<T>(v, packed));
      store_vector<T>((char *)a.up_values + offset, vectors, col, a.cols, packed);
    }
#pragma unroll
    for (int j = 0; j < COLS; j++) {
      float u = T::get(up[j / T::PER_REG], j % T::PER_REG);
      if (GRADIENTS) {
        float g = T::get(dy[j / T::PER_REG], j % T::PER_REG);
        v[j] = __fmul_rn(__fmul_rn(g, u), activated[j].derivative);
      } else {
        v[j] = __fmul_rn(activated[j].value, u);
      }
    }
    // The registers of the gate are free now.
    amax = T::amax(amax, pack<T>(v, gate));
    store_vector<T>((char *)a.values + offset, vectors, col, a.cols, gate);

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

#define GLU(NAME, T, F)                                                                            \
  extern "C" __global__ void __launch_bounds__(256)                                                \
      glu_##NAME(const __grid_constant__ GluArgs a) { glu<T, F, false>(a); }                       \
  extern "C" __global__ void __launch_bounds__(256)                                                \
      glu_gradients_##NAME(const __grid_constant__ GluArgs a) { glu<T, F, true>(a); }
FOR_TYPES(GLU)
