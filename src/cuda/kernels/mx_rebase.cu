// Rebase of MXFP8 planes to one power-of-two fp32 scale a row or a column.
//
// Every code is rewritten for the largest scale of its line: code' = cvt(code * 2^(e_block - e)).
// Only codes pushed into the format's subnormals lose bits.
#include "blocks.cuh"

struct RebaseArgs {
  const u8 *codes;       // (rows, cols)
  const u8 *scales;      // (row blocks, column blocks of 32)
  u8 *out;               // (rows, cols), or (cols, rows)
  float *out_scale;      // one a row of `out`
  i64 codes_rs, codes_cs, scales_rs, scales_cs, out_rs, out_cs, out_scale_rs;
  i64 rows, cols;
  i64 block_rows;        // 1 or 32
  i64 tiles_across;
  u32 flags;             // 1: `codes` in 16-byte (columns: 8-byte) vectors, 2: `out` in 16-byte
                         // ones, 4: four scales are an aligned word
  u32 unused;            // the struct ends on 8 bytes
};

struct CodesE4m3 : E4m3 {
  static DEVICE u32 halves(u16 two) {
    u32 d;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(two));
    return d;
  }
};
struct CodesE5m2 : E5m2 {
  static DEVICE u32 halves(u16 two) {
    u32 d;
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(d) : "h"(two));
    return d;
  }
};

DEVICE float half_at(u32 halves, int i) {
  float d;
  u16 h = i ? (u16)(halves >> 16) : (u16)halves;
  asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(h));
  return d;
}

/// Scale byte as an exponent that never wins: 255 says NaN, whose block does not count.
DEVICE u32 countable(u32 byte) { return byte == 255u ? 0u : byte; }

/// 2^(byte - base) for byte <= base; NaN for 255. Below 2^-64 every code is zero all the same.
DEVICE float rebase_factor(u32 byte, u32 base) {
  if (byte == 255u) return __uint_as_float(0x7fffffffu);
  u32 shift = min(base - byte, 64u);
  return __uint_as_float((127u - shift) << 23);
}

/// Scale of a line whose largest byte is `base` (at least 1, which is 2^-126).
DEVICE float line_scale(u32 base) { return __uint_as_float(base << 23); }

/// Four codes times `factor`; `seen` keeps the largest magnitude, NaN codes and blocks left out.
template <class F> DEVICE u32 rebase_word(u32 word, float factor, float &seen) {
  u32 lo = F::halves((u16)word), hi = F::halves((u16)(word >> 16));
  float v[4] = {half_at(lo, 0), half_at(lo, 1), half_at(hi, 0), half_at(hi, 1)};
  float m = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
  if (factor == factor) seen = fmaxf(seen, m);
  return F::pair(v[0] * factor, v[1] * factor) | (u32)F::pair(v[2] * factor, v[3] * factor) << 16;
}

/// Along rows: a block a row.
template <class F> DEVICE void rebase_rows(const RebaseArgs &a) {
  __shared__ u32 part[8];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  i64 row = blockIdx.x;
  const u8 *scale = a.scales + row / a.block_rows * a.scales_rs;
  i64 blocks = (a.cols + 31) / 32;
  u32 base = 1;
  for (i64 k = threadIdx.x; k < blocks; k += 256) base = max(base, countable(scale[k * a.scales_cs]));
  base = __reduce_max_sync(0xffffffffu, base);
  if (lane == 0) part[warp] = base;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < 8; w++) base = max(base, part[w]);

  const u8 *from = a.codes + row * a.codes_rs;
  u8 *to = a.out + row * a.out_rs;
  float seen = 0.0f;
  i64 vectors = a.flags == 3 ? a.cols / 16 : 0;
  // Four loads in flight.
  for (i64 first = threadIdx.x; first < vectors; first += 4 * 256) {
    uint4 v[4];
    u32 byte[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      i64 i = first + k * 256;
      if (i < vectors) {
        v[k] = ((const uint4 *)from)[i];
        byte[k] = scale[i / 2 * a.scales_cs];
      }
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
      i64 i = first + k * 256;
      if (i >= vectors) break;
      float f = rebase_factor(byte[k], base);
      v[k].x = rebase_word<F>(v[k].x, f, seen), v[k].y = rebase_word<F>(v[k].y, f, seen);
      v[k].z = rebase_word<F>(v[k].z, f, seen), v[k].w = rebase_word<F>(v[k].w, f, seen);
      ((uint4 *)to)[i] = v[k];
    }
  }
  for (i64 c = vectors * 16 + threadIdx.x; c < a.cols; c += 256) {
    float f = rebase_factor(scale[c / 32 * a.scales_cs], base);
    to[c * a.out_cs] = (u8)rebase_word<F>(from[c * a.codes_cs], f, seen);
  }
  bool any = __syncthreads_or(seen > 0.0f);
  if (threadIdx.x == 0) a.out_scale[row * a.out_scale_rs] = any ? line_scale(base) : 1.0f;
}

/// Along columns, transposed: a block of 128 takes a 128x128 tile, a thread 16 rows of 8 codes.
/// `out_scale` is all ones before; a column gets its scale from every tile with a non-zero code.
/// Each tile reads its columns' scales anew, with square blocks rows / 8 bytes from the L2: launches
/// that found them once, and gave columns of zeros their 1 at the end, took 58.6 us where this took
/// 53.6 (8192x8192, H200, benches/RESULTS.md).
template <class F> DEVICE void rebase_cols(const RebaseArgs &a) {
  __shared__ u32 part[4][4];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  i64 tile_row = blockIdx.x / a.tiles_across;
  i64 tile_col = blockIdx.x - tile_row * a.tiles_across;
  i64 row = tile_row * 128 + warp / 2 * 64 + (lane >> 3) * 16;
  int col_in_tile = warp % 2 * 64 + (lane & 7) * 8;
  i64 col = tile_col * 128 + col_in_tile;
  bool rows_inside = row + 16 <= a.rows, cols_inside = col + 8 <= a.cols;

  u32 d[16][2];
  if ((a.flags & 1) && cols_inside) {
#pragma unroll
    for (int r = 0; r < 16; r++) {
      uint2 v = make_uint2(0, 0);
      if (row + r < a.rows) v = *(const uint2 *)(a.codes + (row + r) * a.codes_rs + col);
      d[r][0] = v.x, d[r][1] = v.y;
    }
  } else {
#pragma unroll
    for (int r = 0; r < 16; r++) {
      u64 all = 0;
      if (row + r < a.rows) {
        const u8 *from = a.codes + (row + r) * a.codes_rs + col * a.codes_cs;
#pragma unroll 1
        for (int j = 7; j >= 0; j--)
          all = all << 8 | (col + j < a.cols ? from[j * a.codes_cs] : 0);
      }
      d[r][0] = (u32)all, d[r][1] = (u32)(all >> 32);
    }
  }

  // The largest byte of the tile's four columns of blocks, over all rows.
  i64 row_blocks = (a.rows + a.block_rows - 1) / a.block_rows, blocks = (a.cols + 31) / 32;
  {
    u32 base[4] = {1, 1, 1, 1};
    const u8 *from = a.scales + tile_col * 4 * a.scales_cs;
    if (a.flags & 4) {
#pragma unroll 4
      for (i64 r = threadIdx.x; r < row_blocks; r += 128) {
        u32 word = *(const u32 *)(from + r * a.scales_rs);
#pragma unroll
        for (int k = 0; k < 4; k++) base[k] = max(base[k], countable(word >> (8 * k) & 0xff));
      }
    } else {
      for (i64 r = threadIdx.x; r < row_blocks; r += 128)
        for (int k = 0; k < 4; k++)
          if (tile_col * 4 + k < blocks)
            base[k] = max(base[k], countable(from[r * a.scales_rs + k * a.scales_cs]));
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
      u32 m = __reduce_max_sync(0xffffffffu, base[k]);
      if (lane == 0) part[warp][k] = m;
    }
  }
  __syncthreads();
  int k = col_in_tile / 32;
  u32 base = max(max(part[0][k], part[1][k]), max(part[2][k], part[3][k]));

  const u8 *scale = a.scales + (tile_col * 4 + k) * a.scales_cs;
  float seen[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  float f = 0.0f;
#pragma unroll
  for (int r = 0; r < 16; r++) {
    if ((r == 0 || a.block_rows == 1) && row + r < a.rows && col < a.cols)
      f = rebase_factor(scale[(row + r) / a.block_rows * a.scales_rs], base);
#pragma unroll
    for (int w = 0; w < 2; w++) {
      u32 lo = F::halves((u16)d[r][w]), hi = F::halves((u16)(d[r][w] >> 16));
      float v[4] = {half_at(lo, 0), half_at(lo, 1), half_at(hi, 0), half_at(hi, 1)};
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (f == f) seen[4 * w + j] = fmaxf(seen[4 * w + j], fabsf(v[j]));
      d[r][w] = F::pair(v[0] * f, v[1] * f) | (u32)F::pair(v[2] * f, v[3] * f) << 16;
    }
  }

#pragma unroll
  for (int w = 0; w < 2; w++) {
    u32 t[4][4];                                     // [column][four rows]
#pragma unroll
    for (int q = 0; q < 4; q++) {
      u32 r0 = d[4 * q][w], r1 = d[4 * q + 1][w], r2 = d[4 * q + 2][w], r3 = d[4 * q + 3][w];
      u32 a01 = byte_permute(r0, r1, 0x5140), b01 = byte_permute(r0, r1, 0x7362);
      u32 a23 = byte_permute(r2, r3, 0x5140), b23 = byte_permute(r2, r3, 0x7362);
      t[0][q] = byte_permute(a01, a23, 0x5410), t[1][q] = byte_permute(a01, a23, 0x7632);
      t[2][q] = byte_permute(b01, b23, 0x5410), t[3][q] = byte_permute(b01, b23, 0x7632);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      i64 c = col + 4 * w + j;
      if (c >= a.cols) continue;
      u8 *to = a.out + c * a.out_rs + row * a.out_cs;
      if ((a.flags & 2) && rows_inside) {
        *(uint4 *)to = make_uint4(t[j][0], t[j][1], t[j][2], t[j][3]);
      } else {
        u64 low = (u64)t[j][1] << 32 | t[j][0], high = (u64)t[j][3] << 32 | t[j][2];
#pragma unroll 1
        for (int r = 0; r < 16 && row + r < a.rows; r++) {
          to[r * a.out_cs] = (u8)low;
          low = low >> 8 | high << 56;
          high >>= 8;
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 8; j++)
    if (seen[j] > 0.0f && col + j < a.cols) a.out_scale[(col + j) * a.out_scale_rs] = line_scale(base);
}

extern "C" __global__ void __launch_bounds__(256) mx_rebase_rows_e4m3(
    const __grid_constant__ RebaseArgs a) {
  rebase_rows<CodesE4m3>(a);
}
extern "C" __global__ void __launch_bounds__(256) mx_rebase_rows_e5m2(
    const __grid_constant__ RebaseArgs a) {
  rebase_rows<CodesE5m2>(a);
}
extern "C" __global__ void __launch_bounds__(128) mx_rebase_cols_e4m3(
    const __grid_constant__ RebaseArgs a) {
  rebase_cols<CodesE4m3>(a);
}
extern "C" __global__ void __launch_bounds__(128) mx_rebase_cols_e5m2(
    const __grid_constant__ RebaseArgs a) {
  rebase_cols<CodesE5m2>(a);
}
