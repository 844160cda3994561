// Rotary position embeddings (format/rotation.rs).
#include "vectors.cuh"

struct RotationArgs {
  const void *x;         // (rows, heads * 2 * half)
  const float *cos;      // (positions, 2 * half), contiguous
  const float *sin;
  void *out;             // contiguous
  u64 rows, positions;   // row r is at position r % positions
  i64 x_rs, x_cs;
  u32 heads, half;
  u32 back;              // multiply by the transposed matrix
  u32 unused;            // pads the struct to a multiple of 8 bytes
};

/// The place of a thread's elements in the first half of a head. Those in the second half are `half`
/// columns to the right.
struct Place {
  u64 row;
  u32 col;               // in the row
  u64 angle;             // of cosines and sines
};

/// Places a thread that has `elements` of each half. Returns false if there is nothing left.
DEVICE bool place(const RotationArgs &a, u32 elements, Place &p) {
  u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  u32 of_head = a.half / elements, of_row = a.heads * of_head;
  if (thread >= a.rows * of_row) return false;
  p.row = thread / of_row;
  u32 item = (u32)(thread - p.row * of_row), head = item / of_head;
  u32 channel = (item - head * of_head) * elements;
  p.col = head * 2 * a.half + channel;
  p.angle = p.row % a.positions * 2 * a.half + channel;
  return true;
}

/// The angles of two elements of a head.
struct Angles {
  float first_cos, second_cos, first_sin, second_sin;
};

/// Rotates two elements in place.
DEVICE void rotate(const Angles &angles, bool back, float &first, float &second) {
  float first_term = back ? __fmul_rn(second, angles.second_sin) : -__fmul_rn(second, angles.first_sin);
  float second_term = back ? -__fmul_rn(first, angles.first_sin) : __fmul_rn(first, angles.second_sin);
  first = __fadd_rn(__fmul_rn(first, angles.first_cos), first_term);
  second = __fadd_rn(__fmul_rn(second, angles.second_cos), second_term);
}

/// Loads numbers from a 16-byte boundary.
template <u32 COUNT> DEVICE void load_floats(const float *from, float (&v)[COUNT]) {
#pragma unroll
  for (u32 k = 0; k < COUNT; k += 4) {
    float4 four = *(const float4 *)(from + k);
    v[k] = four.x, v[k + 1] = four.y, v[k + 2] = four.z, v[k + 3] = four.w;
  }
}

/// Rows and outputs are contiguous and 16-byte aligned, and so are the halves of heads.
template <class T> DEVICE void rotate_vectors(const RotationArgs &a) {
  constexpr u32 COLS = 4 * T::PER_REG;
  Place p;
  if (!place(a, COLS, p)) return;
  const char *from = (const char *)a.x + ((i64)p.row * a.x_rs + p.col) * T::BYTES;
  const uint4 first = *(const uint4 *)from;
  const uint4 second = *(const uint4 *)(from + (u64)a.half * T::BYTES);
  const u32 firsts[4] = {first.x, first.y, first.z, first.w};
  const u32 seconds[4] = {second.x, second.y, second.z, second.w};
  float first_cos[COLS], second_cos[COLS], first_sin[COLS], second_sin[COLS];
  load_floats(a.cos + p.angle, first_cos);
  load_floats(a.cos + p.angle + a.half, second_cos);
  load_floats(a.sin + p.angle, first_sin);
  load_floats(a.sin + p.angle + a.half, second_sin);

  float v[COLS], w[COLS];
#pragma unroll
  for (u32 j = 0; j < COLS; j++) {
    v[j] = T::get(firsts[j / T::PER_REG], j % T::PER_REG);
    w[j] = T::get(seconds[j / T::PER_REG], j % T::PER_REG);
    rotate({first_cos[j], second_cos[j], first_sin[j], second_sin[j]}, a.back, v[j], w[j]);
  }
  u32 to_first[4], to_second[4];
  pack<T>(v, to_first);
  pack<T>(w, to_second);
  u64 cols = (u64)a.heads * 2 * a.half;
  char *to = (char *)a.out + (p.row * cols + p.col) * T::BYTES;
  *(uint4 *)to = make_uint4(to_first[0], to_first[1], to_first[2], to_first[3]);
  *(uint4 *)(to + (u64)a.half * T::BYTES) =
      make_uint4(to_second[0], to_second[1], to_second[2], to_second[3]);
}

/// Any strides of `x`, and any alignment.
template <class T> DEVICE void rotate_elements(const RotationArgs &a) {
  typedef typename Output<T>::type O;
  Place p;
  if (!place(a, 1, p)) return;
  i64 at = (i64)p.row * a.x_rs + p.col * a.x_cs;
  float first = T::get(T::load(a.x, at), 0);
  float second = T::get(T::load(a.x, at + a.half * a.x_cs), 0);
  const float *cos = a.cos + p.angle, *sin = a.sin + p.angle;
  rotate({cos[0], cos[a.half], sin[0], sin[a.half]}, a.back, first, second);
  u64 to = p.row * a.heads * 2 * a.half + p.col;
  if (T::BYTES == 4) {
    ((u32 *)a.out)[to] = O::bits(first);
    ((u32 *)a.out)[to + a.half] = O::bits(second);
  } else {
    ((u16 *)a.out)[to] = (u16)O::bits(first);
    ((u16 *)a.out)[to + a.half] = (u16)O::bits(second);
  }
}

#define ROTATE(NAME, T)                                                                            \
  extern "C" __global__ void __launch_bounds__(256)                                                \
      rotate_##NAME(const __grid_constant__ RotationArgs a) { rotate_vectors<T>(a); }              \
  extern "C" __global__ void __launch_bounds__(256)                                                \
      strided_rotate_##NAME(const __grid_constant__ RotationArgs a) { rotate_elements<T>(a); }
FOR_INPUTS(ROTATE)
