// MXFP8 with 1x32 blocks in one direction, at the speed of a copy.
//
// A warp processes 1024 elements, which are 32 blocks. With unpacked scales these are 1024
// adjacent elements of a contiguous tensor, so that the scale bytes are written as one 32-byte
// sector. With packed scales they are 8 rows of 128 columns, so that a block of 512 threads
// writes one 128x4 tile. Each 16-byte load of a warp covers 512 (16-bit) or 128 (fp32)
// adjacent elements.
#include "blocks.cuh"

struct MxRowArgs {
  const void *x;
  u8 *codes;
  u8 *scales;
  i64 rows, cols;        // unpacked: 1, and the number of elements, a multiple of 32
  i64 x_rs, codes_rs;    // packed only
  i64 tiles_across;      // packed only
  u32 floor_rule;
  u32 unused;            // pads the struct to a multiple of 8 bytes
};

template <class T> struct MxRow;

/// fp32: 8 groups of 4 elements per thread. 8 lanes share a block.
template <> struct MxRow<InF32> {
  static constexpr int GROUPS = 8, ELEMENTS = 4, LANES = 8, VECTORS = 1;
};
/// 16-bit types: 2 groups of 16 elements per thread. 2 lanes share a block.
struct MxRow16 {
  static constexpr int GROUPS = 2, ELEMENTS = 16, LANES = 2, VECTORS = 2;
};
template <> struct MxRow<InBf16> : MxRow16 {};
template <> struct MxRow<InF16> : MxRow16 {};

template <class T, class F, bool PACKED> DEVICE void mx_row(const MxRowArgs &a) {
  typedef MxRow<T> S;
  constexpr int WORDS = 4 * S::VECTORS;              // registers per group
  constexpr int SPAN = 32 * S::ELEMENTS;             // elements of a group over all lanes
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  i64 tile_row = 0, tile_col = 0, warp_at = 0;
  if (PACKED) {
    tile_row = blockIdx.x / a.tiles_across;
    tile_col = blockIdx.x - tile_row * a.tiles_across;
  } else {
    warp_at = ((i64)blockIdx.x * (blockDim.x >> 5) + warp) * 1024;
  }
  const char *from[S::GROUPS];
  i64 to[S::GROUPS];
  bool inside[S::GROUPS];
#pragma unroll
  for (int g = 0; g < S::GROUPS; g++) {
    if (PACKED) {
      int e = g * SPAN + lane * S::ELEMENTS;         // in the warp's 8x128 elements
      i64 r = tile_row * 128 + warp * 8 + e / 128, c = tile_col * 128 + e % 128;
      inside[g] = r < a.rows && c < a.cols;
      from[g] = (const char *)a.x + (r * a.x_rs + c) * T::BYTES;
      to[g] = r * a.codes_rs + c;
    } else {
      to[g] = warp_at + g * SPAN + lane * S::ELEMENTS;
      inside[g] = to[g] < a.cols;
      from[g] = (const char *)a.x + to[g] * T::BYTES;
    }
  }
  u32 d[S::GROUPS][WORDS];
#pragma unroll
  for (int g = 0; g < S::GROUPS; g++)
#pragma unroll
    for (int v = 0; v < S::VECTORS; v++) {
      uint4 w = make_uint4(0, 0, 0, 0);
      if (inside[g]) w = ((const uint4 *)from[g])[v];
      d[g][4 * v] = w.x, d[g][4 * v + 1] = w.y, d[g][4 * v + 2] = w.z, d[g][4 * v + 3] = w.w;
    }

  // After this, each lane has the scale byte of one of the warp's 32 blocks.
  u32 byte;
  int group;                                         // the block's group
  if (T::PER_REG == 2) {
    u32 m[2];
#pragma unroll
    for (int g = 0; g < 2; g++) {
      const u32(&w)[WORDS] = d[g];
      u32 n[4];
#pragma unroll
      for (int i = 0; i < 4; i++) n[i] = T::amax(w[i], w[(i + 4) % WORDS]);
      m[g] = T::amax(T::amax(n[0], n[1]), T::amax(n[2], n[3]));
    }
    u32 both = T::amax(byte_permute(m[0], m[1], 0x5410), byte_permute(m[0], m[1], 0x7632));
    both = T::amax(both, shuffle_xor(both, 1));
    group = lane & 1;
    byte = e8m0_byte<F>(group ? T::amax_bits(both, T::PER_REG - 1) : T::amax_bits(both, 0),
                        a.floor_rule);
  } else {
    u32 unit[S::GROUPS];
#pragma unroll
    for (int g = 0; g < S::GROUPS; g++)
      unit[g] = T::amax(T::amax(d[g][0], d[g][1]), T::amax(d[g][2], d[g][3]));
    group = 0;
    int count = S::GROUPS;
#pragma unroll
    for (int mask = 1; mask < S::LANES; mask *= 2) {
      fold_halves<T>(unit, count, lane, mask);
      count /= 2;
      if (lane & mask) group += count;
    }
    byte = e8m0_byte<F>(T::amax_bits(unit[0], 0), a.floor_rule);
  }

#pragma unroll
  for (int g = 0; g < S::GROUPS; g++) {
    // The lane of this block that holds group g's byte. `fold_halves` halves the highest bit
    // of g first.
    int owner = S::LANES == 2 ? g : (g >> 2 & 1) | (g & 2) | (g & 1) << 2;
    u32 b = __shfl_sync(0xffffffffu, byte, (lane & ~(S::LANES - 1)) | owner);
    float f = e8m0_factor(b);
    u32 word[S::ELEMENTS / 4];
#pragma unroll
    for (int i = 0; i < S::ELEMENTS / 4; i++) {
      float v[4];
#pragma unroll
      for (int j = 0; j < 4; j++)
        v[j] = T::get(d[g][(4 * i + j) / T::PER_REG], j % T::PER_REG) * f;
      word[i] = F::pair(v[0], v[1]) | (u32)F::pair(v[2], v[3]) << 16;
    }
    if (inside[g]) {
      if (S::ELEMENTS == 16)
        *(uint4 *)(a.codes + to[g]) =
            make_uint4(word[0], word[1 % (S::ELEMENTS / 4)], word[2 % (S::ELEMENTS / 4)],
                       word[3 % (S::ELEMENTS / 4)]);
      else *(u32 *)(a.codes + to[g]) = word[0];
    }
  }

  int block = group * (SPAN / 32) + lane / S::LANES; // in the warp's 32 blocks
  if (PACKED) {
    // The warp's blocks are 8 rows of 4. Zeros outside the tensor yield byte 0, which is the
    // padding.
    __shared__ __align__(16) u8 tile[512];
    int r = warp * 8 + block / 4;
    tile[(r % 32) * 16 + r / 32 * 4 + block % 4] = byte;
    __syncthreads();
    if (threadIdx.x < 32)
      ((uint4 *)(a.scales + (i64)blockIdx.x * 512))[threadIdx.x] =
          ((const uint4 *)tile)[threadIdx.x];
  } else {
    i64 at = warp_at / 32 + block;
    if (at * 32 < a.cols) a.scales[at] = byte;
  }
}

#define MX_ROW(NAME, T, F)                                                                       \
  extern "C" __global__ void __launch_bounds__(256) mx_row_##NAME(                                \
      const __grid_constant__ MxRowArgs a) {                                                      \
    mx_row<T, F, false>(a);                                                                       \
  }                                                                                               \
  extern "C" __global__ void __launch_bounds__(512) mx_row_packed_##NAME(                         \
      const __grid_constant__ MxRowArgs a) {                                                      \
    mx_row<T, F, true>(a);                                                                        \
  }

FOR_TYPES(MX_ROW)
