// Gated activations of two matrices with quantization of their result and of their gradients
// (format/activation.rs).
//
// With current scaling, the first launch computes the scales, and further launches cast in both
// directions. Every launch reads the inputs and computes the values again.
#include "activation.cuh"
#include "fused.cuh"

/// What a launch computes.
enum Wanted : u32 { PRODUCT, GATE_GRADIENT, UP_GRADIENT, BOTH_GRADIENTS };

/// The factors besides the gate.
struct FactorArgs {
  const void *up;
  const void *dy;        // the gradient of the product, for gradients
  i64 up_rs, up_cs, dy_rs, dy_cs;
  u32 gelu;              // the activation: SiLU, or GELU
  Wanted wanted;
};

/// Returns the product or one gradient.
DEVICE float glu_value(const FactorArgs &f, float gate, float up, float dy) {
  Activated a = activate(f.gelu, gate);
  if (f.wanted == PRODUCT) return __fmul_rn(a.value, up);
  if (f.wanted == GATE_GRADIENT) return __fmul_rn(__fmul_rn(dy, up), a.derivative);
  return __fmul_rn(dy, a.value);
}

struct GluScaleArgs {
  const void *gate;      // (rows, cols)
  FactorArgs factors;    // PRODUCT or BOTH_GRADIENTS
  float *scale;          // output, of the product or of the gradient of gate
  float *up_scale;       // output, of the gradient of up
  GridMax *grid_max;     // two of them
  i64 rows, cols;
  i64 gate_rs, gate_cs;
  Rule rule;
  u32 flags;
};

enum : u32 { VECTORS = 1 };  // rows of all inputs are contiguous and 16-byte aligned

template <class T, class F> DEVICE void glu_scale(const GluScaleArgs &a) {
  constexpr int COLS = 4 * T::PER_REG;
  const FactorArgs &f = a.factors;
  const bool gradients = f.wanted != PRODUCT, vectors = a.flags & VECTORS;
  i64 across = (a.cols + COLS - 1) / COLS, count = a.rows * across;
  u32 m = 0, up_m = 0;
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += (i64)gridDim.x * blockDim.x) {
    i64 row = a.rows == 1 ? 0 : i / across, col = (i - row * across) * COLS;
    u32 gate[4], up[4], dy[4] = {0, 0, 0, 0};
    load_vector<T>(a.gate, a.gate_rs, a.gate_cs, vectors, row, col, a.cols, gate);
    load_vector<T>(f.up, f.up_rs, f.up_cs, vectors, row, col, a.cols, up);
    if (gradients) load_vector<T>(f.dy, f.dy_rs, f.dy_cs, vectors, row, col, a.cols, dy);
    // Elements outside are 0, and so are their products and gradients.
    float v[COLS], w[COLS];
#pragma unroll
    for (int j = 0; j < COLS; j++) {
      int r = j / T::PER_REG, e = j % T::PER_REG;
      Activated found = activate(f.gelu, T::get(gate[r], e));
      float u = T::get(up[r], e), g = T::get(dy[r], e);
      v[j] = gradients ? __fmul_rn(__fmul_rn(g, u), found.derivative) : __fmul_rn(found.value, u);
      w[j] = __fmul_rn(g, found.value);
    }
    pack<T>(v, gate);
#pragma unroll
    for (int k = 0; k < 4; k++) m = T::amax(m, gate[k]);
    if (gradients) {
      pack<T>(w, up);
#pragma unroll
      for (int k = 0; k < 4; k++) up_m = T::amax(up_m, up[k]);
    }
  }
  u32 most = block_max(magnitude<T>(m));
  if (last_of(a.grid_max, gridDim.x, most)) *a.scale = scale_of<F>(most, a.rule);
  if (!gradients) return;
  __syncthreads();  // the shared memory of the first maximum is used again
  most = block_max(magnitude<T>(up_m));
  if (last_of(a.grid_max + 1, gridDim.x, most)) *a.up_scale = scale_of<F>(most, a.rule);
}

struct GluCastArgs {
  StridedArgs cast;      // its input is the gate
  FactorArgs factors;    // PRODUCT, GATE_GRADIENT or UP_GRADIENT
};

template <class T, class F> DEVICE void glu_cast(const GluCastArgs &a) {
  const FactorArgs &f = a.factors;
  cast_patch<T, F>(a.cast, [&](Patch<T> &patch, i64 r, i64 c) {
    constexpr int PER = 4 * T::PER_REG;
    const bool gradient = f.wanted != PRODUCT, needs_up = f.wanted != UP_GRADIENT;
    patch.load(a.cast, blockIdx.x);
    const char *ups = (const char *)f.up + (r * f.up_rs + c) * T::BYTES;
    const char *dys = (const char *)f.dy + (r * f.dy_rs + c) * T::BYTES;
#pragma unroll
    for (int i = 0; i < Patch<T>::ROWS; i++) {
#pragma unroll
      for (int k = 0; k < Patch<T>::VECTORS; k++) {
        uint4 &d = patch.v[i * Patch<T>::VECTORS + k];
        uint4 u = make_uint4(0, 0, 0, 0), g = make_uint4(0, 0, 0, 0);
        if (needs_up) u = ((const uint4 *)(ups + i * f.up_rs * T::BYTES))[k];
        if (gradient) g = ((const uint4 *)(dys + i * f.dy_rs * T::BYTES))[k];
        u32 gate[4] = {d.x, d.y, d.z, d.w};
        u32 up[4] = {u.x, u.y, u.z, u.w}, dy[4] = {g.x, g.y, g.z, g.w};
        float v[PER];
#pragma unroll
        for (int j = 0; j < PER; j++) {
          int w = j / T::PER_REG, e = j % T::PER_REG;
          v[j] = glu_value(f, T::get(gate[w], e), T::get(up[w], e), T::get(dy[w], e));
        }
        pack<T>(v, gate);
        d = make_uint4(gate[0], gate[1], gate[2], gate[3]);
      }
    }
  });
}

template <class T, class F> DEVICE void glu_strided(const GluCastArgs &a) {
  const FactorArgs &f = a.factors;
  cast_strided<T, F>(a.cast, [&](i64 r, i64 c) {
    float gate = T::get(T::load(a.cast.x, r * a.cast.x_rs + c * a.cast.x_cs), 0);
    float up = T::get(T::load(f.up, r * f.up_rs + c * f.up_cs), 0);
    float dy = f.dy ? T::get(T::load(f.dy, r * f.dy_rs + c * f.dy_cs), 0) : 0.0f;
    return rounded<T>(glu_value(f, gate, up, dy));
  });
}

#define GLU(NAME, T, F)                                                                            \
  extern "C" __global__ void __launch_bounds__(256)                                                \
      glu_scale_##NAME(const __grid_constant__ GluScaleArgs a) { glu_scale<T, F>(a); }             \
  extern "C" __global__ void __launch_bounds__(128)                                                \
      glu_cast_##NAME(const __grid_constant__ GluCastArgs a) { glu_cast<T, F>(a); }                \
  extern "C" __global__ void __launch_bounds__(256)                                                \
      glu_strided_##NAME(const __grid_constant__ GluCastArgs a) { glu_strided<T, F>(a); }
FOR_TYPES(GLU)
