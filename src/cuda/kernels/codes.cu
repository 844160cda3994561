// Operations on FP8 codes: transpose, dequantize with the scales of any block shape, and rescale.
#include "values.cuh"

struct TransposeArgs {
  const u8 *codes;
  u8 *out;               // (cols, rows)
  i64 rows, cols;
  i64 codes_rs, codes_cs, out_rs, out_cs;
  i64 codes_bs, out_bs;  // from a matrix of the batch to the next one
  i64 tiles_across, tiles_down;
};

/// The tile of a block, and the start of its matrix.
struct TransposeTile {
  const u8 *codes;
  u8 *out;
  i64 row, col;
};

DEVICE TransposeTile transpose_tile(const TransposeArgs &a, i64 size) {
  i64 down = blockIdx.x / a.tiles_across, matrix = down / a.tiles_down;
  return {a.codes + matrix * a.codes_bs, a.out + matrix * a.out_bs,
          (down - matrix * a.tiles_down) * size, (blockIdx.x - down * a.tiles_across) * size};
}

/// A thread transposes 16 rows of 8 columns, a warp 64x64, and four warps 128x128. The number
/// of rows is a multiple of 16, and of columns a multiple of 8. Rows of both matrices are
/// contiguous and aligned.
extern "C" __global__ void __launch_bounds__(128)
    transpose(const __grid_constant__ TransposeArgs a) {
  TransposeTile t = transpose_tile(a, 128);
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  i64 r = t.row + (warp >> 1) * 64 + (lane >> 3) * 16;
  i64 c = t.col + (warp & 1) * 64 + (lane & 7) * 8;
  if (r >= a.rows || c >= a.cols) return;
  uint2 w[16];
#pragma unroll
  for (int i = 0; i < 16; i++) w[i] = *(const uint2 *)(t.codes + (r + i) * a.codes_rs + c);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32 column[4][4];                                // [rows / 4][column]
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint2 *p = w + 4 * i;
      if (half) transpose_4x4(p[0].y, p[1].y, p[2].y, p[3].y, column[i]);
      else transpose_4x4(p[0].x, p[1].x, p[2].x, p[3].x, column[i]);
    }
#pragma unroll
    for (int j = 0; j < 4; j++)
      *(uint4 *)(t.out + (c + half * 4 + j) * a.out_rs + r) =
          make_uint4(column[0][j], column[1][j], column[2][j], column[3][j]);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    strided_transpose(const __grid_constant__ TransposeArgs a) {
  __shared__ u8 tile[32][33];
  TransposeTile t = transpose_tile(a, 32);
  i64 r0 = t.row, c0 = t.col;
  int across = threadIdx.x & 31, down = threadIdx.x >> 5;
  for (int k = down; k < 32; k += 8)
    if (r0 + k < a.rows && c0 + across < a.cols)
      tile[k][across] = t.codes[(r0 + k) * a.codes_rs + (c0 + across) * a.codes_cs];
  __syncthreads();
  for (int k = down; k < 32; k += 8)
    if (c0 + k < a.cols && r0 + across < a.rows)
      t.out[(c0 + k) * a.out_rs + (r0 + across) * a.out_cs] = tile[across][k];
}

struct DequantizeArgs {
  const u8 *codes;
  const void *scale;     // (rows of blocks, columns of blocks)
  void *out;
  i64 rows, cols;
  i64 codes_rs, codes_cs, scale_rs, scale_cs, out_rs, out_cs;
  i64 block_rows, block_cols;
  u32 e8m0;
};

DEVICE float scale_at(const DequantizeArgs &a, i64 r, i64 c) {
  i64 at = r / a.block_rows * a.scale_rs + c / a.block_cols * a.scale_cs;
  if (!a.e8m0) return ((const float *)a.scale)[at];
  u32 b = ((const u8 *)a.scale)[at];
  return __uint_as_float(b == 255u ? NAN_BITS : b == 0u ? 0x00400000u : b << 23);
}

/// A thread dequantizes N adjacent elements with the same scale. All matrices are contiguous
/// and aligned, and the number of columns and of the block's columns are multiples of N. N is
/// 16, so that the divisions that locate the scale are rare. For fp32 outputs N is 8, because
/// the 16-byte stores of a warp would otherwise be 64 bytes apart.
template <class F, class O> DEVICE void dequantize(const DequantizeArgs &a) {
  constexpr int N = O::BYTES == 4 ? 8 : 16;
  i64 at = ((i64)blockIdx.x * 256 + threadIdx.x) * N;
  if (at >= a.rows * a.cols) return;
  float scale = a.block_rows >= a.rows && a.block_cols >= a.cols
                    ? scale_at(a, 0, 0)
                    : scale_at(a, at / a.cols, at % a.cols);
  u32 w[N / 4];
  if (N == 16) {
    uint4 d = *(const uint4 *)(a.codes + at);
    w[0] = d.x, w[1] = d.y, w[2 % (N / 4)] = d.z, w[3 % (N / 4)] = d.w;
  } else {
    uint2 d = *(const uint2 *)(a.codes + at);
    w[0] = d.x, w[1] = d.y;
  }
  constexpr int WORDS = N * O::BYTES / 4;
  u32 out[WORDS];
#pragma unroll
  for (int i = 0; i < N / 2; i++) {
    u32 pair = F::halves(i % 2 ? w[i / 2] >> 16 : w[i / 2]);
    u32 low = O::bits(__fmul_rn(InF16::get(pair, 0), scale));
    u32 high = O::bits(__fmul_rn(InF16::get(pair, 1), scale));
    if (O::BYTES == 4) out[2 * i % WORDS] = low, out[(2 * i + 1) % WORDS] = high;
    else out[i] = low | high << 16;
  }
  uint4 *to = (uint4 *)((char *)a.out + at * O::BYTES);
#pragma unroll
  for (int i = 0; i < WORDS / 4; i++)
    to[i] = make_uint4(out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]);
}

template <class F, class O> DEVICE void strided_dequantize(const DequantizeArgs &a) {
  i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
  if (i >= a.rows * a.cols) return;
  i64 r = i / a.cols, c = i - r * a.cols;
  u32 pair = F::halves(a.codes[r * a.codes_rs + c * a.codes_cs]);
  u32 bits = O::bits(__fmul_rn(InF16::get(pair, 0), scale_at(a, r, c)));
  i64 to = r * a.out_rs + c * a.out_cs;
  if (O::BYTES == 4) ((u32 *)a.out)[to] = bits;
  else ((u16 *)a.out)[to] = bits;
}

#define DEQUANTIZE(NAME, F, O)                                                                     \
  extern "C" __global__ void __launch_bounds__(256)                                                \
      dequantize_##NAME(const __grid_constant__ DequantizeArgs a) { dequantize<F, O>(a); }         \
  extern "C" __global__ void __launch_bounds__(256)                                                \
      strided_dequantize_##NAME(const __grid_constant__ DequantizeArgs a) {                        \
    strided_dequantize<F, O>(a);                                                                   \
  }
DEQUANTIZE(f32_e4m3, FromE4m3, OutF32)
DEQUANTIZE(f32_e5m2, FromE5m2, OutF32)
DEQUANTIZE(bf16_e4m3, FromE4m3, OutBf16)
DEQUANTIZE(bf16_e5m2, FromE5m2, OutBf16)
DEQUANTIZE(f16_e4m3, FromE4m3, OutF16)
DEQUANTIZE(f16_e5m2, FromE5m2, OutF16)

/// A batch of matrices of codes that are rescaled.
struct RescaleEntry {
  u8 *codes;
  i64 batch, rows, cols;
  i64 codes_bs, codes_rs, codes_cs;
  i64 first_scale;       // index of the scale of the first columns of the first matrix
};

struct RescaleArgs {
  const float *scales;
  const float *new_scales;
  i64 width;             // columns per scale
  RescaleEntry entries[48];
};

/// Thread blocks per entry, and rows per piece of work. `RESCALE_BLOCKS` is also in cuda/codes.rs.
#define RESCALE_BLOCKS 32
#define RESCALE_ROWS 32

/// Rounds codes again if their scale changes. Usually no scale changes, and then only scales are
/// read. A warp rescales up to 32 rows of the columns that one scale belongs to.
template <class F, class From> DEVICE void rescale(const RescaleArgs &a) {
  const RescaleEntry &t = a.entries[blockIdx.x / RESCALE_BLOCKS];
  i64 across = (t.cols + a.width - 1) / a.width, down = (t.rows + RESCALE_ROWS - 1) / RESCALE_ROWS;
  int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  i64 piece = (i64)(blockIdx.x % RESCALE_BLOCKS) * warps + (threadIdx.x >> 5);
  for (; piece < t.batch * down * across; piece += RESCALE_BLOCKS * warps) {
    i64 line = piece / across, matrix = line / down, s = piece - line * across;
    i64 r0 = (line - matrix * down) * RESCALE_ROWS, c0 = s * a.width;
    i64 at = t.first_scale + matrix * across + s;
    float from = a.scales[at], to = a.new_scales[at];
    if (__float_as_uint(from) == __float_as_uint(to)) continue;
    float q = reciprocal(to);
    i64 rows = t.rows - r0 < RESCALE_ROWS ? t.rows - r0 : RESCALE_ROWS;
    i64 cols = t.cols - c0 < a.width ? t.cols - c0 : a.width;
    for (i64 i = lane; i < rows * cols; i += 32) {
      i64 place = matrix * t.codes_bs + (r0 + i / cols) * t.codes_rs + (c0 + i % cols) * t.codes_cs;
      u8 *code = t.codes + place;
      float value = __fmul_rn(InF16::get(From::halves(*code), 0), from);
      *code = encode<F>(__fmul_rn(value, q));
    }
  }
}

extern "C" __global__ void __launch_bounds__(256)
    rescale_e4m3(const __grid_constant__ RescaleArgs a) { rescale<E4m3, FromE4m3>(a); }
extern "C" __global__ void __launch_bounds__(256)
    rescale_e5m2(const __grid_constant__ RescaleArgs a) { rescale<E5m2, FromE5m2>(a); }
