// Rebase of MXFP8 planes to one power-of-two fp32 scale per row or column.
//
// Every code is rewritten for the largest scale of its line: code' = cvt(code * 2^(e_block -
// e)). Codes lose bits only if they become subnormal in the format.
#include "blocks.cuh"
#include "values.cuh"

struct RebaseArgs {
  const u8 *codes;       // (rows, cols)
  const u8 *scales;      // (row blocks, column blocks of 32)
  u8 *out;               // (rows, cols), or (cols, rows)
  float *out_scale;      // one per row of `out`
  i64 codes_rs, codes_cs, scales_rs, scales_cs, out_rs, out_cs, out_scale_rs;
  i64 rows, cols;
  i64 block_rows;        // 1 or 32
  i64 tiles_across;
  u32 flags;             // 1: `codes` allows 16-byte (columns: 8-byte) loads, 2: `out` allows 16-byte
                         // stores, 4: four scales are an aligned word, 8: one block per row
  u32 unused;            // pads the struct to a multiple of 8 bytes
};

// Codes are exact in fp16. Their product with a power of two is exact down to 2^-20 (E4M3,
// which has 4 significant bits; E5M2: 2^-21), because the last bit of fp16 is 2^-24. Smaller
// products become zero however they are rounded, because half the smallest code is 2^-10
// (E5M2: 2^-17).
struct CodesE4m3 : FromE4m3 {
  /// 448 * 2^-24 rounds to zero.
  static constexpr u32 LARGEST_SHIFT = 24;
  static DEVICE u16 pair(u32 halves) {
    u16 d;
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(d) : "r"(halves));
    return d;
  }
};
struct CodesE5m2 : FromE5m2 {
  /// 57344 * 2^-40 rounds to zero.
  static constexpr u32 LARGEST_SHIFT = 40;
  static DEVICE u16 pair(u32 halves) {
    u16 d;
    asm("cvt.rn.satfinite.e5m2x2.f16x2 %0, %1;" : "=h"(d) : "r"(halves));
    return d;
  }
};

DEVICE u32 times(u32 halves, u32 factors) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(halves), "r"(factors));
  return d;
}

/// Returns the larger of each pair of halves. If one is NaN, returns the other.
DEVICE u32 larger(u32 a, u32 b) {
  u32 d;
  asm("max.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

/// Returns 2^-shift in both halves, for a shift of at most 24.
DEVICE u32 halves_of_power(u32 shift) {
  u32 bits = shift <= 14 ? (15 - shift) << 10 : 1u << (24 - shift);
  return bits | bits << 16;
}

/// Returns a scale byte as a candidate for the maximum. 255 is NaN, and its block is ignored.
DEVICE u32 countable(u32 byte) { return byte == 255u ? 0u : byte; }

/// The factor 2^(byte - base) for byte <= base, as one fp16 factor or two; NaN for 255.
template <class F> struct Factor {
  u32 first, second;
  bool counts;                                       // the block is not NaN

  DEVICE Factor(u32 byte, u32 base) {
    counts = byte != 255u;
    u32 shift = min(base - byte, F::LARGEST_SHIFT);
    first = counts ? halves_of_power(min(shift, 24u)) : 0x7fff7fffu;
    second = halves_of_power(shift - min(shift, 24u));
  }

  /// Rebases two codes, given as halves. `seen` collects their magnitudes, except for NaN
  /// codes and blocks.
  DEVICE u16 apply(u32 halves, u32 &seen) const {
    if (counts) seen = larger(seen, halves & 0x7fff7fffu);
    u32 product = times(halves, first);
    if (F::LARGEST_SHIFT > 24) product = times(product, second);
    return F::pair(product);
  }

  /// Rebases four codes.
  DEVICE u32 word(u32 codes, u32 &seen_lo, u32 &seen_hi) const {
    u32 lo = apply(F::halves(codes), seen_lo);
    return lo | (u32)apply(F::halves(codes >> 16), seen_hi) << 16;
  }
};

/// Returns the scale of a line whose largest byte is `base` (at least 1, which is 2^-126).
DEVICE float line_scale(u32 base) { return __uint_as_float(base << 23); }

/// Rebases along rows. A warp processes a row, which needs no barrier. If that would result in
/// few blocks, a block of 256 threads processes a row. The first codes are loaded while the
/// largest scale is computed.
template <class F> DEVICE void rebase_rows(const RebaseArgs &a) {
  constexpr int LOADS = 8;
  __shared__ u32 part[8];
  bool whole = a.flags & 8;
  int team = whole ? 256 : 32, thread = threadIdx.x & (team - 1), warp = threadIdx.x >> 5;
  i64 row = whole ? blockIdx.x : (i64)blockIdx.x * 8 + warp;
  if (row >= a.rows) return;
  const u8 *from = a.codes + row * a.codes_rs;
  u8 *to = a.out + row * a.out_rs;
  const u8 *scale = a.scales + row / a.block_rows * a.scales_rs;
  i64 vectors = (a.flags & 3) == 3 ? a.cols / 16 : 0, blocks = (a.cols + 31) / 32;

  uint4 v[LOADS];
  auto load = [&](i64 first) {
#pragma unroll
    for (int k = 0; k < LOADS; k++) {
      i64 i = first + k * team;
      if (i < vectors) v[k] = ((const uint4 *)from)[i];
    }
  };
  load(thread);
  u32 base = 1;
  if (a.flags & 4) {
    for (i64 k = thread; k < blocks / 4; k += team) {
      u32 word = ((const u32 *)scale)[k];
#pragma unroll
      for (int j = 0; j < 4; j++) base = max(base, countable(word >> (8 * j) & 0xff));
    }
  } else {
    for (i64 k = thread; k < blocks; k += team) base = max(base, countable(scale[k * a.scales_cs]));
  }
  base = __reduce_max_sync(0xffffffffu, base);
  if (whole) {
    if ((threadIdx.x & 31) == 0) part[warp] = base;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < 8; w++) base = max(base, part[w]);
  }

  u32 seen = 0;
  for (i64 first = thread; first < vectors; first += LOADS * team) {
    if (first != thread) load(first);
#pragma unroll
    for (int k = 0; k < LOADS; k++) {
      i64 i = first + k * team;
      if (i >= vectors) break;
      Factor<F> f(scale[i / 2 * a.scales_cs], base);
      v[k].x = f.word(v[k].x, seen, seen), v[k].y = f.word(v[k].y, seen, seen);
      v[k].z = f.word(v[k].z, seen, seen), v[k].w = f.word(v[k].w, seen, seen);
      ((uint4 *)to)[i] = v[k];
    }
  }
  for (i64 c = vectors * 16 + thread; c < a.cols; c += team) {
    Factor<F> f(scale[c / 32 * a.scales_cs], base);
    to[c * a.out_cs] = (u8)f.word(from[c * a.codes_cs], seen, seen);
  }
  bool any = whole ? __syncthreads_or(seen != 0) : __any_sync(0xffffffffu, seen != 0);
  if (thread == 0) a.out_scale[row * a.out_scale_rs] = any ? line_scale(base) : 1.0f;
}

/// Rebases along columns and transposes. A block processes a tile of 128x128 codes, and a
/// thread 16 rows of 8 codes. `out_scale` must be all ones before. A column gets its scale
/// from every tile that has a nonzero code. Each tile searches the scales of its columns, but
/// does not wait for that: without the search the kernel was not faster. Separate launches
/// that computed the maxima once, and set the scales of all-zero columns to 1 at the end, were
/// slower (benches/RESULTS.md).
template <class F> DEVICE void rebase_cols(const RebaseArgs &a) {
  constexpr int WARPS = 4;
  __shared__ u32 part[WARPS][4];
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

  // The thread's own scale is also loaded before any barrier.
  int k = col_in_tile / 32;
  const u8 *own = a.scales + row / a.block_rows * a.scales_rs + (tile_col * 4 + k) * a.scales_cs;
  bool inside = row < a.rows && col < a.cols;
  u32 byte = inside ? *own : 0;

  // The largest byte in each of the tile's four columns of blocks, over all rows.
  i64 row_blocks = (a.rows + a.block_rows - 1) / a.block_rows, blocks = (a.cols + 31) / 32;
  {
    u32 base[4] = {1, 1, 1, 1};
    const u8 *from = a.scales + tile_col * 4 * a.scales_cs;
    if (a.flags & 4) {
#pragma unroll 4
      for (i64 r = threadIdx.x; r < row_blocks; r += 32 * WARPS) {
        u32 word = *(const u32 *)(from + r * a.scales_rs);
#pragma unroll
        for (int b = 0; b < 4; b++) base[b] = max(base[b], countable(word >> (8 * b) & 0xff));
      }
    } else {
      for (i64 r = threadIdx.x; r < row_blocks; r += 32 * WARPS)
        for (int b = 0; b < 4; b++)
          if (tile_col * 4 + b < blocks)
            base[b] = max(base[b], countable(from[r * a.scales_rs + b * a.scales_cs]));
    }
#pragma unroll
    for (int b = 0; b < 4; b++) {
      u32 m = __reduce_max_sync(0xffffffffu, base[b]);
      if (lane == 0) part[warp][b] = m;
    }
  }
  __syncthreads();
  u32 base = part[0][k];
#pragma unroll
  for (int w = 1; w < WARPS; w++) base = max(base, part[w][k]);

  u32 seen[4] = {0, 0, 0, 0};                        // two columns each
  Factor<F> f(byte, base);
#pragma unroll
  for (int r = 0; r < 16; r++) {
    if (r > 0 && a.block_rows == 1) {
      own += a.scales_rs;
      if (inside && row + r < a.rows) f = Factor<F>(*own, base);
    }
#pragma unroll
    for (int w = 0; w < 2; w++) d[r][w] = f.word(d[r][w], seen[2 * w], seen[2 * w + 1]);
  }

#pragma unroll
  for (int w = 0; w < 2; w++) {
    u32 t[4][4];                                     // [four rows][column]
#pragma unroll
    for (int q = 0; q < 4; q++)
      transpose_4x4(d[4 * q][w], d[4 * q + 1][w], d[4 * q + 2][w], d[4 * q + 3][w], t[q]);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      i64 c = col + 4 * w + j;
      if (c >= a.cols) continue;
      u8 *to = a.out + c * a.out_rs + row * a.out_cs;
      if ((a.flags & 2) && rows_inside) {
        *(uint4 *)to = make_uint4(t[0][j], t[1][j], t[2][j], t[3][j]);
      } else {
        u64 low = (u64)t[1][j] << 32 | t[0][j], high = (u64)t[3][j] << 32 | t[2][j];
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
    if ((seen[j / 2] >> (j % 2 * 16) & 0xffff) && col + j < a.cols)
      a.out_scale[(col + j) * a.out_scale_rs] = line_scale(base);
}

extern "C" __global__ void __launch_bounds__(256) mx_rebase_rows_e4m3(
    const __grid_constant__ RebaseArgs a) {
  rebase_rows<CodesE4m3>(a);
}
extern "C" __global__ void __launch_bounds__(256) mx_rebase_rows_e5m2(
    const __grid_constant__ RebaseArgs a) {
  rebase_rows<CodesE5m2>(a);
}
extern "C" __global__ void __launch_bounds__(128, 7) mx_rebase_cols_e4m3(
    const __grid_constant__ RebaseArgs a) {
  rebase_cols<CodesE4m3>(a);
}
extern "C" __global__ void __launch_bounds__(128, 6) mx_rebase_cols_e5m2(
    const __grid_constant__ RebaseArgs a) {
  rebase_cols<CodesE5m2>(a);
}
